"""Interpolation along dims that are cut.

Decides how the taps of every output are read from a block. The taps are those of JAX's own interpolation
(`resize`) or of torch's formulas (`interpolate`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.lower.row_tables import VOID, mine, pick
from jax_bridge.nn.placed import Placed
from xshard.nn.resample import Taps, resampled_field, taps


def resize(x: Placed, shape: Sequence[int], method: str, *, antialias: bool = True) -> Placed:
    """`jax.image.resize` of the global array: dims of other lengths, interpolated.

    shape: global, of the result. method, antialias: as in `jax.image` (nearest, linear, cubic, lanczos3,
    lanczos5; half-pixel centres). Unlike `interpolate` it widens the kernel when it samples down, its cubic
    kernel has constant -0.5, not -0.75, nearest takes the centre of a pixel (`nearest-exact`), and taps
    beyond the ends are left out, not clamped.

    >>> from jax_bridge.nn.placed import place
    >>> larger = jax.pmap(lambda x: resize(place(x, "h/sp"), (8,), "linear"), "sp")
    >>> larger(jnp.ones((1, 4))).block.shape  # one block on one device
    (1, 8)
    """
    changed = {d: n for d, n in enumerate(shape) if n != x.sharding.shape[d]}
    dtype = jnp.result_type(float)
    found = {d: _jax_taps(x.sharding.shape[d], n, method, antialias, dtype) for d, n in changed.items()}
    return _resampled(x, found)


def interpolate(
    x: Placed,
    shape: Sequence[int],
    mode: str,
    *,
    align_corners: bool = False,
    scale: Sequence[float | None] | None = None,
) -> Placed:
    """torch's `interpolate` of the global array: dims of other lengths, interpolated.

    shape: global, of the result. mode: nearest, nearest-exact, linear (in two dims bilinear), cubic.
    scale: outputs per input for every dim; None for the ratio of the lengths.
    """
    scales = scale or (None,) * len(shape)
    found = {
        d: taps(mode, x.sharding.shape[d], n, align_corners=align_corners, scale=scales[d])
        for d, n in enumerate(shape)
        if n != x.sharding.shape[d] or scales[d] is not None
    }
    return _resampled(x, found)


@functools.lru_cache(maxsize=256)
def _jax_taps(length: int, outputs: int, method: str, antialias: bool, dtype: np.dtype) -> Taps:
    """The taps of `jax.image.resize`, from its response to every single input."""
    with jax.ensure_compile_time_eval():
        eye = jnp.eye(length, dtype=dtype)
        each = jax.image.resize(eye, (outputs, length), method, antialias=antialias)
    matrix = np.asarray(each, np.float64)
    first = (matrix != 0).argmax(axis=1)
    last = length - (matrix[:, ::-1] != 0).argmax(axis=1)
    inputs = first[:, None] + np.arange((last - first).max())
    weights = np.take_along_axis(matrix, np.minimum(inputs, length - 1), 1) * (inputs < last[:, None])
    return Taps(np.minimum(inputs, last[:, None] - 1), weights)


def _resampled(x: Placed, found: dict[int, Taps]) -> Placed:
    dims, mesh, shape = list(x.layout.dims), x.sharding.mesh, list(x.sharding.shape)
    dims = [replace(dim, overlap=None) for dim in dims]
    reads = {
        d: resampled_field(dims[d], shape[d], mesh.sizes_of(dims[d].axes), some) for d, some in found.items()
    }
    fetched = [reads[d].source if d in reads else dim for d, dim in enumerate(dims)]
    block = x.to(replace(x.layout, dims=tuple(fetched))).block
    for d, read in reads.items():
        inputs, weights = found[d]
        longest = max(stop - start for start, stop in read.outputs)
        positions = np.full((len(read.outputs), longest, inputs.shape[1]), VOID, np.int64)
        factors = np.zeros(positions.shape, weights.dtype)
        for part, ((first, _), (start, stop)) in enumerate(zip(read.inputs, read.outputs, strict=True)):
            positions[part, : stop - start] = inputs[start:stop] - first
            factors[part, : stop - start] = weights[start:stop]
        axes, along = dims[d].axes, [1] * block.ndim
        along[d] = -1
        picked = (pick(block, d, positions[..., tap], axes) for tap in range(inputs.shape[1]))
        if (weights != 1).any():
            shares = (mine(factors[..., tap], axes) for tap in range(inputs.shape[1]))
            picked = (p * w.astype(p.dtype).reshape(along) for p, w in zip(picked, shares, strict=True))
        block, dims[d], shape[d] = functools.reduce(operator.add, picked), read.result, read.length
    return x.remade(block, dims, shape)
