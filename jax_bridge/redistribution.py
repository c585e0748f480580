"""`redistribute`: one device's block from one layout to another, and the mask of its padding.

Decides what a call inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)` does: the plan comes from
`planning`, derivatives from `autodiff`, checks of replicas from `replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jax_bridge.autodiff.function import MODES, apply
from jax_bridge.keys import are_keys, as_words
from jax_bridge.lower.row_tables import valid
from jax_bridge.planning import AnyMesh, as_array, parse_call, plan_here, sharding_here, with_entry_type
from jax_bridge.replicas import apply_checked
from xshard import Layout, Plan, Profile, XshardError
from xshard.arguments import lengths_of
from xshard.plans.expression import Expression
from xshard.replicas import are_checked

Derivatives = Literal["linear", "custom_vjp"]


def redistribute(
    x: jax.Array,
    expression: Expression,
    mesh: AnyMesh | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "auto",
    check_replicated: bool | None = None,
    ad: Derivatives = "linear",
) -> jax.Array:
    """This device's block under the left layout -> its block under the right one, differentiable.

    expression: `"layout -> layout"`, a pair of layouts, or a plan. mesh: by default the one of the context.
    shape: the global shape; by default inferred from the numbers of cuts, as in `n/sizes(dp,2,3)`, else
    assuming all blocks are equal. An uneven block has the shape of the largest: its padding may hold anything
    on the way in and is zero on the way out.
    profile: the machine to plan for.
    ad: "linear" supports every mode of differentiation. "custom_vjp" supports reverse mode only, and jaxprs
    show the collectives of `jax.lax`.
    Axes that the expression does not name are left alone: blocks may differ along them. With
    `check_vma=True` the result is invariant along an axis that only the left side names. Blocks of PRNG keys
    are moved too, under layouts that neither add nor overlap.

    Raises while tracing: NotationError, MeshError, ShapeError, DtypeError, PlanError; LinearityError for an
    undefined gradient. With `check_replicated` a run may raise JAX's error with the text of a ReplicaError.

    >>> gather = jax.pmap(lambda x: redistribute(x, "n/dp d -> n d | copy(dp)"), "dp")
    >>> gather(jax.numpy.ones((1, 4, 2))).shape  # one block on one device
    (1, 4, 2)
    """
    if ad not in MODES:
        raise XshardError(f"no derivatives ad={ad!r}", hint=f"there are: {', '.join(MODES)}")
    parsed = parse_call(x, expression)
    x, text = as_array(x, parsed.text), parsed.text
    if are_keys(x) and not isinstance(expression, Plan):
        words, wider, keys_of = as_words(x, parsed)
        whole = None if shape is None else (*lengths_of(shape), words.shape[-1])
        options: Any = {"shape": whole, "profile": profile, "check_replicated": check_replicated, "ad": ad}
        return keys_of(redistribute(words, wider, mesh, **options))
    plan = plan_here(x, expression, parsed, mesh, shape, profile)
    return carry_out(plan, with_entry_type(x, plan, text), text, check_replicated, ad)


def carry_out(
    plan: Plan, x: jax.Array, text: str, check_replicated: bool | None = None, ad: Derivatives = "linear"
) -> jax.Array:
    """A block of the type that `with_entry_type` gives it, under `plan.src` -> the block under `plan.dst`."""
    return apply_checked(plan, x, text, ad) if are_checked(check_replicated) else apply(plan, x, ad)


def valid_mask(layout: Layout | str, shape: Sequence[int], mesh: AnyMesh | None = None) -> jax.Array:
    """A mask of this device's block: True at elements of the array, False in its padding.

    shape: the global shape; if it does not divide, blocks are padded at the end of a dim to the largest.
    mesh: by default the one of the context. Raises as `redistribute` does.

    >>> masks = jax.pmap(lambda x: valid_mask("n/dp", (3,)), "dp")
    >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
    [[True, True, True]]
    """
    return valid(sharding_here(layout, shape, mesh))
