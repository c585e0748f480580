"""Ops over windows of sharded dims, and interpolation: one program, with tables of what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.lower.row_tables import VOID, Table, along, mine, pick, table_of
from jax_bridge.nn.sharded import Sharded
from xshard.errors import PlanError, ShapeError
from xshard.nn.windows import Frame, Taps, resampled_frame, taps, window_frame
from xshard.notation.overlap import OUTPUT_RULES, Boundary, Window
from xshard.notation.overlap_parser import parse_boundaries

Boundaries = str | Mapping[str, str] | None
Scales = Sequence[float | None] | None


class Local(NamedTuple):
    """The arguments of the local op along one dim."""

    rows: Table | None  # their positions in the block; None: all
    stride: int
    padding: tuple[int, int]
    outputs: Table | None  # their positions in the result; None: the first ones


def apply_windows(
    x: Sharded,
    windows: Mapping[int, Window],
    op: Callable[[jax.Array, Mapping[int, Local]], jax.Array],
    *,
    fill: float,
    boundary: Boundaries,
    outputs: str,
    base: Mapping[int, int] | None = None,
    order: Sequence[int] | None = None,
    features: Mapping[int, int] | None = None,
) -> Sharded:
    """Apply a window op to a block. windows: by dim of the array, without boundary and output rule. fill: the
    value that the op assumes beyond the ends. boundary: the user's rule there. base: dilation of the rows.
    order: for every dim of the output its dim in the input. features: new lengths of other dims.
    """
    if outputs not in ("", *OUTPUT_RULES):
        raise PlanError(
            f"no output rule {outputs!r}", hint=f"rules are: {', '.join(OUTPUT_RULES)}, or empty"
        )
    names = x.layout.names
    shape = x.sharding.shape
    mesh = x.sharding.mesh
    rules = _rules(boundary, [names[d] for d in windows], fill)
    plain = [replace(dim, overlap=None) for dim in x.layout.dims]
    frames: dict[int, Frame] = {}
    local: dict[int, Local] = {}
    for d, window in windows.items():
        (before, after), dilation, dim = rules[names[d]], (base or {}).get(d, 1), plain[d]
        is_filled = before.fill == after.fill == fill
        if not is_filled and any(window.padding) and (dilation > 1 or min(window.padding) < 0):
            what = f"boundary {before} of {dim.name!r} with dilated inputs or negative padding"
            raise PlanError(what, hint="only the fill is possible there: halo_exchange first")
        if not any(window.padding):
            before = after = Boundary("constant", fill)
        window = replace(window, out=outputs, before=before, after=after)
        frames[d] = window_frame(dim, shape[d], mesh.sizes_of(dim.axes), window, dilation)
        if not dim.axes and is_filled:
            frames[d] = replace(frames[d], source=dim)
            local[d] = Local(None, window.s, window.padding, None)
        else:
            local[d] = _local(frames[d], window, dilation)
    fetched = [frames[d].source if d in frames else dim for d, dim in enumerate(plain)]
    block = x.to(replace(x.layout, dims=tuple(fetched))).block
    for d, arguments in local.items():
        if arguments.rows is not None:
            block = pick(block, d, arguments.rows, plain[d].axes)
    y = op(block, local)
    order = range(len(names)) if order is None else order
    for d, arguments in local.items():
        if arguments.outputs is not None:
            y = pick(y, order.index(d), arguments.outputs, plain[d].axes)
    lengths = (
        dict(enumerate(shape))
        | {d: frame.length for d, frame in frames.items()}
        | dict(features or {})
    )
    dims = [frames[d].result if d in frames else plain[d] for d in order]
    return x.with_block(y, dims, [lengths[d] for d in order])


def _rules(
    boundary: Boundaries, names: Sequence[str], fill: float
) -> dict[str, tuple[Boundary, Boundary]]:
    """The boundary rules at both ends of every dim."""
    texts = dict.fromkeys(names, boundary) if isinstance(boundary, str) else dict(boundary or {})
    if unknown := [name for name in texts if name not in names]:
        raise ShapeError(
            f"a boundary for {unknown[0]!r}", hint=f"the windows are over: {', '.join(names)}"
        )
    rules = dict.fromkeys(names, (Boundary("constant", fill),) * 2)
    rules |= {name: parse_boundaries(text) for name, text in texts.items()}
    for name, pair in rules.items():
        if "none" in [rule.kind for rule in pair]:
            what = f"no rows beyond the ends of {name!r}, which a window reads"
            raise PlanError(what, hint="padding=0 reads none")
    return rules


def _local(frame: Frame, window: Window, base: int) -> Local:
    """The arguments for a block that holds the rows of `frame`."""
    s = window.s
    span = window.d * (window.k - 1) + 1
    if (
        max(map(len, frame.runs)) > 1
    ):  # every run gets rows of its own, starting where an output can begin
        rows: list[list[int]] = [[] for _ in frame.runs]
        outputs: list[list[int]] = [[] for _ in frame.runs]
        for runs, mine, kept in zip(frame.runs, rows, outputs, strict=True):
            output = fetched = 0
            for run in runs:
                mine += [VOID] * (output * s - len(mine)) + list(range(fetched, fetched + run.rows))
                kept += range(output, output + run.outputs)
                fetched += run.rows
                output = -(-len(mine) // s)
        return Local(table_of(rows), s, (0, 0), table_of(outputs))
    # Between its first tap and its first row a part may have padding, or gaps between dilated rows.
    leads = [
        [run.first * base - (run.start * s - window.padding[0]) for run in runs]
        for runs in frame.runs
    ]
    counts = [sum(run.outputs for run in runs) for runs in frame.runs]
    held = max((run.rows for runs in frame.runs for run in runs), default=0)
    lead = max(map(max, filter(None, leads)), default=0)
    positions = (held - 1) * base + 1 if held else 0
    if len({mine for part in leads for mine in part}) <= 1:
        stride = s
        extent = (max(counts) - 1) * s + span if any(counts) else 0
        table = None
    else:
        parts = zip(leads, counts, strict=True)
        steps = [
            [lead - mine + i * s for mine in part for i in range(count)] for part, count in parts
        ]
        stride = 1
        extent = max(max(part, default=0) for part in steps) + span
        table = table_of(steps)
    return Local(None, stride, (lead, extent - positions - lead), table)


def resize(x: Sharded, shape: Sequence[int], method: str, *, antialias: bool = True) -> Sharded:
    """`jax.image.resize` of the global array: dims of other lengths, interpolated.

    shape: global, of the result. method, antialias: as in `jax.image`. Unlike `interpolate` it widens the
    kernel when it samples down, its cubic kernel has constant -0.5, not -0.75, nearest takes the centre of a
    pixel (`nearest-exact`), and taps beyond the ends are left out, not clamped.

    >>> larger = jax.pmap(lambda x: resize(Sharded(x, "h/sp"), (8,), "linear"), "sp")
    >>> larger(jnp.ones((1, 4))).block.shape  # one block on one device
    (1, 8)
    """
    changed = {d: n for d, n in enumerate(shape) if n != x.sharding.shape[d]}
    dtype = jnp.result_type(float)
    jax_taps = {
        d: _jax_taps(x.sharding.shape[d], n, method, antialias, dtype) for d, n in changed.items()
    }
    return _resampled(x, jax_taps)


def interpolate(
    x: Sharded,
    shape: Sequence[int],
    mode: str,
    *,
    align_corners: bool = False,
    scale: Scales = None,
) -> Sharded:
    """Torch's `interpolate` of the global array: dims of other lengths, interpolated.

    shape: global, of the result. mode: nearest, nearest-exact, linear (in two dims bilinear), cubic.
    scale: outputs per input for every dim; None for the ratio of the lengths.
    """
    scales = scale or (None,) * len(shape)
    torch_taps = {
        d: taps(mode, x.sharding.shape[d], n, align_corners=align_corners, scale=scales[d])
        for d, n in enumerate(shape)
        if n != x.sharding.shape[d] or scales[d] is not None
    }
    return _resampled(x, torch_taps)


@lru_cache(maxsize=256)
def _jax_taps(length: int, outputs: int, method: str, antialias: bool, dtype: np.dtype) -> Taps:
    """The taps of `jax.image.resize`, from its response to every single input."""
    with jax.ensure_compile_time_eval():
        each = jax.image.resize(
            jnp.eye(length, dtype=dtype), (outputs, length), method, antialias=antialias
        )
    matrix = np.asarray(each, np.float64)
    first = (matrix != 0).argmax(axis=1)
    last = length - (matrix[:, ::-1] != 0).argmax(axis=1)
    inputs = first[:, None] + np.arange((last - first).max())
    weights = np.take_along_axis(matrix, np.minimum(inputs, length - 1), 1) * (
        inputs < last[:, None]
    )
    return Taps(np.minimum(inputs, last[:, None] - 1), weights)


def _resampled(x: Sharded, taps_of: dict[int, Taps]) -> Sharded:
    """taps_of: the taps of every dim that is interpolated."""
    mesh = x.sharding.mesh
    shape = list(x.sharding.shape)
    dims = [replace(dim, overlap=None) for dim in x.layout.dims]
    sizes = [mesh.sizes_of(dim.axes) for dim in dims]
    frames = {d: resampled_frame(dims[d], shape[d], sizes[d], some) for d, some in taps_of.items()}
    fetched = [frames[d].source if d in frames else dim for d, dim in enumerate(dims)]
    block = x.to(replace(x.layout, dims=tuple(fetched))).block
    for d, frame in frames.items():
        inputs, weights = taps_of[d]
        longest = max(run.outputs for runs in frame.runs for run in runs)
        positions = np.full((len(frame.runs), longest, inputs.shape[1]), VOID, np.int64)
        factors = np.zeros(positions.shape, weights.dtype)
        for part, runs in enumerate(frame.runs):
            for first, _, start, n in runs:
                positions[part, :n] = inputs[start : start + n] - first
                factors[part, :n] = weights[start : start + n]
        axes = dims[d].axes
        numbers = range(inputs.shape[1])
        parts = [pick(block, d, positions[..., tap], axes) for tap in numbers]
        if (weights != 1).any():
            shares = (mine(factors[..., tap], axes).astype(block.dtype) for tap in numbers)
            parts = [
                part * along(share, d, block.ndim)
                for part, share in zip(parts, shares, strict=True)
            ]
        block = reduce(add, parts)
        dims[d] = frame.result
        shape[d] = frame.length
    return x.with_block(block, dims, shape)
