"""The picture of a layout shows exactly the devices that have each element."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.fuzz.chains import random_chain
from xshard.layout.runs import FILL, Run
from xshard.pictures.grid import picture
from xshard.pictures.rows import MAX_BLOCKS, devices_text, rows_text
from xshard.pictures.terminal import console, renderable


def sharding(layout: str, mesh: str, *shape: int) -> xs.Sharding:
    return xs.Sharding(layout, xs.Mesh.parse(mesh), shape)


@given(st.integers(0, 2**32), st.data())
def test_every_element_has_its_owner_on_one_card_for_each_place_along_other_axes(seed, data):
    """With or without overlaps, along no, one or two of the dims."""
    chain = random_chain(seed)
    made = xs.Sharding(chain.layouts[0], chain.mesh, chain.shape)
    names = made.layout.names
    names = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=2)) if names else []
    drawn = picture(made, names)
    drawn_dims = [made.dim_index(strip.dim.name) for strip in drawn.strips]
    devices = range(made.mesh.n_devices)
    owned = {(d, i): set(_owned(made, d, i)) for d in drawn_dims for i in devices}
    along = {a for d in drawn_dims for a in made.layout.dims[d].axes}
    others = [a for a in made.mesh.axes if a not in along]
    assert sorted(a for _, axes in drawn.roles for a in axes) == sorted(
        a for a in others if made.mesh.size(a) > 1
    )
    for element in itertools.product(*(range(made.shape[d]) for d in drawn_dims)):
        owners = {
            i
            for i in devices
            if all(x in owned[d, i] for d, x in zip(drawn_dims, element, strict=True))
        }
        at = [0, 0]
        for strip, x in zip(drawn.strips, element, strict=True):
            at.append(next(i for i, (start, stop) in enumerate(strip.blocks) if start <= x < stop))
        cards = drawn.cards[:, at[-2], at[-1]]
        assert set(cards) == owners and len(cards) == len(owners)
    if 0 not in made.shape:
        nothing = {i for i in devices if not all(made.owned(d, i) for d in range(len(made.shape)))}
        assert set(drawn.empty) == nothing


def _owned(made, d, device):
    return oracle.owned_rows(made.layout.dims[d], made.shape[d], made.mesh, device)


def test_zigzag_blocks():
    drawn = picture(sharding("b s/zigzag(cp) c", "cp=2", 2, 8, 4))
    assert [strip.dim.name for strip in drawn.strips] == ["s", "c"]
    assert drawn.strips[0].blocks == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert drawn.cards.tolist() == [[[0], [1], [1], [0]]]


def test_a_table_has_a_row_for_each_device():
    out = console()
    with out.capture() as shown:
        out.print(renderable(sharding("h/sp:halo(1,1) w", "dp=2,sp=2", 8, 3)))
    assert shown.get().split()[-8:] == ["3", "1", "1", "6x3", "4-7", "3-7,", "1", "fill"]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("a/x b c", ("a", "c")),
        ("a b/x c/y", ("b", "c")),
        ("a/x b/y c/z", ("a", "b")),
        ("a b c", ("b", "c")),
    ],
)
def test_two_dims_are_drawn_cut_ones_first(layout, names):
    drawn = picture(sharding(layout, "x=2,y=2,z=2", 4, 4, 4))
    assert tuple(strip.dim.name for strip in drawn.strips) == names


def test_a_scalar_is_one_cell():
    assert picture(sharding("()", "a=2")).cards.tolist() == [[[0]], [[1]]]


def test_an_empty_array_has_no_cell():
    assert picture(sharding("n/a m", "a=2", 0, 4), ["n", "m"]).cards.size == 0


def test_long_dims_are_cut_off():
    strip = picture(sharding("s/cyclic(cp)", "cp=4", 8192)).strips[0]
    assert len(strip.blocks) == MAX_BLOCKS
    assert strip.n_drawn == MAX_BLOCKS


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ("n d | sum(a)", "along a every device holds an addend: the array is their sum"),
        ("n d | mean(a)", "along a every device holds an addend: the array is their mean"),
        ("n d | max(a)", "along a every device holds a candidate: the array is their maximum"),
        (
            "n d | copy(a)",
            "along a every device has a copy of its own, and the gradients of the copies add up",
        ),
        ("n d/b", "along a all devices hold the same values (replicas)"),
        ("n/(b,a) d", "n is cut over b x a, in contiguous chunks"),
        (
            "n/a:fold(halo(1,1)) d",
            "n overlaps: rows of neighbours are contributions, added at their owner",
        ),
    ],
)
def test_notes_say_what_every_axis_does(layout, note):
    assert any(found.startswith(note) for found in picture(sharding(layout, "a=2,b=2", 4, 4)).notes)


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        (["q"], "no dim 'q' in 'a b c'"),
        (["a", "b", "c"], "one or two dims"),
        (["a", "a"], "one or two dims"),
    ],
)
def test_wrong_dims_raise(dims, reason):
    with pytest.raises(xs.errors.ShapeError, match=reason):
        picture(sharding("a b c", "x=2", 4, 4, 4), dims)


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ((), "none"),
        ((Run(3, 1),), "3"),
        ((Run(0, 2), Run(2, 2)), "0-3"),
        ((Run(6, 2), Run(0, 2)), "6-7, 0-1"),
        ((Run(1, 1, 4, 4),), "1-13 step 4"),
        ((Run(0, 2, 3, 8),), "0-1, 8-9, 16-17"),
        ((Run(3, 1, 3, -1), Run(1, 4)), "3-1 step -1, 1-4"),
        ((Run(0, 1, 2, 0), Run(0, 3)), "0 x2, 0-2"),
        ((Run(FILL, 2), Run(0, 3)), "2 fill, 0-2"),
        ((Run(0, 2, 100, 8),), "0-1, 8-9, 16-17, 24-25, 32-33, 40-41, ..."),
    ],
)
def test_rows_are_written_in_local_order(runs, text):
    assert rows_text(runs) == text


def test_devices_are_joined():
    given = [(3,), (0, 1), (0, 1, 2), (1, 3, 5), (0, 1, 4, 5), (0, 3, 4, 7, 9)]
    expected = ["3", "0-1", "0-2", "1-5 step 2", "0-1,4-5", "0,3-4,7,..."]
    assert [devices_text(devices) for devices in given] == expected
