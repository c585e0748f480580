"""Layouts that overlap: what a block holds, what moves, and adjoints."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.fuzz.chains import random_chain
from xshard.errors import DtypeError, PlanError
from xshard.layout.block_rows import output_dim
from xshard.notation.overlap import BOUNDARIES

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("expression", "mesh", "shape"),
    [
        *((f"h/a w -> h/a:halo(4,4,{b}) w", "a=4", (8, 6)) for b in BOUNDARIES if b != "none"),
        ("h/a w -> h/a:halo(0,3,constant(7)) w", "a=4", (8, 6)),
        ("h/a -> h/a:halo(1,2,periodic)", "a=1", (8,)),
        ("h/a -> h/a:halo(1,2,periodic)", "a=2", (8,)),
        # Beyond the second pole rows are as they were.
        ("h/a w/b -> h/a:halo(5,7,pole(-1)) w/b", "a=2,b=2", (3, 4)),
        # Longitudes that overlap already are rolled too.
        (
            "h/a w/b:halo(1,1,periodic) -> h/a:halo(1,1,pole) w/b:halo(1,1,periodic)",
            "a=2,b=2",
            (4, 8),
        ),
        # The later dim fills the corners.
        ("h w -> h:halo(1,0,constant(5)) w:halo(1,0,constant(7))", "a=1", (2, 2)),
    ],
)
def test_halos_are_cuts_of_the_padded_array(expression, mesh, shape):
    plan = xs.plan(expression, xs.Mesh.parse(mesh), shape, "float64")
    x = RNG.integers(1, 10, shape).astype(float)
    moved = xs.reference.run(plan, xs.reference.scatter(x, plan.src, plan.mesh))
    scattered = xs.reference.scatter(x, plan.dst, plan.mesh)
    for device, blocks in enumerate(zip(moved, scattered, strict=True)):
        expected = oracle.spread(x, plan.dst, plan.mesh, device)
        assert all(np.array_equal(block, expected) for block in blocks)


@given(st.integers(0, 2**32))
def test_scatter_is_the_padded_array_cut_dim_after_dim(seed):
    chain = random_chain(seed)
    layout = xs.Layout(chain.layouts[0].dims)
    x = RNG.integers(-9, 10, chain.shape).astype(float)
    if "fold" not in str(layout):
        for device, block in enumerate(xs.reference.scatter(x, layout, chain.mesh)):
            assert np.array_equal(block, oracle.spread(x, layout, chain.mesh, device))


def test_rows_beyond_a_pole_come_from_across():
    """credit's earth padding with h=3, longitudes cut and periodic, corners included."""
    x = RNG.integers(-9, 10, (16, 32)).astype(float)
    north, south = (-np.roll(part, 16, axis=1)[::-1] for part in (x[:3], x[-3:]))
    earth = np.pad(np.concatenate([north, x, south]), [(0, 0), (1, 1)], mode="wrap")
    mesh = xs.Mesh(lat=4, lon=2)
    text = "h/lat:halo(3,3,pole(w,-1)) w/lon:halo(1,1,periodic)"
    plan = xs.plan(f"h/lat w/lon -> {text}", mesh, x.shape, "float64")
    blocks = xs.reference.run(plan, xs.reference.scatter(x, "h/lat w/lon", mesh))
    for device, block in enumerate(blocks):
        i, j = mesh.coords(device)
        assert np.array_equal(block, earth[4 * i : 4 * i + 10, 16 * j : 16 * j + 18])


def test_either_end_has_a_boundary_of_its_own():
    """PhysicsNeMo's one-sided padding: the top row repeated, ones below."""
    x = np.arange(8.0)
    blocks = xs.reference.scatter(x, "h/sp:halo([2,0],[0,2],edge,constant(1))", xs.Mesh(sp=2))
    assert [b.tolist() for b in blocks] == [[0, 0, 0, 1, 2, 3], [4, 5, 6, 7, 1, 1]]


