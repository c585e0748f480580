"""One compiled program for all arrays of a `reshard` call, cached for the next call like it. A plan on a
global array is a primitive that carries the plan and the mesh. A batch is one more dim, so that JAX never has
to batch the `shard_map` inside: the mesh axes of the batch would be Explicit among manual ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh

from jax_bridge.arrays.stored import ArrayMesh, StoredArray, check_even
from jax_bridge.autodiff.function import batch_dim, batched
from jax_bridge.calls import BlockCall
from jax_bridge.mesh.axis_types import as_tagged
from jax_bridge.mesh.context import free_axes
from jax_bridge.specs import storage_sharding
from jax_bridge.versions import Batch, linear_primitive, with_sharding
from xshard import Plan, ProfileLike, planner
from xshard.errors import MeshError, located
from xshard.formatting import format_bytes
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, check_given, sides

LOG = logging.getLogger("xshard.reshard")

Move = tuple[
    Expression, tuple[int, ...], np.dtype, str
]  # an array's shape, dtype, and name for errors


class Program(NamedTuple):
    """A function of all arrays, as it is and jitted, its plans, and the arrays that it expects."""

    plans: tuple[Plan, ...]
    sources: tuple[StoredArray, ...]
    traced: Callable[..., Sequence[jax.Array]]
    run: Callable[..., Sequence[jax.Array]]


@lru_cache(maxsize=4096)
def make_program(
    moves: tuple[Move, ...], mesh: ArrayMesh, donate: bool, profile: ProfileLike
) -> Program:
    """The program for one array per move."""
    plans = list[Plan]()
    sources = list[StoredArray]()
    targets = list[StoredArray]()
    for i, (expression, shape, dtype, path) in enumerate(moves, 1):
        src, dst, text = sides(expression)
        with located(path):
            if isinstance(expression, Plan):
                plan = expression
                with mark_errors(text):
                    check_given("the array is", plan, dtype.name, shape)
                    mesh.free(plan.axes, text, plan.mesh)
            else:
                free = mesh.free((*src.axes, *dst.axes), text)
                plan = planner.plan(expression, free, shape, dtype.name, profile=profile)
            check_even(plan.source, text)
            targets.append(StoredArray.of(plan.target, mesh, text, path))
            sources.append(StoredArray.of(plan.source, mesh, text, path))
        plans.append(plan)
        array = (text, dtype.name, list(shape))
        sent = (len(plan.steps), format_bytes(plan.bytes_received))
        what = "array %d of %d: %s, %s%s: %d steps, %s received by the busiest device"
        LOG.info(what, i, len(moves), *array, *sent)

    def run(*arrays: jax.Array) -> Sequence[jax.Array]:
        LOG.info(
            "tracing one program for %d arrays", len(arrays)
        )  # a compiled program is not traced again
        return [_move(x, plan=plan, mesh=mesh.here) for plan, x in zip(plans, arrays, strict=True)]

    # Blocks that keep their size can use the memory of donated ones.
    reusable = [
        i
        for i, plan in enumerate(plans)
        if plan.source.max_local_size == plan.target.max_local_size
    ]
    # A mesh without devices comes from the context: the jit around this one knows the devices.
    known = None if isinstance(mesh.here, AbstractMesh) else [x.sharding for x in targets]
    jitted = jax.jit(run, donate_argnums=reusable if donate else [], out_shardings=known)
    return Program(tuple(plans), tuple(sources), run, jitted)


@partial(jax.jit, static_argnames=("plan", "mesh"), inline=True)
def _run(x: jax.Array, *, plan: Plan, mesh: JaxMesh | AbstractMesh) -> jax.Array:
    def local(x: jax.Array) -> jax.Array:
        return as_tagged(BlockCall(sides(plan), plan).run(x), plan.dst)

    specs = (
        storage_sharding(plan.source.layout, mesh).spec,
        storage_sharding(plan.target.layout, mesh).spec,
    )
    axes = frozenset(free_axes(mesh))
    return jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names=axes)(
        x
    )


def _batched_plan(plan: Plan, along: Batch) -> Plan:
    if used := [axis for axis in along.mesh_axes if axis in (*plan.src.axes, *plan.dst.axes)]:
        hint = "an axis shards one dim at a time: reshard the unsharded batch, outside of vmap"
        reason = f"mesh axis {used[0]!r} shards the batch of vmap"
        raise MeshError(reason, text=f"{plan.src} -> {plan.dst}", hint=hint)
    if not set(along.mesh_axes) & set(plan.axes):
        return batched(plan, along.size, along.mesh_axes)
    # The steps borrow an axis of the batch: other steps can do without it.
    dim = batch_dim(plan, along.mesh_axes)
    src, dst = (
        replace(side.layout, dims=(dim, *side.layout.dims)) for side in (plan.source, plan.target)
    )
    return planner.plan(
        (src, dst), plan.mesh, (along.size, *plan.shape), plan.dtype, profile=plan.profile
    )


def _batch(
    x: jax.Array, dim: int | None, along: Batch, *, plan: Plan, mesh: JaxMesh | AbstractMesh
) -> tuple[jax.Array, int | None]:
    if dim is None:
        return _move(x, plan=plan, mesh=mesh), None
    return _move(jnp.moveaxis(x, dim, 0), plan=_batched_plan(plan, along), mesh=mesh), 0


# A global array under `plan.src` -> the same array under `plan.dst`.
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
