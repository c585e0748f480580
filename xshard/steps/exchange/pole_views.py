"""Views: the parts of a block inside the array and beyond its poles, in which dims are independent."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

from xshard.layout import Sharding
from xshard.layout.block_rows import boundary_at
from xshard.layout.providers import STRAIGHT
from xshard.layout.validation import rolled_dim
from xshard.notation.overlap import unfolded


class View(NamedTuple):
    """A part of a block: per dim its side and the number added to its rows; and the factor of its values."""

    sides: tuple[str, ...]
    shifts: tuple[int, ...]
    sign: int = 1


@lru_cache(maxsize=8192)
def views(sharding: Sharding, carried: tuple[int, ...] = ()) -> tuple[View, ...]:
    """All views of a block, one if no dim has a pole; `carried` dims are not split into sides."""
    dims, shape = sharding.layout.dims, sharding.shape
    poles: dict[tuple[int, str], tuple[int | None, int]] = {}  # (dim, end) -> dim that is rolled, sign
    for d, dim in enumerate(dims):
        if dim.overlap is None or d in carried:
            continue
        for end in ("before", "after"):
            rule = boundary_at(unfolded(dim.overlap), end)
            if rule.kind == "pole":
                poles[d, end] = rolled_dim(dims, d, rule, shape), rule.sign
    options = [
        (STRAIGHT, *(end for end in ("before", "after") if (d, end) in poles)) for d in range(len(dims))
    ]
    result = []
    for sides in itertools.product(*options):
        shifts, sign = [0] * len(dims), 1
        for d, side in enumerate(sides):
            if side != STRAIGHT:
                rolled, factor = poles[d, side]
                if rolled is not None:
                    shifts[rolled] = (shifts[rolled] + shape[rolled] // 2) % max(shape[rolled], 1)
                sign *= factor
        result.append(View(sides, tuple(shifts), sign))
    return tuple(result)


def carried_dims(before: Sharding, after: Sharding) -> tuple[int, ...]:
    """Dims with the same overlap before and after: all their rows stay on their device."""
    dims = zip(before.layout.dims, after.layout.dims, strict=True)
    return tuple(d for d, (a, b) in enumerate(dims) if a.overlap is not None and a == b)
