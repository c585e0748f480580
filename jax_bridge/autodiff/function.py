"""The one differentiable function: a plan. Its gradient is the dual plan.

No collective has a derivative of its own. To JAX a linear plan is a primitive, a linear map that supports
every mode, or a function with a rule for reverse mode (`custom_vjp`). The tangent of `max` and `min` consists
of linear plans, and reverse mode is its transpose.

The cotangent *inside* the program that the devices run always follows the duality: the cotangent of a block
under layout `l` is a block under `l.dual`. Along a replicated axis every device holds the one cotangent of
the one value; along `copy(a)` the devices' cotangents are addends; along `sum(a)` they are copies. So
`jax.grad` inside gives the same gradients under `check_vma=True`, under `check_vma=False`, in `pmap` and in
`vmap(axis_name=)`.

Gradients taken *outside* cross the border, where JAX has its own conventions for an axis that a spec omits:

- `check_vma=True`: if an out_spec omits `a`, the output's cotangent arrives whole; if an in_spec omits `a`,
  the input's cotangent leaves whole. Both are replicas: write `n d`.
- `check_vma=False` and `pmap`: the output's cotangent arrives divided by the size of `a`, the input's is
  summed over `a`. `vmap(axis_name=)`: if the caller uses one device's output, that device has the cotangent
  and the others zeros; `in_axes=None` sums. All of these are addends: write `n d | copy(a)`.

With types a replica is invariant, and JAX enforces it. Without types JAX treats every device's value as its
own, which is the meaning of `copy`: write it, and gradients are right on both sides of the border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.lower.row_tables import with_fills
from jax_bridge.lower.rules import run
from jax_bridge.lower.transports import PERMUTE, PERMUTE_UNBRANCHED, RAGGED, Transport
from jax_bridge.versions import ACCELERATORS, Batch, batch_first, linear_primitive, types_of
from xshard import Layout, Plan, XshardError
from xshard.notation.parser import Dim, Shard
from xshard.plans.max_min import max_min_plans
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
    """The same steps on an array with a new first dim of length `n`, whole or cut over other axes."""
    dim = batch_dim(plan, cut)

    def wider(layout: Layout) -> Layout:
        return replace(layout, dims=(dim, *layout.dims))

    def stepping(step: Step) -> Step:
        layouts = {f.name: getattr(step, f.name) for f in fields(step)}  # type: ignore[arg-type]
        return replace(step, **{k: wider(v) for k, v in layouts.items() if isinstance(v, Layout)})  # type: ignore[type-var]

    src = wider(plan.source.layout)
    dst = wider(plan.target.layout)
    steps = tuple(map(stepping, plan.steps))
    limit = plan.memory_limit and n * plan.memory_limit
    return replace(plan, src=src, dst=dst, shape=(n, *plan.shape), steps=steps, memory_limit=limit)


def _run(
    x: jax.Array, *, plan: Plan, devices: str | None, transport: Transport = PERMUTE
) -> jax.Array:
    """The block after the plan. devices: an axis named by `vmap`: the first dim has a block per device."""
    one = partial(run, plan, transport=transport)
    return one(x) if devices is None else jax.vmap(one, axis_name=devices)(x)


_abstract_eval = types_of(_run, ("plan", "devices"))


def batch(
    bind: Callable[..., Any],
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


_move: Callable[..., jax.Array] = linear_primitive(
    "xshard_move",
    run=_run,
    abstract_eval=_abstract_eval,
    transpose=lambda cotangent, *, plan, devices: _move(
        cotangent, plan=plan.backward, devices=devices
    ),
    batch=lambda *block, **params: batch(_move, *block, **params),
    on_platforms=dict.fromkeys(ACCELERATORS, partial(_run, transport=RAGGED)),
)


Move = Callable[[Plan, jax.Array], jax.Array]


def apply(plan: Plan, x: jax.Array, ad: str) -> jax.Array:
    """A block under `plan.src` -> the block under `plan.dst`; its gradient is `plan.backward`. x: varying on
    the axes of `plan.src`, invariant on the plan's others, as is its cotangent. ad: one of `MODES`.
    """
    # The constants of a boundary are not linear in x: they are filled in afterwards.
    linear = plan.tangent
    y = MODES[ad][0](linear, x) if plan.src.is_linear else _extreme(linear, ad, x)
    return y if linear is plan else with_fills(y, plan.target)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extreme(plan: Plan, ad: str, x: jax.Array) -> jax.Array:
    return MODES[ad][0](plan, x)


@_extreme.defjvp
def _extreme_tangent(plan: Plan, ad: str, primals, tangents):
    """Equal shares of the winners' tangents: the transpose of this map is the cotangent plan."""
    (x,), (tangent,), (forward, tangent_map) = primals, tangents, MODES[ad]
    y = apply(plan, x, ad)
    plans = max_min_plans(plan)
    won = x == forward(plans.result, y if plans.result.src.is_linear else lax.stop_gradient(x))
    count = forward(plans.count, won.astype(x.dtype))
    share = jnp.where(
        won, tangent / jnp.maximum(count, 1), jnp.zeros_like(x)
    )  # padding has no winner
    return y, tangent_map(plans.cotangent.backward, share)


# `ad="custom_vjp"`: jaxprs show the collectives to their readers, as policies of `jax.checkpoint`. Forward
# mode is refused by an error that names the other mode, unlike with JAX's own `custom_vjp`.


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _collectives(plan: Plan, tangent: Move, x: jax.Array) -> jax.Array:
    return _forward(run(plan, x, PERMUTE_UNBRANCHED), plan=plan)


@_collectives.defjvp
def _rule(plan: Plan, tangent: Move, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # The rule limits the first derivative only: further ones exist in every mode.
    return _collectives(plan, move, *primals), tangent(plan, *tangents)


def _transpose_of_pulled(cotangent: jax.Array, *, plan: Plan, devices: str | None) -> jax.Array:
    back = partial(_collectives, plan.backward, move)
    return back(cotangent) if devices is None else jax.vmap(back, axis_name=devices)(cotangent)


def _refuse(what: str, plan: Plan) -> NoReturn:
    hint = (
        'ad="linear", the default, has every mode; "custom_vjp" has reverse mode: grad, vjp, jacrev'
    )
    raise XshardError(f"{what} of '{plan.src} -> {plan.dst}' with ad=\"custom_vjp\"", hint=hint)


_pulled: Callable[..., jax.Array] = linear_primitive(
    "xshard_pulled",
    run=lambda x, *, plan, devices: _refuse("forward mode", plan),
    abstract_eval=_abstract_eval,
    transpose=_transpose_of_pulled,
    batch=lambda *block, **params: batch(_pulled, *block, **params),
)

# The identity, which a transposition meets first: it refuses, and the collectives are never transposed.
_forward: Callable[..., jax.Array] = linear_primitive(
    "xshard_forward",
    run=lambda x, *, plan: x,
    transpose=lambda _, *, plan: _refuse("linear_transpose", plan),
)


def _reverse_only(plan: Plan, tangent: jax.Array) -> jax.Array:
    return _pulled(tangent, plan=plan, devices=None)


# How a block, and how its tangent, goes through a plan.
MODES: dict[str, tuple[Move, Move]] = {
    "linear": (move, move),
    "custom_vjp": (lambda plan, x: _collectives(plan, _reverse_only, x), _reverse_only),
}
