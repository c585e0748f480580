"""Which rows of its input a device needs for the outputs it computes: transposed windows and resampling.

Decides the interval of every part's inputs, written as a halo with a width per part. What a plain
window reads is notation of its own (`window(...)`, `held.output_dim`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from xshard.errors import ShapeError
from xshard.notation import SIZES, Dim, Shard
from xshard.overlap import Boundary, Halo
from xshard.ownership import Runs, owners, size

Sizes = tuple[int, ...]
Needs = Callable[[int, int], tuple[int, int]]  # outputs [start, stop) -> the inputs they need


@dataclass(frozen=True)
class Read:
    """One dim of an op: the input it reads, and the output it makes.

    source: the dim as blocks must hold it. result: the dim of the outputs, of length `length`.
    inputs, outputs: for every part, row-major, the global interval that its block holds and computes.
    """

    source: Dim
    result: Dim
    length: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


def transposed(
    dim: Dim, length: int, sizes: Sizes, *, k: int, s: int = 1, d: int = 1, p: int = 0, extra: int = 0
) -> Read:
    """What a transposed convolution reads: output `i * s - p + d * j` gets input i by tap j.

    extra: rows added to the output at its end (torch's output_padding).

    >>> read = transposed(Dim("h", (Shard(("sp",)),)), 8, (2,), k=3, s=2, p=1, extra=1)
    >>> str(read.source), read.inputs, read.outputs
    ('h/sp:halo([0,0],[1,0],none)', ((0, 5), (4, 8)), ((0, 8), (8, 16)))
    """
    outputs = max(0, (length - 1) * s - 2 * p + d * (k - 1) + 1 + extra) if length else 0
    return read(dim, length, sizes, outputs, covered(k, 1, d, s, d * (k - 1) - p))


def covered(k: int, s: int, d: int, base: int, before: int) -> Needs:
    """The inputs under taps: tap j of output o is at row `o * s - before + d * j`, input i at `i * base`."""

    def needs(start: int, stop: int) -> tuple[int, int]:
        return -((before - start * s) // base), ((stop - 1) * s - before + d * (k - 1)) // base + 1

    return needs


def read(dim: Dim, length: int, sizes: Sizes, outputs: int, needs: Needs, out: str = "") -> Read:
    """The read of an op of which every part makes some outputs and reads an interval of inputs.

    needs: clipped to the array; what lies outside is not read. out: how the outputs are cut: as the
    inputs are or, where the sizes of those are given, aligned (empty), `balanced`, or `aligned`: a part
    makes the share of all outputs that it has of the inputs. Raises ShapeError where the parts of the dim
    are no intervals.
    """
    owned = owners(dim, length, sizes)
    if any(len(runs) > 1 or any(run.repeats > 1 for run in runs) for runs in owned):
        raise ShapeError(
            f"'{dim}' is not cut into intervals",
            hint="redistribute to contiguous parts first, as in h/sp",
        )
    result = _result(dim, length, outputs, owned, out)
    mine, made = intervals(owned), intervals(owners(result, outputs, sizes))
    inputs = []
    for (start, stop), (own, _) in zip(made, mine, strict=True):
        first, last = needs(start, stop) if start < stop else (own, own)
        first, last = min(max(first, 0), length), min(max(last, 0), length)
        inputs.append((first, max(first, last)))
    lo = tuple(own[0] - first for own, (first, _) in zip(mine, inputs, strict=True))
    hi = tuple(last - own[1] for own, (_, last) in zip(mine, inputs, strict=True))
    none = Boundary("none")
    source = Dim(dim.name, dim.shards, Halo(lo, hi, none, none))
    return Read(source, result, outputs, tuple(inputs), tuple(made))


def _result(dim: Dim, length: int, outputs: int, owned: tuple[Runs, ...], out: str) -> Dim:
    if out == "balanced" and dim.axes:
        return Dim(dim.name, (Shard(dim.axes, out),))
    if out != "aligned" and not any(shard.order == SIZES for shard in dim.shards):
        return Dim(dim.name, dim.shards)
    ends = [math.ceil(at * outputs / length) for _, at in intervals(owned)] if length else [0] * len(owned)
    return Dim(dim.name, (Shard(dim.axes, SIZES, tuple(b - a for a, b in itertools.pairwise((0, *ends)))),))


def intervals(parts: tuple[Runs, ...]) -> list[tuple[int, int]]:
    """Contiguous parts in their order; an empty one stands where the ones before it end."""
    ends = list(itertools.accumulate((size(runs) for runs in parts), initial=0))
    return list(itertools.pairwise(ends))
