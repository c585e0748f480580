"""Layouts that overlap: what a block holds, what moves, and adjoints.

Long because every overlap has its table of blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.strategies import layouts
from xshard.errors import DtypeError, PlanError
from xshard.layout.block_rows import output_dim
from xshard.layout.providers import missing_rows
from xshard.notation.overlap import BOUNDARIES, Boundary, Fold, Halo, Window, unfolded
from xshard.notation.parser import Dim

RNG = np.random.default_rng(0)


def padded(x: np.ndarray, lo: int, hi: int, boundary: str, value: float = 0.0) -> np.ndarray:
    """numpy's own padding of the first dim."""
    if boundary in ("zero", "constant"):
        return np.pad(x, [(lo, hi)] + [(0, 0)] * (x.ndim - 1), constant_values=value)
    if boundary == "pole":
        rolled = np.roll(x, x.shape[1] // 2, axis=1) if x.ndim > 1 else x
        return np.concatenate([rolled[:lo][::-1], x, rolled[len(x) - hi :][::-1]])
    mode = {"periodic": "wrap", "reflect": "reflect", "edge": "edge"}[boundary]
    return np.pad(x, [(lo, hi)] + [(0, 0)] * (x.ndim - 1), mode=mode)


@pytest.mark.parametrize("boundary", [b for b in BOUNDARIES if b != "none"])
@pytest.mark.parametrize(("lo", "hi"), [(1, 1), (2, 0), (0, 3), (4, 4)])
def test_halos_are_cuts_of_the_padded_array(boundary, lo, hi):
    x, mesh = RNG.integers(-9, 10, (8, 6)).astype(float), xs.Mesh(sp=4)
    text = f"h/sp:halo({lo},{hi},{'constant(7)' if boundary == 'constant' else boundary}) w"
    whole = padded(x, lo, hi, boundary, 7.0 * (boundary == "constant"))
    expected = [whole[2 * i : 2 * i + 2 + lo + hi] for i in range(4)]
    for found in (
        xs.reference.scatter(x, text, mesh),
        xs.reference.run(xs.plan(f"h/sp w -> {text}", mesh, x.shape, "float64"), np.split(x, 4)),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rows_beyond_a_pole_are_rolled_and_negated_wherever_the_longitudes_are():
    """credit's earth padding with h=3, longitudes cut and periodic, corners included."""
    x = RNG.integers(-9, 10, (16, 32)).astype(float)
    north, south = (-np.roll(part, 16, axis=1)[::-1] for part in (x[:3], x[-3:]))
    earth = np.pad(np.concatenate([north, x, south]), [(0, 0), (1, 1)], mode="wrap")
    mesh, text = xs.Mesh(lat=4, lon=2), "h/lat:halo(3,3,pole(w,-1)) w/lon:halo(1,1,periodic)"
    plan = xs.plan(f"h/lat w/lon -> {text}", mesh, x.shape, "float64")
    blocks = xs.reference.run(plan, xs.reference.scatter(x, "h/lat w/lon", mesh))
    for device, block in enumerate(blocks):
        i, j = mesh.coords(device)
        assert np.array_equal(block, earth[4 * i : 4 * i + 10, 16 * j : 16 * j + 18])


def test_beyond_the_second_pole_rows_are_as_they_were():
    mesh, text = xs.Mesh(lat=2, lon=2), "h/lat:halo(5,7,pole(-1)) w/lon"
    x = RNG.integers(1, 10, (3, 4)).astype(float)
    blocks = xs.reference.run(
        xs.plan(f"h/lat w/lon -> {text}", mesh, x.shape, "float64"),
        xs.reference.scatter(x, "h/lat w/lon", mesh),
    )
    for device, block in enumerate(blocks):
        assert np.array_equal(block, oracle.spread(x, xs.Layout.parse(text), mesh, device))
    back = -np.roll(x, 2, axis=1)[::-1]
    assert np.array_equal(blocks[0][:5], np.concatenate([x, back])[1:, :2])


def test_longitudes_that_overlap_already_are_rolled_too():
    mesh, wide = xs.Mesh(lat=2, lon=2), "w/lon:halo(1,1,periodic)"
    x = RNG.integers(1, 10, (4, 8)).astype(float)
    plan = xs.plan(f"h/lat {wide} -> h/lat:halo(1,1,pole) {wide}", mesh, x.shape, "float64")
    blocks = xs.reference.run(plan, xs.reference.scatter(x, plan.src, mesh))
    for device, block in enumerate(blocks):
        assert np.array_equal(block, oracle.spread(x, plan.dst, mesh, device))


def test_either_end_has_a_boundary_of_its_own():
    """PhysicsNeMo's one-sided padding: the top row repeated, ones below."""
    x = np.arange(8.0)
    blocks = xs.reference.scatter(x, "h/sp:halo([2,0],[0,2],edge,constant(1))", xs.Mesh(sp=2))
    assert [b.tolist() for b in blocks] == [[0, 0, 0, 1, 2, 3], [4, 5, 6, 7, 1, 1]]


def test_the_later_dim_fills_the_corners():
    x, mesh = np.ones((2, 2)), xs.Mesh(sp=1)
    (block,) = xs.reference.scatter(x, "h:halo(1,0,constant(5)) w:halo(1,0,constant(7))", mesh)
    assert block.tolist() == [[7, 5, 5], [7, 1, 1], [7, 1, 1]]
    plan = xs.plan("h w -> h:halo(1,0,constant(5)) w:halo(1,0,constant(7))", mesh, (2, 2))
    assert np.array_equal(xs.reference.run(plan, [x])[0], block)


def test_a_cut_of_given_sizes():
    mesh = xs.Mesh(sp=4)
    blocks = xs.reference.scatter(np.arange(8), "s/sizes(sp,3,0,3,2)", mesh)
    assert [b.tolist() for b in blocks] == [[0, 1, 2], [], [3, 4, 5], [6, 7]]
    halos = xs.reference.scatter(np.arange(8), "s/sizes(sp,3,0,3,2):halo([1,0,1,1],[1,0,1,1])", mesh)
    assert [b.tolist() for b in halos] == [[0, 0, 1, 2, 3], [], [2, 3, 4, 5, 6], [5, 6, 7, 0]]
    same = xs.Sharding(xs.Layout.parse("s/sizes(sp,2,2,2,2)"), mesh, (8,))
    assert str(same.normal) == "s/sp"


@given(st.data())
def test_scatter_is_the_padded_array_cut_dim_after_dim(data):
    mesh, shape, layout, _ = data.draw(moves())
    # The chunks of a zigzag have a halo each; the oracle knows them where no other cut is around.
    assume(all(len(d.shards) == 1 or "zigzag" not in str(d) for d in layout.dims))
    assume("cyclic" not in str(layout))
    layout = xs.Layout(
        tuple(Dim(d.name, d.shards, unfolded(d.overlap) if d.overlap else None) for d in layout.dims)
    )
    x = RNG.integers(-9, 10, shape).astype(float)
    for device, block in enumerate(xs.reference.scatter(x, layout, mesh)):
        assert np.array_equal(block, oracle.spread(x, layout, mesh, device))


# -- plans -------------------------------------------------------------------------------------------------


@st.composite
def ends(draw):
    return Boundary(draw(st.sampled_from(BOUNDARIES)), sign=draw(st.sampled_from((1, -1))))


@st.composite
def overlaps(draw):
    before, after = (b if b.kind == "pole" else Boundary(b.kind) for b in (draw(ends()), draw(ends())))
    if draw(st.booleans()):
        overlap = Halo(draw(st.integers(0, 5)), draw(st.integers(0, 5)), before, after)
    else:
        k, s, d = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        overlap = Window(k, s, d, padding, "", before, after)
    return Fold(overlap) if draw(st.booleans()) else overlap


@st.composite
def moves(draw):
    """(mesh, shape, src, dst): two dims that may overlap on up to nine devices."""
    mesh = xs.Mesh(x=draw(st.integers(1, 3)), y=draw(st.integers(1, 3)))
    shape = (draw(st.integers(1, 9)), draw(st.sampled_from((2, 4, 6, 8))))
    sides = []
    for _ in range(2):
        layout = draw(layouts(mesh, 2, kinds=("sum", "copy")))
        dims = tuple(Dim(dim.name, dim.shards, draw(st.none() | overlaps())) for dim in layout.dims)
        # A pole rolls the next dim: the last has none.
        if "pole" in str(dims[1]):
            dims = (dims[0], Dim(dims[1].name, dims[1].shards))
        sides.append(xs.Layout(dims, layout.tags))
    return mesh, shape, *sides


def legal_blocks(layout, mesh, shape):
    """Contributions and addends arbitrary, copies of every kind equal."""
    bare = xs.Layout(
        tuple(d if isinstance(d.overlap, Fold) else Dim(d.name, d.shards) for d in layout.dims), layout.tags
    )
    sharding, replicas = xs.Sharding(bare, mesh, shape), [a for a in mesh.axes if a not in bare.axes]
    replicas += bare.tagged("copy")
    blocks = [RNG.integers(-9, 10, sharding.local_shape(d)).astype(float) for d in range(mesh.n_devices)]
    blocks = [blocks[mesh.group(d, replicas)[0]] for d in range(mesh.n_devices)]
    return xs.reference.run(xs.plan((bare, layout), mesh, shape, "float64"), blocks)


def planned(src, dst, mesh, shape):
    try:
        return xs.plan((src, dst), mesh, shape, "float64")
    except PlanError as error:
        if "holds row" in error.reason or "is in no block" in error.reason:
            return None
        raise


@given(moves())
def test_a_redistribution_leaves_the_array_as_it_is_and_its_backward_plan_is_the_adjoint(move):
    """<A x, y> = <x, A* y> in whole numbers, over random halos, windows and folds of every boundary."""
    mesh, shape, src, dst = move
    plan = planned(src, dst, mesh, shape)
    if plan is None:
        return
    blocks = legal_blocks(src, mesh, shape)
    value = xs.reference.gather(blocks, src, mesh, shape)
    result = xs.reference.run(plan, blocks)
    assert not plan.exceeds_endpoints
    y = legal_blocks(dst.dual, mesh, shape)
    back = xs.reference.run(plan.backward, y)
    assert oracle.paired(result, y, dst, mesh) == oracle.paired(blocks, back, src, mesh)
    if not dst.tagged("sum") and not any(isinstance(d.overlap, Fold) for d in dst.dims):
        expected = xs.reference.scatter(value, dst, mesh)
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))
    else:
        for d, (dim, n) in enumerate(zip(dst.dims, shape, strict=True)):  # rows that the result has
            gone = [
                r.start + i for r in missing_rows(dim, n, mesh.sizes_of(dim.axes)) for i in range(r.length)
            ]
            value[(slice(None),) * d + (gone,)] = 0
        assert np.array_equal(xs.reference.gather(result, dst, mesh, shape), value)


