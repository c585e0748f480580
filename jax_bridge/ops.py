"""Common cases of `redistribute` under their usual names: inside `jax.shard_map`, `jax.pmap` and, along one
axis, `jax.vmap(axis_name=)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import mine, row_table, valid
from jax_bridge.mesh.axis_types import bound_sizes
from jax_bridge.mesh.context import AnyMesh, sharding_here, xshard_mesh
from xshard import Layout, Sharding
from xshard.arguments import lengths_of
from xshard.errors import MeshError
from xshard.notation.parser import mark_errors
from xshard.ops import Axes, HaloWidth, Shape, Side, gradient_tag, halo, move, sharded, tag

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "copy_to", "halo_exchange", "reduce_scatter", "shard",
    "trim_halo", "valid_mask",
]  # fmt: skip

Grad = Literal["sum", "replicated"]


def all_gather(
    x: jax.Array, dim: int, axis: Axes, mesh: AnyMesh | None = None, *, grad: Grad, shape: Shape = None
) -> jax.Array:
    """Concatenate the blocks along `axis` along `dim`: `n/axis -> n`.

    grad: "sum": gradients of the devices' results differ and add up (reduce-scatter); "replicated": they are
    equal (a slice).
    """
    return _moved(x, {dim: sharded(axis)}, gradient_tag(axis, grad), mesh, shape)


def reduce_scatter(
    x: jax.Array, dim: int, axis: Axes, mesh: AnyMesh | None = None, *, op: str = "sum", shape: Shape = None
) -> jax.Array:
    """Reduce the blocks along `axis` and shard the result along `dim`: `n | sum(axis) -> n/axis`.

    op: sum, mean, max or min. The backward pass all-gathers.
    """
    return _moved(x, tag(op, axis), {dim: sharded(axis)}, mesh, shape)


def all_reduce(
    x: jax.Array, axis: Axes, mesh: AnyMesh | None = None, *, op: str = "sum", grad: Grad
) -> jax.Array:
    """Reduce the blocks along `axis`; every device gets the result: `n | sum(axis) -> n`.

    op: sum, mean, max or min. grad: "sum": gradients of the devices' results add up (all-reduce);
    "replicated": they are equal (moves nothing).
    """
    return _moved(x, tag(op, axis), gradient_tag(axis, grad), mesh)


def all_to_all(
    x: jax.Array,
    split_dim: int,
    concat_dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    split_order: str = "block",
    concat_order: str = "block",
    shape: Shape = None,
) -> jax.Array:
    """Shard `split_dim` instead of `concat_dim`: `s/axis c -> s c/axis`.

    split_order, concat_order: the orders of their rows: block, zigzag, cyclic or balanced.
    """
    src, dst = {concat_dim: sharded(axis, concat_order)}, {split_dim: sharded(axis, split_order)}
    return _moved(x, src, dst, mesh, shape)


def halo_exchange(
    x: jax.Array,
    width: HaloWidth,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    boundary: str = "zero",
    shape: Shape = None,
) -> jax.Array:
    """Widen each block by rows of its neighbours: `h/axis -> h/axis:halo(width, width, boundary)`.

    width: rows at both ends, or `(before, after)`; a list has one number per part. A width may exceed a
    neighbour's block; a negative one leaves rows out. boundary: zero, constant(1.5), periodic, reflect, edge,
    none, pole, or one for each end ("edge,zero"). The backward pass adds the gradients of a row's copies.
    """
    return _moved(x, {dim: sharded(axis)}, {dim: halo(axis, width, boundary)}, mesh, shape)


def trim_halo(
    x: jax.Array,
    width: HaloWidth,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    boundary: str = "zero",
    shape: Shape = None,
) -> jax.Array:
    """Remove the rows that `halo_exchange` added: `h/axis:halo(width, width, boundary) -> h/axis`.

    >>> import functools
    >>> both = lambda x: trim_halo(halo_exchange(x, 1, 0, "sp"), 1, 0, "sp")
    >>> jax.pmap(both, "sp")(jax.numpy.ones((1, 4))).shape  # one block on one device
    (1, 4)
    """
    return _moved(x, {dim: halo(axis, width, boundary)}, {dim: sharded(axis)}, mesh, shape)


def shard(x: jax.Array, dim: int, axis: Axes, mesh: AnyMesh | None = None, *, grad: Grad) -> jax.Array:
    """Take this device's part of `dim` of a block replicated along `axis`: `n -> n/axis`.

    grad: the gradient of the block. "sum": each device has its own addend (zero outside its part);
    "replicated": all have the same (all-gather).
    """
    return _moved(x, gradient_tag(axis, grad), {dim: sharded(axis)}, mesh)


def copy_to(x: jax.Array, axis: Axes, mesh: AnyMesh | None = None) -> jax.Array:
    """Turn a replicated block into one copy per device along `axis`: `n -> n | copy(axis)`.

    Moves nothing; the backward pass all-reduces.
    """
    return _moved(x, "", gradient_tag(axis, "sum"), mesh)


def valid_mask(layout: Layout | str, mesh: AnyMesh | None = None, *, shape: Sequence[int]) -> jax.Array:
    """A mask of this device's block: True at elements of the array, False in its padding.

    shape: the global shape; if it does not divide, blocks are padded at the end of a dim to the largest.
    mesh: default: the mesh of the context. Raises as `redistribute` does.

    >>> masks = jax.pmap(lambda x: valid_mask("n/dp", shape=(3,)), "dp")
    >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
    [[True, True, True]]
    """
    return valid(sharding_here(layout, shape, mesh))


def _moved(
    x: jax.typing.ArrayLike, src: Side, dst: Side, mesh: AnyMesh | None, shape: Shape = None
) -> jax.Array:
    expression = move(np.shape(x), src, dst)
    return redistribute(as_array(x, expression), expression, mesh, shape=shape)


def positions(
    layout: Layout | str, mesh: AnyMesh | None = None, *, shape: Sequence[int], dim: int | str
) -> jax.Array:
    """The global number of every row of a dim, as integers: `[rows]`.

    Inside `shard_map`, `pmap` or `vmap(axis_name=)` over the layout's axes: for this device's block. Outside:
    for all blocks, concatenated and sharded over the dim's axes. That is the order in which `reshard` stores
    the dim: if blocks are even, `x[positions(...)]` puts rows into it.
    -1 stands for rows outside the array: padding, or a constant beyond its ends.
    shape: the global shape. dim: name or index. mesh: default, inside only: the one of the context.

    Raises as `xshard.Layout.positions` does, and MeshError for axes that are not manual, without a mesh.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> positions("b s/zigzag(cp)", mesh, shape=(3, 8), dim="s").tolist()  # one device has all rows
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    shape = lengths_of(shape)
    layout = Layout.parse(layout).resolved(len(shape))
    index = layout.dim_index(dim)
    if bound_sizes(layout.axes) or (mesh is None and not layout.axes):
        sharding = sharding_here(layout, shape, mesh)
        return mine(row_table(sharding, index), sharding.layout.dims[index].axes)
    if mesh is None:
        hint = "outside shard_map and pmap pass a mesh: positions(layout, mesh, shape=shape, dim=dim)"
        raise MeshError("no axis of the layout is manual here", text=str(layout), hint=hint)
    with mark_errors(str(layout)):
        rows = jnp.asarray(row_table(Sharding(layout, xshard_mesh(mesh), shape), index).ravel())
    if not isinstance(mesh, JaxMesh):
        return rows
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec(layout.dims[index].axes or None)))
