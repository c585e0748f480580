"""Window ops on blocks: the rows to fetch, the arguments of the local op, the outputs to keep.

Decides this one dim at a time, as tables with a row per part, since one program runs on all devices. Rows
of a dim come from neighbours if the dim is cut or its boundary is more than a fill; otherwise the local op
pads the dim itself. Does not know what the op computes.
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
    """A window over one dim: k taps, stride s, dilation d.

    base: dilation of the inputs, with the fill between them. padding: rows of the boundary before and after
    the array; negative padding leaves rows out.
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

    source: the dim of the block to fetch. result, length: the dim of the outputs, and its global length.
    rows: positions of the local op's rows in the fetched block (None: as fetched). stride, padding: arguments
    of the local op. made: positions of the device's outputs among those of the op (None: the first ones).
    """

    source: Dim
    result: Dim
    length: int
    rows: Table | None
    stride: int
    padding: tuple[int, int]
    made: Table | None


def apply_windows(
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
    """Apply a window op to a block: windows over some dims of the array.

    local: the op on a block, given strides and padding of the dims of `windows`, in their order.
    fill: the value that it assumes beyond the ends. boundary: the user's rule there, for all dims or by name.
    outputs: how they are cut: like the dim (""), `balanced` or `aligned`. order: for every dim of the output
    its dim in the input. features: new lengths of dims without a window.
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
    """The boundary rules at both ends of every dim."""
    beyond = Boundary("constant", fill)
    given = dict.fromkeys(names, boundary) if isinstance(boundary, str) else dict(boundary or {})
    if unknown := [name for name in given if name not in names]:
        raise ShapeError(f"a boundary for {unknown[0]!r}", hint=f"the windows are over: {', '.join(names)}")
    rules = {name: parse_boundaries(given[name]) if name in given else (beyond, beyond) for name in names}
    for name, ends in rules.items():
        if any(end.kind == "none" for end in ends):
            raise PlanError(
                f"no rows beyond the ends of {name!r}, which a window reads", hint="padding=0 reads none"
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
            hint="only the fill is possible there: halo_exchange first",
        )
    return _dilated(plain, length, sizes, window, fill, rule)


def _plain(dim: Dim, window: Window, length: int, sizes: tuple[int, ...]) -> Frame:
    """The frame of a window without dilated inputs or negative padding.

    If a block is one interval, its outputs start at its first row.
    """
    result, n = output_dim(dim, length, sizes)
    span = window.d * (window.k - 1) + 1
    parts = [
        [run.length for run in unrolled(window_outputs(dim, window, length, sizes, c))]
        for c in itertools.product(*map(range, sizes))
    ]
    if max(map(len, parts)) < 2:
        return Frame(dim, result, n, None, window.s, (0, 0), None)
    # Every piece gets its own rows, starting where an output can begin.
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
    """The frame of a window over dilated inputs: every part may start at another phase."""
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
    """Positions of every part, padded to the longest with VOID."""
    table = np.full((len(rows), max(map(len, rows))), VOID, np.int64)
    for part, positions in enumerate(rows):
        table[part, : len(positions)] = positions
    return table
