"""A checkpoint: named arrays that lie in a place, any box of which can be read alone.

Decides what a format of files has to offer. Knows no format, no framework and no process.
"""

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
    """An array in a place. dtype: a name of xshard's, as "bfloat16"."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Fill `out` with a part of the array, as `dtypes.carrier(self.dtype)`; threads may read at once."""


@dataclass(eq=False)
class Checkpoint(Mapping[str, Stored]):
    """Arrays by name, and what the place says of them.

    layouts, mesh: how the arrays were cut. names: what made them of the arrays of the program that saved.
    constants: leaves of its tree that are no arrays, by name. sums: by name, checksums of boxes that together
    are the array. places: the file of each. bytes_read: so far, by `read`.
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
        """A box of an array, in new memory or in `out`; it is counted."""
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
        """A leaf that is a constant, or part of one: of a list, or of a dict.

        >>> Checkpoint({}, constants={"groups": [{"lr": 0.5}]}).constant("groups.0.lr", 0.1)
        0.5
        """
        top = next((each for each in self.constants if f"{name}.".startswith(f"{each}.")), None)
        if top is None:
            return default
        found = self.constants[top]
        with suppress(LookupError, TypeError, ValueError):  # a tree of another form
            for key in name[len(top) :].split(".")[1:]:
                found = found[int(key) if isinstance(found, list | tuple) else key]
            return found
        return default

    def close(self) -> None:
        self.arrays = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
