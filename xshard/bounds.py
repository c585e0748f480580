"""Lower bounds: the fewest elements that must reach the busiest device, whatever the plan."""

from __future__ import annotations

import math

import numpy as np

from xshard.sharding import Sharding
from xshard.steps.exchange import Exchange, begun, ended, reach


def received_elements(src: Sharding, dst: Sharding) -> int:
    """Fewest elements the busiest device must receive between two shardings in normal form.

    Without a reduction: what its destination block holds beyond its source block; where a sum
    begins any device of the sum may contribute an element, so there it is their mean. Where a
    reduction ends: an element of n addends that ends in m copies takes n-1 + m-1 messages, and
    the busiest device receives at least the mean over all devices.
    """
    mesh, ends, begins = dst.mesh, ended(src.layout, dst.layout), begun(src.layout, dst.layout)
    if not ends and not begins:
        return Exchange(dst.layout).traffic(src).received
    if not ends:
        lacking = reach(src, dst, ()).elements - reach(src, dst, mesh.axes).elements
        lacking = np.broadcast_to(lacking, mesh.sizes)
        total = lacking.sum(axis=tuple(mesh.position(a) for a in begins))
        return -(-int(total.max()) // mesh.size(*begins))
    kept = [a for a in dst.layout.tagged("sum", "max", "min") if a not in begins]
    cut = [a for dim in dst.layout.dims for a in dim.axes]
    fibres = mesh.size(*kept)
    copies = mesh.n_devices // mesh.size(*cut) // mesh.size(*dst.layout.tagged("sum", "max", "min"))
    messages = fibres * math.prod(dst.shape) * (mesh.size(*ends) + copies - 2)
    return -(-messages // mesh.n_devices)
