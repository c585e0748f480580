"""One compiled program for all arrays of a `reshard` call, cached for the next call like it.

A plan on a global array is a primitive that carries the plan and the mesh. A batch is one more dim,
so that JAX never has to batch the `shard_map` inside: the mesh axes of the batch would be Explicit
among manual ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.arrays.stored import ArrayMesh, StoredArray, check_even
from jax_bridge.autodiff.function import batch_dim, with_batch_dim
from jax_bridge.calls import MoveCall
from jax_bridge.mesh.axis_types import as_tagged
from jax_bridge.mesh.context import AnyJaxMesh, free_axes
from jax_bridge.specs import storage_sharding
from jax_bridge.versions import (
    Batch,
    Operation,
    devices_in_program,
    linear_primitive,
    with_sharding,
)
from xshard import Plan, ProfileLike, planner
from xshard.errors import MeshError, located
from xshard.formatting import format_bytes
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, check_given, sides

LOG = logging.getLogger("xshard.reshard")

# One array of a call: its expression, shape, dtype, and name for errors. A plain tuple, since every
# call makes one for each array and looks the program up by them.
Move = tuple[Expression, tuple[int, ...], np.dtype, str]


class Program(NamedTuple):
    """A function of all arrays of a call, as it is (`traced`) and jitted (`run`)."""

    plans: tuple[Plan, ...]
    sources: tuple[StoredArray, ...]  # the arrays that it expects
    traced: Callable[..., Sequence[jax.Array]]
    run: Callable[..., Sequence[jax.Array]]


@lru_cache(maxsize=4096)
def make_program(
    moves: tuple[Move, ...], mesh: ArrayMesh, donate: bool, profile: ProfileLike
) -> Program:
    """Plan the moves of several arrays, and make one jitted program of them, cached by arguments.

    Args:
        moves: For each array its expression, shape, dtype, and name for errors.
        mesh: The mesh of the arrays.
        donate: Whether results may use the memory of the arrays.
        profile: The machine to plan for.

    Returns:
        The plans, the shardings that the program expects, and the program: arrays -> moved arrays.
    """
    plans = []
    sources = []
    targets = []
    donated = []
    for i, (expression, shape, dtype, path) in enumerate(moves):
        text = sides(expression).text
        with located(path):
            plan = _plan_move(expression, shape, dtype, mesh, profile)
            check_even(plan.source, text)
            targets.append(StoredArray.of(plan.target, mesh, text, path))
            sources.append(StoredArray.of(plan.source, mesh, text, path))
        plans.append(plan)
        # XLA can write a result into donated memory of the same size only.
        if donate and plan.source.max_local_size == plan.target.max_local_size:
            donated.append(i)
        LOG.info(
            "array %d of %d: %s, %s%s: %d steps, %s received by the busiest device",
            i + 1,
            len(moves),
            text,
            dtype.name,
            list(shape),
            len(plan.steps),
            format_bytes(plan.bytes_received),
        )

    def run(*arrays: jax.Array) -> Sequence[jax.Array]:
        # A compiled program is not traced again: the log tells how often JAX traced it.
        LOG.info("tracing one program for %d arrays", len(arrays))
        pairs = zip(plans, arrays, strict=True)
        devices = devices_in_program(mesh.in_context)
        return [_move(x, plan=plan, mesh=mesh.in_context, devices=devices) for plan, x in pairs]

    out_shardings = [target.sharding_on_devices for target in targets]
    jitted = jax.jit(run, donate_argnums=donated, out_shardings=out_shardings)
    return Program(tuple(plans), tuple(sources), run, jitted)


def _plan_move(
    expression: Expression,
    shape: tuple[int, ...],
    dtype: np.dtype,
    mesh: ArrayMesh,
    profile: ProfileLike,
) -> Plan:
    """Plan the move of a global array, or check that a given plan fits its shape and mesh."""
    src, dst, text = sides(expression)
    if not isinstance(expression, Plan):
        free = mesh.free((*src.axes, *dst.axes), text)
        return planner.plan(expression, free, shape, dtype.name, profile=profile)
    with mark_errors(text):
        check_given("the array is", expression, dtype.name, shape)
        mesh.check_plan(expression, text)
    return expression


# The primitive: a global array under `plan.src` -> the same array under `plan.dst`.


@partial(jax.jit, static_argnames=("plan", "mesh", "devices"), inline=True)
def _run(x: jax.Array, *, plan: Plan, mesh: AnyJaxMesh, devices: object) -> jax.Array:
    """Run a plan on the blocks of a global array.

    Args:
        x: The array.
        plan: The plan.
        mesh: The mesh.
        devices: For the `jit` around the primitive alone, see `devices_in_program`.
    """

    def move_block(block: jax.Array) -> jax.Array:
        return as_tagged(MoveCall(sides(plan), plan).run(block), plan.dst)

    on_devices = jax.shard_map(
        move_block,
        mesh=mesh,
        in_specs=storage_sharding(plan.source.layout, mesh).spec,
        out_specs=storage_sharding(plan.target.layout, mesh).spec,
        axis_names=frozenset(free_axes(mesh)),
    )
    return on_devices(x)


def _type_of_result(
    aval: Any, *, plan: Plan, mesh: AnyJaxMesh, devices: object
) -> tuple[Any, set[Any]]:
    """Return the type of the moved array, and no effects."""
    sharding = storage_sharding(plan.target.layout, mesh)
    return with_sharding(aval, sharding, plan.target.shape), set()


def _transpose_move(cotangent: jax.Array, *, plan: Plan, **where: Any) -> jax.Array:
    """Move a cotangent back, by the dual plan, on the same mesh."""
    return _move(cotangent, plan=plan.backward, **where)


def _batch_move(
    bind: Operation,
    x: jax.Array,
    dim: int | None,
    batch: Batch,
    *,
    plan: Plan,
    **where: Any,
) -> tuple[jax.Array, int | None]:
    """Move a batch of arrays under `jax.vmap` at once, as one array with the batch as first dim.

    Args:
        bind: The move.
        x: The arrays.
        dim: The batch's dim of `x`; None if `x` is the same for the whole batch.
        batch: The batch's length, and the mesh axes that shard it.
        plan: The plan for one array of the batch.
        where: The mesh and its devices.

    Returns:
        The result, and its batch dim.
    """
    if dim is None:
        return bind(x, plan=plan, **where), None
    return bind(jnp.moveaxis(x, dim, 0), plan=_batched_plan(plan, batch), **where), 0


def _batched_plan(plan: Plan, batch: Batch) -> Plan:
    """Return the plan for a batch of arrays: a plan for [n, d] -> one for [batch, n, d].

    The batch dim may itself be sharded, over mesh axes that the plan's layouts do not name.

    Raises:
        MeshError: They name one. A mesh axis shards one dim of an array at most.
    """
    for axis in batch.mesh_axes:
        if axis in plan.src.axes or axis in plan.dst.axes:
            hint = "an axis shards one dim at a time: reshard the unsharded batch, outside of vmap"
            reason = f"mesh axis {axis!r} shards the batch of vmap"
            raise MeshError(reason, text=f"{plan.src} -> {plan.dst}", hint=hint)
    if not set(batch.mesh_axes) & set(plan.axes):
        return with_batch_dim(plan, batch.size, batch.mesh_axes)

    # Some step of the plan shards a dim over an axis of the batch for a while, as a detour. Plan
    # anew for the batched array, whose layouts name that axis: the steps then leave it alone.
    dim = batch_dim(plan, batch.mesh_axes)
    layouts = (plan.source.layout, plan.target.layout)
    src, dst = (replace(layout, dims=(dim, *layout.dims)) for layout in layouts)
    shape = (batch.size, *plan.shape)
    return planner.plan((src, dst), plan.mesh, shape, plan.dtype, profile=plan.profile)


_move: Operation = linear_primitive(
    "xshard_reshard",
    run=_run,
    abstract_eval=_type_of_result,
    transpose=_transpose_move,
    batch=_batch_move,
)
