"""Pooling along sharded dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import mine
from jax_bridge.nn.conv import Padding, windows_of
from jax_bridge.nn.sharded import Sharded
from jax_bridge.nn.window import Boundaries, Local, apply_windows
from xshard.layout.runs import row_numbers
from xshard.nn.windows import pool_counts, pool_window
from xshard.notation.overlap import Window


def reduce_window(
    operand: Sharded,
    init_value: float,
    computation: Callable[[jax.Array, jax.Array], jax.Array],
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
    whole, ones = operand.sharding.shape, (1,) * operand.block.ndim
    strides, base, dilation = (tuple(o or ones) for o in (window_strides, base_dilation, window_dilation))
    init = np.array(init_value, operand.block.dtype)
    # On the global array: lax raises its own errors for arguments that do not fit.
    arguments = computation, window_dimensions, strides, padding, base, dilation
    struct = jax.ShapeDtypeStruct(whole, init.dtype)
    jax.eval_shape(lambda x: lax.reduce_window(x, init, *arguments), struct)
    every = windows_of(whole, window_dimensions, strides, dilation, padding)
    windows = {d: w for d, w in enumerate(every) if w != Window(1, p=(0, 0)) or base[d] > 1}

    def reduced(block: jax.Array, local: Mapping[int, Local]) -> jax.Array:
        stride = [local[d].stride if d in local else 1 for d in range(block.ndim)]
        pads = [local[d].padding if d in local else (0, 0) for d in range(block.ndim)]
        reduce = lax.reduce_window if dilation == ones else _by_phases
        return reduce(block, init, computation, window_dimensions, stride, pads, base, dilation)

    return apply_windows(
        operand,
        windows,
        reduced,
        fill=float(init_value),
        boundary=boundary,
        outputs=outputs,
        base=dict(enumerate(base)),
    )


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
    pads = [pool_window(n, w, ceil=ceil_mode).padding for n, w in zip(lengths, windows, strict=False)]
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
    for d, (n, window) in enumerate(zip(lengths, wider, strict=True)):
        outputs_of, after = range(total.sharding.shape[d]), windows[d].padding[1]
        counts = pool_counts(n, window, outputs_of, padding=after, include_pad=count_include_pad)
        mean = mean / _along(total, d, counts)
    return Sharded(mean, total.sharding)


def _along(y: Sharded, d: int, values: NDArray[np.int64]) -> jax.Array:
    """Values for all rows of a dim -> the values of this device's rows, and 1 in the padding."""
    axes = y.layout.dims[d].axes
    table = np.ones((y.sharding.mesh.size(*axes), y.block.shape[d]), np.float32)
    for part, runs in enumerate(y.sharding.owners(d)):
        rows = row_numbers(runs)
        table[part, : len(rows)] = values[rows]
    along = [1] * y.block.ndim
    along[d] = -1
    return mine(table, axes).astype(jnp.promote_types(y.block.dtype, np.float16)).reshape(along)


def _by_phases(
    x: jax.Array,
    init_value: np.ndarray,
    computation: Callable[[jax.Array, jax.Array], jax.Array],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """`lax.reduce_window` with dilated windows as dense ones: JAX has no gradient of a dilated maximum.

    Rows r, r + d, ... become a dim. Windows begin at every row; what a stride skips is dropped at the end.
    """
    x = lax.pad(x, init_value, [(*pair, b - 1) for pair, b in zip(padding, base, strict=True)])
    starts = [n - (k - 1) * d for n, k, d in zip(x.shape, window, dilation, strict=True)]
    x = lax.pad(x, init_value, [(0, -n % d, 0) for n, d in zip(x.shape, dilation, strict=True)])
    x = x.reshape(_pairs((n // d, d) for n, d in zip(x.shape, dilation, strict=True)))
    y = lax.reduce_window(x, init_value, computation, _pairs((k, 1) for k in window), None, "VALID")
    y = y.reshape([m * d for m, d in zip(y.shape[::2], dilation, strict=True)])
    return lax.slice(y, (0,) * y.ndim, starts, strides)


def _pairs(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return list(itertools.chain.from_iterable(pairs))
