"""The one differentiable function: a plan. Its gradient is the dual plan.

No collective has a derivative of its own. To JAX a linear plan is a primitive, a linear map that
supports every mode, or a function with a rule for reverse mode (`custom_vjp`). The tangent of `max`
and `min` consists of linear plans, and reverse mode is its transpose.

The cotangent *inside* the program that the devices run always follows the duality: the cotangent of
a block under layout `l` is a block under `l.dual`. Along a replicated axis every device holds the
one cotangent of the one value; along `copy(a)` the devices' cotangents are addends; along `sum(a)`
they are copies. So `jax.grad` inside gives the same gradients under `check_vma=True`, under
`check_vma=False`, in `pmap` and in `vmap(axis_name=)`.

Gradients taken *outside* cross the border, where JAX has its own conventions for an axis that a
spec omits:

- `check_vma=True`: if an out_spec omits `a`, the output's cotangent arrives whole; if an in_spec
  omits `a`, the input's cotangent leaves whole. Both are replicas: write `n d`.
- `check_vma=False` and `pmap`: the output's cotangent arrives divided by the size of `a`, the
  input's is summed over `a`. `vmap(axis_name=)`: if the caller uses one device's output, that
  device has the cotangent and the others zeros; `in_axes=None` sums. All of these are addends:
  write `n d | copy(a)`.

With types a replica is invariant, and JAX enforces it. Without types JAX treats every device's
value as its own, which is the meaning of `copy`: write it, and gradients are right on both sides of
the border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.lower.row_tables import with_boundary_constants
from jax_bridge.lower.rules import run
from jax_bridge.lower.transports import PERMUTE, PERMUTE_UNBRANCHED, RAGGED, Transport
from jax_bridge.versions import (
    ACCELERATORS,
    Batch,
    Operation,
    batch_first,
    linear_primitive,
    types_of,
)
from xshard import Layout, Plan, XshardError
from xshard.notation.parser import Dim, Shard
from xshard.plans.max_min import max_min_plans
from xshard.steps import Step

Move = Callable[[Plan, jax.Array], jax.Array]


def apply(plan: Plan, x: jax.Array, ad: str) -> jax.Array:
    """Run a plan on this device's block, differentiably: its gradient is `plan.backward`.

    Args:
        plan: The plan.
        x: The block under `plan.src`. By its JAX type it may differ between devices along the axes
            of `plan.src` (varying), and is equal along the plan's others (invariant).
        ad: How it is differentiated: one of `MODES`.

    Returns:
        The block under `plan.dst`.
    """
    # A boundary such as constant(7) writes 7 into rows beyond the ends of the array. That is not
    # linear in x: the plan without it runs first, and the constants are written afterwards.
    without_constants = plan.tangent
    if plan.src.is_linear:  # no max or min is pending
        y = MODES[ad].forward(without_constants, x)
    else:
        y = _max_or_min(without_constants, ad, x)
    if without_constants is plan:
        return y
    return with_boundary_constants(y, plan.target)


# Linear plans: a primitive that every transformation of JAX knows.


def move(plan: Plan, x: jax.Array) -> jax.Array:
    """Run a linear plan on this device's block.

    Args:
        plan: The plan.
        x: As for `apply`.
    """
    return _move(x, plan=plan, devices=None)


def batch_dim(plan: Plan, batch_axes: tuple[str, ...]) -> Dim:
    """Return a dim with a name that the plan's array does not have; mesh axes may shard it."""
    name = new_name("batch", plan.source.layout.names)
    return Dim(name, (Shard(batch_axes),) if batch_axes else ())


def new_name(kind: str, names: Sequence[str]) -> str:
    """Return a name for one more dim: "batch0", or "batch1" if the dims have "batch0", and so on."""
    suffix = 0
    while f"{kind}{suffix}" in names:
        suffix += 1
    return f"{kind}{suffix}"


