"""Convolutions and pools along sharded dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import VOID, along_dim, row_of_this_device, row_table
from jax_bridge.nn.sharded import Sharded
from jax_bridge.nn.window import Boundaries, WindowedDim, WindowRules, apply_windows
from xshard.errors import ShapeError, api_boundary
from xshard.nn.windows import pool_counts, pool_window
from xshard.notation.overlap import OutputRule, Window

Ints = Sequence[int]
Pads = Sequence[tuple[int, int]]
Padding = Literal["SAME", "SAME_LOWER", "VALID", "same", "same_lower", "valid"] | Pads
Reducer = Callable[[jax.Array, jax.Array], jax.Array]


@api_boundary
def conv_general_dilated(  # noqa: PLR0913  the arguments of `lax.conv_general_dilated`
    lhs: Sharded,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    *,
    boundary: Boundaries = None,
    outputs: OutputRule = "",
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Sharded:
    """Convolve a sharded array, with the result of `lax.conv_general_dilated` on the global array.

        y = conv_general_dilated(Sharded(x, "n c h/sp w"), kernel, (1, 1), "SAME")
        # x: [n, c, h/4, w], kernel: [features, c, 3, 3] -> y.block: [n, features, h/4, w] on 4
        devices

    Takes the arguments of `lax`, for the global array. Spatial dims may be sharded in any way.

    Args:
        lhs: The sharded array.
        rhs: This device's copy of the kernel. With `check_vma=True` JAX adds the gradients of a
            kernel that all devices share; without, `copy_to(rhs, axes)` does.
        window_strides: As in `lax`.
        padding: As in `lax`.
        lhs_dilation: As in `lax`.
        rhs_dilation: As in `lax`.
        dimension_numbers: As in `lax`.
        feature_group_count: As in `lax`.
        boundary: The rows of `padding`: zeros by default, or `periodic`, `reflect`, `edge`, `pole`,
            ... for all spatial dims or by name.
        outputs: How the outputs are sharded: like the dim (""), `balanced`, or `aligned` (each on
            the device where its stride begins).
        precision: As in `lax`.
        preferred_element_type: As in `lax`.

    Returns:
        The convolved array, with the tags of `lhs`.

    Raises:
        ShapeError: The features of `lhs` are sharded.
        XshardError: As `redistribute` does.

    Examples:
        >>> def blur(x):
        ...     return conv_general_dilated(
        ...         Sharded(x, "n c h/sp"), jnp.ones((1, 1, 3)), (1,), "SAME"
        ...     )
        >>> jax.pmap(blur, "sp")(jnp.ones((1, 1, 1, 4))).block  # one block on one device
        Array([[[[2., 3., 3., 2.]]]], dtype=float32)
    """
    shape = lhs.sharding.shape
    dim_numbers = lax.conv_dimension_numbers(shape, rhs.shape, dimension_numbers)
    dims = _ConvDims.of(dim_numbers)
    _check_features(lhs, dims.features)
    array_dilation = _or_ones(lhs_dilation, len(dims.space))
    kernel_dilation = _or_ones(rhs_dilation, len(dims.space))
    convolve: Any = partial(
        lax.conv_general_dilated,
        lhs_dilation=array_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=dim_numbers,
        feature_group_count=feature_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    # On the global array: lax raises its own errors for arguments that do not fit.
    jax.eval_shape(
        partial(convolve, window_strides=window_strides, padding=padding),
        jax.ShapeDtypeStruct(shape, lhs.block.dtype),
        jax.ShapeDtypeStruct(rhs.shape, rhs.dtype),
    )

    def convolve_block(block: jax.Array, local: Mapping[int, WindowedDim]) -> jax.Array:
        block_strides = [local[dim].stride for dim in dims.space]
        block_padding = [local[dim].padding for dim in dims.space]
        return convolve(block, rhs, block_strides, block_padding)

    windows = windows_of(
        [shape[dim] for dim in dims.space],
        [rhs.shape[dim] for dim in dims.kernel_space],
        window_strides,
        kernel_dilation,
        padding,
    )
    return apply_windows(
        lhs,
        dict(zip(dims.space, windows, strict=True)),
        convolve_block,
        WindowRules(fill=0.0, boundary=boundary, outputs=outputs),
        base=dict(zip(dims.space, array_dilation, strict=True)),
        order=dims.output_order,
        features={dims.features: rhs.shape[dims.kernel_output_features]},
    )


class _ConvDims(NamedTuple):
    """The dims of a convolution by what they hold.

    Attributes:
        features: The dim of the input with its features.
        space: The spatial dims of the input.
        kernel_output_features: The dim of the kernel with the features of the output.
        kernel_space: The spatial dims of the kernel, in the order of `space`.
        output_order: For each dim of the output, the dim of the input that has its place.
    """

    features: int
    space: list[int]
    kernel_output_features: int
    kernel_space: list[int]
    output_order: list[int]

    @classmethod
    def of(cls, numbers: lax.ConvDimensionNumbers) -> _ConvDims:
        """Read the dims from the numbers of `lax`.

        Its specs list batch, features, then space: "NHWC" is (0, 3, 1, 2). A kernel has output
        features, input features, then space: "HWIO" is (3, 2, 0, 1).
        """
        _, features, *space = numbers.lhs_spec
        kernel_output_features, _, *kernel_space = numbers.rhs_spec
        # Dim lhs_spec[i] of the input becomes dim out_spec[i] of the output.
        input_dim_of = dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))
        output_order = [input_dim_of[dim] for dim in range(len(input_dim_of))]
        return cls(
            features=features,
            space=space,
            kernel_output_features=kernel_output_features,
            kernel_space=kernel_space,
            output_order=output_order,
        )


def _check_features(x: Sharded, feature_dim: int) -> None:
    """Raise ShapeError if the features, which a convolution adds up, are sharded."""
    dim = x.layout.dims[feature_dim]
    if dim.axes:
        reason = f"features {str(dim)!r} are sharded, and a convolution adds over them"
        hint = "x.to(...) a layout with unsharded features"
        raise ShapeError(reason, text=str(x.layout), hint=hint)


def _or_ones(values: Ints | None, n: int) -> tuple[int, ...]:
    """Return `n` strides or dilations: the given ones, or ones."""
    return tuple(values) if values else (1,) * n


def windows_of(
    lengths: Ints, sizes: Ints, strides: Ints | None, dilation: Ints | None, padding: Padding
) -> list[Window]:
    """Return the window over every dim of the global array, with the padding in numbers.

    Lengths [8], sizes [3], padding "SAME" -> [Window(3, p=(1, 1))]

    Args:
        lengths: The lengths of the array's dims.
        sizes: The lengths of the window, per dim.
        strides: The strides, per dim; None for 1.
        dilation: The dilations of the window, per dim; None for 1.
        padding: As in `lax`: a word, or rows before and after, per dim.
    """
    strides = _or_ones(strides, len(sizes))
    dilation = _or_ones(dilation, len(sizes))
    if isinstance(padding, str):
        dilated_sizes = []
        for size, row_distance in zip(sizes, dilation, strict=True):
            dilated_sizes.append(row_distance * (size - 1) + 1)
        padding = lax.padtype_to_pads(lengths, dilated_sizes, strides, padding)
    pairs = [(int(before), int(after)) for before, after in padding]
    # Not strict: `lax` refuses arguments of unequal lengths, and says which.
    options_by_dim = zip(sizes, strides, dilation, pairs, strict=False)
    return [
        Window(k=size, s=stride, d=row_distance, p=pair)
        for size, stride, row_distance, pair in options_by_dim
    ]


@api_boundary
def reduce_window(  # noqa: PLR0913  the arguments of `lax.reduce_window`
    operand: Sharded,
    init_value: float,
    computation: Reducer,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
    *,
    boundary: Boundaries = None,
    outputs: OutputRule = "",
) -> Sharded:
    """Reduce windows of a sharded array, as `lax.reduce_window` of the global array.

        y = reduce_window(Sharded(x, "h/sp"), 0.0, lax.add, (2,), (2,))     # [8] -> [4]

    Takes the arguments of `lax`, with a number for every dim, for the global array.

    Args:
        operand: The sharded array.
        init_value: As in `lax`.
        computation: As in `lax`.
        window_dimensions: As in `lax`.
        window_strides: As in `lax`.
        padding: As in `lax`.
        base_dilation: As in `lax`.
        window_dilation: As in `lax`.
        boundary: The rows of `padding`, by default `init_value`.
        outputs: How the outputs are sharded, as in `conv_general_dilated`.

    Returns:
        The reduced array.

    Raises:
        XshardError: As `redistribute` does.
    """
    shape = operand.sharding.shape
    ndim = operand.block.ndim
    base = _or_ones(base_dilation, ndim)
    dilation = _or_ones(window_dilation, ndim)
    init = np.array(init_value, operand.block.dtype)
    # On the global array: lax raises its own errors for arguments that do not fit.
    jax.eval_shape(
        lambda x: lax.reduce_window(
            x, init, computation, window_dimensions, window_strides, padding, base, dilation
        ),
        jax.ShapeDtypeStruct(shape, init.dtype),
    )
    windows = {}
    all_windows = windows_of(shape, window_dimensions, window_strides, dilation, padding)
    for dim, window in enumerate(all_windows):
        # A window of 1 without padding, as over the batch, needs no rows of other devices.
        if window != Window(1, p=(0, 0)) or base[dim] > 1:
            windows[dim] = window

    def reduce_block(block: jax.Array, local: Mapping[int, WindowedDim]) -> jax.Array:
        block_strides = [1] * ndim
        pads = [(0, 0)] * ndim
        for dim, window in local.items():
            block_strides[dim] = window.stride
            pads[dim] = window.padding
        is_dilated = any(d > 1 for d in dilation)
        reduce = _reduce_dilated_window if is_dilated else lax.reduce_window
        return reduce(
            block, init, computation, window_dimensions, block_strides, pads, base, dilation
        )

    return apply_windows(
        operand,
        windows,
        reduce_block,
        WindowRules(float(init_value), boundary, outputs),
        base=dict(enumerate(base)),
        order=range(ndim),
        features={},
    )


@api_boundary
def max_pool(
    x: Sharded,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    window_dilation: Sequence[int] | None = None,
    *,
    ceil_mode: bool = False,
    outputs: OutputRule = "",
) -> Sharded:
    """Pool a sharded array by maximum; rows beyond the ends of the array do not count.

        y = max_pool(Sharded(x, "n c h/sp w"), (1, 1, 2, 2), (1, 1, 2, 2))
        # [n, c, 8, 8] -> [n, c, 4, 4]

    Args:
        x: The sharded array.
        window_dimensions: As in `reduce_window`.
        window_strides: As in `reduce_window`.
        padding: As in `reduce_window`.
        window_dilation: As in `reduce_window`.
        ceil_mode: Keep a last window that begins inside the array.
        outputs: How the outputs are sharded, as in `conv_general_dilated`.

    Returns:
        The pooled array.

    Raises:
        XshardError: As `redistribute` does.
    """
    dtype = x.block.dtype
    lowest_value = -np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
    lengths = x.sharding.shape
    windows = windows_of(lengths, window_dimensions, window_strides, window_dilation, padding)
    pads = [window.padding for window in _pool_windows(lengths, windows, ceil_mode)]
    return reduce_window(
        x,
        lowest_value,
        lax.max,
        window_dimensions,
        window_strides,
        pads,
        window_dilation=window_dilation,
        outputs=outputs,
    )


@api_boundary
def avg_pool(
    x: Sharded,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    count_include_pad: bool = True,
    ceil_mode: bool = False,
    outputs: OutputRule = "",
) -> Sharded:
    """Pool a sharded array by the mean of every window.

        y = avg_pool(Sharded(x, "n c h/sp w"), (1, 1, 2, 2), (1, 1, 2, 2))
        # [n, c, 8, 8] -> [n, c, 4, 4]

    Args:
        x: The sharded array.
        window_dimensions: As in `reduce_window`.
        window_strides: As in `reduce_window`.
        padding: As in `reduce_window`.
        count_include_pad: Count rows of `padding`; rows that `ceil_mode` adds never count.
        ceil_mode: Keep a last window that begins inside the array.
        outputs: How the outputs are sharded, as in `conv_general_dilated`.

    Returns:
        The pooled array.

    Raises:
        XshardError: As `redistribute` does.
    """
    lengths = x.sharding.shape
    windows = windows_of(lengths, window_dimensions, window_strides, None, padding)
    pool_windows = _pool_windows(lengths, windows, ceil_mode)
    pads = [window.padding for window in pool_windows]
    sums = reduce_window(x, 0.0, lax.add, window_dimensions, window_strides, pads, outputs=outputs)

    # The number of elements of a window is the product of its rows along each dim: the sum is
    # divided by one dim's count after the other.
    mean = sums.block
    for dim, (length, window) in enumerate(zip(lengths, pool_windows, strict=True)):
        output_rows = range(sums.sharding.shape[dim])
        padding_after = windows[dim].padding[1]  # without the rows that `ceil_mode` adds
        counts = pool_counts(
            length, window, output_rows, padding=padding_after, include_pad=count_include_pad
        )
        mean = mean / _local_divisors(sums, dim, counts)
    return Sharded(mean, sums.sharding)


def _pool_windows(lengths: Ints, windows: Sequence[Window], ceil_mode: bool) -> list[Window]:
    """Widen the padding at the end so that `ceil_mode` keeps a last, incomplete window.

    As in torch. Without `ceil_mode` the windows stay as they are.
    """
    return list(map(partial(pool_window, ceil=ceil_mode), lengths, windows))


def _local_divisors(y: Sharded, dim: int, counts: NDArray[np.int64]) -> jax.Array:
    """Return the counts of this device's rows along one dim, shaped to divide its block.

    Counts [2, 3, 3, 2] of 4 rows on 2 devices, dim 1 of a block [n, 2]: [[2, 3]] on device 0.
    Padding is divided by 1.
    """
    rows = row_table(y.sharding, dim)
    table = np.where(rows == VOID, 1, counts[rows]).astype(np.float32)
    # Whole numbers are divided as floats; short floats keep their dtype.
    dtype = jnp.promote_types(y.block.dtype, np.float16)
    divisors = row_of_this_device(table, y.layout.dims[dim].axes).astype(dtype)
    return along_dim(divisors, dim, y.block.ndim)


def _reduce_dilated_window(
    x: jax.Array,
    init: Any,
    op: Reducer,
    window: Ints,
    strides: Ints,
    pads: Pads,
    base: Ints,
    dilation: Ints,
) -> jax.Array:
    """Compute `lax.reduce_window` with dilated windows by dense ones, which JAX can differentiate.

    JAX lacks the gradient of a dilated maximum. Here the rows that one window reads are laid one
    behind the other in a new first dim, along which a window of all of them is dense.

    Args:
        x: The array.
        init: The value in the padding.
        op: Reduces two arrays elementwise.
        window: The rows of a window along each dim.
        strides: The stride along each dim.
        pads: The padding (before, after) of each dim.
        base: The dilation of the array's rows.
        dilation: The dilation of the windows.
    """
    padding = [(*pair, dilation - 1) for pair, dilation in zip(pads, base, strict=True)]
    x = lax.pad(x, init, padding)
    # How many windows fit at stride 1.
    spans = np.multiply(np.subtract(window, 1), dilation)
    n_positions = np.subtract(x.shape, spans)
    taps = []
    for tap in itertools.product(*map(range, window)):
        starts = np.multiply(tap, dilation)
        stops = starts + n_positions
        taps.append(lax.slice(x, starts.tolist(), stops.tolist(), strides))
    window_of_taps = (len(taps), *[1] * x.ndim)
    return lax.reduce_window(jnp.stack(taps), init, op, window_of_taps, None, "VALID")[0]
