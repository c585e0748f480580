"""Arguments and results as trees: arrays in dicts, lists and tuples, nested at will.

Decides what a leaf is called and in which order leaves come. Knows no arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from xshard.errors import XshardError

Tree = Any  # a leaf, or a dict, list or tuple of trees; None is a tree without leaves


class StructureError(XshardError):
    """Trees that should have the same leaves, but do not."""


def leaves(tree: Tree, name: str = "") -> dict[str, Any]:
    """Every leaf by its place, in order; the keys of a dict are sorted, as in JAX.

    >>> leaves({"w": 1, "b": (2, 3)}, "x")
    {"x['b'][0]": 2, "x['b'][1]": 3, "x['w']": 1}
    """
    return dict(_walk(tree, name))


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `function` applied to every leaf.

    >>> mapped(str, {"w": 1, "b": (2, None)})
    {'b': ('2', None), 'w': '1'}
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: mapped(function, tree[key]) for key in _keys(tree)}
    if isinstance(tree, list):
        return [mapped(function, part) for part in tree]
    if isinstance(tree, tuple):
        parts = [mapped(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return function(tree)


def numbered(tree: Tree) -> Tree:
    """The same tree with leaves 0, 1, 2, ... in the order of `leaves`."""
    numbers = iter(range(len(leaves(tree))))
    return mapped(lambda _: next(numbers), tree)


def broadcast_prefix(prefix: Tree, tree: Tree, name: str = "") -> list[Any]:
    """One leaf of `prefix` for every leaf of `tree`: a leaf in the place of a branch stands for all of it.

    Raises StructureError if the prefix has other branches than the tree.

    >>> broadcast_prefix(("a", "b"), (1, {"w": 2, "v": 3}))
    ['a', 'b', 'b']
    """
    if not isinstance(prefix, dict | list | tuple):
        return [prefix] * len(leaves(tree))
    if not isinstance(tree, dict | list | tuple):
        raise StructureError(f"{name or 'it'} is one array, its layouts are {mapped(str, prefix)!r}")
    keys = _keys(tree) if isinstance(tree, dict) else range(len(tree))
    given = _keys(prefix) if isinstance(prefix, dict) else range(len(prefix))
    if isinstance(tree, dict) != isinstance(prefix, dict) or list(keys) != list(given):
        raise StructureError(
            f"{name or 'it'} has {_described(tree)}, its layouts have {_described(prefix)}",
            hint="one layout per array, or one for all that a branch holds",
        )
    return [leaf for key in keys for leaf in broadcast_prefix(prefix[key], tree[key], f"{name}[{key!r}]")]


def _walk(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key in _keys(tree):
            yield from _walk(tree[key], f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            yield from _walk(part, f"{name}[{i}]")
    elif tree is not None:
        yield name, tree


def _keys(tree: dict[Any, Any]) -> list[Any]:
    return sorted(tree, key=str)


def _described(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"keys {', '.join(map(repr, _keys(tree)))}"
    return f"{len(tree)} parts"
