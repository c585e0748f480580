"""Global row numbers of local rows, and the global shape that a block tells."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests.strategies import layouts, meshes, shapes
from xshard.errors import MeshError, NotationError, ShapeError
from xshard.layout.lengths import global_shape

FOUR = xs.Mesh(cp=4)


@given(st.data(), meshes(), shapes())
def test_positions_are_the_numbers_that_the_reference_scatters(data, mesh, shape):
    layout = data.draw(layouts(mesh, len(shape), kinds=("copy",)))
    for d, n in enumerate(shape):
        along = np.broadcast_to(np.arange(n).reshape(-1, *[1] * (len(shape) - d - 1)), shape)
        for device, block in enumerate(xs.reference.scatter(along, layout, mesh)):
            found = layout.positions(mesh, shape, d, device)
            assert found.dtype == np.int64 and len(found) == block.shape[d]
            column = found.reshape(-1, *[1] * (len(shape) - d - 1))
            assert np.array_equal(block, np.broadcast_to(column, block.shape))


@pytest.mark.parametrize(
    "dim",
    [
        "s/zigzag(cp,5,0,8,3)",
        "s/cyclic(cp,3)",
        "s/sizes(cp,3,0,9,4)",
        "s/intervals(cp,[12,16],[0,1,4,12],[4,4],[1,4])",
        "s/cp:halo(2,1,constant(-1))",
        "s/cp:halo(5,6,periodic)",
        "s/cp:halo([0,1,2,3],[-1,0,1,2],reflect,edge)",
        "s/zigzag(cp):halo(3,0,constant(-1))",
        "s/cp:window(k=3,s=2,p=1,constant(-1))",
        "s/cp:halo(1,1,none)",
        "s/cp:halo(2,0,pole)",
    ],
)
def test_positions_are_the_rows_that_scatter_gives(dim):
    for device, block in enumerate(xs.reference.scatter(np.arange(16), dim, FOUR)):
        assert np.array_equal(xs.Layout.parse(dim).positions(FOUR, (16,), "s", device), block)


def positions(text, device):
    return xs.Layout.parse(text).positions(FOUR, (8,), "s", device).tolist()


def test_constant_rows_have_no_number():
    assert positions("s/cp:halo(2,1)", 0) == [-1, -1, 0, 1, 2]


def test_contributions_have_the_number_of_their_row():
    assert positions("s/cp:fold(halo(2,1))", 3) == [4, 5, 6, 7, -1]


def test_a_dim_is_named_in_any_way():
    layout = xs.Layout.parse("... s/cp c")
    for dim in ("s", 2, -2):
        assert layout.positions(FOUR, (2, 3, 8, 5), dim, 1).tolist() == [2, 3]
    assert layout.positions(FOUR, (2, 3, 8, 5), "_1", 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("layout", "shape", "dim", "device", "error", "message"),
    [
        ("s/cp c", (8, 2), "t", 0, ShapeError, "no dim 't' in 's/cp c'\n  dims are: s, c"),
        ("s/cp c", (8, 2), 2, 0, ShapeError, "no dim 2 in"),
        ("s/cp c", (8,), 0, 0, ShapeError, "has 2 dims, the array has 1"),
        ("s/tp", (8,), 0, 0, NotationError, "unknown mesh axis 'tp'"),
        ("s/cp", (8,), 0, 4, MeshError, "no device 4"),
        ("s/zigzag(cp,4,5)", (8,), 0, 0, ShapeError, "adds up to 9 rows, not 8"),
    ],
)
def test_what_is_refused(layout, shape, dim, device, error, message):
    with pytest.raises(error, match=re.escape(message)):
        xs.Layout.parse(layout).positions(FOUR, shape, dim, device)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("n/sizes(dp,2,3) d", (5, 4)),
        ("n/sizes(dp,2,0) d/tp", (2, 4)),
        ("n/dp/sizes(tp,1,3) d", (8, 4)),
        ("n/sizes(dp,4,2)/tp d", (6, 4)),
        ("n/intervals(dp,[0,2,5,7],[2,5]) d", (7, 4)),
        ("n/zigzag(dp,5,4) d", (9, 4)),
        ("n/sizes(dp,2,3):halo(1,1,none) d", (5, 4)),
        ("n/sizes(dp,3,5):window(k=3,s=2) d", (8, 4)),
        ("n/cyclic(dp,2) d/tp:halo(1,1)", (8, 4)),
    ],
)
def test_a_block_of_any_device_gives_the_shape(layout, shape):
    mesh = xs.Mesh(dp=2, tp=2)
    parsed = xs.Layout.parse(layout)
    for device in range(4):
        assert global_shape(parsed, mesh, parsed.local_shape(mesh, shape, device), layout) == shape


def test_a_block_that_does_not_say_it():
    with pytest.raises(ShapeError, match="4 rows do not say how long dim 'h' is"):
        global_shape(xs.Layout.parse("h/tp:window(k=3)"), xs.Mesh(tp=2), (4,), "h/tp:window(k=3)")
