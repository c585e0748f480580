"""A plan on a global array as one operation of JAX: a primitive that carries the plan and the mesh.

The tangent moves by the same plan, the cotangent by the backward plan, and a batch is one more dim, sharded
as `vmap` has it. So JAX never has to batch the `shard_map` inside: the mesh axes of the batch would be
Explicit among manual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh

from jax_bridge.autodiff.primitive import batch_dim, batched
from jax_bridge.calls import BlockCall
from jax_bridge.mesh.axis_types import as_tagged
from jax_bridge.mesh.context import free_axes
from jax_bridge.specs import storage_sharding
from jax_bridge.versions import Batch, linear_primitive, with_sharding
from xshard import Plan, planner
from xshard.errors import MeshError
from xshard.plans.expression import sides

Mesh = JaxMesh | AbstractMesh


def move(x: jax.Array, plan: Plan, mesh: Mesh) -> jax.Array:
    """A global array under `plan.src` -> the same array under `plan.dst`."""
    return _move(x, plan=plan, mesh=mesh)


@partial(jax.jit, static_argnames=("plan", "mesh"), inline=True)
def _run(x: jax.Array, *, plan: Plan, mesh: Mesh) -> jax.Array:
    def local(x: jax.Array) -> jax.Array:
        return as_tagged(BlockCall(sides(plan), plan).run(x), plan.dst)

    specs = storage_sharding(plan.source.layout, mesh).spec, storage_sharding(plan.target.layout, mesh).spec
    axes = frozenset(free_axes(mesh))
    return jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names=axes)(x)


def _batched_plan(plan: Plan, along: Batch) -> Plan:
    used = [axis for axis in along.mesh_axes if axis in (*plan.src.axes, *plan.dst.axes)]
    if used:
        raise MeshError(
            f"mesh axis {used[0]!r} shards the batch of vmap",
            text=f"{plan.src} -> {plan.dst}",
            hint="an axis shards one dim at a time: reshard the unsharded batch, outside of vmap",
        )
    if not set(along.mesh_axes) & set(plan.axes):
        return batched(plan, along.size, along.mesh_axes)
    # The steps borrow an axis of the batch: other steps can do without it.
    dim = batch_dim(plan, along.mesh_axes)
    src, dst = (replace(side.layout, dims=(dim, *side.layout.dims)) for side in (plan.source, plan.target))
    return planner.plan((src, dst), plan.mesh, (along.size, *plan.shape), plan.dtype, profile=plan.profile)


def _batch(
    x: jax.Array, dim: int | None, along: Batch, *, plan: Plan, mesh: Mesh
) -> tuple[jax.Array, int | None]:
    if dim is None:
        return move(x, plan, mesh), None
    return move(jnp.moveaxis(x, dim, 0), _batched_plan(plan, along), mesh), 0


_move: Callable[..., jax.Array] = linear_primitive(
    "xshard_reshard",
    run=_run,
    abstract_eval=lambda x, *, plan, mesh: (
        with_sharding(x, storage_sharding(plan.target.layout, mesh), plan.target.shape),
        set(),
    ),
    transpose=lambda cotangent, *, plan, mesh: _move(cotangent, plan=plan.backward, mesh=mesh),
    batch=_batch,
)
