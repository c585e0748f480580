"""Rows of padded blocks, picked by tables: the local part of every step in an SPMD program. A table is a
numpy constant with one row of positions per device. Padding with zeros stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from xshard import Mesh, Sharding
from xshard.steps.exchange.messages import fill_boxes

VOID = -1  # the position of no row: it is filled with zeros
Table = NDArray[np.int64]  # (devices along some axes, rows): positions


def table(
    mesh: Mesh, axes: Sequence[str], width: int, rows_of: Callable[[int], NDArray[np.int64]]
) -> Table:
    """Positions for every device along `axes`, padded to `width` with VOID."""
    return table_of([rows_of(device) for device in mesh.group(0, axes)], width)


def table_of(rows: Sequence[Sequence[int] | NDArray], width: int | None = None) -> Table:
    """Positions for every device, padded with VOID to `width`, or to the longest."""
    result = np.full((len(rows), max(map(len, rows)) if width is None else width), VOID, np.int64)
    for own, numbers in zip(result, rows, strict=True):
        own[: len(numbers)] = numbers
    return result


def along(values: jax.Array, dim: int, ndim: int) -> jax.Array:
    """A number for each row of a dim, to be broadcast over the other dims of a block."""
    return values.reshape([-1 if d == dim else 1 for d in range(ndim)])


def row_table(sharding: Sharding, dim: int) -> Table:
    """The global rows of every device along a dim's axes, padded to the most."""
    axes = sharding.layout.dims[dim].axes
    width = sharding.max_local_shape[dim]
    rows_of = partial(sharding.layout.positions, sharding.mesh, sharding.shape, dim)
    return table(sharding.mesh, axes, width, rows_of)


def inverse(positions: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The index of each of `length` numbers in `positions`; VOID for a number that they lack."""
    result = np.full(length, VOID, np.int64)
    result[positions] = np.arange(len(positions))
    return result


def pick(x: jax.Array, dim: int, positions: Table, axes: Sequence[str]) -> jax.Array:
    """Pick rows of a dim by a table over `axes`: out[i] = x[positions[my index, i]], zero for VOID."""
    length = x.shape[dim]
    width = positions.shape[1]
    if width == length and (positions == np.arange(length)).all():
        return x
    if (positions == VOID).all():
        return jnp.zeros((*x.shape[:dim], width, *x.shape[dim + 1 :]), x.dtype)
    if (positions == positions[:, :1] + np.arange(width)).all() and (positions[:, 0] != VOID).all():
        return lax.dynamic_slice_in_dim(x, mine(positions[:, 0].astype(np.int32), axes), width, dim)
    chunk = _chunk(positions, length)
    chunks = positions[:, ::chunk] // chunk
    filled = bool((chunks < 0).any())
    chunks = np.where(chunks < 0, length // chunk, chunks)  # out of bounds: filled
    x = x.reshape(*x.shape[:dim], length // chunk, chunk, *x.shape[dim + 1 :])
    taken = x.at[(slice(None),) * dim + (mine(chunks.astype(np.int32), axes),)].get(
        mode="fill" if filled else "promise_in_bounds", fill_value=0, wrap_negative_indices=False
    )
    return taken.reshape(*x.shape[:dim], width, *x.shape[dim + 2 :])


def mine(values: NDArray, axes: Sequence[str]) -> jax.Array:
    """This device's row of a table over `axes`; a constant if all rows are equal."""
    if (values == values[0]).all():
        return jnp.asarray(values[0])
    index = lax.axis_index(tuple(axes))
    return lax.dynamic_index_in_dim(
        jnp.asarray(values), index, keepdims=False, allow_negative_indices=False
    )


def valid(sharding: Sharding) -> jax.Array:
    """True where this device's padded block holds an element of the array."""
    shape = sharding.max_local_shape
    mask = jnp.ones(shape, bool)
    for dim, sizes in enumerate(sharding.local_sizes):
        if len(set(sizes)) > 1:
            length = mine(np.array(sizes, np.int32), sharding.layout.dims[dim].axes)
            mask &= lax.broadcasted_iota(np.int32, shape, dim) < length
    return mask


def without_padding(x: jax.Array, sharding: Sharding) -> jax.Array:
    """A padded block with zeros in its padding."""
    return x if sharding.is_even else jnp.where(valid(sharding), x, jnp.zeros_like(x))


def with_fills(x: jax.Array, sharding: Sharding) -> jax.Array:
    """A block with the constants of its boundaries filled in beyond the ends of the array."""
    mesh = sharding.mesh
    for dim, length in enumerate(sharding.max_local_shape):
        axes = [axis for axis in sharding.layout.dims[dim].axes if axis in mesh.long_axes]
        devices = mesh.group(0, axes)  # the same along other axes: the type stays invariant
        values = np.zeros((len(devices), length))
        outside = np.zeros((len(devices), length), bool)
        for i, device in enumerate(devices):
            for d, start, stop, value in fill_boxes(sharding, device):
                if d == dim:
                    values[i, start:stop] = value
                    outside[i, start:stop] = True
        if x.size and outside.any():  # JAX gives an empty array the type of a constant
            constants = along(mine(values, axes).astype(x.dtype), dim, x.ndim)
            x = jnp.where(along(mine(outside, axes), dim, x.ndim), constants, x)
    return without_padding(x, sharding)  # constants along one dim reach the padding of the others


def _chunk(positions: Table, length: int) -> int:
    """The largest number of rows that always move together, aligned: few large rows copy faster."""
    jumps = np.ones(positions.shape, bool)
    last = positions[:, :-1]
    here = positions[:, 1:]
    jumps[:, 1:] = np.where(last == VOID, here != VOID, here != last + 1)
    starts = positions[jumps]
    columns = np.nonzero(jumps)[1]
    aligned = np.gcd.reduce(starts[starts != VOID]), np.gcd.reduce(columns)
    return math.gcd(length, positions.shape[1], *map(int, aligned))
