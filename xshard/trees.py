"""Trees of arrays: the names of their leaves, a value for each leaf, and leaves in groups of limited size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from xshard.arguments import shown
from xshard.errors import PlanError, XshardError, located
from xshard.rules import Rules, listed

T = TypeVar("T")
Test = Callable[[Any], bool]


class Leaf(NamedTuple):
    """A leaf of a tree, and the value given for it. name: the keys from the root, with dots between them."""

    name: str
    x: Any
    given: Any

    @property
    def place(self) -> str:
        return place_of(self.name)


def leaf_name(path: Iterable[Any]) -> str:
    """The name of a leaf: the keys of JAX or torch from the root, with dots between them."""
    named = ("key", "idx", "name")
    return ".".join(str(next((getattr(k, a) for a in named if hasattr(k, a)), k)) for k in path)


def place_of(name: str) -> str:
    """The beginning of an error about a leaf; "" for a tree that is one leaf."""
    return f"leaf '{name}'" if name else ""


def named_once(leaves: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Leaves by name. Raises XshardError for two leaves of one name."""
    by_name: dict[str, T] = {}
    for name, x in leaves:
        if name in by_name:
            raise XshardError(f"two leaves are called {name!r}", hint="a key without dots")
        by_name[name] = x
    return by_name


def spread(
    branches: Iterable[tuple[str, Any, Any]],
    named_leaves: Callable[[Any], Iterable[tuple[str, Any]]],
    takes_value: Test = lambda _: True,
) -> list[Leaf]:
    """Every leaf of a tree with its value, by `prefix_branches`; None for leaves that take no value."""
    leaves = []
    for branch, value, tree in branches:
        named = list(named_leaves(tree))
        values = dict.fromkeys((name for name, x in named if takes_value(x)), value)
        if isinstance(value, Rules):
            with located(place_of(branch)):
                values = value.match(list(values))
        for name, x in named:
            whole = ".".join(part for part in (branch, name) if part)
            leaves.append(Leaf(whole, x, values[name] if takes_value(x) else None))
    return leaves


def children(tree: Any) -> dict[Any, Any] | None:
    """The branches of a dict, a list or a tuple, in order; None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    return dict(enumerate(tree)) if isinstance(tree, list | tuple) else None


def prefix_branches(
    given: Any,
    tree: Any,
    is_value: Test,
    what: tuple[str, str],
    *,
    children: Callable[[Any], dict[Any, Any] | None] = children,
    name: str = "",
    error: type[XshardError] = PlanError,
) -> Iterator[tuple[str, Any, Any]]:
    """Name, value or `Rules`, and tree of each branch for which `given` has one; raises `error`. A dict is
    rules for a module or state, unless it has a value for each of its parts.
    """
    parts = children(tree)
    if isinstance(given, Rules) or is_value(given):
        yield name, given, tree
        return
    values = children(given)
    place = f"{what[0]}{f' at {name!r}' if name else ''}"
    if parts is None or values is None:
        reason = f"{place}: one array, but {what[1]} {shown(given)}"
        raise error(reason, hint=f"one of the {what[1]} for each array")
    if isinstance(tree, Mapping) != isinstance(given, Mapping) or parts.keys() != values.keys():
        if isinstance(given, dict) and not isinstance(tree, dict | list | tuple):
            yield name, Rules(given), tree
            return
        reason = f"{place} and {what[1]} differ: {_described(tree, parts)}, and {_described(given, values)}"
        hint = "one for each array, or one for all arrays of a branch; patterns over names: xshard.Rules"
        raise error(reason, hint=hint)
    for key, part in parts.items():
        whole = f"{name}.{key}" if name else str(key)
        yield from prefix_branches(
            values[key], part, is_value, what, children=children, name=whole, error=error
        )


def _described(tree: Any, parts: Mapping[Any, Any]) -> str:
    return (
        f"keys {listed(list(map(repr, parts)))}"
        if isinstance(tree, Mapping)
        else f"{len(parts)} items"
    )


def groups(
    sizes: Sequence[int | Counter[int]], limit: int | None, keys: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Indices of items of one key, in order, in groups of at most `limit` bytes per device, or alone."""
    by_key: dict[Hashable, list[list[int]]] = {}
    filled: dict[Hashable, Counter[int]] = {}
    for i, size in enumerate(sizes):
        key = keys[i] if keys is not None else None
        size = Counter({0: size}) if isinstance(size, int) else size
        total = filled.get(key, Counter()) + size
        if key not in by_key or (limit is not None and max(total.values(), default=0) > limit):
            by_key.setdefault(key, []).append([])
            total = size
        by_key[key][-1].append(i)
        filled[key] = total
    return [group for of_key in by_key.values() for group in of_key]
