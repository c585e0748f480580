"""Window operations over sharded dims, and interpolation.

One program runs on all devices. Where devices differ, as at the ends of the array or in uneven
blocks, numpy tables say which rows of its block a device reads and which of its outputs it keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import (
    VOID,
    Table,
    along_dim,
    padded_table,
    pick_rows,
    row_of_this_device,
)
from jax_bridge.nn.sharded import Sharded
from xshard.errors import PlanError, ShapeError
from xshard.nn.windows import Frame, OutputRun, Taps, resampled_frame, taps, window_frame
from xshard.notation.overlap import OUTPUT_RULES, Boundary, Window
from xshard.notation.overlap_parser import parse_boundaries
from xshard.notation.parser import Dim

Boundaries = str | Mapping[str, str] | None
Scales = Sequence[float | None] | None


class LocalWindow(NamedTuple):
    """How a window operation runs along one dim of this device's block.

    `rows` are picked from the block first; None: all rows. The operation then runs with `stride`
    and `padding`, and `outputs` are picked from its result; None: the first ones, as many as the
    device has.
    """

    rows: Table | None
    stride: int
    padding: tuple[int, int]
    outputs: Table | None


class WindowedDim(NamedTuple):
    """One dim of a window operation: the rows that every device needs, and how it uses them."""

    frame: Frame
    local: LocalWindow


class BoundaryPair(NamedTuple):
    """What a window reads before the first row and after the last row of the array."""

    before: Boundary
    after: Boundary


WindowOp = Callable[[jax.Array, Mapping[int, LocalWindow]], jax.Array]


def apply_windows(
    x: Sharded,
    windows: Mapping[int, Window],
    op: WindowOp,
    *,
    fill: float,
    boundary: Boundaries,
    outputs: str,
    base: Mapping[int, int] | None = None,
    order: Sequence[int] | None = None,
    features: Mapping[int, int] | None = None,
) -> Sharded:
    """Run a convolution, a pool or another window operation on a sharded array.

    Every device fetches the rows that its outputs read, from its neighbours or from beyond the
    ends, and then runs the operation on its block alone.

    Args:
        x: The sharded array.
        windows: The window over each dim, by dim of `x`; without boundary and output rule.
        op: The local operation: a block and how it runs along each dim -> the block of results.
        fill: The value that `op` assumes beyond the ends of a block.
        boundary: The user's rule for rows beyond the ends of the array.
        outputs: How outputs are sharded: one of `OUTPUT_RULES`, or empty for a rule by the dim.
        base: The dilation of rows, by dim; 1 if left out.
        order: For every dim of the output its dim in the input; the same if left out.
        features: The new lengths of other dims, by dim of `x`.

    Returns:
        The result of `op` on the global array, sharded by the output rule.
    """
    if outputs not in ("", *OUTPUT_RULES):
        raise PlanError(
            f"no output rule {outputs!r}", hint=f"rules are: {', '.join(OUTPUT_RULES)}, or empty"
        )
    names = x.layout.names
    boundaries = _boundaries_of_dims(boundary, [names[dim] for dim in windows], fill)
    windowed: dict[int, WindowedDim] = {}
    for dim, window in windows.items():
        dilation = 1 if base is None else base.get(dim, 1)
        window = replace(window, out=outputs)
        windowed[dim] = _windowed_dim(x, dim, window, boundaries[names[dim]], fill, dilation)

    block = _fetched_block(x, {dim: plan.frame for dim, plan in windowed.items()})
    for dim, plan in windowed.items():
        if plan.local.rows is not None:
            block = pick_rows(block, dim, plan.local.rows, x.layout.dims[dim].axes)
    y = op(block, {dim: plan.local for dim, plan in windowed.items()})

    input_dims = range(len(names)) if order is None else order
    for dim, plan in windowed.items():
        if plan.local.outputs is not None:
            y = pick_rows(y, input_dims.index(dim), plan.local.outputs, x.layout.dims[dim].axes)

    result_dims = _without_overlaps(x)
    lengths = dict(enumerate(x.sharding.shape))
    for dim, plan in windowed.items():
        result_dims[dim] = plan.frame.result
        lengths[dim] = plan.frame.length
    if features is not None:
        lengths |= features
    return x.with_block(
        y, [result_dims[dim] for dim in input_dims], [lengths[dim] for dim in input_dims]
    )


def _without_overlaps(x: Sharded) -> list[Dim]:
    """Return the array's dims with every row at its owner only."""
    return [replace(dim, overlap=None) for dim in x.layout.dims]