def test_constants_have_no_derivative():
    mesh, shape = xs.Mesh(sp=2), (4,)
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


def test_neighbours_exchange_two_messages_per_axis_and_corners_come_along():
    plan = xs.plan("h/a w/b -> h/a:halo(1,1) w/b:halo(1,1)", xs.Mesh(a=3, b=3), (96, 96), "float32")
    assert [str(s.after.layout) for s in plan.stages] == ["h/a:halo(1,1) w/b", "h/a:halo(1,1) w/b:halo(1,1)"]
    assert [hop.messages for s in plan.stages for hop in s.step.traffic(s.before).hops] == [2, 2]
    assert plan.bytes_received == plan.bytes_lower_bound == 4 * (2 * 32 + 2 * 34)
    assert str(plan.backward.stages[0].after.layout) == "h/a:fold(halo(1,1)) w/b"
    assert plan.backward.bytes_received == plan.bytes_received


@pytest.mark.parametrize("axis", [1, 2])
def test_a_periodic_axis_of_one_or_two_devices(axis):
    mesh, x = xs.Mesh(a=axis), np.arange(8.0)
    plan = xs.plan("h/a -> h/a:halo(1,2,periodic)", mesh, (8,), "float64")
    whole = np.pad(x, (1, 2), mode="wrap")
    n = 8 // axis
    for i, block in enumerate(xs.reference.run(plan, np.split(x, axis))):
        assert np.array_equal(block, whole[i * n : i * n + n + 3])


