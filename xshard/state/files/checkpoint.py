"""A checkpoint of any format: named arrays; any box of an array can be read alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.layout import Layout, Mesh
from xshard.state.names import Names

Box = tuple[slice, ...]  # per dim; steps are > 0


class Stored(Protocol):
    """An array in files. dtype: a name as "bfloat16"."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Fill `out` with a box of the array, as `dtypes.carrier(self.dtype)`; threads may read at once."""


@dataclass(eq=False)
class Checkpoint(Mapping[str, Stored]):
    """Arrays by name, and their metadata.

    layouts, mesh: the shardings when they were saved. names: maps the names of the program that saved to
    stored names. constants: other leaves by name. sums: by name, checksums of boxes that together are the
    array. places: the file of each array. bytes_read: bytes read so far by `read`.
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
        return {name: array.shape for name, array in self.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: array.dtype for name, array in self.items()}

    def read(self, name: str, box: Box = (), out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read a box of an array, into new memory or into `out`."""
        stored = self[name]
        box = (*box, *map(slice, stored.shape[len(box) :]))
        if out is None:
            shape = [len(range(*rows.indices(n))) for rows, n in zip(box, stored.shape, strict=True)]
            out = np.empty(shape, dtypes.carrier(stored.dtype))
        stored.read(box, out)
        with self._counting:
            self.bytes_read += out.nbytes
        return out

    def constant(self, name: str, default: Any) -> Any:
        """A constant leaf, or an item of one that is a list or a dict.

        >>> Checkpoint({}, constants={"groups": [{"lr": 0.5}]}).constant("groups.0.lr", 0.1)
        0.5
        """
        top = next((known for known in self.constants if f"{name}.".startswith(f"{known}.")), None)
        if top is None:
            return default
        value = self.constants[top]
        with suppress(LookupError, TypeError, ValueError):  # a tree of another form
            for key in name[len(top) :].split(".")[1:]:
                value = value[int(key) if isinstance(value, list | tuple) else key]
            return value
        return default

    def close(self) -> None:
        self.arrays = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