@lru_cache(maxsize=1024)
def with_batch_dim(plan: Plan, length: int, batch_axes: tuple[str, ...] = ()) -> Plan:
    """Return the plan for a batch of arrays: the same steps with a new first dim.

    A plan for [n, d] becomes one for [length, n, d], and "n/dp d -> n d" one for
    "batch0 n/dp d -> batch0 n d".

    Args:
        plan: The plan.
        length: The global length of the new dim.
        batch_axes: Mesh axes that shard the new dim; the plan uses none of them.
    """
    dim = batch_dim(plan, batch_axes)

    def wider(layout: Layout) -> Layout:
        return replace(layout, dims=(dim, *layout.dims))

    def wider_step(step: Step) -> Step:
        """Return the step with wider layouts, in whichever fields it has layouts."""
        changes: dict[str, Any] = {}
        for field in fields(step):  # type: ignore[arg-type]  # every kind of step is a dataclass
            value = getattr(step, field.name)
            if isinstance(value, Layout):
                changes[field.name] = wider(value)
        return replace(step, **changes)  # type: ignore[type-var]  # the same

    limit = plan.memory_limit
    return replace(
        plan,
        src=wider(plan.source.layout),
        dst=wider(plan.target.layout),
        shape=(length, *plan.shape),
        steps=tuple(map(wider_step, plan.steps)),
        memory_limit=None if limit is None else length * limit,
    )


def _on_blocks(
    move_block: Callable[[jax.Array], jax.Array], x: jax.Array, devices: str | None
) -> jax.Array:
    """Move a block; or the blocks of all devices, one after the other along the first dim of `x`.

    Args:
        move_block: Moves one block.
        x: The block, or the blocks.
        devices: The name of the `vmap` of which the devices are the batch; None for one block.
    """
    if devices is None:
        return move_block(x)
    return jax.vmap(move_block, axis_name=devices)(x)


def _run(
    x: jax.Array, *, plan: Plan, devices: str | None, transport: Transport = PERMUTE
) -> jax.Array:
    """Run a plan.

    Args:
        x: The block, or the blocks of all devices.
        plan: The plan.
        devices: As for `_on_blocks`.
        transport: How boxes travel.
    """
    return _on_blocks(partial(run, plan, transport=transport), x, devices)


_abstract_eval = types_of(_run, ("plan", "devices"))


def _batch_rule(
    bind: Operation,
    x: jax.Array,
    dim: int | None,
    batch: Batch,
    *,
    plan: Plan,
    devices: str | None,
) -> tuple[jax.Array, int | None]:
    """Run an operation that carries a plan on a batch (the rule of `jax.vmap`).

    The batch may be the devices themselves, as in vmap(axis_name="dp") of a plan over dp, where
    entry i is the block of device i. The operation is then run on all blocks at once, along the
    first dim, with devices="dp". Any other batch is one more dim of a block, and of the plan.

    Args:
        bind: The operation.
        x: Its argument.
        dim: The batch dim of `x`; None if `x` is the same for the whole batch.
        batch: The batch.
        plan: The operation's plan.
        devices: The name of another `vmap` whose batch is the devices, along the first dim of `x`;
            None if there is none.

    Returns:
        The result, and its batch dim.
    """
    if batch.name in plan.mesh.axes and batch.size > 1:  # the devices
        return bind(batch_first(x, dim, batch.size), plan=plan, devices=batch.name), 0
    if dim is None:
        return bind(x, plan=plan, devices=devices), None
    # The first dim stays that of the devices, if another `vmap` has made one.
    new_dim = 0 if devices is None else 1
    x = jnp.moveaxis(x, dim, new_dim)
    return bind(x, plan=with_batch_dim(plan, batch.size), devices=devices), new_dim


def _transpose_move(cotangent: jax.Array, *, plan: Plan, devices: str | None) -> jax.Array:
    return _move(cotangent, plan=plan.backward, devices=devices)


_move: Operation = linear_primitive(
    "xshard_move",
    run=_run,
    abstract_eval=_abstract_eval,
    transpose=_transpose_move,
    batch=_batch_rule,
    on_platforms=dict.fromkeys(ACCELERATORS, partial(_run, transport=RAGGED)),
)


# Plans from a pending max or min.


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _max_or_min(plan: Plan, ad: str, x: jax.Array) -> jax.Array:
    """Run a plan whose source is a pending max or min. Its derivative is `_max_or_min_tangent`."""
    return MODES[ad].forward(plan, x)