def test_other_dims_move_by_collectives_past_an_overlap():
    mesh = xs.Mesh(sp=2, tp=2)
    plan = xs.plan("b h/sp:halo(1,1) c/tp -> b h/sp:halo(1,1) c", mesh, (2, 64, 64), profile="h100")
    assert [str(step) for step in plan.steps] == ["all_gather c/tp"]
    assert [s.kind for s in xs.plan("h/sp:halo(1,1) c -> h c/sp", xs.Mesh(sp=2), (8, 8)).steps][
        -1
    ] != "all_gather"


def test_overlaps_of_nothing_are_none():
    plan = xs.plan("h w:window(k=2,p=2,none) -> h w:fold(halo(0,0))", xs.Mesh(a=2), (1, 6))
    assert plan.steps == ()


def test_an_axis_whose_blocks_all_hold_everything_may_become_copies():
    """The blocks are the same before and after; what the axis is called is not."""
    plan = xs.plan("h/b:halo(2,2,none) -> h | copy(b)", xs.Mesh(b=2), (2,), "float64")
    assert [b.tolist() for b in xs.reference.run(plan, [np.array([1.0, 2.0])] * 2)] == [[1, 2], [1, 2]]
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
    (block,) = xs.reference.run(xs.plan(f"h -> h:fold({repeated[2:]})", mesh, (1,)), [np.float32([5])])
    assert block.tolist() == [5, 0]
    with pytest.raises(PlanError, match="holds row 0"):  # beyond the pole it is another row
        xs.plan("h:window(k=1,s=9,p=1,pole) w -> h w", mesh, (2, 2))


