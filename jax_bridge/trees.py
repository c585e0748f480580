"""Pytrees of JAX: their leaves by name, each with the layout or the expression given for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from xshard import Layout, Plan, XshardError
from xshard.plans.expression import Sides
from xshard.trees import Leaf, always, leaf_name, leaves_with_values, prefix_branches


def is_array(x: Any) -> bool:
    """Return whether x is an array of any framework, or its type or shape.

    Not for numbers and functions.
    """
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_layout(value: Any) -> bool:
    """Return whether a value is one layout or expression, or None for other leaves.

    A pair is a tree.
    """
    return value is None or isinstance(value, str | Layout | Plan | Sides)


def never(x: Any) -> bool:
    """Count no inner node of a pytree as a leaf, or as a value: a test that is always false."""
    return False


def leaves_with_given_values(
    given: Any,
    tree: Any,
    is_value: Callable[[Any], bool] = is_layout,
    *,
    is_leaf: Callable[[Any], bool] = never,
    takes_value: Callable[[Any], bool] = always,
) -> list[Leaf]:
    """List the leaves of a pytree by name, each with the layout (or other value) given for it.

    Of {"w": x, "b": [y]} with the layout "n" for all: ("b.0", y, "n") and ("w", x, "n"), in JAX's
    order.

    Args:
        given: One value for all leaves; or `Rules`, patterns over the leaves' names; or a pytree
            prefix of these, as {"w": "n d", "b": "d"}. Patterns in it count from their place.
        tree: The tree.
        is_value: A test for one value, as opposed to a tree of values.
        is_leaf: A test for inner nodes that count as leaves.
        takes_value: A test for leaves that take a value; others get None. By default all do.

    Returns:
        The leaves.

    Raises:
        XshardError: The prefix has other branches, or as `Rules.match` raises it.

    Examples:
        >>> [leaf[:2] for leaf in leaves_with_given_values("n", {"w": 1, "b": [2]})]
        [('b.0', 2), ('w', 1)]
    """

    def is_one_value(value: Any) -> bool:
        # What is neither a value nor a tree raises later, when it is read as a layout.
        return is_value(value) or _children(value) is None

    names_in_errors = ("the arrays", "the layouts")
    branches = prefix_branches(
        given, tree, is_one_value, names_in_errors, children=_children, error=XshardError
    )
    return leaves_with_values(branches, partial(_named_leaves, is_leaf=is_leaf), takes_value)


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return the branches of a pytree by name; None for a leaf."""
    # All that is below the root counts as a leaf: one level of branches.
    children, _ = jax.tree_util.tree_flatten_with_path(tree, lambda x: x is not tree)
    is_leaf = bool(children) and not children[0][0]  # its path is empty
    return None if is_leaf else {leaf_name(path): child for path, child in children}


def array_leaves(given: Any, tree: Any) -> list[Leaf]:
    """List the leaves of a tree in which only arrays have layouts."""
    return leaves_with_given_values(given, tree, takes_value=is_array)


def _named_leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """List the leaves of a pytree with their names: {"up": [x]} -> [("up.0", x)].

    A variable of flax nnx, or a box of linen, is a pytree around one array: it gives the array its
    own name, without ".value".
    """

    def ends_path(x: Any) -> bool:
        return _is_box(x) or is_leaf(x)

    paths_and_boxes, _ = jax.tree_util.tree_flatten_with_path(tree, ends_path)
    named: list[tuple[str, Any]] = []
    for path, box in paths_and_boxes:
        name = leaf_name(path)
        named += [(name, leaf) for leaf in jax.tree.leaves(box, is_leaf=is_leaf)]
    return named


def _is_box(x: Any) -> bool:
    """Return whether x is a variable of flax nnx or a box of flax linen, without importing flax."""
    for base in type(x).__mro__:
        if base.__module__.startswith("flax.") and base.__name__ in ("Variable", "AxisMetadata"):
            return True
    return False
