"""A plan as one operation of JAX: a primitive with the plan as a parameter.

The tangent moves by the same plan, the transpose is the backward plan, a batch is one more unsharded dim. So
JAX sees, and transposes, one linear map instead of collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_bridge.lower.rules import run
from jax_bridge.lower.transports import PERMUTE, RAGGED, Transport
from jax_bridge.versions import Batch, batch_first, linear_primitive
from xshard import Layout, Plan
from xshard.notation.parser import Dim, Shard
from xshard.steps import Step


def move(plan: Plan, x: jax.Array) -> jax.Array:
    """A block under `plan.src` -> the block under `plan.dst`; linear if the plan is. x: as for `apply`."""
    return _move(x, plan=plan, devices=None)


def batch_dim(plan: Plan, cut: tuple[str, ...]) -> Dim:
    """A dim that the plan's array does not have yet, whole or cut over axes."""
    taken = plan.source.layout.names
    name = next(f"batch{i}" for i in range(len(taken) + 1) if f"batch{i}" not in taken)
    return Dim(name, (Shard(cut),) if cut else ())


@lru_cache(maxsize=1024)
def batched(plan: Plan, n: int, cut: tuple[str, ...] = ()) -> Plan:
    """The same steps on an array with one more dim, first, of length `n`: whole, or cut over axes of the mesh
    that the steps do not use."""
    dim = batch_dim(plan, cut)

    def wider(layout: Layout) -> Layout:
        return replace(layout, dims=(dim, *layout.dims))

    def stepping(step: Step) -> Step:
        layouts = {f.name: getattr(step, f.name) for f in fields(step)}  # type: ignore[arg-type]
        return replace(step, **{k: wider(v) for k, v in layouts.items() if isinstance(v, Layout)})  # type: ignore[type-var]

    return replace(
        plan,
        src=wider(plan.source.layout),
        dst=wider(plan.target.layout),
        shape=(n, *plan.shape),
        steps=tuple(map(stepping, plan.steps)),
        memory_limit=plan.memory_limit and n * plan.memory_limit,
    )


def _run(x: jax.Array, *, plan: Plan, devices: str | None, transport: Transport = PERMUTE) -> jax.Array:
    """The block after the plan, by collectives of `jax.lax`.

    devices: the axis named by `vmap`; the first dim here has one block per device along it.
    """
    one = partial(run, plan, transport=transport)
    return one(x) if devices is None else jax.vmap(one, axis_name=devices)(x)


_traced = jax.jit(_run, static_argnames=("plan", "devices"), inline=True)


def abstract_eval(x: Any, **params: Any) -> tuple[Any, Any]:
    """The type of a block -> the type of the block after the plan, and the effects."""
    traced = _traced.trace(x, **params).jaxpr
    (result,) = traced.out_avals
    return result, traced.effects


def batch(
    bind: Callable[..., jax.Array],
    x: jax.Array,
    dim: int | None,
    along: Batch,
    *,
    plan: Plan,
    devices: str | None,
) -> tuple[jax.Array, int | None]:
    """Batch an operation that carries a plan: the same operation with the batched plan."""
    if along.name in plan.mesh.axes and along.size > 1:
        return bind(batch_first(x, dim, along.size), plan=plan, devices=along.name), 0
    if dim is None:
        return bind(x, plan=plan, devices=devices), None
    new = 0 if devices is None else 1
    return bind(jnp.moveaxis(x, dim, new), plan=batched(plan, along.size), devices=devices), new


def _transpose(cotangent: jax.Array, *, plan: Plan, devices: str | None) -> jax.Array:
    return _move(cotangent, plan=plan.backward, devices=devices)


_move: Callable[..., jax.Array] = linear_primitive(
    "xshard_move",
    run=_run,
    abstract_eval=abstract_eval,
    transpose=_transpose,
    batch=lambda *block, **params: batch(_move, *block, **params),
    on_platforms=dict.fromkeys(("cuda", "rocm", "tpu"), partial(_run, transport=RAGGED)),
)
