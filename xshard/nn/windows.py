"""Windows over one sharded dim, by torch's formulas: the rows that every part reads, and its outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.errors import ShapeError, XshardError
from xshard.layout.block_rows import output_dim, window_outputs
from xshard.layout.partition import Sizes, all_owned_rows
from xshard.layout.runs import Runs, n_rows, unrolled
from xshard.notation.overlap import Boundary, Halo, Window
from xshard.notation.parser import SIZES, Dim, Shard

Interval = tuple[int, int]  # start, stop
Reads = Callable[
    [int, int], Interval
]  # outputs [start, stop) -> the rows [first, last) that they read
EMPTY = Boundary("none")
MODES = ("nearest", "nearest-exact", "linear", "cubic")
CUBIC = -0.75  # the constant of the cubic kernel (Keys 1981 has -0.5; torch, OpenCV -0.75)


class OutputRun(NamedTuple):
    """Consecutive outputs of one part, and the rows that they read: numbers of the first, and counts."""

    first: int
    rows: int
    start: int
    outputs: int


@dataclass(frozen=True)
class Frame:
    """One dim of an op; a part's block holds the rows of each of its runs in turn."""

    source: Dim
    result: Dim
    length: int
    runs: tuple[tuple[OutputRun, ...], ...]


@layout_cache(maxsize=4096)
def window_frame(dim: Dim, length: int, sizes: Sizes, window: Window, base: int = 1) -> Frame:
    """The frame of a convolution or a pool; base: dilation of rows, the boundary's value between them."""
    before, after = window.padding
    s = window.s
    span = window.d * (window.k - 1) + 1
    if base > 1 or min(before, after) < 0:
        rows = (length - 1) * base + 1 if length else 0
        outputs = max(0, (rows + before + after - span) // s + 1)
        reads = _tap_rows(span, s, base, before)
        return interval_frame(
            dim, length, sizes, outputs, reads, rule=window.out, beyond=window.before
        )
    source = replace(dim, overlap=window)
    result, outputs = output_dim(source, length, sizes)
    parts = []
    for coords in itertools.product(*map(range, sizes)):
        runs = (
            (r.start, r.length)
            for r in unrolled(window_outputs(source, window, length, sizes, coords))
        )
        parts.append(
            tuple(OutputRun(a * s - before, (n - 1) * s + span, a, n) for a, n in runs if n)
        )
    return Frame(source, result, outputs, tuple(parts))


@layout_cache(maxsize=4096)
def transposed_frame(
    dim: Dim,
    length: int,
    sizes: Sizes,
    *,
    k: int,
    s: int = 1,
    d: int = 1,
    p: int = 0,
    extra: int = 0,
) -> Frame:
    """The frame of a transposed convolution: tap j adds row i to output `i * s - p + d * j`."""
    span = d * (k - 1) + 1
    outputs = max(0, (length - 1) * s - 2 * p + span + extra) if length else 0
    return interval_frame(dim, length, sizes, outputs, _tap_rows(span, 1, s, span - 1 - p))


def interval_frame(
    dim: Dim,
    length: int,
    sizes: Sizes,
    outputs: int,
    reads: Reads,
    rule: str = "",
    beyond: Boundary = EMPTY,
) -> Frame:
    """The frame of an op in which the outputs of every part read one interval of rows. rule: how outputs are
    sharded: like the rows, or aligned if the rows have given sizes (empty); `balanced`; or `aligned`: a part
    has the same share of the outputs as of the rows. Without rows `beyond` the ends, intervals end with the
    array. Raises ShapeError if the parts of the dim are not intervals.
    """
    owned = all_owned_rows(dim, length, sizes)
    if any(len(runs) > 1 or any(run.repeats > 1 for run in runs) for runs in owned):
        what = f"the parts of '{dim}' are not intervals"
        raise ShapeError(what, hint="redistribute to contiguous parts first, as in h/sp")
    mine = _intervals(owned)
    result = _result_dim(dim, length, outputs, mine, rule)
    lo = []
    hi = []
    runs = []
    theirs = _intervals(all_owned_rows(result, outputs, sizes))
    for (own, end), (start, stop) in zip(mine, theirs, strict=True):
        first, last = reads(start, stop) if start < stop else (own, own)
        if beyond == EMPTY:
            first = min(max(first, 0), length)
            last = min(max(last, 0), length)
        last = max(first, last)
        lo.append(own - first)
        hi.append(last - end)
        runs.append((OutputRun(first, last - first, start, stop - start),) if start < stop else ())
    source = Dim(dim.name, dim.shards, Halo(tuple(lo), tuple(hi), beyond, beyond))
    return Frame(source, result, outputs, tuple(runs))


def _tap_rows(span: int, s: int, base: int, before: int) -> Reads:
    """Output o reads the positions from `o * s - before`, `span` of them; row i is position `i * base`."""

    def reads(start: int, stop: int) -> Interval:
        return -((before - start * s) // base), ((stop - 1) * s - before + span - 1) // base + 1

    return reads


def _result_dim(dim: Dim, length: int, outputs: int, owned: list[Interval], rule: str) -> Dim:
    if rule == "balanced" and dim.axes:
        return Dim(dim.name, (Shard(dim.axes, rule),))
    if not dim.axes or (
        rule != "aligned" and not any(shard.order == SIZES for shard in dim.shards)
    ):
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
    span = window.d * (window.k - 1) + 1
    padded = length + before + after
    last = -(-(padded - span) // window.s) * window.s
    # The last window counts if it begins in the array or in the padding before it.
    if not ceil or last >= length + before:
        return window
    return replace(window, p=(before, after + last + span - padded))


def pool_counts(
    length: int, window: Window, outputs: Sequence[int], *, padding: int, include_pad: bool
) -> NDArray[np.int64]:
    """The rows by which an average pool divides, as in torch; padding: rows after the array that count."""
    first = np.asarray(outputs, np.int64) * window.s - window.padding[0]
    last = np.minimum(first + window.k, length + padding)
    if not include_pad:
        first = np.maximum(first, 0)
        last = np.minimum(last, length)
    return np.asarray(last - first, np.int64)


class Taps(NamedTuple):
    """Arrays (outputs, taps): the inputs of every output, and their weights."""

    inputs: NDArray[np.int64]
    weights: NDArray[np.float64]


def taps(
    mode: str, length: int, outputs: int, *, align_corners: bool = False, scale: float | None = None
) -> Taps:
    """Taps of `outputs` rows of `length` rows; scale: outputs per input. XshardError for other modes."""
    if mode not in MODES:
        raise XshardError(f"no interpolation {mode!r}", hint=f"modes are: {', '.join(MODES)}")
    output = np.arange(outputs, dtype=np.float64)
    step = length / outputs if scale is None else 1 / scale
    if mode.startswith("nearest"):
        shift = 0.5 if mode == "nearest-exact" else 0.0
        nearest = np.minimum(np.floor((output + shift) * step).astype(np.int64), length - 1)
        return Taps(nearest[:, None], np.ones((outputs, 1)))
    if align_corners:
        centre = output * ((length - 1) / (outputs - 1) if outputs > 1 else 0.0)
    else:
        centre = (output + 0.5) * step - 0.5
    centre = np.maximum(centre, 0.0) if mode == "linear" else centre
    first = np.floor(centre).astype(np.int64)
    part = centre - first
    if mode == "linear":
        offsets = range(2)
        weights = [1 - part, part]
    else:
        offsets = range(-1, 3)
        weights = [*map(_cubic, (part + 1, part, 1 - part, 2 - part))]
    return Taps(np.clip(first[:, None] + np.array(offsets), 0, length - 1), np.stack(weights, 1))


def resampled_frame(dim: Dim, length: int, sizes: Sizes, resampling: Taps) -> Frame:
    """The frame of an interpolation; outputs are sharded like the dim. Raises as `interval_frame` does."""

    def reads(start: int, stop: int) -> tuple[int, int]:
        inputs = resampling.inputs[start:stop]
        return int(inputs.min()), int(inputs.max()) + 1

    return interval_frame(dim, length, sizes, len(resampling.inputs), reads)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    return np.where(x <= 1, near, ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC)
