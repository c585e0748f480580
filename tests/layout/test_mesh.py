"""Devices, coordinates and groups."""

import numpy as np
import pytest

import xshard as xs
from tests.messages import refused, said


@pytest.mark.parametrize(
    "mesh", [xs.Mesh(a=2, b=3, c=4), xs.Mesh(a=1, b=5), xs.Mesh(a=7), xs.Mesh()], ids=str
)
def test_devices_number_a_row_major_array(mesh):
    numbers = np.arange(mesh.n_devices).reshape(mesh.sizes)
    for coords, device in np.ndenumerate(numbers):
        assert mesh.coords(int(device)) == coords
        assert mesh.device(coords) == device


def test_groups_are_slices_of_that_array():
    mesh = xs.Mesh(a=2, b=3, c=4)
    numbers = np.arange(24).reshape(2, 3, 4)
    assert mesh.groups(("b",)) == tuple(
        map(tuple, numbers.transpose(0, 2, 1).reshape(-1, 3).tolist())
    )
    assert mesh.groups(("a", "c")) == tuple(
        map(tuple, numbers.transpose(1, 0, 2).reshape(-1, 8).tolist())
    )
    assert mesh.groups(("c", "a")) == tuple(
        map(tuple, numbers.transpose(1, 2, 0).reshape(-1, 8).tolist())
    )
    assert mesh.groups(()) == tuple((device,) for device in range(24))
    for axes in [(), ("a",), ("c", "a"), ("b", "c", "a")]:
        for device in range(24):
            assert mesh.group(device, axes)[mesh.index(device, axes)] == device


def test_sizes():
    mesh = xs.Mesh(a=2, b=3, c=4)
    assert (mesh.size("c", "a"), mesh.size(), mesh.sizes_of(("c", "a")), mesh.n_devices) == (
        8,
        1,
        (4, 2),
        24,
    )


def test_order_of_axes_is_part_of_the_value():
    assert xs.Mesh(a=2, b=3) == xs.Mesh({"a": 2, "b": 3})
    assert xs.Mesh(a=2, b=3) != xs.Mesh(b=3, a=2)
    assert len({xs.Mesh(a=2), xs.Mesh(a=2), xs.Mesh(a=3)}) == 2


@pytest.mark.parametrize("mesh", [xs.Mesh(dp=2, cp=4), xs.Mesh(x=1), xs.Mesh()], ids=str)
def test_text_parses_back(mesh):
    assert xs.Mesh.parse(str(mesh)) == mesh
    assert eval(repr(mesh), {"Mesh": xs.Mesh}) == mesh


NO_NAME = "\n  letters, digits and '_', without a digit first"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: xs.Mesh(a=0), "axis 'a' has size 0\n  a size is a whole number >= 1"),
        (lambda: xs.Mesh(a=True), "axis 'a' has size True\n  a size is a whole number >= 1"),
        (lambda: xs.Mesh(a=2.0), "axis 'a' has size 2.0\n  a size is a whole number >= 1"),
        (lambda: xs.Mesh({"2a": 2}), "axis name '2a'" + NO_NAME),
        (lambda: xs.Mesh({"é": 2}), "axis name 'é'" + NO_NAME),
        (lambda: xs.Mesh(a=2, b=3).size("c"), "unknown mesh axis 'c'\n  the mesh has: a=2, b=3"),
        (lambda: xs.Mesh().position("c"), "unknown mesh axis 'c'\n  the mesh has: no axes"),
        (lambda: xs.Mesh(a=2, b=3).coords(6), "no device 6 in Mesh(a=2, b=3)\n  devices are 0..5"),
        (lambda: xs.Mesh(a=2).coords(-1), "no device -1 in Mesh(a=2)\n  devices are 0..1"),
        (
            lambda: xs.Mesh.parse("a=2,b"),
            said("a=2,«b»", "an axis reads NAME=SIZE", "as in dp=2,cp=4"),
        ),
        (lambda: xs.Mesh.parse("a=2,a=3"), said("a=2,«a=3»", "axis 'a' is named twice")),
    ],
)
def test_errors(make, message):
    with refused(xs.errors.MeshError, message):
        make()
