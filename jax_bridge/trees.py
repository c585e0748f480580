"""Pytrees of JAX: their leaves by name, each with the layout or the expression given for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xshard import Layout, Plan, Rules, XshardError
from xshard.plans.expression import Sides
from xshard.trees import Leaf, leaf_name, spread


def is_array(x: Any) -> bool:
    """True for an array of any framework, and for its type or shape; False for numbers and functions."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_layout(value: Any) -> bool:
    """True for one layout or expression, or None for other leaves than arrays; a pair is a tree."""
    return value is None or isinstance(value, str | Layout | Plan | Sides)


def leaves_of(
    given: Any,
    tree: Any,
    is_value: Callable[[Any], bool] = is_layout,
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
    takes_value: Callable[[Any], bool] = lambda _: True,
) -> list[Leaf]:
    """Every leaf of a tree with the value given for it, in JAX's order.

    given: one value for all leaves, rules, or a pytree prefix of these; names then count from there.
    is_value: True for one value. takes_value: False for leaves with the value None.
    Raises XshardError if the prefix has other branches, and as `Rules.match` does.

    >>> [leaf[:2] for leaf in leaves_of("n", {"w": 1, "b": [2]})]
    [('b.0', 2), ('w', 1)]
    """
    structure: Any
    values, structure = jax.tree_util.tree_flatten_with_path(
        given, lambda x: isinstance(x, Rules) or is_value(x)
    )
    try:
        branches = structure.flatten_up_to(tree)
    except ValueError as error:
        reason = f"the expressions do not fit the arrays: {error}"
        hint = "pass one for all arrays, or a pytree prefix of the arrays; rules over names: xshard.Rules"
        raise XshardError(reason, hint=hint) from None
    parts = ((leaf_name(path), value, branch) for (path, value), branch in zip(values, branches, strict=True))
    return spread(parts, lambda branch: _named_leaves(branch, is_leaf), takes_value)


def array_leaves(given: Any, tree: Any) -> list[Leaf]:
    """`leaves_of` a tree in which only arrays have layouts."""
    return leaves_of(given, tree, takes_value=is_array)


def _named_leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Leaves by name. A variable of flax nnx, or a box of linen, has the name of what it is."""
    named = jax.tree_util.tree_flatten_with_path(tree, lambda x: _is_box(x) or is_leaf(x))[0]
    return [(leaf_name(path), x) for path, box in named for x in jax.tree.leaves(box, is_leaf=is_leaf)]


def _is_box(x: Any) -> bool:
    flax_classes = (kind.__name__ for kind in type(x).__mro__ if kind.__module__.startswith("flax."))
    return any(name in ("Variable", "AxisMetadata") for name in flax_classes)
