"""A plan on a global array as one operation of JAX: a primitive that carries the plan and the mesh.

Decides how transformations act on an array that is resharded: its tangent moves alike, its cotangent by the
backward plan, and a batch is one more dim, cut as `vmap` finds it. So JAX never has to batch the `shard_map`
inside, where the mesh axes of the batch would be Explicit among manual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import Mesh as JaxMesh

from jax_bridge.autodiff.primitive import batch_dim, batched
from jax_bridge.mesh.axis_types import as_reduced, as_unreduced
from jax_bridge.planning import free_axes
from jax_bridge.redistribution import redistribute
from jax_bridge.specs import storage_layout, to_named_sharding
from jax_bridge.versions import Batch, linear_primitive, with_sharding
from xshard import Plan, planner
from xshard.errors import MeshError

Mesh = JaxMesh | AbstractMesh


def move(x: jax.Array, plan: Plan, mesh: Mesh) -> jax.Array:
    """A global array under `plan.src` -> the same array under `plan.dst`."""
    return _move(x, plan=plan, mesh=mesh)


def ends(plan: Plan, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """How JAX shards the array before the plan and after it. Raises as `to_named_sharding` does."""
    source, target = plan.source.layout, plan.target.layout
    return to_named_sharding(storage_layout(source), mesh), to_named_sharding(storage_layout(target), mesh)


@partial(jax.jit, static_argnames=("plan", "mesh"), inline=True)
def _carried_out(x: jax.Array, *, plan: Plan, mesh: Mesh) -> jax.Array:
    def local(x: jax.Array) -> jax.Array:
        y = redistribute(x, plan)
        return as_reduced(as_unreduced(y, plan.dst.tagged("sum")), plan.dst.tagged("copy"))

    source, target = ends(plan, mesh)
    axes = frozenset(free_axes(mesh))
    return jax.shard_map(local, mesh=mesh, in_specs=source.spec, out_specs=target.spec, axis_names=axes)(x)


def _batched_plan(plan: Plan, along: Batch) -> Plan:
    taken = [axis for axis in along.mesh_axes if axis in (*plan.src.axes, *plan.dst.axes)]
    if taken:
        raise MeshError(
            f"mesh axis {taken[0]!r} cuts the batch of vmap",
            text=f"{plan.src} -> {plan.dst}",
            hint="an axis has one use at a time: reshard the whole batch, outside of vmap",
        )
    if not set(along.mesh_axes) & set(plan.axes):
        return batched(plan, along.size, along.mesh_axes)
    # The steps borrow an axis of the batch: other steps can do without it.
    dim = batch_dim(plan, along.mesh_axes)
    src, dst = (replace(at.layout, dims=(dim, *at.layout.dims)) for at in (plan.source, plan.target))
    return planner.plan((src, dst), plan.mesh, (along.size, *plan.shape), plan.dtype, profile=plan.profile)


def _batched(
    x: jax.Array, dim: int | None, along: Batch, *, plan: Plan, mesh: Mesh
) -> tuple[jax.Array, int | None]:
    if dim is None:
        return _move(x, plan=plan, mesh=mesh), None
    wider = _batched_plan(plan, along)
    return _move(jnp.moveaxis(x, dim, 0), plan=wider, mesh=mesh), 0


_move: Callable[..., jax.Array] = linear_primitive(
    "xshard_reshard",
    run=_carried_out,
    abstract_eval=lambda x, *, plan, mesh: (with_sharding(x, ends(plan, mesh)[1], plan.target.shape), set()),
    transpose=lambda cotangent, *, plan, mesh: _move(cotangent, plan=plan.backward, mesh=mesh),
    batch=_batched,
)
