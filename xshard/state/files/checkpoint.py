"""A checkpoint of any format: named arrays, boxes that fill the blocks of devices, differences of two."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.runs import Run, Runs, Segment, common_segments, interval, select, unrolled
from xshard.state.names import Names
from xshard.state.relations import PartMapping

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
class Checkpoint(Mapping[str, Stored], AbstractContextManager["Checkpoint"]):
    """Arrays by name, and their metadata.

    layouts, mesh: the shardings when they were saved. names: maps names of the program that saved to stored
    names. constants: other leaves. sums: checksums of the boxes of an array. places: the file of each array.
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
            shape = [
                len(range(*rows.indices(n))) for rows, n in zip(box, stored.shape, strict=True)
            ]
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

    def __exit__(self, *raised: object) -> None:
        self.close()


Rows = tuple[slice, slice]  # of a stored array, and of a block


class BoxPair(NamedTuple):
    """A box of the stored array `name`, and the slices of the same elements in a block. order: dim i of the
    part of the block is dim `order[i]` of the box, with the dim of 1 of a stacked array.
    """

    name: str
    box: Box
    order: tuple[int, ...]
    slices: tuple[slice | None, ...]

    def view(self, block: NDArray[Any]) -> NDArray[Any]:
        """The elements of the block, in the shape of the box."""
        shape = [len(range(s.start, s.stop, s.step or 1)) for s in self.box]
        return block[(*self.slices, ...)].transpose(np.argsort(self.order)).reshape(shape)


def check_whole(sharding: Sharding) -> None:
    """Raise PlanError for a layout with blocks that are not parts of the array: addends, or rows twice."""
    layout = sharding.layout
    if layout.tagged("sum", "mean", "max", "min") or any(dim.overlap for dim in layout.dims):
        hint = "redistribute sums, halos and windows to whole blocks first"
        raise PlanError(f"'{layout}' cannot be in files, which have every element once", hint=hint)


def box_pairs(pieces: Iterable[PartMapping], sharding: Sharding, device: int) -> Iterator[BoxPair]:
    """The boxes of a device's block of an array. pieces: the parts that make the array."""
    held = [sharding.held(d, device) for d in range(len(sharding.shape))]
    for src, dst, order in pieces:
        dims: list[list[Rows]] = []
        for i, j in enumerate(order):
            src_rows = src.rows if j == src.dim else None
            if (
                dst.adds and i == dst.dim
            ):  # one row of the stored array, along a dim that the block lacks
                dims.append(list(_rows((Segment(0, 0, 1),), src_rows)))
            else:
                d = i - 1 if dst.adds and dst.dim is not None and i > dst.dim else i
                dst_rows = (
                    dst.rows if i == dst.dim and not dst.adds else interval(0, sharding.shape[d])
                )
                segments = common_segments(dst_rows, held[d])
                dims.append(list(_rows(segments, None if src.adds else src_rows)))
        for rows in itertools.product(*dims):
            stored = {j: of_src for j, (of_src, _) in zip(order, rows, strict=True)}
            box = tuple(stored[j] for j in sorted(stored) if not (src.adds and j == src.dim))
            slices = (
                None if dst.adds and i == dst.dim else of_dst for i, (_, of_dst) in enumerate(rows)
            )
            yield BoxPair(src.name, box, order, tuple(slices))


def _rows(segments: Iterable[Segment], part: Runs | None) -> Iterator[Rows]:
    """Rows of a part in a block, as slices of the stored array and of the block. part: its stored rows."""
    runs: list[tuple[int, int, int]] = []  # start in the stored array, start in the block, length
    for start, dst, n in segments:
        for run in unrolled(select(part, Run(start, n)) if part is not None else (Run(start, n),)):
            runs.append((run.start, dst, run.length))
            dst += run.length
    i = 0
    while i < len(runs):
        (a, b, n), stop = runs[i], i + 1
        step = (runs[stop][0] - a, runs[stop][1] - b) if stop < len(runs) else (0, 0)
        if n == 1 and min(step) > 0:  # single rows, evenly apart on both sides, are one slice
            while stop < len(runs) and runs[stop] == (
                a + (stop - i) * step[0],
                b + (stop - i) * step[1],
                1,
            ):
                stop += 1
        if stop - i > 1:
            last = stop - i - 1
            yield (
                slice(a, a + last * step[0] + 1, step[0]),
                slice(b, b + last * step[1] + 1, step[1]),
            )
        else:
            yield slice(a, a + n), slice(b, b + n)
        i = stop


def diff_checkpoints(
    a: Checkpoint, b: Checkpoint, before: Checkpoint | None = None
) -> Iterator[tuple[str, str]]:
    """The arrays of `b` that are not as in `a`, and how. before: an older state of `b`, for lost updates."""
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield name, f"only in the {'first' if name in a else 'second'}"
        elif a[name].dtype != b[name].dtype:
            yield name, f"{a[name].dtype} and {b[name].dtype}"
        elif not np.array_equal(x := _bits(a, name), y := _bits(b, name)):
            known = before is not None and name in before and before[name].dtype == b[name].dtype
            old = known and before is not None and np.array_equal(_bits(before, name), y)
            yield name, "not updated" if old else _how(x, y)


def _bits(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    values = checkpoint.read(name)
    return values.view(f"u{values.itemsize}")


def _how(x: NDArray[Any], y: NDArray[Any]) -> str:
    if x.ndim == 2 and np.array_equal(x.T, y):
        return "transposed"
    if x.shape != y.shape:
        return f"shape {x.shape} and {y.shape}"
    for d, n in enumerate(x.shape):
        if n % 2 == 0 and np.array_equal(np.roll(x, n // 2, d), y):
            return f"the halves of dim {d} are swapped, as gate and up"
    for d in range(min(x.ndim, 2)):
        if sorted(_checksums(x, d)) == sorted(_checksums(y, d)):
            return f"the rows of dim {d} are in another order"
    return f"{np.count_nonzero(x != y)} of {x.size} elements differ"


def _checksums(x: NDArray[Any], d: int) -> Iterator[int]:
    return (zlib.crc32(np.ascontiguousarray(row).data) for row in np.moveaxis(x, d, 0))
