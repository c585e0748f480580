"""Convolutions and pools along sharded dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import along, mine
from jax_bridge.nn.sharded import Sharded
from jax_bridge.nn.window import Boundaries, Local, apply_windows
from xshard.errors import ShapeError
from xshard.layout.runs import row_numbers
from xshard.nn.windows import pool_counts, pool_window
from xshard.notation.overlap import Window

Ints = Sequence[int]
Pads = Sequence[tuple[int, int]]
Padding = str | Pads
Reducer = Callable[[jax.Array, jax.Array], jax.Array]


def conv_general_dilated(
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
    outputs: str = "",
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Sharded:
    """`lax.conv_general_dilated` of the global array: blocks [n, c, *space] -> blocks [n, features, *space].

    Takes the arguments of `lax`, for the global array; spatial dims may be sharded in any way.
    rhs: this device's copy of the kernel. With `check_vma=True` JAX adds the gradients of a kernel
    that all devices share; without, `copy_to(rhs, axes)` does. boundary: the rows of `padding`: zeros by
    default, or `periodic`, `reflect`, `edge`, `pole`, ... for all spatial dims or by name. outputs: how the
    outputs are sharded: like the dim (""), `balanced`, or `aligned` (each on the device where its stride
    begins). Raises ShapeError for sharded features, and as `redistribute` does.

    >>> def blur(x):
    ...     return conv_general_dilated(Sharded(x, "n c h/sp"), jnp.ones((1, 1, 3)), (1,), "SAME")
    >>> jax.pmap(blur, "sp")(jnp.ones((1, 1, 1, 4))).block  # one block on one device
    Array([[[[2., 3., 3., 2.]]]], dtype=float32)
    """
    shape = lhs.sharding.shape
    numbers = lax.conv_dimension_numbers(shape, rhs.shape, dimension_numbers)
    (_, channel, *space), (out, _, *taps) = numbers.lhs_spec, numbers.rhs_spec
    if lhs.layout.dims[channel].axes:
        what = f"features {str(lhs.layout.dims[channel])!r} are sharded, and a convolution adds over them"
        raise ShapeError(
            what, text=str(lhs.layout), hint="x.to(...) a layout with unsharded features"
        )
    base, dilation = (tuple(d or (1,) * len(space)) for d in (lhs_dilation, rhs_dilation))
    options: Any = {"lhs_dilation": base, "rhs_dilation": dilation, "dimension_numbers": numbers}
    options |= {"feature_group_count": feature_group_count, "precision": precision}
    options["preferred_element_type"] = preferred_element_type
    convolve: Any = partial(lax.conv_general_dilated, **options)
    # On the global array: lax raises its own errors for arguments that do not fit.
    whole = jax.ShapeDtypeStruct(shape, lhs.block.dtype), jax.ShapeDtypeStruct(rhs.shape, rhs.dtype)
    jax.eval_shape(lambda x, kernel: convolve(x, kernel, tuple(window_strides), padding), *whole)
    kernel = [rhs.shape[d] for d in taps]
    strides = tuple(window_strides)
    windows = windows_of([shape[d] for d in space], kernel, strides, dilation, padding)
    # Dim lhs_spec[i] of the input becomes dim out_spec[i] of the output.
    order = [
        dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))[d] for d in range(len(shape))
    ]
    by_dim = dict(zip(space, windows, strict=True))
    bases = dict(zip(space, base, strict=True))

    def convolved(x: jax.Array, local: Mapping[int, Local]) -> jax.Array:
        return convolve(x, rhs, [local[d].stride for d in space], [local[d].padding for d in space])

    rules: Any = {
        "fill": 0.0,
        "boundary": boundary,
        "outputs": outputs,
        "base": bases,
        "order": order,
    }
    return apply_windows(lhs, by_dim, convolved, **rules, features={channel: rhs.shape[out]})


def windows_of(
    lengths: Ints, sizes: Ints, strides: Ints | None, dilation: Ints | None, padding: Padding
) -> list[Window]:
    """The window over every dim of the global array."""
    strides, dilation = (tuple(numbers or (1,) * len(sizes)) for numbers in (strides, dilation))
    if isinstance(padding, str):
        spans = [d * (k - 1) + 1 for k, d in zip(sizes, dilation, strict=True)]
        padding = lax.padtype_to_pads(lengths, spans, strides, padding)
    pads = [(int(before), int(after)) for before, after in padding]
    return list(map(Window, sizes, strides, dilation, pads))


def reduce_window(
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
    outputs: str = "",
) -> Sharded:
    """`lax.reduce_window` of the global array: every output is the reduction of a window of inputs.

    Takes the arguments of `lax`, with a number for every dim, for the global array. boundary: the rows of
    `padding`, by default `init_value`. outputs: as in `conv_general_dilated`. Raises as `redistribute` does.
    """
    whole = operand.sharding.shape
    ones = (1,) * operand.block.ndim
    strides, base, dilation = (
        tuple(o or ones) for o in (window_strides, base_dilation, window_dilation)
    )
    init = np.array(init_value, operand.block.dtype)
    # On the global array: lax raises its own errors for arguments that do not fit.
    arguments = computation, window_dimensions, strides, padding, base, dilation
    jax.eval_shape(
        lambda x: lax.reduce_window(x, init, *arguments), jax.ShapeDtypeStruct(whole, init.dtype)
    )
    every = windows_of(whole, window_dimensions, strides, dilation, padding)
    windows = {d: w for d, w in enumerate(every) if w != Window(1, p=(0, 0)) or base[d] > 1}

    def reduced(block: jax.Array, local: Mapping[int, Local]) -> jax.Array:
        stride = [local[d].stride if d in local else 1 for d in range(block.ndim)]
        pads = [local[d].padding if d in local else (0, 0) for d in range(block.ndim)]
        reduce = lax.reduce_window if dilation == ones else _by_phases
        return reduce(block, init, computation, window_dimensions, stride, pads, base, dilation)

    rules: Any = {"fill": float(init_value), "boundary": boundary, "outputs": outputs}
    return apply_windows(operand, windows, reduced, **rules, base=dict(enumerate(base)))


def max_pool(
    x: Sharded,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    window_dilation: Sequence[int] | None = None,
    *,
    ceil_mode: bool = False,
    outputs: str = "",
) -> Sharded:
    """The largest value of every window; rows beyond the array do not count.

    ceil_mode: keep a last window that begins inside the array. Else as in `reduce_window`.
    """
    least = -np.inf if jnp.issubdtype(x.block.dtype, jnp.inexact) else jnp.iinfo(x.block.dtype).min
    lengths = x.sharding.shape
    windows = windows_of(lengths, window_dimensions, window_strides, window_dilation, padding)
    pads = [
        pool_window(n, w, ceil=ceil_mode).padding for n, w in zip(lengths, windows, strict=False)
    ]
    arguments = window_dimensions, window_strides, pads, None, window_dilation
    return reduce_window(x, least, lax.max, *arguments, outputs=outputs)


def avg_pool(
    x: Sharded,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    count_include_pad: bool = True,
    ceil_mode: bool = False,
    outputs: str = "",
) -> Sharded:
    """The mean of every window, as in `max_pool`.

    count_include_pad: count rows of `padding`; rows that `ceil_mode` adds never count.
    """
    lengths = x.sharding.shape
    windows = windows_of(lengths, window_dimensions, window_strides, None, padding)
    wider = [pool_window(n, w, ceil=ceil_mode) for n, w in zip(lengths, windows, strict=False)]
    pads = [window.padding for window in wider]
    total = reduce_window(x, 0.0, lax.add, window_dimensions, window_strides, pads, outputs=outputs)
    mean = total.block
    rows = map(range, total.sharding.shape)
    for d, each in enumerate(zip(lengths, wider, rows, strict=True)):
        counts = pool_counts(*each, padding=windows[d].padding[1], include_pad=count_include_pad)
        mean = mean / _along(total, d, counts)
    return Sharded(mean, total.sharding)


def _along(y: Sharded, d: int, values: NDArray[np.int64]) -> jax.Array:
    """Values for all rows of a dim -> the values of this device's rows, and 1 in the padding."""
    axes = y.layout.dims[d].axes
    table = np.ones((y.sharding.mesh.size(*axes), y.block.shape[d]), np.float32)
    for part, runs in enumerate(y.sharding.owners(d)):
        rows = row_numbers(runs)
        table[part, : len(rows)] = values[rows]
    return along(
        mine(table, axes).astype(jnp.promote_types(y.block.dtype, np.float16)), d, y.block.ndim
    )


def _by_phases(
    x: jax.Array,
    init: Any,
    op: Reducer,
    window: Ints,
    strides: Ints,
    pads: Pads,
    base: Ints,
    dilation: Ints,
) -> jax.Array:
    """`lax.reduce_window` with dilated windows as dense ones: JAX has no gradient of a dilated maximum."""
    x = lax.pad(x, init, [(*pair, b - 1) for pair, b in zip(pads, base, strict=True)])
    starts = [n - (k - 1) * d for n, k, d in zip(x.shape, window, dilation, strict=True)]
    x = lax.pad(x, init, [(0, -n % d, 0) for n, d in zip(x.shape, dilation, strict=True)])
    x = x.reshape([*chain(*((n // d, d) for n, d in zip(x.shape, dilation, strict=True)))])
    y = lax.reduce_window(x, init, op, [*chain(*((k, 1) for k in window))], None, "VALID")
    y = y.reshape([m * d for m, d in zip(y.shape[::2], dilation, strict=True)])
    return lax.slice(y, (0,) * y.ndim, starts, strides)
