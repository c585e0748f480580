"""`ad="custom_vjp"`: a plan as collectives of `jax.lax` with a rule for reverse mode.

Jaxprs then show the collectives to their readers: policies of `jax.checkpoint`, counters of communication.
Forward mode is refused by an error that names the other mode, unlike with JAX's own `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax

from jax_bridge.autodiff.primitive import abstract_eval, batch, move
from jax_bridge.lower.rules import run
from jax_bridge.lower.transports import PERMUTE_UNBRANCHED
from jax_bridge.versions import linear_primitive
from xshard import Plan, XshardError

Tangent = Callable[[Plan, jax.Array], jax.Array]


def move_by_collectives(plan: Plan, x: jax.Array) -> jax.Array:
    """As `primitive.move`, with a first derivative in reverse mode only."""
    return _collectives(plan, reverse_only_tangent, x)


def reverse_only_tangent(plan: Plan, tangent: jax.Array) -> jax.Array:
    """The tangent of a moved block; only its transpose exists."""
    return _pulled(tangent, plan=plan, devices=None)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _collectives(plan: Plan, tangent: Tangent, x: jax.Array) -> jax.Array:
    return _forward(run(plan, x, PERMUTE_UNBRANCHED), plan=plan)


@_collectives.defjvp
def _rule(plan: Plan, tangent: Tangent, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # The rule limits the first derivative only: further ones exist in every mode.
    return _collectives(plan, move, *primals), tangent(plan, *tangents)


def _transpose_of_pulled(cotangent: jax.Array, *, plan: Plan, devices: str | None) -> jax.Array:
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
    transpose=_transpose_of_pulled,
    batch=lambda *block, **params: batch(_pulled, *block, **params),
)

# The identity, which a transposition meets first: it refuses, and the collectives are never transposed.
_forward: Callable[..., jax.Array] = linear_primitive(
    "xshard_forward",
    run=lambda x, *, plan: x,
    abstract_eval=lambda x, *, plan: (x, set()),
    transpose=lambda cotangent, *, plan: _refuse("linear_transpose", plan),
    batch=lambda x, dim, _, *, plan: (_forward(x, plan=plan), dim),
)
