"""Windows over one sharded dim: the rows that every part reads, and the outputs that it computes.
A `Frame` describes a convolution, its transpose, a pool or an interpolation; bridges run the op."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError
from xshard.layout.block_rows import Sizes, output_dim, window_outputs
from xshard.layout.partition import all_owned_rows
from xshard.layout.runs import Runs, n_rows, unrolled
from xshard.notation.overlap import Boundary, Halo, Window
from xshard.notation.parser import SIZES, Dim, Shard

Interval = tuple[int, int]  # start, stop
NeededRows = Callable[[int, int], Interval]  # outputs [start, stop) -> the rows [first, last) that they read
NO_ROWS = Boundary("none")


class OutputRun(NamedTuple):
    """Consecutive outputs of one part, and the rows that they read: numbers of the first, and counts."""

    first: int
    rows: int
    start: int
    outputs: int


@dataclass(frozen=True)
class Frame:
    """One dim of an op: input dim with its overlap, output dim, global length, and the runs of every part.

    A part's block holds the rows of each of its runs in turn.
    """

    source: Dim
    result: Dim
    length: int
    runs: tuple[tuple[OutputRun, ...], ...]


@lru_cache(maxsize=4096)
def window_frame(dim: Dim, length: int, sizes: Sizes, window: Window, base: int = 1) -> Frame:
    """The frame of a convolution or a pool. base: dilation of the rows, with the boundary's value in between.

    Raises ShapeError if no layout can express how the outputs are sharded, or if rows are dilated or cropped
    and the parts of the dim are not intervals.
    """
    before, after = window.padding
    span = window.d * (window.k - 1) + 1
    if base > 1 or min(before, after) < 0:
        rows = (length - 1) * base + 1 if length else 0
        outputs = max(0, (rows + before + after - span) // window.s + 1)
        reads = _tap_rows(span, window.s, base, before)
        return interval_frame(dim, length, sizes, outputs, reads, rule=window.out, beyond=window.before)
    source = replace(dim, overlap=window)
    result, outputs = output_dim(source, length, sizes)
    runs = tuple(
        tuple(
            OutputRun(
                run.start * window.s - before, (run.length - 1) * window.s + span, run.start, run.length
            )
            for run in unrolled(window_outputs(source, window, length, sizes, coords))
            if run.length
        )
        for coords in itertools.product(*map(range, sizes))
    )
    return Frame(source, result, outputs, runs)


@lru_cache(maxsize=4096)
def transposed_frame(
    dim: Dim, length: int, sizes: Sizes, *, k: int, s: int = 1, d: int = 1, p: int = 0, extra: int = 0
) -> Frame:
    """The frame of a transposed convolution: tap j adds row i to output `i * s - p + d * j`.

    extra: rows added at the end of the output (torch's output_padding).
    """
    span = d * (k - 1) + 1
    outputs = max(0, (length - 1) * s - 2 * p + span + extra) if length else 0
    return interval_frame(dim, length, sizes, outputs, _tap_rows(span, 1, s, span - 1 - p))


def interval_frame(
    dim: Dim,
    length: int,
    sizes: Sizes,
    outputs: int,
    reads: NeededRows,
    *,
    rule: str = "",
    beyond: Boundary = NO_ROWS,
) -> Frame:
    """The frame of an op in which the outputs of every part read one interval of rows.

    rule: how outputs are sharded: like the rows, or aligned if the rows have given sizes (empty); `balanced`;
    or `aligned`: a part has the same share of the outputs as of the rows. Without rows `beyond` the ends,
    intervals end with the array. Raises ShapeError if the parts of the dim are not intervals.
    """
    owned = all_owned_rows(dim, length, sizes)
    if any(len(runs) > 1 or any(run.repeats > 1 for run in runs) for runs in owned):
        raise ShapeError(
            f"the parts of '{dim}' are not intervals",
            hint="redistribute to contiguous parts first, as in h/sp",
        )
    mine = _intervals(owned)
    result = _result_dim(dim, length, outputs, mine, rule)
    lo, hi, runs = [], [], []
    for (own, end), (start, stop) in zip(
        mine, _intervals(all_owned_rows(result, outputs, sizes)), strict=True
    ):
        first, last = reads(start, stop) if start < stop else (own, own)
        if beyond == NO_ROWS:
            first, last = min(max(first, 0), length), min(max(last, 0), length)
        last = max(first, last)
        lo.append(own - first)
        hi.append(last - end)
        runs.append((OutputRun(first, last - first, start, stop - start),) if start < stop else ())
    source = Dim(dim.name, dim.shards, Halo(tuple(lo), tuple(hi), beyond, beyond))
    return Frame(source, result, outputs, tuple(runs))


def _tap_rows(span: int, s: int, base: int, before: int) -> NeededRows:
    """Output o reads the positions from `o * s - before`, `span` of them; row i is position `i * base`."""

    def reads(start: int, stop: int) -> Interval:
        return -((before - start * s) // base), ((stop - 1) * s - before + span - 1) // base + 1

    return reads


def _result_dim(dim: Dim, length: int, outputs: int, owned: list[Interval], rule: str) -> Dim:
    if rule == "balanced" and dim.axes:
        return Dim(dim.name, (Shard(dim.axes, rule),))
    if not dim.axes or (rule != "aligned" and not any(shard.order == SIZES for shard in dim.shards)):
        return Dim(dim.name, dim.shards)
    stops = [math.ceil(stop * outputs / length) if length else 0 for _, stop in owned]
    lengths = tuple(stop - start for start, stop in itertools.pairwise((0, *stops)))
    return Dim(dim.name, (Shard(dim.axes, SIZES, lengths),))


def _intervals(parts: tuple[Runs, ...]) -> list[Interval]:
    """The intervals of contiguous parts; an empty part stands at the end of the parts before it."""
    return list(itertools.pairwise(itertools.accumulate(map(n_rows, parts), initial=0)))


def pool_window(length: int, window: Window, *, ceil: bool) -> Window:
    """The window of a pool; with `ceil`, padded at its end by what torch's `ceil_mode` reads there."""
    before, after = window.padding
    span, padded = window.d * (window.k - 1) + 1, length + before + after
    last = -(-(padded - span) // window.s) * window.s
    # The last window counts if it begins in the array or in the padding before it.
    if not ceil or last >= length + before:
        return window
    return replace(window, p=(before, after + last + span - padded))


def pool_counts(
    length: int, window: Window, outputs: Sequence[int], *, padding: int, include_pad: bool
) -> NDArray[np.int64]:
    """The number of rows by which each output of an average pool is divided, as in torch.

    padding: rows after the array that count as padding; rows that `ceil_mode` reads beyond them never do.
    """
    first = np.asarray(outputs, np.int64) * window.s - window.padding[0]
    last = np.minimum(first + window.k, length + padding)
    if not include_pad:
        first, last = np.maximum(first, 0), np.minimum(last, length)
    counts: NDArray[np.int64] = last - first
    return counts
