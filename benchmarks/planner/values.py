"""Plans run on numpy: the steps planned for the real shape must give the right values on a small one.

The small shape is as divisible as the steps need; uneven lengths keep their remainder.
"""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from xshard import reference

SMALL_ELEMENTS = 1 << 20  # arrays up to this size are run as they are
ROWS = (2, 1, 3, 5, 8)  # rows per finest part; the first that fits is taken


def are_right(plan: xs.Plan) -> bool:
    """Whether the plan's steps give every device the values of the destination."""
    return _runs_right(scaled_down(plan))


def scaled_down(plan: xs.Plan) -> xs.Plan:
    """The same steps for a small array. Raises PlanError if no small shape takes them."""
    if math.prod(plan.shape) <= SMALL_ELEMENTS:
        return plan
    passed = [plan.source, plan.target, *(stage.after for stage in plan.stages)]
    sizes = [[s.mesh.size(*dim.axes) for dim in s.layout.dims] for s in passed]
    parts = [
        math.lcm(*column) for column in zip(*sizes, strict=True)
    ]  # every layout on the way has these
    error: xs.XshardError | None = None
    for rows in ROWS:
        shape = (min(n, rows * p + n % p) for n, p in zip(plan.shape, parts, strict=True))
        try:
            return replace(plan, shape=tuple(shape))
        except xs.XshardError as failed:
            error = failed
    raise xs.errors.PlanError(f"no small shape for the steps of {plan.src} -> {plan.dst}: {error}")


@lru_cache(maxsize=4096)
def _runs_right(plan: xs.Plan) -> bool:
    blocks, value = _drawn(plan)
    return is_value(reference.run(plan, blocks), value, plan)


def is_value(blocks: list[NDArray[np.int64]], value: NDArray[np.int64], plan: xs.Plan) -> bool:
    """Whether the blocks of all devices, in the plan's destination, hold an array."""
    if plan.dst.tagged("sum"):
        return np.array_equal(reference.gather(blocks, plan.dst, plan.mesh, plan.shape), value)
    wanted = reference.scatter(value, plan.dst, plan.mesh)
    return all(np.array_equal(a, b) for a, b in zip(blocks, wanted, strict=True))


def _drawn(plan: xs.Plan) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Random blocks in the plan's source, addends included, and the array that they hold."""
    rng = np.random.default_rng(0)
    sums = plan.src.tagged("sum")
    whole = replace(plan.src, tags=())
    shares = [
        rng.integers(-1000, 1000, plan.shape) for _ in range(math.prod(plan.mesh.sizes_of(sums)))
    ]
    scattered = [reference.scatter(share, whole, plan.mesh) for share in shares]
    blocks = [scattered[plan.mesh.index(d, sums)][d] for d in range(plan.mesh.n_devices)]
    return blocks, np.sum(shares, axis=0)
