"""Lower bounds: the fewest elements that must reach all devices, and the busiest one, whatever the plan."""

from __future__ import annotations

import math

import numpy as np

from xshard.sharding import Sharding
from xshard.steps import Exchange
from xshard.steps.digits import met_elements
from xshard.steps.reach import begun, cuts_on_lanes, ended, reach


def received_elements(src: Sharding, dst: Sharding) -> int:
    """Fewest elements the busiest device must receive between two shardings in normal form.

    Without a reduction: what its destination block holds beyond its source block; where a sum
    begins any device of the sum may contribute an element, so there it is their mean. Where a
    reduction ends it receives at least the mean over all devices.
    """
    mesh, begins = dst.mesh, begun(src.layout, dst.layout)
    if ended(src.layout, dst.layout):
        return -(-total_elements(src, dst) // mesh.n_devices)
    if not begins:
        return Exchange(dst.layout).traffic(src).received
    total = _lacking(src, dst).sum(axis=tuple(mesh.position(a) for a in begins))
    return -(-int(total.max()) // mesh.size(*begins))


def total_elements(src: Sharding, dst: Sharding) -> int:
    """Fewest elements that all devices together must receive between two shardings in normal form.

    Without a reduction: what each device lacks. Where a reduction of n addends ends in m copies, every
    element takes n-1 + m-1 messages: n-1 until some device has the whole reduction, and one more to
    every other owner, each of which is complete later. One more again where no owner of the element
    holds an addend of it: then either the first to complete is no owner, or it had all n addends
    sent. All that once for every addend of the sums that stay.
    """
    mesh, ends, begins = dst.mesh, ended(src.layout, dst.layout), begun(src.layout, dst.layout)
    if not ends:
        return int(_lacking(src, dst).sum())
    sums = dst.layout.tagged("sum", "max", "min")
    cut = [a for dim in dst.layout.dims for a in dim.axes]
    copies = mesh.n_devices // mesh.size(*cut, *sums)
    whole = math.prod(dst.shape)
    messages = whole * (mesh.size(*ends) + copies - 2)
    if not begins:
        messages += whole - _met(src, dst)
    return messages * mesh.size(*(a for a in sums if a not in begins))


def _lacking(src: Sharding, dst: Sharding) -> np.ndarray:
    """What every device needs and does not have, as an array over the mesh."""
    mesh = dst.mesh
    lacking = reach(src, dst, ()).elements - reach(src, dst, mesh.axes).elements
    return np.broadcast_to(lacking, mesh.sizes)


def _met(src: Sharding, dst: Sharding) -> int:
    """Elements that some device holds at both ends; all where that has no closed form."""
    cuts = [cuts_on_lanes(s, ()) for s in (src, dst)]
    met = None if cuts[0] is None or cuts[1] is None else met_elements(src.shape, cuts[0], cuts[1])
    return math.prod(src.shape) if met is None else met
