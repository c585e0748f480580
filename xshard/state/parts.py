"""A part of a cut array, as an array that is cut itself.

Decides which rows of the part every device holds, under which layout, and where they lie in its block.
Knows one array: no mapping, no other mesh.
"""

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
from xshard.state.relations import Side

ADDED = "_added"  # the dim of length 1 of an array that is stacked


@dataclass(frozen=True)
class CutPart:
    """The part `side` of the array `whole`; `sharding` is that of the part.

    rows: for every index along the axes that cut dim `side.dim`, where the part's rows are in the block.
    """

    whole: Sharding
    side: Side
    sharding: Sharding
    rows: tuple[Runs, ...] = ()

    def at(self, device: int) -> tuple[Any, ...]:
        """The numpy index of the device's block of the part in its block of the whole."""
        if not self.rows:
            return self.side.at
        assert self.side.dim is not None
        return self.side._replace(rows=self.rows[self.whole.dim_device(self.side.dim, device)]).at


@lru_cache(maxsize=65536)
def part_of(whole: Sharding, side: Side) -> CutPart:
    """The part of a cut array. Raises PlanError where the part's rows are in blocks that overlap.

    >>> from xshard import Layout, Mesh
    >>> from xshard.layout.runs import interval
    >>> fused = Sharding(Layout("o/tp i"), Mesh(tp=2), (12, 3))
    >>> keys = part_of(fused, Side("qkv", 0, interval(4, 8)))
    >>> keys.sharding, keys.at(0), keys.at(1)
    (Sharding('o/tp i', Mesh(tp=2), (4, 3)), (slice(4, 6, 1),), (slice(0, 2, 1),))
    """
    d, dims = side.dim, whole.layout.dims
    if d is None:
        return CutPart(whole, side, whole)
    if side.adds:
        layout = replace(whole.layout, dims=(*dims[:d], Dim(ADDED), *dims[d:]))
        return CutPart(whole, side, Sharding(layout, whole.mesh, side.seen(whole.shape)))
    if dims[d].overlap is not None:
        raise PlanError(
            f"a part of '{dims[d]}', whose blocks overlap, has no layout", hint="trim before, widen after"
        )
    # Segments of the part's rows in local order: where they are in the part, and in the block.
    found = [common_segments(side.rows, rows) for rows in whole.owners(d)]
    held = tuple(merge_adjacent(Run(s.src, s.length) for s in segments) for segments in found)
    places = tuple(_in_turn([Run(s.dst, s.length) for s in segments]) for segments in found)
    dim = _cut_as(dims[d], held, whole.mesh.sizes_of(dims[d].axes), n_rows(side.rows))
    layout = replace(whole.layout, dims=(*dims[:d], dim, *dims[d + 1 :]))
    return CutPart(whole, side, Sharding(layout, whole.mesh, side.seen(whole.shape)), places)


def _cut_as(dim: Dim, held: tuple[Runs, ...], sizes: tuple[int, ...], length: int) -> Dim:
    """The dim with the plainest cut that gives every device these rows."""
    axes = dim.axes
    unnumbered = tuple(replace(shard, numbers=()) for shard in dim.shards)
    for shards in (unnumbered, (Shard(axes),)):
        if any(shard.order in ("sizes", INTERVALS) for shard in shards) or not axes:
            continue
        plain = Dim(dim.name, shards)
        if tuple(map(merge_adjacent, all_owned_rows(plain, length, sizes))) == held:
            return plain
    numbers = tuple(
        tuple(end for run in runs for end in (run.start, run.start + run.length)) for runs in held
    )
    return Dim(dim.name, (Shard(axes, INTERVALS, numbers),)) if axes else dim


def _in_turn(runs: Sequence[Run]) -> Runs:
    """Runs of one length at one stride as one run, whose rows an index reaches without a copy."""
    starts, lengths = [run.start for run in runs], {run.length for run in runs}
    strides = {b - a for a, b in itertools.pairwise(starts)}
    if len(lengths) == len(strides) == 1 and min(strides) > 0:
        return (Run(starts[0], lengths.pop(), len(runs), strides.pop()),)
    return merge_adjacent(runs)