@_max_or_min.defjvp
def _max_or_min_tangent(
    plan: Plan, ad: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Differentiate a maximum or minimum over devices: the mean of the winners' tangents.

    Of 3, 5, 5 on three devices the maximum is 5; each winner's tangent counts one half.

    Args:
        plan: The plan from a pending max or min.
        ad: As of `apply`.
        primals: The block.
        tangents: Its tangent.

    Returns:
        The result and its tangent.
    """
    mode = MODES[ad]
    (x,) = primals
    (tangent,) = tangents
    y = apply(plan, x, ad)
    plans = max_min_plans(plan)
    # The maximum comes back to each device, to be compared with its x. `plans.result` takes it from
    # y, or reduces x again if y lacks some rows, as after a slice.
    takes_y = plans.result.src.is_linear
    maximum = mode.forward(plans.result, y if takes_y else lax.stop_gradient(x))
    has_won = x == maximum
    n_winners = mode.forward(plans.count, has_won.astype(x.dtype))
    # Padding has no winner: it would be divided by 0.
    share = tangent / jnp.maximum(n_winners, 1)
    share = jnp.where(has_won, share, jnp.zeros_like(x))
    # The shares of all devices are added up; JAX transposes this to `plans.cotangent`, by which the
    # gradient comes back to each winner.
    return y, mode.tangent(plans.cotangent.backward, share)


# `ad="custom_vjp"`: jaxprs show the collectives to their readers, as policies of `jax.checkpoint`.
# Forward mode is refused by an error that names the other mode, unlike with JAX's own `custom_vjp`.


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _collectives(plan: Plan, tangent_map: Move, x: jax.Array) -> jax.Array:
    """Run a plan so that a jaxpr shows its collectives.

    Args:
        plan: The plan.
        tangent_map: Takes a tangent through it.
        x: The block.
    """
    return _no_transpose(run(plan, x, PERMUTE_UNBRANCHED), plan=plan)


@_collectives.defjvp
def _collectives_tangent(
    plan: Plan, tangent_map: Move, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x,) = primals
    (tangent,) = tangents
    # `tangent_map` limits the first derivative only: further ones exist in every mode.
    return _collectives(plan, move, x), tangent_map(plan, tangent)


def _transpose_reverse_only(cotangent: jax.Array, *, plan: Plan, devices: str | None) -> jax.Array:
    return _on_blocks(partial(_collectives, plan.backward, move), cotangent, devices)


def _refuse(operation: str, x: jax.Array, *, plan: Plan, devices: str | None = None) -> NoReturn:
    """Raise XshardError in place of an operation that `custom_vjp` lacks."""
    hint = (
        'ad="linear", the default, has every mode; "custom_vjp" has reverse mode: grad, vjp, jacrev'
    )
    raise XshardError(
        f"{operation} of '{plan.src} -> {plan.dst}' with ad=\"custom_vjp\"", hint=hint
    )


# The tangent in reverse mode: JAX only transposes it. To run it is forward mode, which is refused.
_reverse_only_primitive: Operation = linear_primitive(
    "xshard_pulled",
    run=partial(_refuse, "forward mode"),
    abstract_eval=_abstract_eval,
    transpose=_transpose_reverse_only,
    batch=_batch_rule,
)

# The identity. A transposition meets it first, and is refused before it meets collectives.
_no_transpose: Operation = linear_primitive(
    "xshard_forward",
    run=lambda x, *, plan: x,
    transpose=partial(_refuse, "linear_transpose"),
)


def _reverse_only(plan: Plan, tangent: jax.Array) -> jax.Array:
    """Take a tangent through a plan, in reverse mode only."""
    return _reverse_only_primitive(tangent, plan=plan, devices=None)


def _show_collectives(plan: Plan, x: jax.Array) -> jax.Array:
    return _collectives(plan, _reverse_only, x)


class Mode(NamedTuple):
    """How a block goes through a plan, and how its tangent does."""

    forward: Move
    tangent: Move


MODES = {
    "linear": Mode(move, move),
    "custom_vjp": Mode(_show_collectives, _reverse_only),
}
