"""Arguments and results as trees: arrays in dicts, lists and tuples, nested at will."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from xshard.errors import XshardError
from xshard.trees import children, prefix_branches

Tree = Any  # a leaf, or a dict, list or tuple of trees; None is a tree without leaves


class StructureError(XshardError):
    """Trees that should have the same leaves, but do not."""


def leaves(tree: Tree, name: str = "") -> dict[str, Any]:
    """Every leaf by its place, in order; the keys of a dict are sorted, as in JAX.

    >>> leaves({"w": 1, "b": (2, 3)}, "x")
    {"x['b'][0]": 2, "x['b'][1]": 3, "x['w']": 1}
    """

    def walk(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
        branches = _sorted_children(tree)
        if branches is not None:
            for key, branch in branches.items():
                yield from walk(branch, f"{name}[{key!r}]")
        elif tree is not None:
            yield name, tree

    return dict(walk(tree, name))


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `function` applied to every leaf.

    >>> mapped(str, {"w": 1, "b": (2, None)})
    {'b': ('2', None), 'w': '1'}
    """
    branches = _sorted_children(tree)
    if branches is None:
        return None if tree is None else function(tree)
    parts = {key: mapped(function, branch) for key, branch in branches.items()}
    if isinstance(tree, dict):
        return parts
    return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(parts.values())


def numbered(tree: Tree) -> Tree:
    """The same tree with leaves 0, 1, 2, ... in the order of `leaves`."""
    numbers = iter(range(len(leaves(tree))))
    return mapped(lambda _: next(numbers), tree)


def broadcast_prefix(prefix: Tree, tree: Tree, name: str = "") -> list[Any]:
    """One leaf of `prefix` for every leaf of `tree`: a leaf in the place of a branch stands for all of it.

    >>> broadcast_prefix(("a", "b"), (1, {"w": 2, "v": 3}))
    ['a', 'b', 'b']
    """
    branches = prefix_branches(
        prefix,
        tree,
        lambda x: _sorted_children(x) is None,
        (name, "layouts"),
        children=_sorted_children,
        error=StructureError,
    )
    return [value for _, value, branch in branches for _ in leaves(branch)]


def _sorted_children(tree: Tree) -> dict[Any, Any] | None:
    branches = children(tree)
    if isinstance(tree, dict):
        return {key: tree[key] for key in sorted(tree, key=str)}
    return branches