def test_a_cut_of_given_sizes():
    mesh = xs.Mesh(sp=4)
    blocks = xs.reference.scatter(np.arange(8), "s/sizes(sp,3,0,3,2)", mesh)
    assert [b.tolist() for b in blocks] == [[0, 1, 2], [], [3, 4, 5], [6, 7]]
    halos = xs.reference.scatter(
        np.arange(8), "s/sizes(sp,3,0,3,2):halo([1,0,1,1],[1,0,1,1])", mesh
    )
    assert [b.tolist() for b in halos] == [[0, 0, 1, 2, 3], [], [2, 3, 4, 5, 6], [5, 6, 7, 0]]
    same = xs.Sharding(xs.Layout.parse("s/sizes(sp,2,2,2,2)"), mesh, (8,))
    assert str(same.normal_layout) == "s/sp"


def test_constants_have_no_derivative():
    mesh = xs.Mesh(sp=2)
    shape = (4,)
    plan = xs.plan("h/sp -> h/sp:halo(1,1,constant(3))", mesh, shape, "float64")
    blocks = xs.reference.run(plan.tangent, [np.ones(2), np.ones(2)])
    assert [b.tolist() for b in blocks] == [[0, 1, 1, 1], [1, 1, 1, 0]]
    assert str(plan.backward.src) == "h/sp:fold(halo(1,1,constant))"
    assert str(plan.backward.backward.dst) == "h/sp:halo(1,1,constant)"
    assert str(xs.Layout.parse("h:fold(halo(1,1,constant(3)))").dual) == "h:halo(1,1,constant)"


def test_a_constant_is_no_contribution():
    plan = xs.plan("h/sp -> h/sp:fold(halo(1,1,constant(3)))", xs.Mesh(sp=2), (4,), "float64")
    blocks = xs.reference.run(plan, [np.ones(2), np.ones(2)])
    assert [b.tolist() for b in blocks] == [[0, 1, 1, 0], [0, 1, 1, 0]]


def test_a_mean_does_not_scale_what_a_boundary_fills_in():
    mesh = xs.Mesh(dp=2)
    plan = xs.plan("h | mean(dp) -> h:halo(1,1,constant(8))", mesh, (2,), "float64")
    first, second = xs.reference.run(plan, [np.array([2.0, 4.0]), np.array([4.0, 8.0])])
    assert first.tolist() == second.tolist() == [8, 3, 6, 8]
    smaller = xs.plan("h | mean(dp) -> h/dp:halo(1,1,constant(8))", mesh, (8,), "float64")
    blocks = xs.reference.run(smaller, [np.full(8, 2.0), np.full(8, 4.0)])
    assert [b.tolist() for b in blocks] == [[8, 3, 3, 3, 3, 3], [3, 3, 3, 3, 3, 8]]


def test_corners_come_along_with_two_messages_per_axis():
    plan = xs.plan("h/a w/b -> h/a:halo(1,1) w/b:halo(1,1)", xs.Mesh(a=3, b=3), (96, 96), "float32")
    assert [str(s.after.layout) for s in plan.stages] == [
        "h/a:halo(1,1) w/b",
        "h/a:halo(1,1) w/b:halo(1,1)",
    ]
    assert [hop.messages for s in plan.stages for hop in s.step.traffic(s.before).hops] == [2, 2]
    assert plan.bytes_received == plan.bytes_lower_bound == 4 * (2 * 32 + 2 * 34)


def test_the_adjoint_of_overlaps_is_as_cheap():
    plan = xs.plan("h/a w/b -> h/a:halo(1,1) w/b:halo(1,1)", xs.Mesh(a=3, b=3), (96, 96), "float32")
    assert str(plan.backward.stages[0].after.layout) == "h/a:fold(halo(1,1)) w/b"
    assert plan.backward.bytes_received == plan.bytes_received


def test_other_dims_move_by_collectives_past_an_overlap():
    mesh = xs.Mesh(sp=2, tp=2)
    plan = xs.plan("b h/sp:halo(1,1) c/tp -> b h/sp:halo(1,1) c", mesh, (2, 64, 64), profile="h100")
    assert [str(step) for step in plan.steps] == ["all_gather c/tp"]
    assert (
        xs.plan("h/sp:halo(1,1) c -> h c/sp", xs.Mesh(sp=2), (8, 8)).steps[-1].kind != "all_gather"
    )


