"""A part of a sharded array, as a sharded array of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.partition import all_owned_rows
from xshard.layout.runs import Run, Runs, common_segments, merge_adjacent, n_rows
from xshard.notation.parser import INTERVALS, Dim, Shard
from xshard.state.relations import ArrayPart

ADDED = "_added"  # the dim of length 1 of an array that is stacked


@dataclass(frozen=True)
class PartSharding:
    """The sharding of the part `part` of an array under `whole`.

    rows: the part's rows in a block, for every index along the axes that shard dim `part.dim`.
    """

    whole: Sharding
    part: ArrayPart
    sharding: Sharding
    rows: tuple[Runs, ...] = ()

    def numpy_index(self, device: int) -> tuple[Any, ...]:
        """The numpy index of the device's block of the part in its block of the whole."""
        if not self.rows:
            return self.part.numpy_index
        assert self.part.dim is not None
        return self.part._replace(rows=self.rows[self.whole.dim_device(self.part.dim, device)]).numpy_index


@lru_cache(maxsize=65536)
def part_of(whole: Sharding, part: ArrayPart) -> PartSharding:
    """The sharding of a part. Raises PlanError for rows of a dim with blocks that overlap.

    >>> from xshard import Layout, Mesh
    >>> from xshard.layout.runs import interval
    >>> fused = Sharding(Layout("o/tp i"), Mesh(tp=2), (12, 3))
    >>> keys = part_of(fused, ArrayPart("qkv", 0, interval(4, 8)))
    >>> keys.sharding, keys.numpy_index(0), keys.numpy_index(1)
    (Sharding('o/tp i', Mesh(tp=2), (4, 3)), (slice(4, 6, 1),), (slice(0, 2, 1),))
    """
    d, dims, shape = part.dim, whole.layout.dims, part.part_shape(whole.shape)
    if d is None:
        return PartSharding(whole, part, whole)
    if part.adds:
        layout = replace(whole.layout, dims=(*dims[:d], Dim(ADDED), *dims[d:]))
        return PartSharding(whole, part, Sharding(layout, whole.mesh, shape))
    if dims[d].overlap is not None:
        raise PlanError(
            f"'{dims[d]}' has blocks that overlap, a part of it cannot have a layout",
            hint="trim before, widen after",
        )
    # Rows in both, with their start in the part and in the block.
    segments = [common_segments(part.rows, rows) for rows in whole.owners(d)]
    held = tuple(merge_adjacent(Run(s.src, s.length) for s in some) for some in segments)
    in_block = tuple(_as_one_run([Run(s.dst, s.length) for s in some]) for some in segments)
    dim = _sharded_as(dims[d], held, whole.mesh.sizes_of(dims[d].axes), n_rows(part.rows))
    layout = replace(whole.layout, dims=(*dims[:d], dim, *dims[d + 1 :]))
    return PartSharding(whole, part, Sharding(layout, whole.mesh, shape), in_block)


def _sharded_as(dim: Dim, held: tuple[Runs, ...], sizes: tuple[int, ...], length: int) -> Dim:
    """The dim with the simplest shards that give every device these rows."""
    axes = dim.axes
    unnumbered = tuple(replace(shard, numbers=()) for shard in dim.shards)
    for shards in (unnumbered, (Shard(axes),)):
        if any(shard.order in ("sizes", INTERVALS) for shard in shards) or not axes:
            continue
        plain = Dim(dim.name, shards)
        if tuple(map(merge_adjacent, all_owned_rows(plain, length, sizes))) == held:
            return plain
    numbers = tuple(
        tuple(bound for run in runs for bound in (run.start, run.start + run.length)) for runs in held
    )
    return Dim(dim.name, (Shard(axes, INTERVALS, numbers),)) if axes else dim


def _as_one_run(runs: Sequence[Run]) -> Runs:
    """Runs of one length at one stride as one run, which an index reaches without a copy."""
    starts, lengths = [run.start for run in runs], {run.length for run in runs}
    strides = {b - a for a, b in itertools.pairwise(starts)}
    if len(lengths) == len(strides) == 1 and min(strides) > 0:
        return (Run(starts[0], lengths.pop(), len(runs), strides.pop()),)
    return merge_adjacent(runs)
