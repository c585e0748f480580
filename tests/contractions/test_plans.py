"""Plans of random contractions on numpy blocks: values and every gradient, in whole numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.contractions.cases import onward
from xshard.contractions.plan import ContractionPlan
from xshard.notation.parser import ORDERS, Dim, Shard

MESHES = (xs.Mesh(x=3), xs.Mesh(x=2, y=2), xs.Mesh(x=2, y=3), xs.Mesh(x=2, y=2, z=2))
LENGTHS = (0, 1, 3, 4, 4, 5, 6, 8)
UNIT = 72  # every mean over axes of these meshes divides it


class Case(NamedTuple):
    """A contraction, the mesh it is on, and the lengths of its dims."""

    mesh: xs.Mesh
    operands: list[xs.Layout]
    result: xs.Layout
    sizes: dict[str, int]
    options: dict[str, str]

    @property
    def plan(self) -> ContractionPlan:
        text = f"{', '.join(map(str, self.operands))} -> {self.result}"
        return xs.plan(text, self.mesh, sizes=self.sizes, dtype="float64", **self.options)

    def shape_of(self, layout: xs.Layout) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in layout.names)


def drawn(rng: random.Random, small: bool = True) -> Case:
    """Any dims in any order under any linear layouts; small: without those that take long to plan."""
    n = rng.choices((1, 2, 3, 4), (3, 10, 2, 0 if small else 1))[0]
    mesh = rng.choice(MESHES[:3] if small else MESHES)
    names = "ijklm"[: rng.randint(0, 5)]
    dims = [rng.sample(names, rng.randint(0, min(3, len(names)))) for _ in range(n)]
    used = sorted({name for some in dims for name in some})
    kept = rng.sample(used, rng.randint(0, min(3, len(used))))
    if n == 1 and set(kept) == set(used):
        dims[0] = [*dims[0], "n"]  # else it would be a redistribution
        used = [*used, "n"]
    lengths = LENGTHS if rng.random() < 0.3 else LENGTHS[2:]
    sizes = {name: rng.choice(lengths) for name in used}
    kinds = ("sum", "mean", "copy") if n < 3 else ("sum", "copy")  # means need large numbers to be whole
    ends = [layout(rng, mesh, some, kinds) for some in (*dims, kept)]
    options = {
        "profile": rng.choice(("bandwidth", "h100")),
        "objective": rng.choice(("forward+backward", "forward")),
    }
    return Case(mesh, ends[:-1], ends[-1], sizes, options)


def layout(rng: random.Random, mesh: xs.Mesh, names: list[str], kinds: tuple[str, ...]) -> xs.Layout:
    axes, cuts, tags = rng.sample(mesh.axes, len(mesh.axes)), dict.fromkeys(names, ()), []
    while axes:
        group = tuple(axes[: rng.choice((1, 1, 1, 2))])
        del axes[: len(group)]
        role = rng.choice([*names * 2, *kinds, None, None])
        if role in cuts:
            order = rng.choice(("block", "block", "block", *ORDERS))
            cuts[role] += (Shard(group, order, (2,) * (order == "cyclic" and rng.random() < 0.5)),)
        elif role:
            tags.append((role, group))
    return xs.Layout(tuple(Dim(name, shards) for name, shards in cuts.items()), tuple(tags))


def dense(case: Case, operands: list[np.ndarray]) -> np.ndarray:
    """numpy's einsum of whole arrays."""
    numbers = {name: n for n, name in enumerate(case.sizes)}
    parts: list[object] = []
    for one, x in zip(case.operands, operands, strict=True):
        parts += [x, [numbers[name] for name in one.names]]
    return np.einsum(*parts, [numbers[name] for name in case.result.names])


def check(case: Case, seed: int) -> None:
    """The plan gives the contraction, and <result, cotangent> = <operand, its gradient> for every operand."""
    plan, rng = case.plan, np.random.default_rng(seed)
    whole = any(end.tagged("mean") for end in (*case.operands, case.result))
    given = [
        oracle.random_blocks(one, case.mesh, case.shape_of(one), rng, UNIT if whole else 1)
        for one in case.operands
    ]
    arrays = [
        oracle.gather(x, one, case.mesh, case.shape_of(one))
        for one, x in zip(case.operands, given, strict=True)
    ]
    end = case.result.dual
    cotangent = oracle.random_blocks(end, case.mesh, case.shape_of(end), rng, UNIT if whole else 1)
    result = xs.reference.run(plan, *given)
    assert np.array_equal(
        oracle.gather(result, case.result, case.mesh, case.shape_of(case.result)), dense(case, arrays)
    )
    paired = oracle.paired(result, cotangent, case.result, case.mesh)
    gradients = xs.reference.pullback(plan, given, cotangent)
    for one, x, gradient in zip(case.operands, given, gradients, strict=True):
        assert oracle.paired(x, gradient, one, case.mesh) == paired
        # Equal gradients where operands are equal: those of copies are addends, which need not be.
        oracle.gather(gradient, one.dual, case.mesh, case.shape_of(one))


