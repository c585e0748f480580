"""Leaves of pytrees by name, and what is said of each: the same for all, by rules, or in a tree.

Decides the names of leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from xshard import Layout, Plan, Rules, XshardError
from xshard.errors import located
from xshard.plans.expression import Sides
from xshard.trees import leaf_name, place_of

Test = Callable[[Any], bool]


class Leaf(NamedTuple):
    """A leaf of a tree, and what is said of it; its name is its place in the whole tree."""

    name: str
    x: Any
    said: Any

    @property
    def place(self) -> str:
        return place_of(self.name)


def is_array(x: Any) -> bool:
    """True for an array of any framework, and what looks like one; False for numbers and functions."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_layout(said: Any) -> bool:
    """True for one layout or expression; a pair is a tree. None is said of what is no array."""
    return said is None or isinstance(said, str | Layout | Plan | Sides)


def of_each(
    said: Any, tree: Any, is_one: Test, *, is_leaf: Test | None = None, has_rule: Test = lambda _: True
) -> list[Leaf]:
    """Every leaf of a tree with what is said of it, in JAX's order.

    said: one thing for all leaves, rules, or a pytree prefix with either in the place of a branch, whose
    names then count from there. is_one: whether something is what can be said. has_rule: whether anything is
    said of a leaf; of others it is None.
    Raises XshardError if the prefix has other branches, and as `Rules.match` does.

    >>> [leaf[:2] for leaf in of_each("n", {"w": 1, "b": [2]}, lambda x: x == "n")]
    [('b.0', 2), ('w', 1)]
    """
    structure: Any
    parts, structure = jax.tree_util.tree_flatten_with_path(said, lambda x: isinstance(x, Rules) or is_one(x))
    try:
        branches = structure.flatten_up_to(tree)
    except ValueError as error:
        raise XshardError(
            f"the expressions do not fit the arrays: {error}",
            hint="pass one for all arrays, or a pytree prefix of the arrays with one for each; rules over "
            "names are an xshard.Rules",
        ) from None
    found = []
    for (path, one), branch in zip(parts, branches, strict=True):
        leaves = _named(branch, is_leaf)
        said_of = dict.fromkeys((name for name, x in leaves if has_rule(x)), one)
        if isinstance(one, Rules):
            with located(place_of(leaf_name(path))):
                said_of = one.match(list(said_of))
        for name, x in leaves:
            whole = ".".join(part for part in (leaf_name(path), name) if part)
            found.append(Leaf(whole, x, said_of[name] if has_rule(x) else None))
    return found


def _named(tree: Any, is_leaf: Test | None) -> list[tuple[str, Any]]:
    """Leaves by name. A variable of flax nnx, or a box of linen, has the name of what it is."""

    def is_named(x: Any) -> bool:
        return _is_box(x) or (is_leaf is not None and is_leaf(x))

    whole = jax.tree_util.tree_flatten_with_path(tree, is_named)[0]
    return [(leaf_name(path), x) for path, box in whole for x in jax.tree.leaves(box, is_leaf=is_leaf)]


def _is_box(x: Any) -> bool:
    own = (kind.__name__ for kind in type(x).__mro__ if kind.__module__.startswith("flax."))
    return any(name in ("Variable", "AxisMetadata") for name in own)
