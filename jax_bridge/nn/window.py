"""Window ops on blocks: which rows to fetch, how the local op is called, which of its outputs count.

Decides it for one dim at a time, as tables with a row per part, since one program runs on all devices.
What the op computes it does not know. A dim is fetched from neighbours where it is cut or where
its boundary is more than a fill; any other the local op pads itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jax_bridge.lower.row_tables import VOID, Table, pick
from jax_bridge.nn.placed import Placed
from xshard.errors import PlanError, ShapeError
from xshard.layout.block_rows import output_dim, window_outputs
from xshard.layout.runs import unrolled
from xshard.nn.receptive_fields import dilated_field
from xshard.notation.overlap import OUTPUT_RULES, Boundary, Window
from xshard.notation.overlap_parser import parse_boundaries
from xshard.notation.parser import Dim

Boundaries = str | Mapping[str, str] | None
Local = Callable[[jax.Array, tuple[int, ...], tuple[tuple[int, int], ...]], jax.Array]


@dataclass(frozen=True)
class Sliding:
    """A window over one dim: k taps, s rows from one to the next output, d from tap to tap.

    base: rows from input to input, fill between them. padding: rows of the boundary before and after
    the array; negative ones leave rows out.
    """

    k: int
    s: int = 1
    d: int = 1
    base: int = 1
    padding: tuple[int, int] = (0, 0)

    @property
    def span(self) -> int:
        return self.d * (self.k - 1) + 1

    def output_length(self, length: int) -> int:
        rows = (length - 1) * self.base + 1 if length else 0
        return max(0, (rows + sum(self.padding) - self.span) // self.s + 1)


@dataclass(frozen=True)
class Frame:
    """One dim of a window op on one device's block.

    source: what the block must hold. result, length: the dim of the outputs. rows: where the local op
    finds every row (None: as fetched). stride, padding: what the local op is told. made: which of
    its outputs the device's are (None: all, from the first).
    """

    source: Dim
    result: Dim
    length: int
    rows: Table | None
    stride: int
    padding: tuple[int, int]
    made: Table | None


def windowed(
    x: Placed,
    windows: Mapping[int, Sliding],
    local: Local,
    *,
    fill: float,
    boundary: Boundaries,
    outputs: str,
    order: Sequence[int] | None = None,
    features: Mapping[int, int] | None = None,
) -> Placed:
    """A window op over some dims of an array.

    local: what it does to a block, given strides and padding for every dim of `windows`, in their order.
    fill: what it takes beyond the ends. boundary: what the user wants there, for all dims or by name.
    outputs: how they are cut: as the dim (""), `balanced` or `aligned`. order: which dim of the input
    every dim of the output is. features: new lengths of dims that have no window.
    """
    if outputs not in ("", *OUTPUT_RULES):
        raise PlanError(f"no output rule {outputs!r}", hint=f"rules are: {', '.join(OUTPUT_RULES)}, or empty")
    names = x.layout.names
    rules = _rules(boundary, [names[d] for d in windows], fill)
    sizes = [x.sharding.mesh.sizes_of(dim.axes) for dim in x.layout.dims]
    frames = {
        d: _frame(x.layout.dims[d], x.sharding.shape[d], sizes[d], window, rules[names[d]], fill, outputs)
        for d, window in windows.items()
    }
    plain = [replace(dim, overlap=None) for dim in x.layout.dims]
    fetched = [frames[d].source if d in frames else dim for d, dim in enumerate(plain)]
    block = x.to(replace(x.layout, dims=tuple(fetched))).block
    for d, frame in frames.items():
        if frame.rows is not None:
            block = pick(block, d, frame.rows, plain[d].axes)
    strides, paddings = ([getattr(f, name) for f in frames.values()] for name in ("stride", "padding"))
    made = local(block, tuple(strides), tuple(paddings))
    order = range(len(names)) if order is None else order
    for d, frame in frames.items():
        if frame.made is not None:
            made = pick(made, order.index(d), frame.made, plain[d].axes)
    dims = [frames[d].result if d in frames else plain[d] for d in order]
    lengths = [
        frames[d].length if d in frames else (features or {}).get(d, x.sharding.shape[d]) for d in order
    ]
    return x.remade(made, dims, lengths)


def _rules(boundary: Boundaries, names: Sequence[str], fill: float) -> dict[str, tuple[Boundary, Boundary]]:
    """The rules beyond either end of every dim."""
    beyond = Boundary("constant", fill)
    given = dict.fromkeys(names, boundary) if isinstance(boundary, str) else dict(boundary or {})
    if unknown := [name for name in given if name not in names]:
        raise ShapeError(f"a boundary for {unknown[0]!r}", hint=f"the windows are over: {', '.join(names)}")
    rules = {name: parse_boundaries(given[name]) if name in given else (beyond, beyond) for name in names}
    for name, ends in rules.items():
        if any(end.kind == "none" for end in ends):
            raise PlanError(
                f"no rows beyond the ends of {name!r}, which a window reads",
                hint="leave the padding away: padding=0 reads none",
            )
    return rules


def _frame(
    dim: Dim,
    length: int,
    sizes: tuple[int, ...],
    window: Sliding,
    rules: tuple[Boundary, Boundary],
    fill: float,
    rule: str,
) -> Frame:
    plain = replace(dim, overlap=None)
    filled = all(end.fill == fill for end in rules)
    if not plain.axes and filled:
        n = window.output_length(length)
        return Frame(plain, plain, n, None, window.s, window.padding, None)
    if window.base == 1 and min(window.padding) >= 0:
        over = Window(window.k, window.s, window.d, window.padding, rule, *rules)
        return _plain(replace(plain, overlap=over), over, length, sizes)
    if not filled and any(window.padding):
        raise PlanError(
            f"boundary {rules[0]} of {dim.name!r} with dilated inputs or negative padding",
            hint="they have no other boundary than the fill; halo_exchange first",
        )
    return _dilated(plain, length, sizes, window, fill, rule)


def _plain(dim: Dim, window: Window, length: int, sizes: tuple[int, ...]) -> Frame:
    """Outputs of a window: from the first row that the block holds, where it is one interval."""
    result, n = output_dim(dim, length, sizes)
    span = window.d * (window.k - 1) + 1
    parts = [
        [run.length for run in unrolled(window_outputs(dim, window, length, sizes, c))]
        for c in itertools.product(*map(range, sizes))
    ]
    if max(map(len, parts)) < 2:
        return Frame(dim, result, n, None, window.s, (0, 0), None)
    # Every piece has rows of its own; it stands where an output can begin.
    rows: list[list[int]] = [[] for _ in parts]
    made: list[list[int]] = [[] for _ in parts]
    for pieces, mine, outs in zip(parts, rows, made, strict=True):
        at = fetched = 0
        for count in pieces:
            held = (count - 1) * window.s + span
            mine += [VOID] * (at * window.s - len(mine)) + list(range(fetched, fetched + held))
            outs += range(at, at + count)
            fetched += held
            at = -(-len(mine) // window.s)
    return Frame(dim, result, n, _padded(rows), window.s, (0, 0), _padded(made))


def _dilated(dim: Dim, length: int, sizes: tuple[int, ...], window: Sliding, fill: float, rule: str) -> Frame:
    """Outputs of a window over dilated rows: every part's first one reads another phase of them."""
    k, s, d, base, (before, after) = window.k, window.s, window.d, window.base, window.padding
    read = dilated_field(dim, length, sizes, k=k, s=s, d=d, base=base, p=(before, after), fill=fill, out=rule)
    leads = [
        first * base - (start * s - before) if start < stop else None
        for (first, _), (start, stop) in zip(read.inputs, read.outputs, strict=True)
    ]
    known = [lead for lead in leads if lead is not None]
    lead, counts = max(known, default=0), [stop - start for start, stop in read.outputs]
    held = max(last - first for first, last in read.inputs)
    rows = (held - 1) * base + 1 if held else 0
    if len(set(known)) <= 1:
        extent = (max(counts) - 1) * s + window.span
        return Frame(read.source, read.result, read.length, None, s, (lead, extent - rows - lead), None)
    made = [
        [lead - mine + i * s for i in range(count)] if mine is not None else []
        for mine, count in zip(leads, counts, strict=True)
    ]
    extent = max(max(some, default=0) for some in made) + window.span
    return Frame(read.source, read.result, read.length, None, 1, (lead, extent - rows - lead), _padded(made))


def _padded(rows: Sequence[Sequence[int]]) -> Table:
    """Positions of every part, as long as the longest."""
    table = np.full((len(rows), max(map(len, rows))), VOID, np.int64)
    for part, positions in enumerate(rows):
        table[part, : len(positions)] = positions
    return table
