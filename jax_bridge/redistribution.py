"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from jax_bridge.autodiff.function import MODES, apply
from jax_bridge.lower.row_tables import valid
from jax_bridge.planning import AnyMesh, as_array, entered, plan_here, sharding_here
from jax_bridge.replicas import apply_checked
from xshard import Layout, Profile, XshardError
from xshard.plans.expression import Expression, sides
from xshard.replicas import are_checked

Derivatives = Literal["linear", "custom_vjp"]


def redistribute(
    x: jax.Array,
    expression: Expression,
    mesh: AnyMesh | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
    check_replicated: bool | None = None,
    ad: Derivatives = "linear",
) -> jax.Array:
    """This device's block under the left layout -> its block under the right one, differentiable.

    expression: `"layout -> layout"`, a pair of layouts, or a plan. mesh: read from the context where
    it is left out. shape: the global shape, inferred where all blocks are as large as this one; an
    uneven block has the shape of the largest. What its padding holds does not matter on the way
    in, and is zero on the way out. profile: the machine it is planned for.
    ad: "linear" has derivatives of every mode. "custom_vjp" has those of reverse mode alone; jaxprs then
    show the collectives of `jax.lax`.
    Axes that the expression does not name are left alone: blocks may differ along them. With
    `check_vma=True` the result is invariant along an axis that only the left side names.

    Raises, while tracing, NotationError, MeshError, ShapeError, DtypeError, PlanError; LinearityError
    for a gradient that is not defined. With `check_replicated`, when it runs, ReplicaError in the text of
    JAX's own error.

    >>> gather = jax.pmap(lambda x: redistribute(x, "n/dp d -> n d | copy(dp)"), "dp")
    >>> gather(jax.numpy.ones((1, 4, 2))).shape  # one block on one device
    (1, 4, 2)
    """
    if ad not in MODES:
        raise XshardError(f"no derivatives ad={ad!r}", hint=f"there are: {', '.join(MODES)}")
    x = as_array(x, expression)
    plan, text = plan_here(x, expression, mesh, shape, profile), sides(expression)[2]
    x = entered(x, plan, text)
    return apply_checked(plan, x, text, ad) if are_checked(check_replicated) else apply(plan, x, ad)


def valid_mask(layout: Layout | str, shape: Sequence[int], mesh: AnyMesh | None = None) -> jax.Array:
    """Which elements of this device's block are the array's and not padding: bool, shaped as the block.

    shape: the global shape; where it does not divide, blocks are padded at the end of a dim to the largest.
    mesh: read from the context where it is left out. Raises as `redistribute` does.

    >>> masks = jax.pmap(lambda x: valid_mask("n/dp", (3,)), "dp")
    >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
    [[True, True, True]]
    """
    return valid(sharding_here(layout, shape, mesh))
