"""Mistakes of place: a block of another device, swapped dims, a local index used as a global one.

Pure functions of a `Case`; see `causes`.
"""

from __future__ import annotations

import itertools

import numpy as np

from xshard.testing.diagnosis.evidence import Case, in_double, names_of, subsets


def stale(case: Case) -> str | None:
    """All devices hold the block of one."""
    mesh = case.sharding.mesh
    for axes in subsets(case.cut_axes):
        for index in range(mesh.size(*axes)):
            held = [mesh.group(d, axes)[index] for d in range(mesh.n_devices)]
            if all(case.near(got, case.want[h]) for got, h in zip(case.got, held, strict=True)):
                which = "the first device" if index == 0 else f"device {index}"
                return (
                    f"all devices along {names_of(axes)} hold the block of {which} there: a broadcast in "
                    "place of a scatter, a stale buffer, or an index that is the same on all"
                )
    return None


def exchanged(case: Case) -> str | None:
    """Whole blocks on the wrong devices."""
    devices = range(len(case.got))
    owners = [[w for w in devices if case.near(got, case.want[w])] for got in case.got]
    if not all(owners):
        return None
    mesh = case.sharding.mesh
    moved = [(d, own[0]) for d, own in zip(devices, owners, strict=True) if d not in own]
    if not moved:
        return None
    places = "; ".join(f"{mesh.place(d)} has the block of {mesh.place(h)}" for d, h in moved[:3])
    return f"blocks are on other devices: {places}: axes in another order, or another rank's index"


def transposed(case: Case) -> str | None:
    """Two dims of equal length are swapped."""
    names = case.sharding.layout.names
    for a, b in itertools.combinations(range(len(names)), 2):
        pairs = zip(case.got, case.want, strict=True)
        if all(case.near(np.swapaxes(in_double(x), a, b), y) for x, y in pairs):
            return f"dims {names[a]!r} and {names[b]!r} have changed places in every block: transposed"
    return None


def first_only_right(case: Case) -> str | None:
    """Right on the first devices along an axis, wrong on all others."""
    mesh = case.sharding.mesh
    for axis in case.cut_axes:
        others = tuple(d for d in range(mesh.n_devices) if mesh.index(d, (axis,)))
        if others == case.wrong_devices:
            return (
                f"right where {axis}=0, wrong on all other devices along {axis}: the index in the block is "
                "used where the one in the array was meant (positions, masks, offsets)"
            )
    return None
