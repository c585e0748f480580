"""A checkpoint of any format: named arrays, of which boxes are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.layout import Layout, Mesh
from xshard.state.files.header import FileError
from xshard.state.files.values import from_json
from xshard.state.names import Names

Box = tuple[slice, ...]  # per dim; steps are > 0


class Stored(Protocol):
    """An array in files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""

    @property
    def dtype(self) -> str:
        """The name of the dtype, such as "bfloat16"."""

    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Fill `out` with a box of the array, as `dtypes.carrier(self.dtype)`; threads may read at once."""


@dataclass(eq=False)
class Checkpoint(Mapping[str, Stored], AbstractContextManager["Checkpoint"]):
    """Arrays by name, and their metadata.

    Attributes:
        arrays: The arrays by stored name.
        layouts: The layouts when they were saved, by stored name.
        mesh: The mesh when they were saved.
        names: Maps names of the program that saved to stored names.
        constants: Leaves that are no arrays, as `values.to_json` has them.
        sums: Checksums of the boxes of an array, by stored name.
        places: The file of each array.
        bytes_read: What `read` has read so far.
    """

    arrays: Mapping[str, Stored]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    mesh: Mesh | None = None
    names: Names | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    sums: Mapping[str, list[tuple[Box, int]]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    _counting: Lock = field(default_factory=Lock, repr=False)

    def __getitem__(self, name: str) -> Stored:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every array."""
        return {name: array.shape for name, array in self.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of every array."""
        return {name: array.dtype for name, array in self.items()}

    def read(self, name: str, box: Box = (), out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read a rectangular region of a stored array, into new memory or into `out`.

        `read("w", (slice(0, 2),))` reads rows 0-1 of w, with all its columns.

        Args:
            name: The stored name.
            box: The region: slices of the first dims. The other dims are read whole.
            out: An array of the region's shape to fill. Its numpy dtype is `dtypes.carrier` of the
                stored one, since numpy has no bfloat16. None: new memory.
        """
        stored = self[name]
        n_given = len(box)
        box = (*box, *map(slice, stored.shape[n_given:]))
        if out is None:
            slices = zip(box, stored.shape, strict=True)
            shape = [len(range(*rows.indices(length))) for rows, length in slices]
            out = np.empty(shape, dtypes.carrier(stored.dtype))
        stored.read(box, out)
        with self._counting:
            self.bytes_read += out.nbytes
        return out

    def readable_constants(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the leaves that are no arrays, without those of DCP that only a pickle could bring back.

        Args:
            arrays: The arrays by stored name, for values with arrays in them.
        """
        constants = {}
        for name in self.constants:
            with suppress(FileError):
                constants[name] = from_json(self.constants[name], name, arrays)
        return constants

    def value(self, name: str, arrays: Mapping[str, Any]) -> Any:
        """Put together what is stored under a name: as one value, or as leaves with longer names.

        {"groups.0.lr": 0.5, "groups.1.lr": 0.1} and the name "groups" -> [{"lr": 0.5}, {"lr": 0.1}]

        Args:
            name: The name.
            arrays: The arrays of the value, by stored name.

        Returns:
            The value; an empty dict if nothing is stored.
        """
        if name in self.constants:
            return from_json(self.constants[name], name, arrays)
        if name in arrays:
            return arrays[name]
        branches: dict[str, None] = {}  # a set with an order
        for leaf in (*self.constants, *arrays):
            if leaf.startswith(f"{name}."):
                key, _, _ = leaf.removeprefix(f"{name}.").partition(".")
                branches[key] = None
        items = {key: self.value(f"{name}.{key}", arrays) for key in branches}
        if items and items.keys() == set(map(str, range(len(items)))):
            return [items[str(i)] for i in range(len(items))]
        return items

    def constant(self, name: str, default: Any) -> Any:
        """Look up a stored value that is no array, such as a step count, or an item inside of one.

        Optimizer states have such values: numbers, texts, and lists or dicts of them.

        Args:
            name: The stored name of the leaf, and the keys of the item behind it.
            default: The result if there is no such leaf or item.

        Examples:
            >>> Checkpoint({}, constants={"groups": [{"lr": 0.5}]}).constant("groups.0.lr", 0.1)
            0.5
        """
        name_parts = name.split(".")
        # The leaf may be stored itself, or within a list or dict. For "groups.0.lr" the stored name
        # may be that, "groups.0", "groups", or "" if the whole tree is one value.
        for n_parts in reversed(range(len(name_parts) + 1)):
            stored_name = ".".join(name_parts[:n_parts])
            if stored_name in self.constants:
                value = from_json(self.constants[stored_name], stored_name, arrays={})
                return _item_at(value, name_parts[n_parts:], default)
        return default

    def close(self) -> None:
        """Let go of the files."""
        self.arrays = {}

    def __exit__(self, *raised: object) -> None:
        self.close()


def _item_at(tree: Any, keys: Sequence[str], default: Any) -> Any:
    """Return an item inside of lists and dicts: keys "0" and "lr" of [{"lr": 0.5}] -> 0.5."""
    try:
        for key in keys:
            tree = tree[int(key) if isinstance(tree, list | tuple) else key]
    except (LookupError, TypeError, ValueError):  # a tree of another form
        return default
    return tree
