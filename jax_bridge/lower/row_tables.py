"""Tables of row positions: how one program picks different rows on every device.

All devices run the same program, so rows that differ between them are looked up. A table is a numpy
constant with one line of row positions for each device: `[devices, rows]`. The file also masks
padding: a block is padded at its ends to the shape of the largest block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.mesh.axis_types import over_whole_axes
from xshard import Mesh, Sharding
from xshard.layout.block_rows import block_fills
from xshard.notation.parser import Dim

# The position of no row: a row of zeros is put there.
VOID = -1

# Row positions: [devices along some mesh axes, rows].
Table = NDArray[np.int64]


def group_table(
    mesh: Mesh, axes: Sequence[str], width: int, rows_of: Callable[[int], NDArray[np.int64]]
) -> Table:
    """Tabulate `rows_of(device)` for every device along mesh axes, padded with VOID to `width`."""
    return padded_table([rows_of(device) for device in mesh.group(0, axes)], width)


def padded_table(rows: Sequence[Sequence[int] | NDArray], width: int | None = None) -> Table:
    """Stack lists of row positions into one array, shorter ones filled up with VOID (-1).

    [[0, 1], [2]] -> [[0, 1], [2, -1]]. `width` is the number of columns; None: the longest list.
    """
    if width is None:
        width = max(map(len, rows))
    result = np.full((len(rows), width), VOID, np.int64)
    for line, positions in zip(result, rows, strict=True):
        line[: len(positions)] = positions
    return result


def along_dim(values: jax.Array, dim: int, ndim: int) -> jax.Array:
    """Reshape one value per row to broadcast over the other dims: [rows] -> [1, rows, 1]."""
    shape = [1] * ndim
    shape[dim] = -1
    return values.reshape(shape)


def with_lengths(x: jax.Array, dim: int, n_dims: int, *lengths: int) -> jax.Array:
    """Reshape `n_dims` dims, from `dim` on, to other lengths: [2, 8] with dim 1 -> [2, 4, 2]."""
    return x.reshape(*x.shape[:dim], *lengths, *x.shape[dim + n_dims :])


def row_table(sharding: Sharding, dim: int) -> Table:
    """Tabulate the global row numbers that every device along a dim's mesh axes holds."""
    layout = sharding.layout
    rows_of = partial(layout.positions, sharding.mesh, sharding.shape, dim)
    return group_table(sharding.mesh, layout.dims[dim].axes, sharding.max_local_shape[dim], rows_of)


