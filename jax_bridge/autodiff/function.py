"""The one differentiable function: a plan, whose gradient is its dual plan.

Decides where derivatives come from; no collective carries one of its own. A linear plan is a linear
map to JAX (`primitive`), which takes it through every mode, or has a rule for reverse mode if that is asked
for (`reverse`). For `max` and `min` there is a tangent of linear plans: reverse mode is its transpose.

What a cotangent is. Inside the program that the devices run, always what the duality says: the
cotangent of a block under layout `l` is a block under `l.dual`. Along a replicated axis every
device holds the one cotangent of the one value; along `copy(a)` the devices' cotangents are addends;
along `sum(a)` they are copies. So `jax.grad` *inside* gives the same gradients under `check_vma=True`,
under `check_vma=False`, in `pmap` and in `vmap(axis_name=)`.

Gradients taken *outside* cross the border, where JAX has a convention of its own for an axis that a
spec omits:

- `check_vma=True`: the cotangent of an output whose out_spec omits `a` arrives whole, that of an input
  whose in_spec omits `a` leaves whole. A replica on both sides: write `n d`.
- `check_vma=False` and `pmap`: the former arrives divided by the size of `a`, the latter is summed over
  `a`. Under `vmap(axis_name=)` it is as the caller writes it: of an output of which one device's is used,
  that device has the cotangent and the others zeros; `in_axes=None` sums. Addends on both sides of
  all three: write `n d | copy(a)`.

With types a replica is invariant and JAX enforces it. Without them JAX takes every device's value
for its own, which is what `copy` says; say so, and gradients are right on both sides of the border.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.autodiff.custom_vjp import collectives, pulled
from jax_bridge.autodiff.primitive import move
from jax_bridge.lower.row_tables import with_fills
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import Plan


class Mode(NamedTuple):
    """What takes a block through a plan, and what takes a tangent."""

    move: Callable[[Plan, jax.Array], jax.Array]
    tangent: Callable[[Plan, jax.Array], jax.Array]


MODES = {"linear": Mode(move, move), "custom_vjp": Mode(collectives, pulled)}


def apply(plan: Plan, x: jax.Array, ad: str) -> jax.Array:
    """A block under `plan.src` -> the block under `plan.dst`; its gradient is `plan.backward`.

    x: varying along the axes that `plan.src` names and invariant along the others that the plan has to
    do with; its cotangent is the same. ad: one of `MODES`.
    """
    # A boundary's constants are no part of what is linear: they are put in afterwards.
    linear = plan.tangent
    y = MODES[ad].move(linear, x) if plan.src.is_linear else _extreme(linear, ad, x)
    return y if linear is plan else with_fills(y, plan.target)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extreme(plan: Plan, ad: str, x: jax.Array) -> jax.Array:
    return MODES[ad].move(plan, x)


@_extreme.defjvp
def _extreme_tangent(plan: Plan, ad: str, primals, tangents):
    """The winners' tangents in equal shares: what the cotangent plan is the transpose of."""
    (x,), (tangent,), mode = primals, tangents, MODES[ad]
    y, plans = apply(plan, x, ad), max_min_plans(plan)
    won = x == mode.move(plans.result, y)
    count = mode.move(plans.count, won.astype(x.dtype))
    share = jnp.where(won, tangent / jnp.maximum(count, 1), jnp.zeros_like(x))  # padding has no winner
    return y, mode.tangent(plans.cotangent.backward, share)
