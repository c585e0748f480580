"""Interpolation along sharded dims, with the taps of JAX (`resize`) or of torch (`interpolate`)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.lower.row_tables import VOID, mine, pick
from jax_bridge.nn.sharded import Sharded
from xshard.nn.windows import Taps, resampled_frame, taps


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
    jax_taps = {d: _jax_taps(x.sharding.shape[d], n, method, antialias, dtype) for d, n in changed.items()}
    return _resampled(x, jax_taps)


def interpolate(
    x: Sharded,
    shape: Sequence[int],
    mode: str,
    *,
    align_corners: bool = False,
    scale: Sequence[float | None] | None = None,
) -> Sharded:
    """torch's `interpolate` of the global array: dims of other lengths, interpolated.

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


def _resampled(x: Sharded, taps_of: dict[int, Taps]) -> Sharded:
    """taps_of: the taps of every dim that is interpolated."""
    mesh, shape = x.sharding.mesh, list(x.sharding.shape)
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
        axes, along = dims[d].axes, [1] * block.ndim
        along[d] = -1
        numbers = range(inputs.shape[1])
        parts = [pick(block, d, positions[..., tap], axes) for tap in numbers]
        if (weights != 1).any():
            shares = [mine(factors[..., tap], axes).astype(block.dtype).reshape(along) for tap in numbers]
            parts = list(map(operator.mul, parts, shares))
        block, dims[d], shape[d] = functools.reduce(operator.add, parts), frame.result, frame.length
    return x.with_block(block, dims, shape)