def test_plans_with_overlaps_are_told_and_stay_within_memory():
    expression, mesh, shape = "h/sp w -> h/sp:halo(1,1,periodic) w", xs.Mesh(sp=4), (64, 64)
    plan = xs.plan(expression, mesh, shape)
    assert xs.Plan.from_json(plan.to_json()) == plan
    assert "direct exchange" in plan.explain()
    assert xs.plan(expression, mesh, shape, memory_limit=plan.peak_bytes).peak_bytes == plan.peak_bytes
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
    window = dim.overlap
    assert n == (length + sum(window.padding) - window.d * (window.k - 1) - 1) // window.s + 1


ERRORS = [
    ("h/a w -> h/a:halo(1,1,pole(z)) w", "no dim 'z' to roll beyond the pole"),
    ("h/a w -> h/a:halo(1,1,pole(h)) w", "dim 'h' has the pole and cannot be the dim that is rolled"),
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
    with pytest.raises(xs.XshardError) as caught:
        xs.plan(expression, xs.Mesh(a=2), (8, 5))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "expression", "message"),
    [
        ("int32", "h -> h:halo(1,1,constant(-inf))", "int32 cannot hold -inf"),
        ("uint8", "h -> h:halo(1,1,constant(-1))", "uint8 cannot hold -1"),
        ("uint8", "h -> h:halo(1,1,pole(-1))", "uint8 lacks negative values"),
        ("bool", "h:fold(halo(1,1)) -> h", "bool lacks a sum"),
    ],
)
def test_what_a_dtype_cannot_hold(dtype, expression, message):
    with pytest.raises(DtypeError, match=message):
        xs.plan(expression, xs.Mesh(a=2), (8,), dtype)


def test_overlaps_move_on_one_mesh():
    with pytest.raises(PlanError, match="trim or fold before"):
        xs.plan("h/a:halo(1,1) -> h/b", src_mesh=xs.Mesh(a=2), dst_mesh=xs.Mesh(b=3), shape=(6,))
