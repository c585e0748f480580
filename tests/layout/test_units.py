"""Dims cut in whole units, `(n 128)/tp`; random ones are in `tests/fuzz/chains.py`."""

import numpy as np
import pytest

import xshard as xs
from tests.messages import refused, rows
from xshard import Layout, Mesh, Sharding

EIGHT = Mesh(tp=8, dp=2)
# A layout, the length of its dim, and how a sharding writes it, with rows.
IN_ROWS = """
(n 128)/tp                  1024   n_128/tp
(n 128)/tp                  1536   n_128/sizes(tp,256,256,256,256,256,256,0,0)
(n 4)/balanced(tp)            40   n_4/sizes(tp,8,8,4,4,4,4,4,4)
(h k)/sizes(tp,2,1,1,0,0,0,0,0) 20   h_k/sizes(tp,10,5,5,0,0,0,0,0)
(n 4)/(dp,tp)                 64   n_4/(dp,tp)
(n 4)/dp/tp                   64   n_4/dp/tp
(n 4)/tp/dp                   36   n_4/sizes(tp,dp,4,4,4,4,4,4,4,4,4,0,0,0,0,0,0,0)
(n 4)/cyclic(tp)              48   n_4/cyclic(tp,4)
(n 4)/cyclic(dp,3)            48   n_4/cyclic(dp,12)
(n 4)/zigzag(tp)              64   n_4/zigzag(tp)
(n 4)/zigzag(dp)              28   n_4/intervals(dp,[0,8,24,28],[8,24])
(n 4)/block(dp,2,4)           24   n_4/block(dp,8,16)
(n 4)/block(dp,3,3)           24   n_4/intervals(dp,[0,8,12,20],[8,12,20,24])
(n 4)/intervals(dp,[2,3],[0,2]) 12 n_4/intervals(dp,[8,12],[0,8])
(n 1)/tp                       9   n_1/tp
(n 4)/tp:halo(1,1)            32   n_4/tp:halo(1,1)
(n 4)                          9   n_4
"""


@pytest.mark.parametrize("row", IN_ROWS.strip().splitlines())
def test_units_become_rows(row):
    *names, length, written = row.split()
    layout = Layout.parse(" ".join(names))
    shape = (int(length),)
    sharding = Sharding(layout, EIGHT, shape)
    assert str(sharding.layout) == written
    assert Layout.parse(str(layout)) == layout and Layout.parse(written) == sharding.layout
    for device in range(0, 16, 5):
        numbers = layout.positions(EIGHT, shape, 0, device)
        assert numbers.tolist() == sharding.layout.positions(EIGHT, shape, 0, device).tolist()


def test_a_composed_dim_is_cut_as_its_first_name_would_be():
    """So the scales of blocks lie where the blocks do, and nothing is sent to multiply them."""
    for cut in ("tp", "balanced(tp)", "block(tp,5,5)", "zigzag(tp)", "cyclic(tp)"):
        weight = f"(n 16)/{cut} (m 16)"
        call = f"{weight}, n/{cut} m -> {weight}"
        plan = xs.plan(call, Mesh(tp=4), sizes={"n": 10, "m": 2})
        assert plan.bytes_received == 0 and str(plan.arrays[-1].layout) == str(
            plan.arrays[0].layout
        )
    rng = np.random.default_rng(0)
    w = rng.integers(-4, 5, (40, 8)).astype(float)
    scale = rng.integers(1, 4, (10, 2)).astype(float)
    x = rng.integers(-4, 5, (3, 8)).astype(float)
    text = "(n 4)/balanced(tp) (m 4), n/balanced(tp) m, b (m 4) | copy(tp) -> b (n 4)/balanced(tp)"
    plan = xs.plan(text, Mesh(tp=4), shape=[w.shape, scale.shape, x.shape], dtype="float64")
    blocks = [
        xs.reference.scatter(array, array_layout, Mesh(tp=4))
        for array, array_layout in zip(
            (w, scale, x), text.partition(" ->")[0].split(", "), strict=True
        )
    ]
    result = xs.reference.run(plan, *blocks)
    whole = xs.reference.gather(result, "b (n 4)/balanced(tp)", Mesh(tp=4), (3, 40))
    assert np.array_equal(whole, x @ (w * scale.repeat(4, 0).repeat(4, 1)).T)


def test_equal_blocks_are_one_layout_however_they_are_written():
    plan = xs.plan("(n 4)/tp d -> n_4/sizes(tp,8,8,8,0) d", Mesh(tp=4), (24, 3))
    assert not plan.steps
    moved = xs.plan("(n 4)/tp d -> (n 4) d/tp", Mesh(tp=4), (24, 8))
    assert moved.bytes_received == moved.bytes_lower_bound
    assert xs.Plan.from_json(moved.to_json()) == moved
    assert str(moved.src) == "(n 4)/tp d"


def test_owners_of_units():
    """A map says which part owns each unit, as each atom with its three coordinates."""
    atoms = xs.Owners([1, 0, 1, 1])
    layout = Layout.parse("(n 3)/by(gp,atoms)", maps={"atoms": atoms})
    mesh = Mesh(gp=2)
    assert layout.positions(mesh, (12,), 0, 0).tolist() == [3, 4, 5]
    assert layout.positions(mesh, (12,), 0, 1).tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11]


REFUSED = """
«(n 5)/tp» -> (n 5)   48 rows of dim '(n 5)' are no whole units of 5
    a block has whole units: 45 rows, or 50
«(h k)/tp» -> (h k)   nothing says how many rows a unit of '(h k)' has
    write their number, as in (h 128), or how many units each part has, as in (h k)/sizes(tp,2,1)
«(n 4)/sizes(dp,3,8)» -> (n 4)   'sizes(dp,3,8)' adds up to 11 units, not 12
    dim '(n 4)' has 12 units of 4 rows
(h k)/tp -> h/tp «k»   dim names differ across the arrow
    left: h_k   right: h k   (the same names, in any order; einsum sums dims)
(h k) d -> (h k) «c»   dim names differ across the arrow
    left: h_k d   right: h_k c   (the same names, in any order; einsum sums dims)
(«128» n)/tp -> n   expected a name, found '128'
    a composed dim is names, then perhaps a number, and is sharded as a whole: (h d)/tp
(n 2 «3»)/tp -> n   expected ')', found '3'
    a composed dim is names, then perhaps a number, and is sharded as a whole: (h d)/tp
(n «0»)/tp -> n   a unit of no rows   a unit has 1 row or more: (n 128)/tp
(n 4) «n» -> n   dim 'n' is named twice   an einsum takes diagonals: i i -> i
"""


@pytest.mark.parametrize(("text", "message"), rows(REFUSED))
def test_what_is_wrong_is_marked(text, message):
    with refused(xs.XshardError, message):
        xs.plan(text, EIGHT, (48,))
