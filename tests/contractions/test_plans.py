"""Plans of contractions on numpy blocks: values and every gradient, whole numbers; `tests.fuzz` has more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from tests.fuzz.contractions import Contraction, judge, planned
from tests.fuzz.runtimes import on_numpy
from xshard.contractions.explain import alternatives

MESH = {"x": 2, "y": 3}
SINGLE = {
    "a sum and a mean over one axis": ("k | mean(x), () | sum(x,y) -> () | sum(y) mean(x)", "k=4"),
    "five operands, which numpy's path takes at once": ("l/x, j, j/x, l, j -> j l/x", "j=5,l=4"),
    "numbers that fit no part of a dim": ("i/sizes(y,2,3,0), i/x -> i", "i=5"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_contractions(name):
    text, lengths = SINGLE[name]
    given, result = text.split(" -> ")
    layouts = [xs.Layout.parse(layout) for layout in (*given.split(", "), result)]
    sizes = sorted(pair.split("=") for pair in lengths.split(","))
    mesh = xs.Mesh({axis: n for axis, n in MESH.items() if axis in text})
    case = Contraction(mesh, tuple(int(n) for _, n in sizes), "float64", tuple(layouts))
    judge(product := planned(case), *on_numpy([product]))
    assert all(len(part.operand_indices) <= 2 for part in product.plan.parts)


@pytest.mark.parametrize(
    ("text", "shapes", "equation"),
    [
        ("... d/x, d/x f -> ... f/y", [(2, 3, 4), (4, 5)], "...d,df->...f"),
        ("... d/x, ... -> d", [(2, 3, 4), (2, 3)], "abd,ab->d"),
        ("s/x ..., s/x -> ...", [(4,), (4,)], "s,s->"),
        ("i/x ... i -> ... i/y", [(7, 2, 7)], "iji->ji"),
    ],
)
def test_dots_are_all_dims_without_a_name(text, shapes, equation):
    plan = xs.plan(text, xs.Mesh(MESH), shape=shapes, dtype="int64")
    assert xs.ContractionPlan.from_json(plan.to_json()) == plan
    arrays = [np.arange(np.prod(shape)).reshape(shape) for shape in shapes]
    blocks = [
        xs.reference.scatter(x, a.layout, a.mesh) for x, a in zip(arrays, plan.arrays, strict=False)
    ]
    end = plan.arrays[-1]
    found = xs.reference.gather(xs.reference.run(plan, *blocks), end.layout, end.mesh, end.shape)
    assert np.array_equal(found, np.einsum(equation, *arrays))


def test_the_scale_of_a_mean_counts_once_where_the_result_is_a_sum():
    layouts = tuple(map(xs.Layout, ("i | copy(x,y)", "() | mean(y)", "i | sum(y)")))
    judge(
        product := planned(Contraction(xs.Mesh(x=3, y=2), (5,), "float64", layouts, "tpu_v5e")),
        *on_numpy([product]),
    )


def test_replicas_in_place_of_copies_would_have_wrong_gradients():
    """A plan that leaves an operand as replicas where it is used apart is none: its gradient is wrong."""
    mesh = xs.Mesh(x=2)
    sizes = {"i": 2, "k": 3, "j": 4}
    plan = xs.plan("i k, k j/x -> i j/x", mesh, sizes=sizes)
    [part], move = plan.parts, xs.plan("i k -> i k", mesh, (2, 3))
    wrong = replace(part, moves=(move, part.moves[1]))
    with pytest.raises(xs.errors.PlanError, match="'x' cuts 'j', which this operand lacks"):
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


def test_a_plan_that_is_best_with_its_gradient_stays_where_memory_is_short():
    """The forward pass alone has a plan that takes fewer seconds, also both ways, and more memory."""
    sizes = {"b": 2048, "d": 512, "e": 32, "f": 512}
    how = {"sizes": sizes, "dtype": "bfloat16", "overlap": "always"}
    text = "d/y b e, d e/x f -> f b/x e"
    fastest, smaller, smallest = (
        xs.plan(text, xs.Mesh(x=2, y=4), memory_limit=limit, **how)
        for limit in (None, 100_000_000, 80_000_000)
    )
    assert fastest.peak_bytes > 100_000_000 > smaller.peak_bytes > smallest.peak_bytes
    assert fastest.cost < smaller.cost < 1.05 * fastest.cost < smallest.cost


def test_other_places_have_no_ring_of_the_plan():
    sizes = {"s": 8192, "d": 8192, "f": 8192}
    plan = xs.plan("s/tp d, d f/tp -> s f/tp", xs.Mesh(tp=4), sizes=sizes, overlap="always")
    (_, first), *others = alternatives(plan)
    assert first.parts[0].ring and others
    for _, other in others:
        [part] = other.parts
        moves = sum(move.cost for move in (*part.moves, part.result))
        assert other.forward_cost == pytest.approx(moves + part.work)


def test_what_the_reference_refuses():
    plan = xs.plan("n/x, n/x -> ()", xs.Mesh(x=2), sizes={"n": 4})
    with pytest.raises(xs.errors.ShapeError, match="1 operands for the 2 of 'n/x, n/x"):
        xs.reference.run(plan, [np.ones(2)] * 2)
    with pytest.raises(xs.errors.ShapeError, match="the block of device 1 has shape"):
        xs.reference.run(plan, [np.ones(2)] * 2, [np.ones(2), np.ones(3)])
