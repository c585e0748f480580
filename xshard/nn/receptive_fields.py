"""Receptive fields: the input rows that each device needs for the outputs that it computes.

Decides these intervals for transposed and dilated windows and for resampling, as halos with a width per
part and a boundary. Plain windows have a notation of their own (`window(...)`, see `windows.py`). Knows
one dim at a time and no framework.
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

NeededInputs = Callable[[int, int], tuple[int, int]]  # outputs [start, stop) -> inputs [first, last)


@dataclass(frozen=True)
class ReceptiveField:
    """The input and the output of an op along one dim.

    source: the input dim with the overlap that blocks must hold. result: the dim of the outputs, of
    length `length`. inputs, outputs: per part, row-major, the global intervals that it holds and computes.
    """

    source: Dim
    result: Dim
    length: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


def transposed_field(
    dim: Dim, length: int, sizes: Sizes, *, k: int, s: int = 1, d: int = 1, p: int = 0, extra: int = 0
) -> ReceptiveField:
    """The receptive field of a transposed convolution: tap j adds input i to output `i * s - p + d * j`.

    extra: rows added at the end of the output (torch's output_padding). Raises as `receptive_field` does.

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
    """The receptive field of windows over an input that is dilated (`base`) or cropped (negative `p`).

    Tap j of output `o` reads row `o * s - p[0] + d * j`, and input i is row `i * base`.
    fill: the value between the inputs and beyond the ends. out: as in `receptive_field`.
    Raises ShapeError if the parts of the dim are not intervals.

    >>> found = dilated_field(Dim("h", (Shard(("sp",)),)), 8, (2,), k=3, base=2, p=(1, 2))
    >>> str(found.source), found.inputs, found.outputs
    ('h/sp:halo([0,0],[1,1],constant)', ((0, 5), (4, 9)), ((0, 8), (8, 16)))
    """
    rows = (length - 1) * base + 1 if length else 0
    outputs = max(0, (rows + sum(p) - d * (k - 1) - 1) // s + 1)
    needs, beyond = tap_inputs(k, s, d, base, p[0]), Boundary("constant", fill)
    return receptive_field(dim, length, sizes, outputs, needs, out=out, beyond=beyond)


def tap_inputs(k: int, s: int, d: int, base: int, before: int) -> NeededInputs:
    """The inputs of taps: tap j of output o reads row `o * s - before + d * j`; input i is row `i * base`."""

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
    """The receptive field of an op in which the outputs of every part need an interval of inputs.

    out: how the outputs are cut: like the inputs, or aligned if these have given sizes (empty);
    `balanced`; or `aligned`: a part has the same share of the outputs as of the inputs.
    beyond: the boundary at the ends of the array; by default intervals end with the array.
    Raises ShapeError if the parts of the dim are not intervals.
    """
    owned = all_owned_rows(dim, length, sizes)
    if any(len(runs) > 1 or any(run.repeats > 1 for run in runs) for runs in owned):
        raise ShapeError(
            f"'{dim}' is not cut into intervals", hint="redistribute to contiguous parts first, as in h/sp"
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
    """The intervals of contiguous parts; an empty part is at the end of the parts before it."""
    ends = list(itertools.accumulate((n_rows(runs) for runs in parts), initial=0))
    return list(itertools.pairwise(ends))
