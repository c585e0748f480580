"""`redistribute`: blocks on one device from one layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jax_bridge.calls import SPECS, BlockCall, Derivatives
from jax_bridge.mesh.context import AnyMesh
from jax_bridge.trees import leaves_of
from xshard import Layout, Plan, Profile
from xshard.arguments import whole_numbers
from xshard.errors import located
from xshard.plans.expression import Sides


def redistribute(
    x: Any,
    layouts: Any,
    mesh: AnyMesh | None = None,
    *,
    shape: Any = None,
    profile: str | Path | Profile = "auto",
    check_replicated: bool | None = None,
    ad: Derivatives = "linear",
) -> Any:
    """This device's block under the left layout -> its block under the right one, differentiable.

    x: a block, or a pytree of blocks. layouts: `"layout -> layout"`, a pair of layouts, or a plan; for a
    pytree one for all, `xshard.Rules` over the names of leaves, or a pytree prefix with either in the place
    of a branch. mesh: default: the mesh of the context.
    shape: the global shape, for a pytree one for all or a tree of shapes. Default: the numbers of the layout,
    as in `n/sizes(dp,2,3)`, else all blocks are assumed to be equal. An uneven block has the shape of the
    largest: its padding may hold anything on the way in and is zero on the way out.
    profile: the machine to plan for. check_replicated: for debugging, compare the replicas and copies of `x`,
    and of the cotangents in the backward pass. Default: the environment variable XSHARD_CHECK_REPLICATED.
    ad: "linear" supports every mode of differentiation. "custom_vjp" supports reverse mode only, and jaxprs
    show the collectives of `jax.lax`.
    Axes that the layouts do not name are left alone: blocks may differ along them. With `check_vma=True` the
    result is invariant along an axis that only the left side names. Blocks of PRNG keys are moved too, under
    layouts that neither add nor overlap.

    Raises while tracing: NotationError, MeshError, ShapeError, DtypeError, PlanError; LinearityError for an
    undefined gradient; XshardError for layouts that do not fit the pytree. With `check_replicated` a run may
    raise JAX's error with the text of a ReplicaError.

    >>> gather = jax.pmap(lambda x: redistribute(x, "n/dp d -> n d | copy(dp)"), "dp")
    >>> gather(jax.numpy.ones((1, 4, 2))).shape  # one block on one device
    (1, 4, 2)
    """
    options: Any = {"profile": profile, "check_replicated": check_replicated}
    if jax.tree_util.all_leaves([x]):
        return BlockCall.of(layouts, mesh, shape, ad, **options).run(x)
    results = []
    for leaf, sized in zip(leaves_of(layouts, x, is_expression), leaves_of(shape, x, _is_shape), strict=True):
        with located(leaf.place):
            results.append(BlockCall.of(leaf.given, mesh, sized.given, ad, **options).run(leaf.x))
    return jax.tree.unflatten(jax.tree.structure(x), results)


def is_expression(value: Any) -> bool:
    """True for a pair of layouts; False for a pair of expressions, which is a pytree."""
    if isinstance(value, tuple) and len(value) == 2:
        return all(
            isinstance(side, (Layout, *SPECS)) or (isinstance(side, str) and "->" not in side)
            for side in value
        )
    return isinstance(value, (str, Plan, Sides, *SPECS))


def _is_shape(value: Any) -> bool:
    lengths = whole_numbers(value)
    return value is None or (lengths is not None and all(isinstance(n, int) for n in lengths))
