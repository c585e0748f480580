"""Common cases of `redistribute` under their usual names: inside `jax.shard_map`, `jax.pmap` and, along one
axis, `jax.vmap(axis_name=)`.

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
from jax_bridge.lower.row_tables import mine, row_table, valid
from jax_bridge.mesh.axis_types import bound_sizes
from jax_bridge.mesh.context import AnyMesh, sharding_here, xshard_mesh
from xshard import Layout, Sharding
from xshard.arguments import lengths_of
from xshard.errors import MeshError
from xshard.notation.maps import Maps
from xshard.notation.parser import mark_errors
from xshard.ops import Operations, Shape, Side, move

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "copy_to", "halo_exchange", "reduce_scatter", "shard",
    "trim_halo", "valid_mask",
]  # fmt: skip


def _moved(x: jax.Array, src: Side, dst: Side, mesh: AnyMesh | None, shape: Shape) -> jax.Array:
    expression = move(np.shape(x), src, dst)
    return redistribute(as_array(x, expression), expression, mesh, shape=shape)


_operations = Operations(_moved)
all_gather = _operations.all_gather
all_reduce = _operations.all_reduce
all_to_all = _operations.all_to_all
copy_to = _operations.copy_to
halo_exchange = _operations.halo_exchange
trim_halo = _operations.trim_halo
reduce_scatter = _operations.reduce_scatter
shard = _operations.shard


def valid_mask(
    layout: Layout | str, mesh: AnyMesh | None = None, *, shape: Sequence[int]
) -> jax.Array:
    """A mask of this device's block: True at elements of the array, False in its padding.

    shape: the global shape; if it does not divide, blocks are padded at the end of a dim to the largest.
    mesh: default: the mesh of the context. Raises as `redistribute` does.

    >>> masks = jax.pmap(lambda x: valid_mask("n/dp", shape=(3,)), "dp")
    >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
    [[True, True, True]]
    """
    return valid(sharding_here(layout, shape, mesh))


def positions(
    layout: Layout | str,
    mesh: AnyMesh | None = None,
    *,
    shape: Sequence[int],
    dim: int | str,
    maps: Maps | None = None,
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
    layout = Layout.parse(layout, maps).resolved(len(shape))
    index = layout.dim_index(dim)
    if bound_sizes(layout.axes) or (mesh is None and not layout.axes):
        sharding = sharding_here(layout, shape, mesh)
        return mine(row_table(sharding, index), sharding.layout.dims[index].axes)
    if mesh is None:
        hint = (
            "outside shard_map and pmap pass a mesh: positions(layout, mesh, shape=shape, dim=dim)"
        )
        raise MeshError("no axis of the layout is manual here", text=str(layout), hint=hint)
    with mark_errors(str(layout)):
        rows = jnp.asarray(row_table(Sharding(layout, xshard_mesh(mesh), shape), index).ravel())
    if not isinstance(mesh, JaxMesh):
        return rows
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec(layout.dims[index].axes or None)))