def test_overlaps_of_nothing_are_none():
    plan = xs.plan("h w:window(k=2,p=2,none) -> h w:fold(halo(0,0))", xs.Mesh(a=2), (1, 6))
    assert plan.steps == ()


def test_an_axis_whose_blocks_all_hold_everything_may_become_copies():
    """The blocks are the same before and after; what the axis is called is not."""
    plan = xs.plan("h/b:halo(2,2,none) -> h | copy(b)", xs.Mesh(b=2), (2,), "float64")
    assert [b.tolist() for b in xs.reference.run(plan, [np.array([1.0, 2.0])] * 2)] == [
        [1, 2],
        [1, 2],
    ]
    apart = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]
    assert [b.tolist() for b in xs.reference.run(plan.backward, apart)] == [[11, 0], [0, 22]]


def test_a_trim_moves_nothing():
    plan = xs.plan("h/sp:halo(1,1) w -> h/sp w", xs.Mesh(sp=4), (16, 4))
    assert plan.bytes_received == 0 and plan.bytes_lower_bound == 0
    widened = xs.plan("h/sp:halo(1,1) -> h/sp:halo(2,2)", xs.Mesh(sp=4), (16,), "float64")
    assert widened.bytes_received == 8 * 2  # what it has already it does not ask for


def test_a_trim_keeps_a_device_s_own_rows_whatever_its_copies_hold():
    """Stencils leave garbage in the halo; on few devices it holds copies of the block itself."""
    plan = xs.plan("h/sp:halo(2,3,periodic) -> h/sp", xs.Mesh(sp=2), (4,), "float64")
    stale = [np.array([9.0, 9, 0, 1, 9, 9, 9]), np.array([9.0, 9, 2, 3, 9, 9, 9])]
    assert [b.tolist() for b in xs.reference.run(plan, stale)] == [[0, 1], [2, 3]]


def test_a_row_held_only_beyond_the_ends():
    mesh = xs.Mesh(sp=1)
    repeated = "h:window(k=2,s=9,p=[3,0],edge)"  # the one row twice, and never in its place
    assert xs.reference.scatter([5.0], repeated, mesh)[0].tolist() == [5, 5]
    (block,) = xs.reference.run(
        xs.plan(f"h -> h:fold({repeated[2:]})", mesh, (1,)), [np.float32([5])]
    )
    assert block.tolist() == [5, 0]
    with pytest.raises(PlanError, match="holds row 0"):  # beyond the pole it is another row
        xs.plan("h:window(k=1,s=9,p=1,pole) w -> h w", mesh, (2, 2))


def test_plans_with_overlaps_survive_json():
    expression = "h/sp w -> h/sp:halo(1,1,periodic) w"
    mesh = xs.Mesh(sp=4)
    shape = (64, 64)
    plan = xs.plan(expression, mesh, shape)
    assert xs.Plan.from_json(plan.to_json()) == plan


def test_plans_with_overlaps_are_explained():
    plan = xs.plan("h/sp w -> h/sp:halo(1,1,periodic) w", xs.Mesh(sp=4), (64, 64))
    assert "direct exchange" in plan.explain()


def test_plans_with_overlaps_stay_within_memory():
    expression = "h/sp w -> h/sp:halo(1,1,periodic) w"
    mesh = xs.Mesh(sp=4)
    shape = (64, 64)
    plan = xs.plan(expression, mesh, shape)
    assert (
        xs.plan(expression, mesh, shape, memory_limit=plan.peak_bytes).peak_bytes == plan.peak_bytes
    )
    with pytest.raises(PlanError, match="the least any plan needs"):
        xs.plan(expression, mesh, shape, memory_limit=plan.peak_bytes - 1)


