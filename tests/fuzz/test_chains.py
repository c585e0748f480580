"""Random cases on every runtime, fewer than `make fuzz` runs; and that what is wrong would be found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xshard as xs
from tests.fuzz import owned
from tests.fuzz.chains import Chain, random_chain
from tests.fuzz.judge import Arrived, judge, trip
from tests.fuzz.run import RUNTIMES, fuzz
from tests.fuzz.runtimes import on_numpy
from tests.fuzz.shrinking import shrunk

SEED = 0
MOVES = {
    "numpy": 160,
    "numpy-owners": 40,
    "numpy-between": 70,
    "numpy-einsum": 36,
    "numpy-trees": 60,
}
MOVES |= {
    "torch": 30,
    "torch-owners": 10,
    "torch-between": 20,
    "torch-einsum": 12,
    "torch-trees": 15,
}
MOVES |= {"jax": 9, "jax-owners": 3, "jax-einsum": 6, "jax-trees": 6}


@pytest.mark.long
@pytest.mark.parametrize("runtime", MOVES)
def test_random_cases(runtime: str) -> None:
    """The seed is the same in every run; an error names the case."""
    *_, report = fuzz(runtime, SEED, MOVES[runtime])
    print(f"seed {SEED}: {report}")
    assert not report.failures, "\n".join(f"{seed}: {why}" for seed, why in report.failures.items())
    assert report.moves >= MOVES[runtime] and report.refused < report.chains / 3
    assert report.pulled > report.chains / 3 or "trees" in runtime


@pytest.mark.parametrize("runtime", ["numpy-between", "numpy-einsum", "numpy-trees"])
def test_a_wrong_number_is_found(runtime: str) -> None:
    """Of a block that arrives, or of a gradient."""
    ask = RUNTIMES[runtime].ask
    subject = RUNTIMES[runtime].subject
    for found in filter(None, (subject.trip(subject.draw(seed)) for seed in range(12))):
        [arrived] = ask([found])
        is_tree = isinstance(arrived, dict)
        has_gradients = runtime == "numpy-einsum"
        lists = (
            arrived.values() if is_tree else [*arrived.blocks, *arrived.gradients * has_gradients]
        )
        for blocks in lists:
            at = next((i for i, block in enumerate(blocks) if block.size), None)
            if at is not None:
                right = blocks[at]
                raw = bytearray(blocks[at].tobytes())
                raw[-1] ^= 1 if right.itemsize == 1 else 64
                blocks[at] = np.frombuffer(bytes(raw), right.dtype).reshape(right.shape)
                with pytest.raises(AssertionError):
                    subject.judge(found, arrived)
                blocks[at] = right
        subject.judge(found, arrived)


def test_cases_of_owners_show_all_that_they_are_for() -> None:
    shown = Counter(
        each for seed in range(60) for each in {*owned.features(owned.random_owned(seed))}
    )
    assert len(shown) == 14 and min(shown.values()) > 3, shown


def test_a_seed_names_a_chain() -> None:
    assert random_chain("7.0.3") == random_chain("7.0.3") != random_chain("7.0.4")
    assert random_chain("7.0.3", devices=4).mesh.n_devices == 4


def test_what_is_wrong_is_shrunk() -> None:
    """A runtime that loses the last row of what device 0 has."""

    def fails(chain: Chain) -> bool:
        found = trip(chain)
        if found is None:
            return False
        (right,) = on_numpy([found])
        blocks = [[block.copy() for block in each] for each in right.blocks]
        if blocks[-1][0].ndim and len(blocks[-1][0]):
            blocks[-1][0][-1:] = 77
        try:
            judge(found, Arrived(blocks, right.gradients))
        except AssertionError:
            return True
        return False

    chain = next(c for i in range(100) if (c := random_chain(i)).moves > 1 and fails(c))
    small = shrunk(chain, fails)
    assert fails(small) and small.moves == 1
    assert sum(small.shape) <= 2 and small.mesh.n_devices == 1


# What random chains found, as the simplest chain that failed: its layouts, mesh, shape and machine.
# fmt: off
FOUND = {
    "a pole rolls a dim that lacks rows": (("b s",
        "b:halo(-1,0,none) s:halo(1,2,edge,pole(b,-1)) | copy(x)"), ("x=3", (2, 1), "host")),
    "a corner, and dims in another order": (("c b", "b:halo(1,1) c:halo(2,2)"), ("", (1, 1), "h100")),
    "a mesh without axes": (("c:halo(1,[3])", "c"), ("", (4,), "h100")),
    "an empty dim has rows beyond its ends": (("c", "c:halo(1,[3])", "c"), ("y=1", (0,), "h100")),
    "a window over an empty dim": (("s:window(k=1,s=2,p=[2,1])", "s"), ("y=1", (0,), "h100")),
    "a bound counts a repeated row once": (("b/x", "b:halo(1,1,zero,edge)"), ("x=5", (5,), "host")),
    "contributions to one row are added before they leave": (("b/y:fold(halo(0,1,none,periodic))", "b"),
        ("y=2", (1,), "bandwidth")),
    "a mean of what no output reads": (("c | mean(x)", "c:window(k=4)"), ("x=5", (2,), "bandwidth")),
    "a fold of nothing": (("b:fold(window(k=4,s=3,d=2,out=aligned,periodic,none)) s/y", "b s"),
        ("y=2", (1, 1), "h100")),
    "sizes of one part align outputs": (("b", "b/sizes(y,12)/x:window(k=2,s=2,constant)", "b"),
        ("x=4,y=1", (12,), "h100")),
    "a pole negates no constants": (("b/x s", "b:halo(2,0,constant(2)) s:halo(5,1,pole(-1),periodic)"),
        ("x=2", (1, 1), "tpu_v5e")),
    "a dim is gathered over nodes beside a halo": (("b/cyclic(y,5) c:halo(1,1)", "b c:halo(1,1)"),
        ("x=2,y=3,z=2", (7, 4), "h100")),
    "a max of blocks with constants": (("a:halo(1,1,constant(1)) | max(x)", "a"), ("x=2", (3,), "h100")),
    "a max of which not all rows stay": (("a/y:halo(1,1) | min(x)", "a:window(k=1,s=2,p=1)"),
        ("x=2,y=2", (6,), "h100")),
    "the max of what a pole negates": (("s b | max(x)", "b:halo(5,2,pole(s,-1)) s"),
        ("x=2", (2, 1), "h100")),
}
# fmt: on


@pytest.mark.parametrize(("layouts", "options"), FOUND.values(), ids=FOUND)
def test_what_was_found_stays_right(layouts: tuple[str, ...], options: tuple[Any, ...]) -> None:
    mesh, shape, profile = options
    chain = Chain(xs.Mesh.parse(mesh), shape, "float64", tuple(map(xs.Layout, layouts)), profile)
    for seed in range(3):
        found = trip(replace(chain, seed=seed))
        assert found is not None and len(found.plans) == chain.moves
        judge(found, *on_numpy([found]))


# Rows that a boundary fills have no winner, and the output lacks rows of the input.
ENDS = xs.Layout("a:halo(1,1,constant(1)) | max(x)"), xs.Layout("a:window(k=1,s=2)")
WINNERS = Chain(xs.Mesh(x=2), (4,), "float64", ENDS)


def test_torch_leaves_no_memory_unwritten() -> None:
    """A fold begins beside a halo that stays: its rows get no contribution, and no message either."""
    texts = ("b s c", "b:fold(halo(1,0)) s:halo(0,2,reflect) c:halo(1,1)")
    found = trip(
        Chain(xs.Mesh(x=1), (4, 8, 8), "float64", tuple(map(xs.Layout, texts)), "bandwidth")
    )
    for each in (found, trip(WINNERS)):
        assert each is not None and each.cotangents is not None
        judge(each, *RUNTIMES["torch"].ask([each]))


def test_what_jax_fills_in_leaves_types_as_they_are() -> None:
    """A block with constants is invariant along an axis whose sum has ended; one without rows varies."""
    texts = ("b | sum(x)", "b/y:halo(3,1,reflect,constant(2))", "b | sum(x)")
    filled = trip(Chain(xs.Mesh(x=2, y=2), (4,), "float64", tuple(map(xs.Layout, texts))))
    texts = ("c d", "c/x d:halo(1,1,constant(2))")
    empty = trip(Chain(xs.Mesh(x=2), (0, 2), "float64", tuple(map(xs.Layout, texts))))
    for found in (filled, empty, trip(WINNERS)):
        assert found is not None
        judge(found, *RUNTIMES["jax"].ask([found]))


# fmt: off
REFUSED = [
    ("b/zigzag(x,15,1) -> b/zigzag(x,15,1):window(k=1,p=1)", (16,),
        "18 outputs cannot be cut like the 16 rows"),
    ("b -> b/intervals(x,[4,8],[0,4]):halo([1,1],[1,1])", (8,), "widths per part need contiguous parts"),
    ("c b -> b:halo(1,1) c:halo(2,2,constant(-3))", (2, 2), "a corner has the constant of the later dim"),
    ("b s:halo(-1,0,none) -> b:halo(1,0,pole(s)) s:halo(-1,0,none)", (2, 2), "holds row 0 of dim 's'"),
    ("b:fold(halo(1,-1,pole)) -> b:fold(window(k=3,d=2,p=[1,0],edge))", (1,),
        "row 0 of dim 'b' is in no block"),
]
# fmt: on


@pytest.mark.parametrize(("expression", "shape", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_what_has_no_meaning_is_refused(
    expression: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(xs.XshardError) as caught:
        xs.plan(expression, xs.Mesh(x=2), shape, "float64")
    assert message in str(caught.value)
