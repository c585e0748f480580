"""Input from outside, mutated: each is refused with an XshardError, or is a value that prints back.

A reader turns a text into a value, and the value into text. A seed gives the same texts on every machine.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xshard as xs
from tests.cases import CASES, CELLS, NEAR
from xshard import dtypes
from xshard.arguments import parse_bytes
from xshard.cli.options import parse_shape, parse_sizes
from xshard.contractions.expression import contraction
from xshard.cost.machine import profile_of
from xshard.layout.layout import parse_expression, parse_layouts
from xshard.notation.overlap_parser import parse_boundaries
from xshard.rules import match_stars
from xshard.state.names import Names, rename

PROFILES = Path(xs.__file__).parent / "cost" / "profiles"
LIMIT_S = 2.0  # of processor time for one text

GEMM = "b s/tp d, d f/tp -> b s f/tp"
SIZES = {"b": 4, "s": 8, "d": 8, "f": 16}
PATTERNS = ("**.{q,k,v}_proj.weight|lm_head.weight", "layers.*.mlp.{up,gate}_proj.*", "**")
PATTERNS += ("**.layers.*.experts.**.w*", "{a,b{c,d}}.x|y")
NAMES = ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "a.a.a.a.a.a.a.a.b")


@dataclass(frozen=True)
class Reader:
    """What reads a text, texts that it reads, and how its value is written.

    read: raises XshardError for other texts. write: the value as text that reads back to an equal one; None
    for values without text.
    """

    read: Callable[[str], Any]
    corpus: tuple[str, ...]
    write: Callable[[Any], str] | None = str


def _rules(text: str) -> list[object]:
    pattern, _, layout = text.partition("=")
    rules = xs.Rules({pattern: layout})
    return [rules.find(name) for name in (*NAMES, text[:200])]


def _relation(text: str) -> object:
    src, _, dst = text.partition("=")
    made = Names(rename(src, dst, "o i -> i o"))
    found = [match_stars(each.parts[0], name) for each in made.relations for name in NAMES]
    return found, list(made.inverse.relations)


def _json_plans() -> Iterator[str]:
    yield from (row.plan().to_json() for row in CASES[::9])
    options = {"src_mesh": xs.Mesh(a=4), "dst_mesh": xs.Mesh(b=2, c=2), "dst_devices": range(2, 6)}
    yield xs.plan("n/a d -> n/b d/c", **options, shape=(8, 4)).to_json()


def readers() -> dict[str, Reader]:
    """Every reader by name."""
    expressions = tuple(row.expression for row in CASES)
    layouts = tuple(side.strip() for text in expressions for side in text.split("->"))
    numbered = (
        "s/sizes(cp,3,0,3,2):halo([1,0,1,1],[1,0,1,1])",
        "o/block(tp,512,128,128) i/intervals(a,[0,4,12,16],[4,12])",
        "h/sp:window(k=3,s=2,d=2,p=[1,2],out=aligned,constant(1.5e-3),pole(w,-1)) w | mean(dp) copy(x)",
        "h:fold(window(k=3,out=balanced,constant(-inf)))",
        f"n/by(a,b,{CELLS}):reads({NEAR}) d/by(c,{CELLS})",
    )
    two = xs.plan(GEMM, xs.Mesh(tp=4), sizes=SIZES)
    return {
        "layout": Reader(xs.Layout.parse, (*layouts, *numbered)),
        "expression": Reader(
            parse_expression, expressions, lambda both: " -> ".join(map(str, both))
        ),
        "contraction": Reader(
            contraction, (GEMM, "a b/x, b/x c -> a c", "b h s/z -> s", "n, n ->"), lambda c: c.text
        ),
        "signature": Reader(
            lambda text: parse_layouts(text, "signature"),
            (f"{GEMM}, ()", "n d -> (), n/a"),
            lambda both: "->".join(",".join(map(str, side)) for side in both),
        ),
        "boundaries": Reader(
            parse_boundaries,
            ("edge,zero", "constant(1.5)", "pole(w,-1),none"),
            lambda b: f"{b[0]},{b[1]}",
        ),
        "mesh": Reader(xs.Mesh.parse, ("dp=2,cp=4", "a=1", "", "x = 3 , y=5")),
        "plan": Reader(xs.Plan.from_json, tuple(_json_plans()), xs.Plan.to_json),
        "contraction plan": Reader(
            xs.ContractionPlan.from_json, (two.to_json(),), xs.ContractionPlan.to_json
        ),
        "profile": Reader(
            lambda text: profile_of("outside", text),
            tuple(file.read_text() for file in sorted(PROFILES.glob("*.json"))),
            lambda profile: profile.to_json(),
        ),
        "rules": Reader(_rules, tuple(f"{p}=o/tp i" for p in PATTERNS), None),
        "names": Reader(_relation, tuple(f"{p}=x.{p}" for p in PATTERNS), None),
        "dtype": Reader(dtypes.name_of, ("float32", "torch.bfloat16", "<f4", "complex64", "int4")),
        "bytes": Reader(parse_bytes, ("1024", "1.5MiB", " 2 GiB")),
        "shape": Reader(parse_shape, ("2,64,32", "0", ""), lambda shape: ",".join(map(str, shape))),
        "sizes": Reader(
            parse_sizes, ("b=8,s=64",), lambda sizes: ",".join(f"{k}={v}" for k, v in sizes.items())
        ),
    }


EXTREMES = (
    *("9" * 100_000, "1" + "0" * 30, "1000000000", "-1", "0", "1e999", "1e-400"),
    *("nan", "inf", "1.5", "9" * 19),
    *(
        "(" * 50_000,
        "fold(" * 20_000,
        "[" * 100_000,
        "{" * 100_000,
        '{"a":' * 20_000,
        "{a}" * 20_000,
    ),
    *(
        "x" * 100_000,
        "n " * 50_000,
        "n/a" * 20_000,
        ",()" * 30_000,
        " ".join(f"n{i}" for i in range(20_000)),
    ),
    ",".join(f"a{i}=1" for i in range(1_000_000)),
    *(
        "**." * 100,
        "**a" * 50,
        "*a" * 500,
        "{a,b}" * 60,
        "a|" * 5000,
        "é",
        "\0",
        "\ud800",
        "٣",
        "−",
        "\t\n",
    ),
    *(
        "null",
        "true",
        "[]",
        "{}",
        '""',
        "NaN",
        "-Infinity",
        '"1e999999999"',
        '"1/0"',
        "[[0],1000000000]",
    ),
)
TOKENS = (
    *"()[]{},:=|/-> \n\"'.*0123456789eE+_",
    *("->", "...", "**", "sum(a)", "halo(", "window(k="),
    *("fold(", "zigzag(", "sizes(", "intervals(", "block(", "a,"),
)


def mutated(rng: random.Random, corpus: tuple[str, ...]) -> str:
    """A text of the corpus after one to six changes."""
    text = rng.choice(corpus)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 1, 1, 2, 5, 20)))
        other = rng.choice(corpus)
        start = rng.randrange(len(other) + 1)
        tokens = rng.choice(TOKENS), rng.choice(TOKENS) * rng.choice((1, 2, 9))
        parts = (
            other[start : start + rng.randrange(40)],
            text[at:end] * 2,
            chr(rng.randrange(1, 0x250)),
        )
        number = str(rng.randrange(10 ** rng.randrange(1, 12)))
        value = rng.choice(EXTREMES) if rng.random() < 0.02 else number
        text = text[:at] + rng.choice(("", *tokens, *parts, value)) + text[end:]
    return text


def mutated_json(rng: random.Random, corpus: tuple[str, ...]) -> str:
    """JSON in which some values are another's, or extreme."""
    data = json.loads(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(data))
        holder, key = rng.choice(places)
        if rng.random() < 0.15:
            del holder[key]
            continue
        other, there = rng.choice(places)
        value = rng.choice(
            (
                other.get(there) if isinstance(other, dict) else None,
                0,
                -1,
                1.5,
                "",
                [],
                {},
                None,
                True,
            )
        )
        if isinstance(holder[key], str):
            value = rng.choice((value, mutated(rng, (holder[key],))))
        elif isinstance(holder[key], int):
            value = rng.choice((value, rng.randrange(10 ** rng.randrange(1, 20)), 10**400, 10**9))
        holder[key] = copy.deepcopy(value)
    return json.dumps(data)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from _places(data[key])


def check(reader: Reader, text: str) -> bool:
    """Whether a text is read; raises AssertionError for one that is neither refused nor written back."""
    start = time.process_time()
    try:
        value = reader.read(text)
    except xs.XshardError:
        read = False
    else:
        read = True
        if reader.write is not None:
            again = reader.read(written := reader.write(value))
            assert again == value or reader.write(again) == written, f"{written!r} is another value"
    taken = time.process_time() - start
    assert taken < LIMIT_S, f"{taken:.1f} s"
    return read


def texts(name: str, reader: Reader, seed: int, n: int) -> Iterator[str]:
    """The mutated texts of a seed."""
    rng = random.Random(f"{name} {seed}")
    for _ in range(n):
        is_json = reader.corpus[0].startswith("{") and rng.random() < 0.6
        yield (mutated_json if is_json else mutated)(rng, reader.corpus)


def failures(name: str, reader: Reader, seed: int, n: int) -> Iterator[str]:
    """The mutated texts of a seed that are neither refused nor written back, and why."""
    for text in (*EXTREMES, *texts(name, reader, seed, n)):
        try:
            check(reader, text)
        except Exception as error:
            yield f"{name} {seed}: {text[:200]!r}: {type(error).__name__}: {error}"
