"""The reference interpreter: blocks in, blocks out, and what it refuses."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.messages import refused
from tests.strategies import layouts, meshes, shapes

NUMPY_DTYPES = sorted({np.dtype(code).name for code in "?bBhHiIlLqQefdgFDG"})
EXTENDED_DTYPES = [
    "bfloat16",
    *(f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")),
    *("int4", "uint4", "float4_e2m1fn"),
]


@given(st.data(), meshes(), shapes())
def test_gather_is_the_inverse_of_scatter(data, mesh, shape):
    layout = data.draw(layouts(mesh, len(shape)))
    x = np.arange(1.0, np.prod(shape) + 1).reshape(shape) * 64 * 9 * 25
    blocks = xs.reference.scatter(x, layout, mesh)
    assert np.array_equal(xs.reference.gather(blocks, layout, mesh, shape), x)
    assert np.array_equal(oracle.gather(blocks, layout, mesh, shape), x)


@given(st.data(), meshes(), shapes())
def test_addends_are_gathered(data, mesh, shape):
    layout = data.draw(layouts(mesh, len(shape)))
    blocks = oracle.random_blocks(layout, mesh, shape, np.random.default_rng(0), unit=64 * 9 * 25)
    expected = oracle.gather(blocks, layout, mesh, shape)
    assert np.array_equal(xs.reference.gather(blocks, layout, mesh, shape), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "bool"])
def test_a_pole_negates_signed_numbers_alone(dtype):
    layout = "n/a:halo(1,1,pole(m,-1)) m"
    x = np.ones((4, 4), dtype)
    with refused(
        xs.errors.DtypeError, f"dtype {dtype} lacks negative values\n  cast to a signed dtype"
    ):
        xs.reference.scatter(x, layout, xs.Mesh(a=2))
    with refused(
        xs.errors.DtypeError, f"dtype {dtype} lacks negative values\n  cast to a signed dtype"
    ):
        xs.reference.gather([x, x], layout, xs.Mesh(a=2), (4, 4))
    assert xs.reference.scatter(x.astype("int8"), layout, xs.Mesh(a=2))[0][0].tolist() == [-1] * 4


def test_scatter_under_tags():
    mesh = xs.Mesh(a=2)
    x = np.array([3, 4])
    held = {
        kind: [b.tolist() for b in xs.reference.scatter(x, f"n | {kind}(a)", mesh)]
        for kind in ("sum", "mean", "max", "min", "copy")
    }
    both = [[3, 4], [3, 4]]
    assert held == {"sum": [[3, 4], [0, 0]], "mean": both, "max": both, "min": both, "copy": both}


def test_scatter_fills_halos_with_zeros():
    """A zero boundary is filled with zeros, and gathering reads every row at its owner."""
    mesh = xs.Mesh(a=2)
    x = np.arange(1, 7)
    blocks = xs.reference.scatter(x, "h/a:halo(2,1)", mesh)
    assert [b.tolist() for b in blocks] == [[0, 0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 0]]


def test_gather_reads_every_row_at_its_owner():
    mesh = xs.Mesh(a=2)
    x = np.arange(1, 7)
    blocks = xs.reference.scatter(x, "h/a:halo(2,1)", mesh)
    blocks[1][:2] = -1  # the neighbour's rows
    assert xs.reference.gather(blocks, "h/a:halo(2,1)", mesh, (6,)).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, *EXTENDED_DTYPES])
def test_every_dtype_moves(dtype):
    x = np.arange(24).reshape(8, 3).astype(dtype)
    mesh = xs.Mesh(a=2, b=2)
    plan = xs.plan("n/a d -> n/zigzag(b) d | copy(a)", mesh, x.shape, dtype)
    assert plan.dtype == dtype and plan.itemsize == x.dtype.itemsize
    result = xs.reference.run(plan, xs.reference.scatter(x, plan.src, mesh))
    assert {block.dtype for block in result} == {x.dtype}
    gathered = xs.reference.gather(result, plan.dst, mesh, x.shape)
    assert gathered.dtype == x.dtype and gathered.tobytes() == x.tobytes()  # a nan moves too


@pytest.mark.parametrize("dtype", [d for d in [*NUMPY_DTYPES, "bfloat16"] if d != "bool"])
def test_every_dtype_with_a_sum_is_summed(dtype):
    mesh = xs.Mesh(a=4)
    x = np.arange(4).astype(dtype)
    plan = xs.plan("n | sum(a) -> n/a", mesh, (4,), dtype)
    result = xs.reference.run(plan, [x] * 4)
    assert [b.tolist() for b in result] == [[4 * i] for i in range(4)]
    assert {block.dtype for block in result} == {x.dtype}


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
)
def test_means_keep_the_dtype(dtype):
    plan = xs.plan("n | mean(a) -> n", xs.Mesh(a=4), (2,), dtype)
    result = xs.reference.run(plan, [np.array([4 * i, -8]).astype(plan.dtype) for i in range(4)])
    assert {block.dtype.name for block in result} == {dtype}
    assert [block.astype(complex).tolist() for block in result] == [[6, -8]] * 4


BOOL = "cast to an integer, or use max (any) or min (all)"
SHORT = "it can only be moved: cast before the reduction"
INTEGERS = "the mean of integers need not be an integer: cast, or use sum"
KNOWN = "as in float32, bfloat16, int64, bool, complex64"


@pytest.mark.parametrize(
    ("tag", "dtype", "reason", "hint"),
    [
        ("sum", "bool", "dtype bool lacks a sum", BOOL),
        ("mean", "bool", "dtype bool lacks a mean", BOOL),
        ("mean", "int32", "dtype int32 lacks a mean", INTEGERS),
        ("max", "complex64", "dtype complex64 lacks a max", "complex numbers are not ordered"),
        ("sum", "float8_e5m2", "dtype float8_e5m2 cannot be reduced", SHORT),
        ("max", "int4", "dtype int4 cannot be reduced", SHORT),
    ],
)
def test_dtypes_that_cannot_be_reduced(tag, dtype, reason, hint):
    text = f"n | {tag}(a) -> n"
    with refused(xs.errors.DtypeError, f"{reason} in '{text}'\n  {hint}"):
        xs.plan(text, xs.Mesh(a=2), (4,), dtype)


def test_products_that_cannot_be_added_up():
    with refused(
        xs.errors.DtypeError, f"dtype float8_e5m2 cannot be reduced in 'n/a, n/a ->'\n  {SHORT}"
    ):
        xs.plan("n/a, n/a ->", xs.Mesh(a=2), sizes={"n": 4}, dtype="float8_e5m2")


@pytest.mark.parametrize("dtype", ["str", "banana"])
def test_unknown_dtypes(dtype):
    with refused(xs.errors.DtypeError, f"unknown dtype '{dtype}'\n  {KNOWN}"):
        xs.plan("n | sum(a) -> n", xs.Mesh(a=2), (4,), dtype)


def test_bool_has_any_or_all():
    blocks = [np.array([True, True, False]), np.array([True, False, False])]
    for kind, expected in (("max", [True, True, False]), ("min", [True, False, False])):
        plan = xs.plan(f"n | {kind}(a) -> n", xs.Mesh(a=2), (3,), "bool")
        assert [b.tolist() for b in xs.reference.run(plan, blocks)] == [expected] * 2


def test_the_dtype_of_the_blocks_decides_what_may_be_reduced():
    plan = xs.plan("n | sum(a) -> n", xs.Mesh(a=2), (4,), "float32")
    with pytest.raises(xs.errors.DtypeError, match="bool lacks a sum"):
        xs.reference.run(plan, [np.ones(4, bool)] * 2)


TALL = np.zeros((3, 4))
WIDE = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (
            [TALL, TALL],
            xs.errors.ShapeError,
            "the block of device 1 has shape (3, 4)\n"
            "  under 'n/a d' a (5, 4) array on Mesh(a=2) gives it (2, 4)",
        ),
        (
            [TALL],
            xs.errors.ShapeError,
            "1 blocks for 2 devices\n  one block per device of Mesh(a=2), row-major",
        ),
        ([TALL, WIDE], xs.errors.DtypeError, "device 1 holds float32, device 0 holds float64"),
    ],
)
def test_blocks_that_do_not_fit(blocks, error, message):
    plan = xs.plan("n/a d -> n d/a", xs.Mesh(a=2), (5, 4))
    with refused(error, message):
        xs.reference.run(plan, blocks)
    with refused(error, message):
        xs.reference.gather(blocks, plan.src, plan.mesh, plan.shape)


@pytest.mark.parametrize(
    "expression",
    [
        "n/a d -> n d/a",
        "n d -> n d | copy(a)",
        "n d -> n/block(a) d",
        "n/a d -> n/a d",
        "n d | sum(a) -> n d",
        "n d | mean(a) -> n d | copy(a)",
        "n d | copy(a) -> n d | sum(a)",
    ],
)
def test_results_share_no_memory_with_inputs_or_each_other(expression):
    mesh = xs.Mesh(a=2, b=2)
    plan = xs.plan(expression, mesh, (4, 6), "float64")
    blocks = xs.reference.scatter(np.arange(24.0).reshape(4, 6), plan.src, mesh)
    given_ = [block.copy() for block in blocks]
    results = xs.reference.run(plan, blocks)
    for block in results:
        block += 1  # a user's own in-place update
    assert all(np.array_equal(a, b) for a, b in zip(blocks, given_, strict=True))
    assert not any(np.shares_memory(a, b) for i, a in enumerate(results) for b in results[:i])


def test_extended_dtypes_have_the_sizes_of_ml_dtypes():
    for name in EXTENDED_DTYPES:
        plan = xs.plan("n/a -> n", xs.Mesh(a=2), (4,), getattr(ml_dtypes, name))
        assert (plan.dtype, plan.itemsize) == (name, np.dtype(getattr(ml_dtypes, name)).itemsize)
