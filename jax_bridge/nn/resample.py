"""Interpolation of an array that is cut along the dims it changes.

Decides how a few taps per output are read from a block. Which taps, JAX's own interpolation says
(`resize`) or torch's formulas (`interpolate`).
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

    shape: of the whole result. method, antialias: as there (nearest, linear, cubic, lanczos3, lanczos5;
    half-pixel centres, the kernel widened where it samples down). It differs from `interpolate` in that
    widening, in its cubic kernel (constant -0.5, not -0.75), in nearest (which takes the centre of a
    pixel, `nearest-exact`) and at the ends, where taps that fall outside are left out, not clamped.

    >>> from jax_bridge.nn.placed import place
    >>> larger = jax.pmap(lambda x: resize(place(x, "h/sp"), (8,), "linear"), "sp")
    >>> larger(jnp.ones((1, 4))).block.shape  # one block on one device
    (1, 8)
    """
    changed = {d: n for d, n in enumerate(shape) if n != x.sharding.shape[d]}
    found = {d: _jax_taps(x.sharding.shape[d], n, method, antialias) for d, n in changed.items()}
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

    shape: of the whole result. mode: nearest, nearest-exact, linear (in two dims bilinear), cubic.
    scale: outputs per input for every dim, where it is not the ratio of the lengths.
    """
    scales = scale or (None,) * len(shape)
    found = {
        d: taps(mode, x.sharding.shape[d], n, align_corners=align_corners, scale=scales[d])
        for d, n in enumerate(shape)
        if n != x.sharding.shape[d] or scales[d] is not None
    }
    return _resampled(x, found)


def _jax_taps(length: int, outputs: int, method: str, antialias: bool) -> Taps:
    """What `jax.image.resize` makes of every single input, as the taps of every output."""
    with jax.ensure_compile_time_eval():
        eye = jnp.eye(length, dtype=jnp.result_type(float))
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
