"""Pytrees of JAX: their leaves by name, each with the layout or the expression given for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xshard import Layout, Plan, XshardError
from xshard.plans.expression import Sides
from xshard.trees import Leaf, leaf_name, prefix_branches, spread


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

    def is_one(value: Any) -> bool:
        return is_value(value) or _children(value) is None  # others raise as layouts

    what = ("the arrays", "the layouts")
    branches = prefix_branches(given, tree, is_one, what, children=_children, error=XshardError)
    return spread(branches, lambda branch: _named_leaves(branch, is_leaf), takes_value)


def _children(tree: Any) -> dict[Any, Any] | None:
    """The branches of a pytree by name; None for a leaf."""
    parts = jax.tree_util.tree_flatten_with_path(tree, lambda x: x is not tree)[0]
    return None if parts and not parts[0][0] else {leaf_name(path): x for path, x in parts}


def array_leaves(given: Any, tree: Any) -> list[Leaf]:
    """`leaves_of` a tree in which only arrays have layouts."""
    return leaves_of(given, tree, takes_value=is_array)


def _named_leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Leaves by name. A variable of flax nnx, or a box of linen, has the name of what it is."""
    named = jax.tree_util.tree_flatten_with_path(tree, lambda x: _is_box(x) or is_leaf(x))[0]
    return [
        (leaf_name(path), x) for path, box in named for x in jax.tree.leaves(box, is_leaf=is_leaf)
    ]


def _is_box(x: Any) -> bool:
    flax_classes = (
        kind.__name__ for kind in type(x).__mro__ if kind.__module__.startswith("flax.")
    )
    return any(name in ("Variable", "AxisMetadata") for name in flax_classes)
