"""A plan as the collectives of `jax.lax` with a rule for reverse mode: what a `custom_vjp` around them does.

Decides what `ad="custom_vjp"` means. Jaxprs then name the collectives, for those who read them: policies of
`jax.checkpoint`, counters of communication. What a rule for reverse mode cannot do is refused by an error
that names the other mode, which JAX's own `custom_vjp` would not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax

from jax_bridge.autodiff.primitive import abstract_eval, batch, move
from jax_bridge.lower.rules import run
from jax_bridge.lower.transports import anywhere
from jax_bridge.versions import linear_primitive
from xshard import XshardError
from xshard.plans.plan import Plan

Tangent = Callable[[Plan, jax.Array], jax.Array]


def collectives(plan: Plan, x: jax.Array) -> jax.Array:
    """As `primitive.move`, with a first derivative in reverse mode alone."""
    return _collectives(plan, pulled, x)


def pulled(plan: Plan, tangent: jax.Array) -> jax.Array:
    """The tangent of what a plan moves, of which only the transpose can be had."""
    return _pulled(tangent, plan=plan, devices=None)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _collectives(plan: Plan, tangent: Tangent, x: jax.Array) -> jax.Array:
    return _forward(run(plan, x, anywhere), plan=plan)


@_collectives.defjvp
def _rule(plan: Plan, tangent: Tangent, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # A rule says nothing of what is made of its own results: further derivatives are of every mode.
    return _collectives(plan, move, *primals), tangent(plan, *tangents)


def _transpose(cotangent: jax.Array, *, plan: Plan, devices: str | None) -> jax.Array:
    back = partial(_collectives, plan.backward, move)
    return back(cotangent) if devices is None else jax.vmap(back, axis_name=devices)(cotangent)


def _refuse(what: str, plan: Plan) -> NoReturn:
    raise XshardError(
        f"{what} of '{plan.src} -> {plan.dst}' with ad=\"custom_vjp\"",
        hint='ad="linear", the default, has every mode; "custom_vjp" has reverse mode: grad, vjp, jacrev',
    )


_pulled: Callable[..., jax.Array] = linear_primitive(
    "xshard_pulled",
    run=lambda x, *, plan, devices: _refuse("forward mode", plan),
    abstract_eval=abstract_eval,
    transpose=_transpose,
    batch=lambda *block, **params: batch(_pulled, *block, **params),
)

# The block itself, which a transposition meets first: transposed are plans, not the collectives of one.
_forward: Callable[..., jax.Array] = linear_primitive(
    "xshard_forward",
    run=lambda x, *, plan: x,
    abstract_eval=lambda x, *, plan: (x, set()),
    transpose=lambda cotangent, *, plan: _refuse("linear_transpose", plan),
    batch=lambda x, dim, _, __, *, plan: (_forward(x, plan=plan), dim),
)
