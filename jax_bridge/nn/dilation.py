"""Dilated windows as dense ones, by phases: rows r, r + d, r + 2d, ... become a dim of their own.

`lax.reduce_window` computes dilated windows, but JAX has no gradient of a dilated maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax import lax


def reduce_window_by_phases(
    x: jax.Array,
    init_value: np.ndarray,
    computation: Callable[[jax.Array, jax.Array], jax.Array],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """`lax.reduce_window` with dilated windows.

    Windows begin at every row; the ones that a stride skips are dropped at the end.
    """
    x = lax.pad(x, init_value, [(*ends, b - 1) for ends, b in zip(padding, base, strict=True)])
    starts = [n - (k - 1) * d for n, k, d in zip(x.shape, window, dilation, strict=True)]
    x = lax.pad(x, init_value, [(0, -n % d, 0) for n, d in zip(x.shape, dilation, strict=True)])
    x = x.reshape(_pairs((n // d, d) for n, d in zip(x.shape, dilation, strict=True)))
    y = lax.reduce_window(x, init_value, computation, _pairs((k, 1) for k in window), None, "VALID")
    y = y.reshape([m * d for m, d in zip(y.shape[::2], dilation, strict=True)])
    return lax.slice(y, (0,) * y.ndim, starts, strides)


def _pairs(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return list(itertools.chain.from_iterable(pairs))
