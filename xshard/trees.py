"""Trees of arrays: the names of their leaves, a value for each leaf, and leaves in groups of limited size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from xshard.errors import PlanError, XshardError, located
from xshard.rules import Rules, listed_names
from xshard.signatures import short_repr

T = TypeVar("T")
Test = Callable[[Any], bool]


class Leaf(NamedTuple):
    """A leaf of a tree, and the value given for it.

    Attributes:
        name: The keys from the root, with dots between them; "" for a tree that is one leaf.
        x: The leaf, as an array.
        value: The value for it, as a layout.
    """

    name: str
    x: Any
    value: Any

    @property
    def place(self) -> str:
        """The beginning of an error about the leaf."""
        return place_of(self.name)


def leaf_name(path: Iterable[Any]) -> str:
    """Return the name of a leaf: keys of JAX or torch from the root -> `layers.0.weight`."""
    return ".".join(str(_key_of(step)) for step in path)


def _key_of(step: Any) -> Any:
    """Return the key of one step of a path: of a dict, of a list, or of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return step


def place_of(name: str) -> str:
    """Return the beginning of an error about a leaf; "" for a tree that is one leaf."""
    return f"leaf '{name}'" if name else ""


def always(x: Any) -> bool:
    """Return True: every leaf takes a value."""
    return True


