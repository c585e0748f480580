"""Window operations over sharded dims, and interpolation.

For one dim a `Frame` of `xshard.nn.windows` says which rows each device reads and which outputs it computes,
in runs of consecutive rows. One program runs on all devices. Where devices differ, as at the ends of the
array or in uneven blocks, numpy tables say which rows of its block a device reads, and which of its outputs
it keeps.
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
from xshard.layout.partition import ceil_div
from xshard.nn.windows import (
    Frame,
    OutputRun,
    Taps,
    along,
    framed_arrays,
    resampled_frame,
    taps,
    taps_of_part,
    window_frame,
)
from xshard.notation.overlap import Boundary, OutputRule, Window
from xshard.notation.overlap_parser import parse_boundaries

Boundaries = str | Mapping[str, str] | None


class WindowedDim(NamedTuple):
    """One dim of a window operation: the rows that every device fetches, and how it uses them.

    Attributes:
        frame: The rows that each device fetches, and the outputs that it computes from them.
        stride: With which the operation runs over the fetched block.
        padding: With which it runs: rows before the block and after it.
        rows: How the fetched block is rearranged before the operation; None: not at all.
        outputs: Which outputs of the operation are kept; None: the first ones, as many as the device
            has.
    """

    frame: Frame
    stride: int
    padding: tuple[int, int] = (0, 0)
    rows: Table | None = None
    outputs: Table | None = None


class WindowRules(NamedTuple):
    """How a window operation treats the ends of the array, and how it shards its outputs."""

    fill: float  # the value of the operation's own padding: 0 of a convolution, -inf of a max pool
    boundary: Boundaries  # the user's rule for rows beyond the ends of the array
    outputs: OutputRule


class BoundaryPair(NamedTuple):
    """The rules for rows that a window reads before the first row of the array, and after its last."""

    before: Boundary
    after: Boundary


WindowOp = Callable[[jax.Array, Mapping[int, WindowedDim]], jax.Array]


def apply_windows(
    x: Sharded,
    windows: Mapping[int, Window],
    op: WindowOp,
    rules: WindowRules,
    *,
    base: Mapping[int, int],
    order: Sequence[int],
    features: Mapping[int, int],
) -> Sharded:
    """Run a convolution, a pool or another window operation on a sharded array.

    Every device fetches the rows that its outputs read, from its neighbours or from beyond the
    ends, and then runs the operation on its block alone.

    Args:
        x: The sharded array.
        windows: The window over each dim, by dim of `x`; without boundary and output rule.
        op: The local operation: a block and how it runs along each dim -> the block of results.
        rules: What lies beyond the ends of the array, and how outputs are sharded.
        base: The dilation of the input's rows, by dim.
        order: For every dim of the output its dim in the input.
        features: The new lengths of other dims, by dim of `x`.

    Returns:
        The result of `op` on the global array, sharded by the output rule.
    """
    windowed_dims = _plan_windows(x, windows, rules, base)
    frames = {dim: windowed.frame for dim, windowed in windowed_dims.items()}
    arrays = framed_arrays(x.sharding, frames, features)
    dims = x.layout.dims
    # The only communication: every device gets the rows that its outputs read.
    block = x.to(arrays.source).block
    for dim, windowed in windowed_dims.items():
        if windowed.rows is not None:
            block = pick_rows(block, dim, windowed.rows, dims[dim].axes)
    y = op(block, windowed_dims)
    for dim, windowed in windowed_dims.items():
        if windowed.outputs is not None:
            y = pick_rows(y, order.index(dim), windowed.outputs, dims[dim].axes)
    names = [x.layout.names[dim] for dim in order]
    return Sharded(y, arrays.result.in_order(names)).owned()


def _plan_windows(
    x: Sharded, windows: Mapping[int, Window], rules: WindowRules, base: Mapping[int, int]
) -> dict[int, WindowedDim]:
    """Decide for each dim which rows every device fetches, and how the windows run over them.

    Args:
        x: The sharded array.
        windows: The window over each dim, by dim.
        rules: What lies beyond the ends of the array, and how outputs are sharded.
        base: The dilation of rows, by dim.
    """
    names = x.layout.names
    boundaries_by_name = _boundaries_of_dims(rules, [names[dim] for dim in windows])
    windowed_dims = {}
    for dim, window in windows.items():
        boundaries = boundaries_by_name[names[dim]]
        windowed_dims[dim] = _windowed_dim(x, dim, window, boundaries, rules, base[dim])
    return windowed_dims


def _constant_boundary(fill: float) -> BoundaryPair:
    """Return the boundary of rows with this value beyond both ends."""
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
    rules_by_dim = rules.boundary
    if rules_by_dim is None:
        rules_by_dim = {}
    elif isinstance(rules_by_dim, str):
        rules_by_dim = dict.fromkeys(names, rules_by_dim)
    boundaries = dict.fromkeys(names, _constant_boundary(rules.fill))
    for name, rule in rules_by_dim.items():
        if name not in names:
            reason = f"a boundary for {name!r}"
            raise ShapeError(reason, hint=f"the windows are over: {', '.join(names)}")
        before, after = parse_boundaries(rule)
        if "none" in (before.kind, after.kind):
            reason = f"no rows beyond the ends of {name!r}, which a window reads"
            raise PlanError(reason, hint="padding=0 reads none")
        boundaries[name] = BoundaryPair(before, after)
    return boundaries


def _windowed_dim(
    x: Sharded, d: int, window: Window, boundaries: BoundaryPair, rules: WindowRules, dilation: int
) -> WindowedDim:
    """Decide which rows of dim `d` every device fetches, and how the window runs over its block.

    8 rows on 2 devices under a window of 3 with padding 1: device 0 fetches rows -1 to 4, device 1
    rows 3 to 8; rows -1 and 8 are made by the boundary rule.

    Args:
        x: The sharded array.
        d: The dim.
        window: The window over it.
        boundaries: The rules for rows beyond its ends.
        rules: How outputs are sharded, and the fill that the operation itself assumes.
        dilation: The dilation of its rows.
    """
    rows = along(x.sharding, d)
    reads_beyond_ends = any(window.padding)
    if not reads_beyond_ends:
        # Any rule will do: constants need no communication.
        boundaries = _constant_boundary(rules.fill)
    can_pad_itself = boundaries.before.fill == boundaries.after.fill == rules.fill
    if not can_pad_itself and (dilation > 1 or min(window.padding) < 0):
        reason = f"boundary {boundaries.before} of {rows.dim.name!r} with dilated inputs or negative padding"
        raise PlanError(reason, hint="only the fill is possible there: halo_exchange first")

    window_with_rules = replace(
        window, before=boundaries.before, after=boundaries.after, out=rules.outputs
    )
    frame = window_frame(rows, window_with_rules, dilation)
    is_sharded = bool(rows.dim.axes)
    if can_pad_itself and not is_sharded:
        # As on a single device: the block has all rows as they are, and the operation pads them.
        frame_without_padding = replace(frame, source=rows.dim)
        return WindowedDim(frame_without_padding, window.s, window.padding)
    most_runs = max(len(runs) for runs in frame.runs)  # of consecutive rows, on one device
    if most_runs > 1:
        return _windows_over_runs(frame, window.s)
    return _windows_over_one_run(frame, window_with_rules, dilation)


def _windows_over_runs(frame: Frame, stride: int) -> WindowedDim:
    """Arrange a block of several runs of rows so that one strided operation computes all outputs.

    In zigzag order a block has two runs of consecutive rows. They are laid one after the other,
    with zeros between them so that each begins at a multiple of the stride, where an output begins.
    Runs of 3 and 3 rows with stride 2: rows 0 1 2 . 3 4 5. Outputs that read rows of two runs, or
    the zeros between them, are dropped.
    """
    rows_of_devices = []
    outputs_of_devices = []
    for runs in frame.runs:
        arranged_rows: list[int] = []  # rows of the fetched block, in their new order
        kept_outputs: list[int] = []  # of those that the operation computes
        n_fetched = 0  # rows of the block in the runs so far
        for run in runs:
            first_output = ceil_div(len(arranged_rows), stride)
            arranged_rows += [VOID] * (first_output * stride - len(arranged_rows))
            arranged_rows += range(n_fetched, n_fetched + run.rows)
            kept_outputs += range(first_output, first_output + run.outputs)
            n_fetched += run.rows
        rows_of_devices.append(arranged_rows)
        outputs_of_devices.append(kept_outputs)
    return WindowedDim(
        frame,
        stride,
        rows=padded_table(rows_of_devices),
        outputs=padded_table(outputs_of_devices),
    )


def _windows_over_one_run(frame: Frame, window: Window, dilation: int) -> WindowedDim:
    """Choose stride and padding so that a window over each block yields this device's outputs.

    A frame says for each device which rows it has, here one run of consecutive rows, and which
    outputs it computes from them. All devices run one program, so that they have one padding. If
    blocks begin at different places of the stride, every device computes the outputs at stride 1
    and picks its own.

    Positions count dilated rows: row i of a run stands at position `i * dilation`.
    """
    all_runs = list(itertools.chain.from_iterable(frame.runs))
    if not all_runs:  # no device has an output
        return WindowedDim(frame, window.s)
    leads = {_lead(run, window, dilation) for run in all_runs}
    longest_lead = max(leads)
    max_rows = max(run.rows for run in all_runs)
    block_span = (max_rows - 1) * dilation + 1 if max_rows else 0

    if len(leads) == 1:
        # All blocks begin at the same place of the stride: the operation itself strides.
        max_outputs = max(run.outputs for run in all_runs)
        last_window = (max_outputs - 1) * window.s
        padding_after = _padding_after(last_window, window.span, longest_lead, block_span)
        return WindowedDim(frame, window.s, (longest_lead, padding_after))
    # Blocks begin at different places of the stride: compute every output, and pick.
    kept_outputs = padded_table(_outputs_at_stride_1(frame, window, dilation, longest_lead))
    last_window = int(kept_outputs.max())
    padding_after = _padding_after(last_window, window.span, longest_lead, block_span)
    return WindowedDim(frame, 1, (longest_lead, padding_after), outputs=kept_outputs)


def _padding_after(last_window: int, window_span: int, lead: int, block_span: int) -> int:
    """Return how far the window of the last output reaches beyond the last row of a block.

        position 0        first row of the block
        |---- lead ----|------ block_span ------|-- padding after --|
        |------------ last_window ------------|---- window_span ----|

    Blocks of 4 rows with padding 1 before, and windows of 3 of which the last begins at 3: 1.

    Args:
        last_window: The position where it begins; the first window begins at 0.
        window_span: The positions of a window.
        lead: The padding before the block.
        block_span: The positions of a block.
    """
    return last_window + window_span - lead - block_span


def _lead(run: OutputRun, window: Window, dilation: int) -> int:
    """Return how far before a run's first row its first window begins, in positions of dilated rows.

    A window of 3 with padding 1 at the start of the array -> 1.
    """
    first_tap = run.start * window.s - window.padding[0]
    return run.first * dilation - first_tap


def _outputs_at_stride_1(
    frame: Frame, window: Window, dilation: int, padding_before: int
) -> list[list[int]]:
    """Return for every device which of the outputs of a window at stride 1 it keeps.

    With stride 2, a device whose first output is output 3 at stride 1 keeps 3, 5, 7, ...

    Args:
        frame: The rows and outputs of each device.
        window: The window.
        dilation: The dilation of rows.
        padding_before: The padding before the block, which is the longest `_lead` of all devices.
    """
    outputs_of_devices = []
    for runs in frame.runs:
        kept_outputs: list[int] = []
        for run in runs:
            first_output = padding_before - _lead(run, window, dilation)
            kept_outputs += range(first_output, first_output + run.outputs * window.s, window.s)
        outputs_of_devices.append(kept_outputs)
    return outputs_of_devices


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
    taps_by_dim = {}
    for dim, new_length in enumerate(shape):
        length = x.sharding.shape[dim]
        if new_length != length:
            taps_by_dim[dim] = _jax_taps(length, new_length, method, antialias, dtype)
    return _resample(x, taps_by_dim)


@api_boundary
def interpolate(
    x: Sharded,
    shape: Sequence[int],
    mode: str,
    *,
    align_corners: bool = False,
) -> Sharded:
    """Interpolate a sharded array to other lengths, with the results of torch's `interpolate`.

        y = interpolate(x, (1, 3, 64, 64), "linear")     # [1, 3, 32, 32] -> [1, 3, 64, 64]

    Args:
        x: The sharded array.
        shape: The global shape of the result.
        mode: nearest, nearest-exact, linear (in two dims bilinear) or cubic.
        align_corners: As in torch.

    Returns:
        The interpolated array, sharded like `x`.
    """
    taps_by_dim = {}
    for dim, new_length in enumerate(shape):
        length = x.sharding.shape[dim]
        if new_length != length:
            taps_by_dim[dim] = taps(mode, length, new_length, align_corners=align_corners)
    return _resample(x, taps_by_dim)


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
    has_weight = matrix != 0
    first_input = has_weight.argmax(axis=1)  # [outputs]: the first input with a weight
    last_input = length - 1 - has_weight[:, ::-1].argmax(axis=1)
    max_taps = (last_input - first_input).max() + 1
    consecutive = first_input[:, None] + np.arange(max_taps)  # [outputs, taps]
    # Outputs with fewer taps repeat their last input, with weight 0.
    inputs = np.minimum(consecutive, last_input[:, None])
    weights = np.take_along_axis(matrix, inputs, 1)
    return Taps(inputs, np.where(consecutive == inputs, weights, 0.0))


def _resample(x: Sharded, taps_by_dim: Mapping[int, Taps]) -> Sharded:
    """Interpolate a sharded array along several dims.

    A frame says for each device which rows its outputs read, and which outputs it computes.

    Args:
        x: The array.
        taps_by_dim: For each dim that changes, the inputs of every output and their weights.
    """
    frames = {}
    for d, dim_taps in taps_by_dim.items():
        frames[d] = resampled_frame(along(x.sharding, d), dim_taps)
    arrays = framed_arrays(x.sharding, frames, lengths={})

    # Interpolation along one dim does not depend on the others: the rows of all dims are fetched
    # at once, and then each dim is interpolated in turn.
    block = x.to(arrays.source).block
    for d, frame in frames.items():
        block = _interpolate_dim(block, d, frame, taps_by_dim[d], x.layout.dims[d].axes)
    return Sharded(block, arrays.result).owned()


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


def _local_taps(frame: Frame, dim_taps: Taps) -> Taps:
    """Return the inputs of each device's outputs as positions in its block, and their weights.

    Both are [devices, outputs, taps].

    Devices with fewer outputs than others have VOID (-1), a row of zeros, and weight 0 at the end.
    """
    taps_of_devices = [taps_of_part(dim_taps, runs) for runs in frame.runs]
    max_outputs = max(len(device_taps.inputs) for device_taps in taps_of_devices)
    shape = (len(taps_of_devices), max_outputs, dim_taps.inputs.shape[1])
    inputs = np.full(shape, VOID, np.int64)
    weights = np.zeros(shape, dim_taps.weights.dtype)
    for device, device_taps in enumerate(taps_of_devices):
        n_outputs = len(device_taps.inputs)
        inputs[device, :n_outputs] = device_taps.inputs
        weights[device, :n_outputs] = device_taps.weights
    return Taps(inputs, weights)
