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
from xshard.errors import PlanError, ShapeError, api_boundary
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


class WindowPlan(NamedTuple):
    """All dims of a window operation, by dim of the input."""

    frames: dict[int, Frame]
    local: dict[int, LocalWindow]


class WindowRules(NamedTuple):
    """How a window operation treats the ends of the array, and how it shards its outputs."""

    fill: float  # the value that the operation itself assumes beyond the ends of a block
    boundary: Boundaries  # the user's rule for rows beyond the ends of the array
    outputs: str  # one of `OUTPUT_RULES`, or empty for a rule by the dim


class BoundaryPair(NamedTuple):
    """What a window reads before the first row and after the last row of the array."""

    before: Boundary
    after: Boundary


WindowOp = Callable[[jax.Array, Mapping[int, LocalWindow]], jax.Array]


def apply_windows(
    x: Sharded,
    windows: Mapping[int, Window],
    op: WindowOp,
    rules: WindowRules,
    *,
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
        rules: What lies beyond the ends of the array, and how outputs are sharded.
        base: The dilation of the input's rows, by dim; 1 if left out.
        order: For every dim of the output its dim in the input; None if they are the same.
        features: The new lengths of other dims, by dim of `x`.

    Returns:
        The result of `op` on the global array, sharded by the output rule.
    """
    plan = _plan_windows(x, windows, rules, {} if base is None else base)
    # The only communication: every device gets the rows that its outputs read.
    block = _fetched_block(x, plan.frames)
    for dim, local in plan.local.items():
        if local.rows is not None:
            block = pick_rows(block, dim, local.rows, x.layout.dims[dim].axes)
    y = op(block, plan.local)

    input_dims = range(x.block.ndim) if order is None else order
    for dim, local in plan.local.items():
        if local.outputs is not None:
            output_dim = input_dims.index(dim)
            y = pick_rows(y, output_dim, local.outputs, x.layout.dims[dim].axes)

    dims = _without_overlaps(x)
    lengths = list(x.sharding.shape)
    for dim, frame in plan.frames.items():
        dims[dim] = frame.result
        lengths[dim] = frame.length
    if features is not None:
        for dim, length in features.items():
            lengths[dim] = length
    return x.with_block(y, [dims[dim] for dim in input_dims], [lengths[dim] for dim in input_dims])


def _plan_windows(
    x: Sharded, windows: Mapping[int, Window], rules: WindowRules, base: Mapping[int, int]
) -> WindowPlan:
    """Decide for each dim which rows every device fetches, and how the windows run over them.

    Args:
        x: The sharded array.
        windows: The window over each dim, by dim.
        rules: What lies beyond the ends of the array, and how outputs are sharded.
        base: The dilation of rows, by dim; 1 if left out.
    """
    if rules.outputs not in ("", *OUTPUT_RULES):
        hint = f"rules are: {', '.join(OUTPUT_RULES)}, or empty"
        raise PlanError(f"no output rule {rules.outputs!r}", hint=hint)
    names = x.layout.names
    ends_by_name = _boundaries_of_dims(rules, [names[dim] for dim in windows])
    plan = WindowPlan({}, {})
    for dim, window in windows.items():
        ends = ends_by_name[names[dim]]
        window = replace(window, out=rules.outputs)
        windowed = _windowed_dim(x, dim, window, ends, rules.fill, base.get(dim, 1))
        plan.frames[dim] = windowed.frame
        plan.local[dim] = windowed.local
    return plan


def _without_overlaps(x: Sharded) -> list[Dim]:
    """Return the array's dims with every row at its owner only."""
    return [replace(dim, overlap=None) for dim in x.layout.dims]


def _fetched_block(x: Sharded, frames: Mapping[int, Frame]) -> jax.Array:
    """Fetch the rows that this device's outputs read, along every dim that has a frame."""
    dims = _without_overlaps(x)
    for dim, frame in frames.items():
        dims[dim] = frame.source
    return x.to(replace(x.layout, dims=tuple(dims))).block


def _filled(fill: float) -> BoundaryPair:
    """Return the boundary of constant rows at both ends."""
    rule = Boundary("constant", fill)
    return BoundaryPair(rule, rule)


def _boundaries_of_dims(rules: WindowRules, names: Sequence[str]) -> dict[str, BoundaryPair]:
    """Parse what windows read before the first and after the last row of the array, by dim.

    "periodic" for the dims h, w -> {"h": (periodic, periodic), "w": (periodic, periodic)}; a dim
    that the user gives no rule for reads rows of the constant `fill`.

    Args:
        rules: The user's boundary: one text, texts by dim, or None; and `fill`.
        names: The dims that have a window.
    """
    texts: Mapping[str, str] = {}
    if isinstance(rules.boundary, str):
        texts = dict.fromkeys(names, rules.boundary)
    elif rules.boundary is not None:
        texts = rules.boundary

    pairs = dict.fromkeys(names, _filled(rules.fill))
    for name, text in texts.items():
        if name not in names:
            raise ShapeError(
                f"a boundary for {name!r}", hint=f"the windows are over: {', '.join(names)}"
            )
        before, after = parse_boundaries(text)
        pairs[name] = BoundaryPair(before, after)

    for name, pair in pairs.items():
        if "none" in (pair.before.kind, pair.after.kind):
            what = f"no rows beyond the ends of {name!r}, which a window reads"
            raise PlanError(what, hint="padding=0 reads none")
    return pairs


def _windowed_dim(
    x: Sharded, d: int, window: Window, ends: BoundaryPair, fill: float, dilation: int
) -> WindowedDim:
    """Decide which rows of dim `d` every device fetches, and how the window runs over its block.

    8 rows on 2 devices under a window of 3 with padding 1: device 0 fetches rows -1 to 4, device 1
    rows 3 to 8; rows -1 and 8 are made by the boundary rule.

    Args:
        x: The sharded array.
        d: The dim.
        window: The window over it.
        ends: The rows beyond its ends.
        fill: The value that the operation itself assumes beyond the ends of a block.
        dilation: The dilation of its rows.
    """
    dim = replace(x.layout.dims[d], overlap=None)
    length = x.sharding.shape[d]
    sizes = x.sharding.mesh.sizes_of(dim.axes)
    is_padded = any(window.padding)
    is_filled = ends.before.fill == ends.after.fill == fill
    if is_padded and not is_filled and (dilation > 1 or min(window.padding) < 0):
        what = f"boundary {ends.before} of {dim.name!r} with dilated inputs or negative padding"
        raise PlanError(what, hint="only the fill is possible there: halo_exchange first")
    if not is_padded:
        # Without padding nothing beyond the ends is read, so that any rule will do: constants
        # need no communication.
        ends = _filled(fill)

    window = replace(window, before=ends.before, after=ends.after)
    frame = window_frame(dim, length, sizes, window, dilation)
    if not dim.axes and is_filled:
        # The dim is not sharded: the operation pads it itself, as it would without devices.
        local = LocalWindow(None, window.s, window.padding, None)
        return WindowedDim(replace(frame, source=dim), local)
    return WindowedDim(frame, _local_window(frame, window, dilation))


def _local_window(frame: Frame, window: Window, dilation: int) -> LocalWindow:
    """Decide how a window runs over blocks that hold the rows of `frame`."""
    if max(map(len, frame.runs)) > 1:
        return _over_several_runs(frame, window.s)
    return _over_one_run(frame, window, dilation)


def _over_several_runs(frame: Frame, stride: int) -> LocalWindow:
    """Arrange a block of several runs of rows so that one strided operation computes all outputs.

    In zigzag order a block has two runs of consecutive rows. They are laid one after the other,
    with zeros between them so that each begins at a multiple of the stride, where an output begins.
    Runs of 3 and 3 rows with stride 2: rows 0 1 2 . 3 4 5. Outputs that read rows of two runs, or
    the zeros between them, are dropped.
    """
    rows_by_part: list[list[int]] = []
    outputs_by_part: list[list[int]] = []
    for runs in frame.runs:
        rows: list[int] = []
        outputs: list[int] = []
        first_row = 0
        for run in runs:
            first_output = -(-len(rows) // stride)  # rounded up
            rows += [VOID] * (first_output * stride - len(rows))
            rows += range(first_row, first_row + run.rows)
            outputs += range(first_output, first_output + run.outputs)
            first_row += run.rows
        rows_by_part.append(rows)
        outputs_by_part.append(outputs)
    return LocalWindow(padded_table(rows_by_part), stride, (0, 0), padded_table(outputs_by_part))


def _over_one_run(frame: Frame, window: Window, dilation: int) -> LocalWindow:
    """Choose stride and padding so that a window over each block yields this device's outputs.

    All devices run one program, so that they have one padding. If blocks begin at different places
    of the stride, every device computes the outputs at stride 1 and picks its own.

    Positions count dilated rows: row i of a run stands at position `i * dilation`.

        first tap         first row of the block
        |---- lead ----|------ block_span ------|-- padding after --|
        |------------------------ read_span -----------------------|
    """
    stride = window.s
    window_span = window.d * (window.k - 1) + 1  # positions from its first tap to its last

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
        # All blocks begin at the same place of the stride: the operation itself strides.
        most_outputs = max((run.outputs for run in all_runs), default=0)
        read_span = (most_outputs - 1) * stride + window_span if most_outputs else 0
        padding = (longest_lead, read_span - block_span - longest_lead)
        return LocalWindow(None, stride, padding, None)

    # Blocks begin at different places of the stride: compute every output, and pick.
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


@api_boundary
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


@api_boundary
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
    """Find which inputs each output of `jax.image.resize` reads, and with which weights.

    Resizing the identity matrix gives the matrix [outputs, inputs] of all weights; kept are the
    columns from the first weight to the last of each output.

    Returns:
        Inputs and weights, [outputs, taps] each.
    """
    with jax.ensure_compile_time_eval():
        identity = jnp.eye(length, dtype=dtype)
        response = jax.image.resize(identity, (outputs, length), method, antialias=antialias)
    matrix = np.asarray(response, np.float64)  # [outputs, inputs]
    first = (matrix != 0).argmax(axis=1)  # [outputs]: the first input with a weight
    stop = length - (matrix[:, ::-1] != 0).argmax(axis=1)
    most_taps = (stop - first).max()
    inputs = first[:, None] + np.arange(most_taps)  # [outputs, taps]
    weights = np.take_along_axis(matrix, np.minimum(inputs, length - 1), 1)
    # Outputs with fewer taps repeat their last input with weight 0.
    is_tap = inputs < stop[:, None]
    return Taps(np.minimum(inputs, stop[:, None] - 1), np.where(is_tap, weights, 0.0))


def _resampled(x: Sharded, taps_by_dim: Mapping[int, Taps]) -> Sharded:
    """Interpolate a sharded array along several dims.

    Args:
        x: The array.
        taps_by_dim: For each dim that changes, the inputs of every output and their weights.
    """
    dims = _without_overlaps(x)
    shape = list(x.sharding.shape)
    frames: dict[int, Frame] = {}
    # Interpolation along one dim does not depend on the others: the rows of all dims are fetched
    # at once, and then each dim is interpolated in turn.
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
    """Interpolate along dim `d` of this device's block: output i = sum of weight * input.

    Args:
        block: The block, with all rows that its outputs read.
        d: The dim.
        frame: The rows that each device has fetched, and the outputs that it computes.
        dim_taps: The inputs of every output of the global array, and their weights.
        axes: The mesh axes that shard the dim.
    """
    local = _local_taps(frame, dim_taps)
    is_weighted = (dim_taps.weights != 1).any()  # nearest only copies, also whole numbers
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
    """Return the inputs of each device's outputs as positions in its block, and their weights.

    An output that reads the global rows 9 and 10 reads 1 and 2 of a block that begins at row 8.
    Devices with fewer outputs than others have VOID (-1) and weight 0 at the end.
    """
    all_runs = itertools.chain.from_iterable(frame.runs)
    most_outputs = max(run.outputs for run in all_runs)
    shape = (len(frame.runs), most_outputs, dim_taps.inputs.shape[1])
    inputs = np.full(shape, VOID, np.int64)  # devices with fewer outputs read zeros
    weights = np.zeros(shape, dim_taps.weights.dtype)
    for part, runs in enumerate(frame.runs):
        for run in runs:
            outputs = slice(run.start, run.start + run.outputs)
            inputs[part, : run.outputs] = dim_taps.inputs[outputs] - run.first
            weights[part, : run.outputs] = dim_taps.weights[outputs]
    return LocalTaps(inputs, weights)
