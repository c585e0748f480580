"""Every public function and constructor of xshard refuses wrong arguments by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest

import xshard as xs
from tests.misuse import Call, Calls, faults, verbs_of
from xshard import reference
from xshard.errors import XshardError, api_boundary
from xshard.signatures import Bytes, Count, Positive, ZeroToOne

MESH = xs.Mesh(dp=2, tp=2)
UP = xs.Op("up", "b c, f c -> b f", ("x", "w"))
LOSS = xs.Op("loss", "b f -> ", ("up",), kind="loss")
STEP = xs.TrainingStep([UP, LOSS], {"b": 8, "c": 8, "f": 8}, {"x": "b c"}, {"w": "f c"})
# Values that the package makes; their parts are checked as those of the functions that make them.
LEFT = {"ContractionPlan", "Plan", "Suggestion"}


def use_profile(profile: xs.ProfileLike) -> None:
    with xs.use_profile(profile):
        pass


def calls() -> dict[str, Callable[[], Call]]:
    made = Calls()
    add = made.add

    layout = xs.Layout("a/tp b")
    owners = xs.Owners([0, 1])
    plan = xs.plan("a/tp b -> a b", MESH, (4, 4))
    add("plan", xs.plan, expression="a/tp b -> a b", mesh=MESH, shape=(4, 4))
    add("owned", xs.owned, shapes={"a": (4, 4)}, mesh=MESH, axis="tp")
    add("show", xs.show, {"what": "text"}, what=xs.Sharding(layout, MESH, (4, 4)))
    add("suggest", xs.suggest, step=STEP, mesh=MESH)
    add("load_profile", xs.load_profile, profile="h100")
    add("use_profile", use_profile, profile="h100")
    add("Layout", xs.Layout, {"tags": "nothing"}, dims="a/tp b")
    add("Layout.parse", xs.Layout.parse, text="a/tp b")
    add("Layout.dim_index", layout.dim_index, dim="a")
    add("Layout.local_shape", layout.local_shape, mesh=MESH, shape=(4, 4), device=0)
    add("Layout.positions", layout.positions, mesh=MESH, shape=(4, 4), dim=0, device=0)
    add("Link", xs.Link, latency_s=1e-6, bytes_per_s=1e9)
    add("Mesh", xs.Mesh, axes={"tp": 2})
    add("Mesh.parse", xs.Mesh.parse, text="tp=2")
    add("Mesh.coords", MESH.coords, device=0)
    add("Needs", xs.Needs, rows=[[1], [0]])
    add("Needs.of_edges", xs.Needs.of_edges, owners=owners, senders=[0], receivers=[1])
    add("Op", xs.Op, name="up", text="b c, f c -> b f", operands=("x", "w"))
    add("Owners", xs.Owners, owner=[0, 1])
    add("Owners.moved", owners.moved, rows=[0], to=[1])
    add("Profile", xs.Profile, name="a", source="b", default=xs.Link(1e-6, 1e9))
    add("Rules", xs.Rules, rules={"a": "b"})
    add("Sharding", xs.Sharding, layout=layout, mesh=MESH, shape=(4, 4))
    lengths = {"b": 8, "c": 8, "f": 8}
    parts = {"inputs": {"x": "b c"}, "parameters": {"w": "f c"}}
    add("TrainingStep", xs.TrainingStep, ops=[UP, LOSS], lengths=lengths, **parts)
    x = np.ones((4, 4))
    blocks = reference.scatter(x, layout, MESH)
    add("reference.scatter", reference.scatter, x=x, layout=layout, mesh=MESH)
    add("reference.gather", reference.gather, blocks=blocks, layout=layout, mesh=MESH, shape=(4, 4))
    wholes = reference.run(plan, blocks)
    also = {"given": "a list"}  # not read where gradients do not depend on it
    add(
        "reference.pullback", reference.pullback, also, plan=plan, given=[blocks], cotangents=wholes
    )
    return made


def test_wrong_arguments_are_refused_by_name() -> None:
    *found, count = faults(calls())
    assert found == []
    assert int(count.split()[0]) > 700
    assert verbs_of([xs], [""]) - calls().keys() == LEFT


@api_boundary
def verb(
    number: int = 0,
    names: Sequence[str] = (),
    lengths: Mapping[str, int | None] | None = None,
    *,
    mode: Literal["a", "b"] = "a",
    share: ZeroToOne = 0.5,
    limit: Bytes = None,
    power: Positive = 2.0,
    is_on: bool = False,
    done: Callable[[int], Any] | None = None,
) -> int:
    """A function with arguments of each kind."""
    return number


RIGHT = [
    {"number": value} for value in (-3, np.int64(3), np.uint8(3), np.array(3))
] + [
    {"names": value} for value in (["ab"], ("a", "b"), {"a": 1}.keys(), np.array(["a"]), iter("a"))
] + [
    {"lengths": {"a": np.int32(3), "b": None}}, {"mode": "b"}, {"is_on": np.bool_(True)},
    {"share": 1}, {"share": np.float32(0.5)}, {"share": np.array(0.25)}, {"power": math.inf},
    {"limit": "2GiB"}, {"limit": 2e9}, {"limit": np.int64(1)}, {"done": print}, {"done": None},
]  # fmt: skip
NOT_RIGHT = [
    {"number": value} for value in (True, 3.0, "3", None, [3], np.ones(2))
] + [
    {"names": value} for value in (b"ab", 3, {"a": 1}, [1], np.array(3))
] + [
    {"lengths": {"a": 2.5}}, {"lengths": {3: 3}}, {"lengths": [("a", 3)]}, {"mode": "c"}, {"mode": ["a"]},
    {"is_on": "yes"}, {"is_on": None}, {"share": 1.01}, {"share": -1}, {"share": math.nan},
    {"share": True}, {"share": "0.5"}, {"power": 0}, {"power": -math.inf}, {"power": math.nan},
    {"limit": -1}, {"limit": [1]}, {"done": 3},
]  # fmt: skip


def named(argument: Any) -> str:
    """The name of a case, the same in every process: without addresses."""
    return re.sub(r" object at 0x\w+", "", str(argument))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"share": 2}, "float, from 0 to 1"),
        ({"limit": -1}, "int | float | str | None, 0 or more"),
        ({"power": 0}, "float, above 0"),
        ({"count": 0}, "int | None, 1 or more"),
    ],
)
def test_ranges_are_said_in_words(argument: Any, words: str) -> None:
    @api_boundary
    def limited(
        share: ZeroToOne = 0.5,
        limit: Bytes = None,
        power: Positive = 2.0,
        count: Count | None = None,
    ) -> None: ...

    with pytest.raises(XshardError, match=re.escape(f"limited takes {words}")):
        limited(**argument)


@pytest.mark.parametrize("argument", RIGHT, ids=named)
def test_what_annotations_take(argument: Any) -> None:
    verb(**argument)


@pytest.mark.parametrize("argument", NOT_RIGHT, ids=named)
def test_what_annotations_do_not_take(argument: Any) -> None:
    (name,) = argument
    with pytest.raises(xs.XshardError, match=f"^{name} is .*, not .*\n  verb takes "):
        verb(**argument)


def test_names_of_arguments() -> None:
    with pytest.raises(
        xs.XshardError, match="unexpected argument 'numbr'\n  did you mean 'number'"
    ):
        verb(numbr=3)
    with pytest.raises(xs.XshardError, match="owned: missing a required argument: 'mesh'"):
        xs.owned({"a": (4,)})  # type: ignore[call-arg]


def test_an_error_of_the_body_stays() -> None:
    @api_boundary
    def fails(number: int) -> None:
        raise KeyError(number)

    with pytest.raises(KeyError):
        fails(3)


def test_arguments_are_named_where_a_parser_has_refused_them() -> None:
    with pytest.raises(xs.errors.NotationError, match=r"^fixed: 3 are not rules"):
        xs.suggest(STEP, MESH, fixed=3)  # type: ignore[arg-type]
