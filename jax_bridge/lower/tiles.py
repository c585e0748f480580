"""Boxes that tile a block: every device concatenates them in its own order.

Decides when boxes tile the block. Then no empty block is made first, and local rows are copied once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax import lax

from jax_bridge.lower.row_tables import mine
from jax_bridge.lower.schedule import Round, box_shape
from xshard import Sharding

# First rows of boxes in a receiver's block, sorted, each with the round in which its box arrives.
Tiling = tuple[tuple[tuple[int, ...], int], ...]

MOST_TILES = 32  # in all distinct tilings together: each tiling is compiled as a branch


def tilings(schedule: Sequence[Round], after: Sharding) -> tuple[Tiling, ...] | None:
    """The tiling of every device; None if boxes differ in shape, leave a gap, or make too many tilings.

    schedule: rounds whose boxes are slices.
    """
    shapes = {box_shape(messages) for messages in schedule}
    if len(shapes) > 1:
        return None
    found: list[dict[tuple[int, ...], int]] = [{} for _ in range(after.mesh.n_devices)]
    for r, messages in enumerate(schedule):
        for message in messages:
            found[message.dst][tuple(segment.dst for (segment,) in message.box)] = r
    by_device = tuple(tuple(sorted(tiling.items())) for tiling in found)
    covered, block = math.prod(*shapes), math.prod(after.max_local_shape)
    fills = all(len(tiling) * covered == block for tiling in by_device)
    return by_device if fills and sum(map(len, set(by_device))) <= MOST_TILES else None


def side_by_side(
    by_device: Sequence[Tiling], box: Callable[[int], jax.Array], axes: Sequence[str]
) -> jax.Array:
    """This device's block. box: the box that arrives in a round."""
    distinct = list(dict.fromkeys(by_device))
    which = np.array([distinct.index(tiling) for tiling in by_device], np.int32)
    return lax.switch(mine(which, axes), [partial(tiled, tiling, box) for tiling in distinct])


def tiled(tiling: Tiling, box: Callable[[int], jax.Array], dim: int = 0) -> jax.Array:
    """The block of one tiling."""
    if len(tiling) == 1:
        return box(tiling[0][1])
    rows = [tuple(along) for _, along in itertools.groupby(tiling, key=lambda tile: tile[0][dim])]
    return lax.concatenate([tiled(row, box, dim + 1) for row in rows], dim)