def _fetched_block(x: Sharded, frames: Mapping[int, Frame]) -> jax.Array:
    """Fetch the rows that this device's outputs read, along every dim that has a frame."""
    dims = _without_overlaps(x)
    for dim, frame in frames.items():
        dims[dim] = frame.source
    return x.to(replace(x.layout, dims=tuple(dims))).block


def _boundaries_of_dims(
    boundary: Boundaries, names: Sequence[str], fill: float
) -> dict[str, BoundaryPair]:
    """Parse the user's boundary rule for every dim that has a window.

    Without a rule, rows of `fill`.
    """
    if boundary is None:
        texts: Mapping[str, str] = {}
    elif isinstance(boundary, str):
        texts = dict.fromkeys(names, boundary)
    else:
        texts = boundary

    rules = dict.fromkeys(
        names, BoundaryPair(Boundary("constant", fill), Boundary("constant", fill))
    )
    for name, text in texts.items():
        if name not in names:
            raise ShapeError(
                f"a boundary for {name!r}", hint=f"the windows are over: {', '.join(names)}"
            )
        before, after = parse_boundaries(text)
        rules[name] = BoundaryPair(before, after)

    for name, rule in rules.items():
        if "none" in (rule.before.kind, rule.after.kind):
            what = f"no rows beyond the ends of {name!r}, which a window reads"
            raise PlanError(what, hint="padding=0 reads none")
    return rules


def _windowed_dim(
    x: Sharded, d: int, window: Window, ends: BoundaryPair, fill: float, dilation: int
) -> WindowedDim:
    """Decide which rows of dim `d` every device needs, and how the window runs over them."""
    dim = replace(x.layout.dims[d], overlap=None)
    length = x.sharding.shape[d]
    sizes = x.sharding.mesh.sizes_of(dim.axes)
    is_padded = any(window.padding)
    is_filled = ends.before.fill == ends.after.fill == fill
    if is_padded and not is_filled and (dilation > 1 or min(window.padding) < 0):
        what = f"boundary {ends.before} of {dim.name!r} with dilated inputs or negative padding"
        raise PlanError(what, hint="only the fill is possible there: halo_exchange first")
    if not is_padded:
        # Nothing beyond the ends is read: the cheapest boundary is as good as the user's.
        ends = BoundaryPair(Boundary("constant", fill), Boundary("constant", fill))

    window = replace(window, before=ends.before, after=ends.after)
    frame = window_frame(dim, length, sizes, window, dilation)
    if not dim.axes and is_filled:
        # The whole dim is here, and the operation itself fills in what lies beyond the ends.
        return WindowedDim(
            replace(frame, source=dim), LocalWindow(None, window.s, window.padding, None)
        )
    return WindowedDim(frame, _local_window(frame, window, dilation))


def _local_window(frame: Frame, window: Window, dilation: int) -> LocalWindow:
    """Decide how a window runs over blocks that hold the rows of `frame`."""
    if max(map(len, frame.runs)) > 1:
        return _over_several_runs(frame, window.s)
    return _over_one_run(frame, window, dilation)