@pytest.mark.parametrize("part", range(2))
def test_random_contractions(part):
    rng = random.Random(part)
    for seed in range(75):
        check(drawn(rng), seed)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(0, 9))
def test_any_contraction(rng, seed):
    check(drawn(rng), seed)


SINGLE = {
    "a sum and a mean over one axis": ("k | mean(x), () | sum(x,y) -> () | sum(y) mean(x)", "k=4"),
    "a gradient in a place of its own": ("l i k/balanced(y,x), k/cyclic(y,2) -> l i", "i=8,k=4,l=5"),
    "none beside a mean": ("k l/y, l/zigzag(x) i | sum(y) -> i k | mean(x,y)", "i=6,k=5,l=3"),
    "dims of one operand alone, a gradient in a place of its own": ("i/x j k, l/y -> l", "i=8,j=2,k=4,l=5"),
    "four operands, a gradient in a place of its own": (
        "i j/y, j k, k/cyclic(y) l, l/zigzag(y) -> i | sum(y)",
        "i=8,j=2,k=6,l=5",
    ),
    "five operands, which numpy's path takes at once": ("l/x, j, j/x, l, j -> j l/x", "j=5,l=4"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_contractions(name):
    text, lengths = SINGLE[name]
    given, result = text.split(" -> ")
    operands = [xs.Layout.parse(operand) for operand in given.split(", ")]
    sizes = {dim: int(n) for dim, n in (pair.split("=") for pair in lengths.split(","))}
    mesh = xs.Mesh({axis: n for axis, n in (("x", 2), ("y", 3)) if axis in text})
    case = Case(mesh, operands, xs.Layout.parse(result), sizes, {})
    check(case, 0)
    assert all(len(part.takes) <= 2 for part in case.plan.parts)
    apart = any(own for part in case.plan.parts for own in part.gradients)
    assert apart or "of its own" not in name
    assert not apart or "mean" not in text


def test_a_cotangent_that_goes_on_from_one_place_to_another():
    plan, rng = onward(), np.random.default_rng(0)
    given, result = plan.contraction.operands, plan.contraction.result
    blocks = [
        oracle.random_blocks(*each, rng) for each in zip(given, [plan.mesh] * 2, plan.shapes, strict=True)
    ]
    cotangent = oracle.random_blocks(result.dual, plan.mesh, (8, 4), rng)
    paired = oracle.paired(xs.reference.run(plan, *blocks), cotangent, result, plan.mesh)
    for one, x, gradient in zip(given, blocks, xs.reference.pullback(plan, blocks, cotangent), strict=True):
        assert oracle.paired(x, gradient, one, plan.mesh) == paired
    assert xs.ContractionPlan.from_json(plan.to_json()) == plan


def test_replicas_in_place_of_copies_would_have_wrong_gradients():
    """A plan that leaves an operand as replicas where it is used apart is none: its gradient is wrong."""
    mesh, sizes = xs.Mesh(x=2), {"i": 2, "k": 3, "j": 4}
    plan = xs.plan("i k, k j/x -> i j/x", mesh, sizes=sizes)
    [part], move = plan.parts, xs.plan("i k -> i k", mesh, (2, 3))
    wrong = replace(part, moves=(move, part.moves[1]))
    with pytest.raises(xs.PlanError, match="'x' cuts 'j', which this operand lacks"):
        replace(plan, parts=(wrong,))
    rng = np.random.default_rng(0)
    x, w, cotangent = (
        oracle.random_blocks(xs.Layout.parse(text), mesh, shape, rng)
        for text, shape in (("i k", (2, 3)), ("k j/x", (3, 4)), ("i j/x", (2, 4)))
    )
    paired = oracle.paired(xs.reference.run(plan, x, w), cotangent, plan.contraction.result, mesh)
    right = xs.reference.pullback(plan, [x, w], cotangent)[0]
    object.__setattr__(plan, "parts", (wrong,))
    broken = xs.reference.pullback(plan, [x, w], cotangent)[0]
    assert oracle.paired(x, right, part.moves[0].src, mesh) == paired
    assert oracle.paired(x, broken, part.moves[0].src, mesh) != paired


def test_what_the_reference_refuses():
    plan = xs.plan("n/x, n/x -> ()", xs.Mesh(x=2), sizes={"n": 4})
    with pytest.raises(xs.ShapeError, match="1 operands for the 2 of 'n/x, n/x"):
        xs.reference.run(plan, [np.ones(2)] * 2)
    with pytest.raises(xs.ShapeError, match="the block of device 1 has shape"):
        xs.reference.run(plan, [np.ones(2)] * 2, [np.ones(2), np.ones(3)])
