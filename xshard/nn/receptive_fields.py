"""Which rows of its input a device needs for the outputs it computes: dilated inputs and resampling.

Decides the interval of every part's inputs, written as a halo with a width per part, with the fill
beyond the ends in it. What a plain window reads is notation of its own (`window(...)`,
`held.output_dim`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from xshard.errors import ShapeError
from xshard.layout.block_rows import Sizes
from xshard.layout.partition import all_owned_rows
from xshard.layout.runs import Runs, n_rows
from xshard.notation.overlap import Boundary, Halo
from xshard.notation.parser import SIZES, Dim, Shard

NOTHING = Boundary("none")

NeededInputs = Callable[[int, int], tuple[int, int]]  # outputs [start, stop) -> the inputs they need


@dataclass(frozen=True)
class ReceptiveField:
    """One dim of an op: the input it reads, and the output it makes.

    source: the dim as blocks must hold it. result: the dim of the outputs, of length `length`.
    inputs, outputs: for every part, row-major, the global interval that its block holds and computes.
    """

    source: Dim
    result: Dim
    length: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


def transposed_field(
    dim: Dim, length: int, sizes: Sizes, *, k: int, s: int = 1, d: int = 1, p: int = 0, extra: int = 0
) -> ReceptiveField:
    """What a transposed convolution reads: output `i * s - p + d * j` gets input i by tap j.

    extra: rows added to the output at its end (torch's output_padding).

    >>> field = transposed_field(Dim("h", (Shard(("sp",)),)), 8, (2,), k=3, s=2, p=1, extra=1)
    >>> str(field.source), field.inputs, field.outputs
    ('h/sp:halo([0,0],[1,0],none)', ((0, 5), (4, 8)), ((0, 8), (8, 16)))
    """
    outputs = max(0, (length - 1) * s - 2 * p + d * (k - 1) + 1 + extra) if length else 0
    return receptive_field(dim, length, sizes, outputs, tap_inputs(k, 1, d, s, d * (k - 1) - p))


def dilated_field(
    dim: Dim,
    length: int,
    sizes: Sizes,
    *,
    k: int,
    s: int = 1,
    d: int = 1,
    base: int = 1,
    p: tuple[int, int] = (0, 0),
    fill: float = 0.0,
    out: str = "",
) -> ReceptiveField:
    """What windows over a dilated or cropped (negative `p`) input read.

    Output `o` takes row `o * s - p[0] + d * j` by tap j, input i being row `i * base`.
    fill: what stands between the inputs, and beyond the ends. out: how the outputs are cut (see `read`).
    Raises ShapeError where the parts of the dim are no intervals.

    >>> found = dilated_field(Dim("h", (Shard(("sp",)),)), 8, (2,), k=3, base=2, p=(1, 2))
    >>> str(found.source), found.inputs, found.outputs
    ('h/sp:halo([0,0],[1,1],constant)', ((0, 5), (4, 9)), ((0, 8), (8, 16)))
    """
    rows = (length - 1) * base + 1 if length else 0
    outputs = max(0, (rows + sum(p) - d * (k - 1) - 1) // s + 1)
    needs, beyond = tap_inputs(k, s, d, base, p[0]), Boundary("constant", fill)
    return receptive_field(dim, length, sizes, outputs, needs, out=out, beyond=beyond)


def tap_inputs(k: int, s: int, d: int, base: int, before: int) -> NeededInputs:
    """The inputs under taps: tap j of output o is at row `o * s - before + d * j`, input i at `i * base`."""

    def needs(start: int, stop: int) -> tuple[int, int]:
        return -((before - start * s) // base), ((stop - 1) * s - before + d * (k - 1)) // base + 1

    return needs


def receptive_field(
    dim: Dim,
    length: int,
    sizes: Sizes,
    outputs: int,
    needs: NeededInputs,
    *,
    out: str = "",
    beyond: Boundary = NOTHING,
) -> ReceptiveField:
    """The read of an op of which every part makes some outputs and reads an interval of inputs.

    out: how the outputs are cut: as the inputs are or, where the sizes of those are given, aligned
    (empty), `balanced`, or `aligned`: a part makes the share of all outputs that it has of the inputs.
    beyond: what is read outside the array; by default nothing: intervals end where it ends.
    Raises ShapeError where the parts of the dim are no intervals.
    """
    owned = all_owned_rows(dim, length, sizes)
    if any(len(runs) > 1 or any(run.repeats > 1 for run in runs) for runs in owned):
        raise ShapeError(
            f"'{dim}' is not cut into intervals",
            hint="redistribute to contiguous parts first, as in h/sp",
        )
    result = _result(dim, length, outputs, owned, out)
    mine, made = contiguous_intervals(owned), contiguous_intervals(all_owned_rows(result, outputs, sizes))
    inputs = []
    for (start, stop), (own, _) in zip(made, mine, strict=True):
        first, last = needs(start, stop) if start < stop else (own, own)
        if beyond == NOTHING:
            first, last = min(max(first, 0), length), min(max(last, 0), length)
        inputs.append((first, max(first, last)))
    lo = tuple(own[0] - first for own, (first, _) in zip(mine, inputs, strict=True))
    hi = tuple(last - own[1] for own, (_, last) in zip(mine, inputs, strict=True))
    source = Dim(dim.name, dim.shards, Halo(lo, hi, beyond, beyond))
    return ReceptiveField(source, result, outputs, tuple(inputs), tuple(made))


def _result(dim: Dim, length: int, outputs: int, owned: tuple[Runs, ...], out: str) -> Dim:
    if out == "balanced" and dim.axes:
        return Dim(dim.name, (Shard(dim.axes, out),))
    if out != "aligned" and not any(shard.order == SIZES for shard in dim.shards):
        return Dim(dim.name, dim.shards)
    ends = (
        [math.ceil(at * outputs / length) for _, at in contiguous_intervals(owned)]
        if length
        else [0] * len(owned)
    )
    return Dim(dim.name, (Shard(dim.axes, SIZES, tuple(b - a for a, b in itertools.pairwise((0, *ends)))),))


def contiguous_intervals(parts: tuple[Runs, ...]) -> list[tuple[int, int]]:
    """Contiguous parts in their order; an empty one stands where the ones before it end."""
    ends = list(itertools.accumulate((n_rows(runs) for runs in parts), initial=0))
    return list(itertools.pairwise(ends))
