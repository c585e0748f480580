"""Mutated input from outside, less than `make fuzz` reads; and sizes that are refused at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

import xshard as xs
from tests.fuzz.texts import EXTREMES, check, readers, texts
from xshard.arguments import parse_bytes
from xshard.cli.options import parse_devices, parse_shape, parse_sizes
from xshard.cost.machine import profile_of
from xshard.errors import ProfileError

READERS = readers()
DIGITS = "9" * 100_000
PLAN = xs.plan("n d | mean(a) -> n/a d", xs.Mesh(a=4), (8, 3)).to_json()


@pytest.mark.parametrize("name", READERS)
def test_mutated_texts_are_refused_or_print_back(name: str) -> None:
    reader = READERS[name]
    n = 250
    assert all(check(reader, text) for text in reader.corpus)
    read = sum(check(reader, text) for text in texts(name, reader, 0, n))
    assert 0 < read < n  # neither is everything refused, nor is nothing


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_extreme_texts_are_refused_or_print_back(name: str) -> None:
    reader = READERS[name]
    for extreme in EXTREMES:
        middle = len(reader.corpus[0]) // 2
        for text in (extreme, reader.corpus[0][:middle] + extreme + reader.corpus[0][middle:]):
            check(reader, text)


TOO_LARGE: dict[str, Callable[[], object]] = {
    "at most 64 axes and 262144 devices": lambda: xs.Mesh(a=10**9),
    "a mesh of 1000000 axes": lambda: xs.Mesh.parse(",".join(f"a{i}=1" for i in range(10**6))),
    "a mesh of 1 axes and a int devices": lambda: xs.Mesh(a=int("9" * 4000) ** 10),
    "an axis reads NAME=SIZE": lambda: xs.Mesh.parse(f"a={DIGITS}"),
    "a number that fits no 64 bits": lambda: xs.Layout(f"n/cyclic(a,{DIGITS[:90_000]})"),
    "a text of 100004 characters": lambda: xs.Layout("n/" + "a" * 99_999 + " d "),
    "a fold of a fold": lambda: xs.Layout("n:" + "fold(" * 19_000),
    "at most 2**60 elements": lambda: xs.plan("n/a -> n", xs.Mesh(a=2), (2**61,)),
    "a length is a whole number": lambda: parse_shape(DIGITS),
    "1000001 dims": lambda: parse_sizes("," * 10**6),
    "devices are numbers and ranges": lambda: parse_devices(f"0-{10**12}"),
    "not a number of bytes": lambda: parse_bytes(DIGITS),
    "is not a fraction": lambda: xs.Plan.from_json(PLAN.replace('"1/4"', '"1e999999999"')),
    "is not a whole number": lambda: xs.Plan.from_json(
        PLAN.replace('"split": {}', '"split": {"a": [[0], 1000000000]}')
    ),
    "this is no plan: RecursionError": lambda: xs.Plan.from_json("[" * 100_000),
    "is malformed: maximum recursion": lambda: profile_of("deep", "[" * 100_000),
    "a pattern of more than 1000 spellings": lambda: xs.Rules({"{a,b}" * 12: "..."}),
    "a pattern of more than 1000000 characters": lambda: xs.Rules({"x" * 1_000_001: "..."}),
    "99999999 rows of 'periodic' beyond an end": lambda: xs.plan(
        "a:halo(99999999,0,periodic) -> a", xs.Mesh(x=2), (8,)
    ),
    "137438953472 pieces of a block": lambda: xs.Layout("n/cyclic(x):halo(1,1)").local_shape(
        xs.Mesh(x=8), (2**40,), 0
    ),
    "100000003 pieces of a block": lambda: xs.plan(
        "a/cyclic(x):window(k=1,p=99999999) -> a", xs.Mesh(x=2), (8,)
    ),
    "rows in 274877906945 separate pieces": lambda: xs.plan(
        "n/cyclic(x,3)/cyclic(y) -> n/x/y", xs.Mesh(x=2, y=2), (2**40,)
    ),
    "a block of up to 2000000000000000006": lambda: xs.plan(
        "a:halo(999999999999999999,999999999999999999) -> a", xs.Mesh(x=2), (8,)
    ),
    "no profile": lambda: xs.load_profile("x" * 5000),
}


@pytest.mark.parametrize("message", TOO_LARGE)
def test_sizes_that_take_for_ever_are_refused_at_once(message: str) -> None:
    start = time.process_time()
    with pytest.raises(xs.XshardError) as caught:
        TOO_LARGE[message]()
    assert message in str(caught.value)
    assert time.process_time() - start < 5  # each of them took minutes, or did not end


def test_stars_are_matched_without_going_back() -> None:
    """Forty `**` against two hundred parts; backtracking would take for ever."""
    start = time.process_time()
    rules = xs.Rules({".".join(["**", "a"] * 40 + ["**", "b"]): "..."})
    assert rules.find(".".join(["a"] * 200)) is None
    assert rules.find(".".join(["a"] * 60 + ["x"] * 60 + ["b"])) == "..."
    check(READERS["names"], "*a" * 20 + "b=" + "*a" * 20 + "b")
    assert time.process_time() - start < 5


WRONG_FIELDS = [
    ("name", 7),
    ("source", None),
    ("node_devices", "8"),
    ("node_devices", 0),
    ("rounds", 1),
]
WRONG_FIELDS += [
    ("inside", {"a": 1.5}),
    ("launch_s", {"other": "soon"}),
    ("launch_s", {"other": -1.0}),
]
WRONG_FIELDS += [("layer_efficiency", 0), ("layer_efficiency", 1.5), ("layer_efficiency", "x")]
WRONG_FIELDS += [("step_slowdown", 0.9), ("step_slowdown", float("inf")), ("step_slowdown", "x")]
WRONG_FIELDS += [("copy_bytes_per_s", float("nan")), ("copy_bytes_per_s", 10**400)]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS)
def test_a_profile_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    good = json.loads(xs.load_profile("gloo").to_json())
    with pytest.raises(ProfileError, match=field):
        profile_of("mine", json.dumps({**good, field: value}))