def named_once(leaves: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return leaves by name.

    Raises:
        XshardError: Two leaves have one name.
    """
    by_name = {}
    for name, x in leaves:
        if name in by_name:
            raise XshardError(f"two leaves are called {name!r}", hint="a key without dots")
        by_name[name] = x
    return by_name


# ---- a value for each leaf


def leaves_with_values(
    branches: Iterable[tuple[str, Any, Any]],
    named_leaves: Callable[[Any], Iterable[tuple[str, Any]]],
    takes_value: Test = always,
) -> list[Leaf]:
    """List every leaf of a tree with the value given for it, such as its layout.

    Of {"a": {"w": x, "b": y}} with one value v for branch a: leaves "a.w" and "a.b", both with v. A
    branch with `Rules` instead, patterns over names, has the value of the pattern that fits.

    Args:
        branches: (name, value or `Rules`, tree) of each branch, as `prefix_branches` yields them.
        named_leaves: A function that lists the leaves of a tree by name.
        takes_value: Whether a leaf takes a value; others get None. By default all do.
    """
    leaves = []
    for branch, value, tree in branches:
        named = list(named_leaves(tree))  # (name, leaf)
        names = dict.fromkeys(name for name, x in named if takes_value(x))
        if isinstance(value, Rules):
            with located(place_of(branch)):
                value_of = value.match(list(names))
        else:
            value_of = dict.fromkeys(names, value)
        for name, x in named:
            leaf_value = value_of[name] if takes_value(x) else None
            leaves.append(Leaf(joined(branch, name), x, leaf_value))
    return leaves


def joined(branch: str, name: str) -> str:
    """Return the name of a leaf from the root: "up", "w" -> "up.w"; either part may be empty."""
    if not branch or not name:
        return branch + name
    return f"{branch}.{name}"


def children(tree: Any) -> dict[Any, Any] | None:
    """Return the branches of a dict, a list or a tuple, in order; None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return None


def is_shape(value: Any) -> bool:
    """Return whether a value is the shape of one array: None, a number, or a flat list of numbers."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list | tuple):
        return True
    return not any(isinstance(length, Mapping | list | tuple | None) for length in value)


def prefix_branches(
    value_tree: Any,
    tree: Any,
    is_value: Test,
    nouns: tuple[str, str],
    *,
    children: Callable[[Any], dict[Any, Any] | None] = children,
    name: str = "",
    error: type[XshardError] = PlanError,
) -> Iterator[tuple[str, Any, Any]]:
    """Match values with the branches of a tree that each one is for.

    For the tree {"a": {"w": x, "b": y}, "c": z} and values {"a": 1, "c": 2}: yields
    ("a", 1, {"w": x, "b": y}) and ("c", 2, z). For the value 3: ("", 3, the tree).

    Args:
        value_tree: The values: one, or a tree of them that ends at branches of `tree`. For a module or
            another object with named parts, a dict that is not nested like it is taken for patterns
            over names: then the value is a `Rules`.
        tree: The tree.
        is_value: Whether something is one value.
        nouns: What errors call the tree and its values, such as ("tensors", "layouts").
        children: A function that returns the branches of a tree by key, or None for a leaf.
        name: The name of the tree in a larger one.
        error: The class of errors.

    Yields:
        (name of a branch, its value, the branch).
    """
    # Asked before `value_tree` is looked into: a value may be a tuple itself, as a pair of layouts is.
    if isinstance(value_tree, Rules) or is_value(value_tree):
        yield name, value_tree, tree
        return
    branches = children(tree)
    value_branches = children(value_tree)
    tree_noun, values_noun = nouns
    tree_text = f"{tree_noun} at {name!r}" if name else tree_noun
    if branches is None or value_branches is None:
        reason = f"{tree_text}: one array, but {values_noun} {short_repr(value_tree)}"
        raise error(reason, hint="one for each array")
    are_alike = isinstance(tree, Mapping) == isinstance(value_tree, Mapping)
    if are_alike and branches.keys() == value_branches.keys():
        for key, subtree in branches.items():
            subtree_name = f"{name}.{key}" if name else str(key)
            yield from prefix_branches(
                value_branches[key],
                subtree,
                is_value,
                nouns,
                children=children,
                name=subtree_name,
                error=error,
            )
    elif isinstance(value_tree, dict) and not isinstance(tree, dict | list | tuple):
        # The tree is a module or another object whose parts have names, and the dict is not nested
        # like it: its keys are patterns over these names.
        yield name, Rules(value_tree), tree
    else:
        difference = f"{_describe(tree, branches)}, and {_describe(value_tree, value_branches)}"
        reason = f"{tree_text} and {values_noun} differ: {difference}"
        hint = "one for each array, or one for all arrays of a branch; patterns over names: xshard.Rules"
        raise error(reason, hint=hint)


def _describe(tree: Any, branches: Mapping[Any, Any]) -> str:
    """Return what an error says of the branches of a tree: their keys, or how many they are."""
    if isinstance(tree, Mapping):
        return f"keys {listed_names(list(map(repr, branches)))}"
    return f"{len(branches)} items"


# ---- groups of limited size


def group_by_bytes(
    sizes: Sequence[int | Counter[int]], limit: int | None, keys: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Split items into groups of at most `limit` bytes on any device, for one message each.

    Sizes 3, 3, 9 with a limit of 6 -> [[0, 1], [2]]: an item that is larger than the limit is
    alone. Items stay in order, and only those with equal keys, such as a dtype, share a group.

    Args:
        sizes: The bytes of each item, or its bytes by device.
        limit: The most bytes of a group on any device; None for no limit.
        keys: The key of each item; only items with equal keys share a group.

    Returns:
        The numbers of the items of each group.
    """
    items_of_key: dict[Hashable, list[int]] = {}
    for i in range(len(sizes)):
        key = None if keys is None else keys[i]
        items_of_key.setdefault(key, []).append(i)
    groups = []
    for items in items_of_key.values():
        groups += _split_at_limit(items, sizes, limit)
    return groups


def _split_at_limit(
    items: Sequence[int], sizes: Sequence[int | Counter[int]], limit: int | None
) -> list[list[int]]:
    """Split items into groups of consecutive ones, each with as many as the limit on bytes allows.

    Items 0, 1, 2 of 3, 3, 9 bytes with a limit of 6 -> [[0, 1], [2]]: the last is alone, though it
    is larger than the limit.

    Args:
        items: The numbers of the items.
        sizes: The bytes of each item of all, or its bytes by device.
        limit: The most bytes of a group on any device; None for no limit.
    """
    groups: list[list[int]] = []
    group_bytes = Counter[int]()  # of the last group, by device
    for i in items:
        size = sizes[i]
        # One number is for all devices alike: device 0 stands for them.
        item_bytes = Counter({0: size}) if isinstance(size, int) else size
        group_bytes = group_bytes + item_bytes
        is_too_large = limit is not None and max(group_bytes.values(), default=0) > limit
        if not groups or is_too_large:
            groups.append([])
            group_bytes = item_bytes
        groups[-1].append(i)
    return groups
