"""`positions`: the global row numbers of blocks, for rotary embeddings and causal masks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_bridge.lower.row_tables import Table, mine, table
from jax_bridge.mesh.axis_types import bound_sizes
from jax_bridge.mesh.context import AnyMesh, sharding_here, xshard_mesh
from xshard import Layout, Sharding
from xshard.arguments import lengths_of
from xshard.errors import MeshError
from xshard.notation.parser import mark_errors


def positions(
    layout: Layout | str, mesh: AnyMesh | None = None, *, shape: Sequence[int], dim: int | str
) -> jax.Array:
    """The global number of every row of a dim, as integers: `[rows]`.

    Inside `shard_map`, `pmap` or `vmap(axis_name=)` over the layout's axes: for this device's block. Outside:
    for all blocks, concatenated and sharded over the dim's axes. That is the order in which `reshard` stores
    the dim: if blocks are even, `x[positions(...)]` puts rows into it.
    -1 stands for rows outside the array: padding, or a constant beyond its ends.
    shape: the global shape. dim: name or index. mesh: default, inside only: the one of the context.

    Raises as `xshard.Layout.positions` does, and MeshError if only some of the axes are manual, or none and
    no mesh is given.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> positions(
    ...     "b s/zigzag(cp)", mesh, shape=(3, 8), dim="s"
    ... ).tolist()  # one device has all rows in their order
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    shape = lengths_of(shape)
    layout = Layout.parse(layout).resolved(len(shape))
    index = layout.dim_index(dim)
    if bound_sizes(layout.axes) or (mesh is None and not layout.axes):
        sharding = sharding_here(layout, shape, mesh)
        return mine(_table(sharding, index), sharding.layout.dims[index].axes)
    if mesh is None:
        raise MeshError(
            "no axis of the layout is manual here",
            text=str(layout),
            hint="outside shard_map and pmap pass a mesh: positions(layout, mesh, shape=shape, dim=dim)",
        )
    with mark_errors(str(layout)):
        rows = jnp.asarray(_table(Sharding(layout, xshard_mesh(mesh), shape), index).ravel())
    if not isinstance(mesh, JaxMesh):
        return rows
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec(layout.dims[index].axes or None)))


def _table(sharding: Sharding, dim: int) -> Table:
    """The rows of every device along the dim's axes, padded to the most."""
    axes, width = sharding.layout.dims[dim].axes, sharding.max_local_shape[dim]

    def rows_of(device: int) -> Table:
        return sharding.layout.positions(sharding.mesh, sharding.shape, dim, device)

    return table(sharding.mesh, axes, width, rows_of)
