"""The one differentiable function: a plan forward, its dual plan backward.

Decides where gradients come from, which is `Plan.backward`; no collective carries one of its own.

What a cotangent is. Inside the program that the devices run, always what the duality says: the
cotangent of a block under layout `l` is a block under `l.dual`. Along a replicated axis every
device holds the one cotangent of the one value; along `copy(a)` the devices' cotangents are addends;
along `sum(a)` they are copies. So `jax.grad` *inside* gives the same gradients under `check_vma=True`,
under `check_vma=False` and in `pmap`.

Gradients taken *outside* a shard_map cross its border, where JAX has a convention of its own for
an axis that a spec omits:

- `check_vma=True`: the cotangent of an output whose out_spec omits `a` arrives whole, that of an input
  whose in_spec omits `a` leaves whole. A replica on both sides: write `n d`.
- `check_vma=False` and `pmap`: the former arrives divided by the size of `a`, the latter is summed over
  `a`. Addends on both sides: write `n d | copy(a)`.

With types a replica is invariant and JAX enforces it. Without them JAX takes every device's value
for its own, which is what `copy` says; say so, and gradients are right on both sides of the border.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_bridge.lower import run
from xshard.plan import Plan
from xshard.winners import winner_plans


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(plan: Plan, x: jax.Array) -> jax.Array:
    """A block under `plan.src` -> the block under `plan.dst`; its gradient is `plan.backward`.

    x: varying along the axes that `plan.src` names and invariant along those that only `plan.dst`
    names; its cotangent is the same.
    """
    return run(plan, x)


def _forward(plan: Plan, x: jax.Array):
    y = apply(plan, x)  # not `run`: this too may be differentiated, for a gradient of a gradient
    return y, None if plan.src.is_linear else (x, y)


def _backward(plan: Plan, residuals, cotangent: jax.Array):
    if plan.src.is_linear:
        return (apply(plan.backward, cotangent),)
    x, y = residuals
    plans = winner_plans(plan)
    won = x == apply(plans.result, y)
    count = apply(plans.count, won.astype(x.dtype))
    shares = apply(plans.cotangent, cotangent) / jnp.maximum(count, 1)  # padding has no winner
    return (jnp.where(won, shares, jnp.zeros_like(x)),)


apply.defvjp(_forward, _backward)
