"""Common cases of `redistribute` under their usual names.

They work inside `jax.shard_map`, `jax.pmap` and, along one axis, `jax.vmap(axis_name=)`.

>>> both = lambda x: trim_halo(halo_exchange(x, 1, 0, "sp"), 1, 0, "sp")
>>> jax.pmap(both, "sp")(jax.numpy.ones((1, 4))).shape  # one block on one device
(1, 4)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import row_table, rows_of_this_device, valid_elements
from jax_bridge.mesh.axis_types import bound_sizes
from jax_bridge.mesh.context import AnyMesh, sharding_in_context, xshard_mesh
from xshard import Layout, Sharding
from xshard.arguments import lengths_of
from xshard.errors import MeshError, api_boundary
from xshard.notation.maps import Maps
from xshard.notation.parser import mark_errors
from xshard.ops import Operations, Shape, Side, move

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to",
    "halo_exchange",
    "reduce_scatter",
    "shard",
    "trim_halo",
    "valid_mask",
]


def _redistribute_positional(
    x: jax.Array, src: Side, dst: Side, mesh: AnyMesh | None, shape: Shape
) -> jax.Array:
    """Redistribute a block between two sides that name its dims by number."""
    expression = move(np.shape(x), src, dst)
    return redistribute(as_array(x, expression), expression, mesh, shape=shape)


_operations = Operations(_redistribute_positional)
all_gather = _operations.all_gather
all_reduce = _operations.all_reduce
all_to_all = _operations.all_to_all
copy_to = _operations.copy_to
halo_exchange = _operations.halo_exchange
trim_halo = _operations.trim_halo
reduce_scatter = _operations.reduce_scatter
shard = _operations.shard


@api_boundary
def valid_mask(
    layout: Layout | str, mesh: AnyMesh | None = None, *, shape: Sequence[int]
) -> jax.Array:
    """Return a mask of this device's block: True at elements of the array, False in its padding.

        mask = valid_mask("n/dp d", shape=(6, 3))     # [2, 3]; False on the last of 4 devices

    Args:
        layout: The layout of the array.
        mesh: The mesh; by default the mesh of the context.
        shape: The global shape; if it does not divide, blocks are padded at the end of a dim to the
            largest.

    Returns:
        The mask, with the shape of the block.

    Raises:
        XshardError: As `redistribute` does.

    Examples:
        >>> masks = jax.pmap(lambda x: valid_mask("n/dp", shape=(3,)), "dp")
        >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
        [[True, True, True]]
    """
    return valid_elements(sharding_in_context(layout, shape, mesh))


@api_boundary
def positions(
    layout: Layout | str,
    mesh: AnyMesh | None = None,
    *,
    shape: Sequence[int],
    dim: int | str,
    maps: Maps | None = None,
) -> jax.Array:
    """Return the global position of every row along a dim, as integers: `[rows]`.

        rows = positions("s/zigzag(cp)", shape=(8,), dim="s")     # device 0 of 2: [0, 1, 6, 7]

    Inside `shard_map`, `pmap` or `vmap(axis_name=)` over the layout's axes the rows are of this
    device's block. Outside they are of all blocks, concatenated and sharded over the dim's axes.
    That is the order in which `reshard` stores the dim: if blocks are even, `x[positions(...)]`
    puts rows into it.

    Args:
        layout: The layout of the array.
        mesh: The mesh; by default, inside only, the mesh of the context.
        shape: The global shape.
        dim: The dim's name or index.
        maps: The `Owners` and `Needs` that the layout names.

    Returns:
        The numbers. -1 stands for rows outside the array: padding, or a constant beyond its ends.

    Raises:
        XshardError: As `xshard.Layout.positions` does.
        MeshError: The axes are not manual, and there is no mesh.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("cp",))
        >>> rows = positions("b s/zigzag(cp)", mesh, shape=(3, 8), dim="s")
        >>> rows.tolist()  # one device has all rows
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    shape = lengths_of(shape)
    layout = Layout.parse(layout, maps).resolved(len(shape))
    # A layout that names no axes has all rows on all devices; without a mesh it is taken to be
    # inside, where none is needed.
    is_inside = bool(bound_sizes(layout.axes)) or (mesh is None and not layout.axes)
    if is_inside:
        sharding = sharding_in_context(layout, shape, mesh)
        return rows_of_this_device(sharding, dim)

    # Outside: the rows of all blocks.
    if mesh is None:
        hint = (
            "outside shard_map and pmap pass a mesh: positions(layout, mesh, shape=shape, dim=dim)"
        )
        raise MeshError("no axis of the layout is manual here", text=str(layout), hint=hint)
    index = layout.dim_index(dim)
    with mark_errors(str(layout)):
        table = row_table(Sharding(layout, xshard_mesh(mesh), shape), index)
    rows = jnp.asarray(table.ravel())  # block after block
    if not isinstance(mesh, JaxMesh):
        return rows
    dim_axes = layout.dims[index].axes
    spec = PartitionSpec(dim_axes if dim_axes else None)
    return jax.device_put(rows, NamedSharding(mesh, spec))