def _over_several_runs(frame: Frame, stride: int) -> LocalWindow:
    """Lay out the runs of rows in each block so that one strided operation serves them all.

    Each run begins at a multiple of the stride, where an output begins. Outputs that read rows of
    two runs, or the zeros between them, are dropped.
    """
    rows_by_part: list[list[int]] = []
    outputs_by_part: list[list[int]] = []
    for runs in frame.runs:
        rows: list[int] = []
        outputs: list[int] = []
        first_row = 0
        for run in runs:
            first_output = -(-len(rows) // stride)
            rows += [VOID] * (first_output * stride - len(rows))
            rows += range(first_row, first_row + run.rows)
            outputs += range(first_output, first_output + run.outputs)
            first_row += run.rows
        rows_by_part.append(rows)
        outputs_by_part.append(outputs)
    return LocalWindow(padded_table(rows_by_part), stride, (0, 0), padded_table(outputs_by_part))


def _over_one_run(frame: Frame, window: Window, dilation: int) -> LocalWindow:
    """Pad each block so that a window over it yields the outputs of its one run.

    Positions count dilated rows: row i of a run stands at position `i * dilation`.
    """
    stride = window.s
    window_span = window.d * (window.k - 1) + 1

    def lead_of(run: OutputRun) -> int:
        """Return how many positions of padding, or of gaps, lie before a run's first row."""
        first_tap = run.start * stride - window.padding[0]
        return run.first * dilation - first_tap

    all_runs = list(itertools.chain.from_iterable(frame.runs))
    leads = {lead_of(run) for run in all_runs}
    longest_lead = max(leads, default=0)
    most_rows = max((run.rows for run in all_runs), default=0)
    block_span = (most_rows - 1) * dilation + 1 if most_rows else 0

    if len(leads) <= 1:
        most_outputs = max((run.outputs for run in all_runs), default=0)
        read_span = (most_outputs - 1) * stride + window_span if most_outputs else 0
        return LocalWindow(
            None, stride, (longest_lead, read_span - block_span - longest_lead), None
        )

    # Blocks begin at different places of the stride: compute the output at every position, and
    # pick.
    outputs_by_part: list[list[int]] = []
    for runs in frame.runs:
        outputs: list[int] = []
        for run in runs:
            first_output = longest_lead - lead_of(run)
            outputs += range(first_output, first_output + run.outputs * stride, stride)
        outputs_by_part.append(outputs)
    last_output = max(itertools.chain.from_iterable(outputs_by_part))
    padding_after = last_output + window_span - block_span - longest_lead
    return LocalWindow(None, 1, (longest_lead, padding_after), padded_table(outputs_by_part))


def resize(x: Sharded, shape: Sequence[int], method: str, *, antialias: bool = True) -> Sharded:
    """Interpolate a sharded array to other lengths, with the results of `jax.image.resize`.

        y = resize(x, (8,), "linear")     # [4] -> [8]

    Unlike `interpolate` it widens the kernel when it samples down. Its cubic kernel has constant
    -0.5, not -0.75. Its nearest takes the centre of a pixel (`nearest-exact`). Taps beyond the ends
    are left out, not clamped.

    Args:
        x: The sharded array.
        shape: The global shape of the result.
        method: As in `jax.image.resize`.
        antialias: As in `jax.image.resize`.

    Returns:
        The interpolated array, sharded like `x`.

    Examples:
        >>> larger = jax.pmap(lambda x: resize(Sharded(x, "h/sp"), (8,), "linear"), "sp")
        >>> larger(jnp.ones((1, 4))).block.shape  # one block on one device
        (1, 8)
    """
    dtype = jnp.result_type(float)
    taps_by_dim: dict[int, Taps] = {}
    for dim, new_length in enumerate(shape):
        length = x.sharding.shape[dim]
        if new_length != length:
            taps_by_dim[dim] = _jax_taps(length, new_length, method, antialias, dtype)
    return _resampled(x, taps_by_dim)


def interpolate(
    x: Sharded,
    shape: Sequence[int],
    mode: str,
    *,
    align_corners: bool = False,
    scale: Scales = None,
) -> Sharded:
    """Interpolate a sharded array to other lengths, with the results of torch's `interpolate`.

        y = interpolate(x, (1, 3, 64, 64), "linear")     # [1, 3, 32, 32] -> [1, 3, 64, 64]

    Args:
        x: The sharded array.
        shape: The global shape of the result.
        mode: nearest, nearest-exact, linear (in two dims bilinear) or cubic.
        align_corners: As in torch.
        scale: Outputs per input for every dim; None for the ratio of the lengths.

    Returns:
        The interpolated array, sharded like `x`.
    """
    scales = scale if scale else (None,) * len(shape)
    taps_by_dim: dict[int, Taps] = {}
    for dim, new_length in enumerate(shape):
        length = x.sharding.shape[dim]
        if new_length != length or scales[dim] is not None:
            taps_by_dim[dim] = taps(
                mode, length, new_length, align_corners=align_corners, scale=scales[dim]
            )
    return _resampled(x, taps_by_dim)


@lru_cache(maxsize=256)
def _jax_taps(length: int, outputs: int, method: str, antialias: bool, dtype: np.dtype) -> Taps:
    """Read the inputs and weights of `jax.image.resize` off its response to the identity matrix."""
    with jax.ensure_compile_time_eval():
        identity = jnp.eye(length, dtype=dtype)
        response = jax.image.resize(identity, (outputs, length), method, antialias=antialias)
    matrix = np.asarray(response, np.float64)  # [outputs, inputs]
    first = (matrix != 0).argmax(axis=1)
    stop = length - (matrix[:, ::-1] != 0).argmax(axis=1)
    inputs = first[:, None] + np.arange((stop - first).max())  # [outputs, taps]
    weights = np.take_along_axis(matrix, np.minimum(inputs, length - 1), 1)
    # Outputs with fewer taps repeat their last input with weight 0.
    is_tap = inputs < stop[:, None]
    return Taps(np.minimum(inputs, stop[:, None] - 1), np.where(is_tap, weights, 0.0))


def _resampled(x: Sharded, taps_by_dim: Mapping[int, Taps]) -> Sharded:
    """Interpolate along the dims that have taps, one dim after the other."""
    dims = _without_overlaps(x)
    shape = list(x.sharding.shape)
    frames: dict[int, Frame] = {}
    for d, dim_taps in taps_by_dim.items():
        sizes = x.sharding.mesh.sizes_of(dims[d].axes)
        frames[d] = resampled_frame(dims[d], shape[d], sizes, dim_taps)

    block = _fetched_block(x, frames)
    for d, frame in frames.items():
        block = _interpolate_dim(block, d, frame, taps_by_dim[d], dims[d].axes)
        dims[d] = frame.result
        shape[d] = frame.length
    return x.with_block(block, dims, shape)


def _interpolate_dim(
    block: jax.Array, d: int, frame: Frame, dim_taps: Taps, axes: Sequence[str]
) -> jax.Array:
    """Add up the weighted inputs of every output along dim `d` of this device's block."""
    local = _local_taps(frame, dim_taps)
    is_weighted = (dim_taps.weights != 1).any()
    addends = []
    for tap in range(local.inputs.shape[-1]):
        addend = pick_rows(block, d, local.inputs[..., tap], axes)
        if is_weighted:
            weights = row_of_this_device(local.weights[..., tap], axes).astype(block.dtype)
            addend = addend * along_dim(weights, d, block.ndim)
        addends.append(addend)
    return reduce(add, addends)


class LocalTaps(NamedTuple):
    """The inputs of every output, and their weights: [devices, outputs, taps].

    Inputs are positions in the device's block.
    """

    inputs: NDArray[np.int64]
    weights: NDArray[np.float64]


def _local_taps(frame: Frame, dim_taps: Taps) -> LocalTaps:
    """Return the inputs of each device's outputs as positions in the device's block."""
    all_runs = itertools.chain.from_iterable(frame.runs)
    most_outputs = max(run.outputs for run in all_runs)
    shape = (len(frame.runs), most_outputs, dim_taps.inputs.shape[1])
    inputs = np.full(shape, VOID, np.int64)
    weights = np.zeros(shape, dim_taps.weights.dtype)
    for part, runs in enumerate(frame.runs):
        for run in runs:
            outputs = slice(run.start, run.start + run.outputs)
            inputs[part, : run.outputs] = dim_taps.inputs[outputs] - run.first
            weights[part, : run.outputs] = dim_taps.weights[outputs]
    return LocalTaps(inputs, weights)