def inverse(positions: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the index of each of `length` numbers in `positions`.

    VOID for a number that is not there.

    [2, 0] with length 3 -> [1, -1, 0]
    """
    result = np.full(length, VOID, np.int64)
    result[positions] = np.arange(len(positions))
    return result


def pick_rows(x: jax.Array, dim: int, positions: Table, axes: Sequence[str]) -> jax.Array:
    """Gather other rows on every device: out[i] = x[positions[this device, i]] along one dim.

    A position of VOID (-1) gives a row of zeros. With positions [[0, 1], [3, -1]] device 0 picks
    its rows 0 and 1, device 1 its row 3 and a row of zeros.

    The table is known while tracing, so the cheapest operation that does the same is compiled:
    none, zeros, a slice, or a gather of the largest runs of rows that always move together.

    Args:
        x: This device's block.
        dim: The dim whose rows are picked.
        positions: A line for every device along `axes`, or one line for all: `[devices, rows]`.
        axes: The mesh axes whose devices the lines belong to, in order; () for a table of one line.

    Returns:
        The block with `positions.shape[1]` rows along `dim`.
    """
    length = x.shape[dim]
    width = positions.shape[1]
    picks_all = width == length and (positions == np.arange(length)).all()
    if picks_all:
        return x
    if (positions == VOID).all():  # also a table of no rows, which has no first column
        shape = list(x.shape)
        shape[dim] = width
        return jnp.zeros(shape, x.dtype)

    first_rows = positions[:, 0]
    are_consecutive = (positions == first_rows[:, None] + np.arange(width)).all()
    if are_consecutive and (first_rows != VOID).all():
        # XLA copies a slice faster than it gathers rows.
        start = row_of_this_device(first_rows.astype(np.int32), axes)
        return lax.dynamic_slice_in_dim(x, start, width, dim)
    return _gather_chunks(x, dim, positions, axes)


def pick_same_rows(x: jax.Array, dim: int, rows: NDArray[np.int64]) -> jax.Array:
    """Gather the same rows on every device: out[i] = x[rows[i]] along one dim."""
    return pick_rows(x, dim, positions=rows[None], axes=())


def _gather_chunks(x: jax.Array, dim: int, positions: Table, axes: Sequence[str]) -> jax.Array:
    """Gather rows as `pick_rows` does, in chunks of consecutive rows, as long as possible.

    Rows [4, 5, 6, 7, 0, 1] of 8 are gathered as the chunks [2, 3, 0] of 2 rows each.
    """
    length = x.shape[dim]
    chunk_rows = _rows_moving_together(positions, length)
    n_chunks = length // chunk_rows
    chunks = positions[:, ::chunk_rows] // chunk_rows  # all rows of a chunk are VOID, or none
    is_void = chunks < 0
    # JAX fills what is out of bounds; a negative index would count from the end.
    chunks = np.where(is_void, n_chunks, chunks)
    # Filling costs a comparison of every index with the bounds.
    mode = "fill" if is_void.any() else "promise_in_bounds"

    in_chunks = with_lengths(x, dim, 1, n_chunks, chunk_rows)  # [..., length, ...] split in two
    indices = row_of_this_device(chunks.astype(np.int32), axes)
    index = (*[slice(None)] * dim, indices)
    gathered = in_chunks.at[index].get(mode=mode, fill_value=0, wrap_negative_indices=False)
    return with_lengths(gathered, dim, 2, positions.shape[1])


def _rows_moving_together(positions: Table, length: int) -> int:
    """Return how many consecutive rows can be gathered as one chunk, on every device.

    Few large chunks copy faster than many rows. Chunks begin at multiples of their size, in the
    block and in the result, so that both can be reshaped to [chunks, rows of a chunk].

    [[4, 5, 6, 7, 0, 1]] of a block of 8 rows has the runs 4-7 and 0-1. They begin at the rows 4 and
    0 of the block, and at the rows 0 and 4 of the result. 2 is the largest number that divides
    these, 8, and the 6 rows of the result.

    Args:
        positions: The rows to gather: [devices, rows]; VOID (-1) is a row of zeros.
        length: The number of rows of the block.
    """
    # A run begins where a row is not the one after the row before it. VOIDs are runs, too.
    previous = positions[:, :-1]
    expected = np.where(previous == VOID, VOID, previous + 1)
    begins_run = np.ones(positions.shape, bool)
    begins_run[:, 1:] = positions[:, 1:] != expected

    run_sources = positions[begins_run]
    source_divisor = np.gcd.reduce(run_sources[run_sources != VOID])
    target_divisor = np.gcd.reduce(np.nonzero(begins_run)[1])
    return math.gcd(length, positions.shape[1], int(source_divisor), int(target_divisor))


def row_of_this_device(values: NDArray, axes: Sequence[str]) -> jax.Array:
    """Look up this device's line of a table over mesh axes: `[devices, ...]` -> `[...]`."""
    if (values == values[0]).all():
        return jnp.asarray(values[0])  # a constant: XLA folds it, and no device index is needed
    index = lax.axis_index(tuple(axes))
    return lax.dynamic_index_in_dim(
        jnp.asarray(values), index, keepdims=False, allow_negative_indices=False
    )


def rows_of_this_device(sharding: Sharding, dim: int | str) -> jax.Array:
    """Return the global numbers of the rows of a dim in this device's block; VOID in its padding."""
    dim_index = sharding.layout.dim_index(dim)
    axes = sharding.layout.dims[dim_index].axes
    return _line_of_this_device(row_table(sharding, dim_index), axes, sharding.mesh)


def _line_of_this_device(table: NDArray[Any], axes: Sequence[str], mesh: Mesh) -> jax.Array:
    """Look up this device's line of a table over axes of a plan's mesh: `[devices, ...]` -> `[...]`.

    These axes may be parts of JAX's (sub-axes), by which JAX cannot look up: the table is repeated
    to one over whole axes.
    """
    whole_table, jax_axes = over_whole_axes(table, axes, mesh)
    return row_of_this_device(whole_table, jax_axes)


def valid_elements(sharding: Sharding) -> jax.Array:
    """Return a mask of this device's padded block: True at elements, False in padding."""
    shape = sharding.max_local_shape
    mask = jnp.ones(shape, bool)
    for dim, sizes in enumerate(sharding.local_sizes):
        if len(set(sizes)) > 1:  # else no device has padding along this dim
            axes = sharding.layout.dims[dim].axes
            length = _line_of_this_device(np.array(sizes, np.int32), axes, sharding.mesh)
            mask &= lax.broadcasted_iota(np.int32, shape, dim) < length
    return mask


def with_zero_padding(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Overwrite the padding of a block with zeros; its shape stays."""
    if sharding.is_even:
        return x
    return jnp.where(valid_elements(sharding), x, jnp.zeros_like(x))


def with_boundary_constants(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Fill the halo rows that lie outside the global array with the boundary's constant.

    A halo is rows of the neighbours around a block. The first and the last block have no neighbour
    on one side: with `h/sp:halo(1,1,constant(7))` their outermost rows become 7. Other blocks and
    rows stay, and padding at the end of a block becomes zero.
    """
    mesh = sharding.mesh
    for d, (dim, length) in enumerate(zip(sharding.layout.dims, sharding.shape, strict=True)):
        constants, is_outside = _boundary_tables(dim, length, x.shape[d], mesh)
        # `where` on an empty array would return the dtype of the constant, not that of x.
        if x.size and is_outside.any():
            # Axes of one device do not decide which block a device has.
            axes = [axis for axis in dim.axes if axis in mesh.long_axes]
            local_constants = _line_of_this_device(constants, axes, mesh).astype(x.dtype)
            local_is_outside = _line_of_this_device(is_outside, axes, mesh)
            fills = along_dim(local_constants, d, x.ndim)
            x = jnp.where(along_dim(local_is_outside, d, x.ndim), fills, x)
    # The fills along one dim went over the whole extent of the others, padding included.
    return with_zero_padding(x, sharding)


def _boundary_tables(
    dim: Dim, length: int, n_rows: int, mesh: Mesh
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Tabulate the constants of a dim's halo rows, and which rows lie outside the array: [blocks, rows].

    The tables are over the dim's own axes only: devices along other axes need equal values, and
    looking them up by these axes would make JAX take the block for different along them.

    Args:
        dim: The dim.
        length: Its global length.
        n_rows: The rows of a block along it.
        mesh: The mesh.
    """
    n_blocks = mesh.size(*dim.axes)
    constants = np.zeros((n_blocks, n_rows))
    is_outside = np.zeros(constants.shape, bool)
    for block in range(n_blocks):
        for start, stop, constant in block_fills(dim, length, mesh.sizes_of(dim.axes), block):
            constants[block, start:stop] = constant
            is_outside[block, start:stop] = True
    return constants, is_outside
