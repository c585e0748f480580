"""The permutation of the destination's devices that moves the fewest elements: COSTA, arXiv 2106.06601."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xshard.cost.bounds import shared_elements
from xshard.errors import PlanError
from xshard.layout import Sharding


def relabelled(
    source: Sharding, target: Sharding, src_devices: Sequence[int], dst_devices: Sequence[int]
) -> tuple[int, ...]:
    """The destination's devices in the order in which the fewest elements move; PlanError without scipy."""
    n = len(dst_devices)
    needed = np.array([math.prod(target.local_shape(j)) for j in range(n)], np.int64)
    position = {device: i for i, device in enumerate(src_devices)}
    lacking = needed - shared_elements(source, target)[[position[device] for device in dst_devices]]
    if sums := target.layout.tagged("sum"):
        lacking[:, [target.mesh.index(j, sums) > 0 for j in range(n)]] = 0
    return tuple(dst_devices[i] for i in best_places(lacking))


def best_places(lacking: NDArray[np.int64]) -> NDArray[np.int64]:
    """What devices lack at each place -> for each place its device. Raises PlanError without scipy."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise PlanError(
            "relabel=True needs scipy", hint="pip install scipy, or xshard with its extra 'relabel'"
        ) from None
    # The fewest elements in all; then for the busiest device, never more than if all stay; then fewest moves.
    places = np.arange(len(lacking))
    unit = max(1, int(np.gcd.reduce(lacking, axis=None)))
    # In one number: fewer elements first, then fewer devices that change places.
    weight = lacking // unit * (len(lacking) + 1) + (1 - np.eye(len(lacking), dtype=np.int64))

    def assign(most: int) -> NDArray[np.int64] | None:
        """The best order in which no device lacks more than `most`."""
        try:
            devices, order_found = linear_sum_assignment(np.where(lacking <= most, weight, np.inf))
        except ValueError:  # there is none
            return None
        return np.asarray(devices[np.argsort(order_found)])

    limits = np.unique(lacking[lacking <= lacking.diagonal().max()])
    order = assign(limits[-1])
    assert order is not None  # all may stay
    fewest, low, high = lacking[order, places].sum(), 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        order_found = assign(limits[middle])
        if order_found is not None and lacking[order_found, places].sum() == fewest:
            order, high = order_found, middle
        else:
            low = middle + 1
    return order