@pytest.mark.parametrize(
    ("text", "length", "parts", "outputs"),
    [
        ("h/sp:window(k=3,s=2,p=1)", 14, 2, "h/sp"),
        ("h/sp:window(k=3,p=0)", 32, 2, "h/sp"),
        ("h/sp:window(k=3,p=0,out=balanced)", 32, 2, "h/sp"),
        ("h/sp:window(k=3,p=0,out=aligned)", 32, 2, "h/sizes(sp,16,14)"),
        ("h/sp:window(k=4,p=1,out=balanced)", 7, 2, "h/sp"),
        ("h/sp:window(k=3,out=balanced)", 8, 4, "h/balanced(sp)"),
        ("h/sizes(sp,5,9):window(k=3,s=2,p=1)", 14, 2, "h/sizes(sp,3,4)"),
        ("h:window(k=3)", 8, 1, "h"),
        ("s/zigzag(sp):window(k=3,p=1,out=aligned)", 8, 2, "s/zigzag(sp)"),
    ],
)
def test_how_the_outputs_of_a_window_are_cut(text, length, parts, outputs):
    dim = xs.Layout.parse(text).dims[0]
    found, n = output_dim(dim, length, (parts,) * len(dim.axes))
    assert str(found) == outputs
    w = dim.overlap
    assert n == (length + sum(w.padding) - w.d * (w.k - 1) - 1) // w.s + 1


ERRORS = [
    ("h/a w -> h/a:halo(1,1,pole(z)) w", "no dim 'z' to roll beyond the pole"),
    (
        "h/a w -> h/a:halo(1,1,pole(h)) w",
        "dim 'h' has the pole and cannot be the dim that is rolled",
    ),
    ("h/a w -> h/a:halo(1,1,pole) w", "beyond a pole, but has 5 rows"),
    ("h/a:window(k=1,s=2) w -> h w", "holds row 3 of dim 'h'"),
    ("h w -> h/a:fold(halo(-1,0)) w", "row 0 of dim 'h' is in no block"),
    ("h/sizes(a,3,4) w -> h w", "'sizes(a,3,4)' adds up to 7 rows, not 8"),
    ("h/sizes(a,3,4,1) w -> h w", "3 sizes for 2 parts"),
    ("h/a w -> h/a:halo([1,1,1],1) w", "3 widths for 2 parts"),
    ("h/zigzag(a) w -> h/zigzag(a):halo([1,1],1) w", "widths per part need contiguous parts"),
    ("h w | sum(a) -> h:halo(1,1,constant(2)) w | sum(a)", "whose sum is another number"),
    ("h:fold(halo(1,1)) w | max(a) -> h w", "reduce the max first"),
]


@pytest.mark.parametrize(("expression", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_what_cannot_be_is_refused_when_it_is_planned(expression, message):
    with pytest.raises(xs.XshardError, match=re.escape(message)):
        xs.plan(expression, xs.Mesh(a=2), (8, 5))


@pytest.mark.parametrize(
    ("dtype", "expression", "message"),
    [
        ("int32", "h -> h:halo(1,1,constant(-inf))", "int32 cannot hold -inf"),
        ("uint8", "h -> h:halo(1,1,constant(-1))", "uint8 cannot hold -1"),
        ("float8_e4m3fn", "h -> h:halo(1,1,constant(-inf))", "float8_e4m3fn cannot hold -inf in"),
        ("float8_e4m3fnuz", "h -> h:halo(1,1,constant(300))", "from -240 to 240, without inf"),
        ("uint8", "h -> h:halo(1,1,pole(-1))", "uint8 lacks negative values"),
        ("bool", "h:fold(halo(1,1)) -> h", "bool lacks a sum"),
    ],
)
def test_what_a_dtype_cannot_hold(dtype, expression, message):
    with pytest.raises(DtypeError, match=message):
        xs.plan(expression, xs.Mesh(a=2), (8,), dtype)


def test_what_a_short_float_can_hold():
    for dtype, value in (("float8_e5m2", "-inf"), ("float8_e4m3fn", "-448"), ("bfloat16", "-inf")):
        xs.plan(f"h -> h:halo(1,1,constant({value}))", xs.Mesh(a=2), (8,), dtype)
