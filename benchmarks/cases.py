"""The cases: redistributions from the test suites and issues of other projects.

The files name the source of every case; the scaled set has the same moves at the sizes of real tensors (even,
bf16, 2^28 elements and more).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import xshard as xs
from xshard import dtypes
from xshard.notation.parser import Dim, Shard

DATA = Path(__file__).parents[1] / "tests" / "data"
FILES = {"public": "reshard.json", "scaled": "reshard_large.json"}


@dataclass(frozen=True)
class Case:
    """A move of an array of global `shape` on a mesh."""

    name: str
    mesh: xs.Mesh
    shape: tuple[int, ...]
    dtype: str
    src: xs.Layout
    dst: xs.Layout

    @property
    def is_partial(self) -> bool:
        """Whether either end holds partial sums."""
        return bool(self.src.tags or self.dst.tags)

    @property
    def expression(self) -> str:
        return f"{self.src} -> {self.dst}"

    @property
    def shardings(self) -> tuple[xs.Sharding, xs.Sharding]:
        return tuple(xs.Sharding(end, self.mesh, self.shape) for end in (self.src, self.dst))

    @cached_property
    def is_even(self) -> bool:
        return all(sharding.is_even for sharding in self.shardings)

    def plan(self, profile: xs.Profile, memory_limit: int | None = None) -> xs.Plan:
        """Our plan."""
        move = self.src, self.dst
        return xs.plan(
            move, self.mesh, self.shape, self.dtype, profile=profile, memory_limit=memory_limit
        )

    def facts(self) -> dict[str, Any]:
        """The case in a row of a JSON file."""
        mesh = dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))
        row = {"case": self.name, "expression": self.expression, "mesh": mesh}
        return row | {"shape": self.shape, "dtype": self.dtype}


def load(which: str) -> tuple[Case, ...]:
    """The cases of a set: "public" or "scaled"."""
    return tuple(
        Case(
            entry["name"],
            xs.Mesh(entry["mesh"]),
            tuple(entry["shape"]),
            entry["dtype"],
            layout_of(entry["src"], entry["src_partial"]),
            layout_of(entry["dst"], entry["dst_partial"]),
        )
        for entry in json.loads((DATA / FILES[which]).read_text())
    )


def scaled(case: Case, least_bytes: int) -> Case:
    """The case with its shortest dims doubled until the array has `least_bytes`, or its longest halved."""
    shape = list(case.shape)
    itemsize = dtypes.itemsize(case.dtype)
    while math.prod(shape) * itemsize < least_bytes:
        shape[shape.index(min(shape))] *= 2
    while math.prod(shape) * itemsize >= 2 * least_bytes:
        shape[shape.index(max(shape))] //= 2
    return replace(case, shape=tuple(shape))


def layout_of(cuts: Iterable[Sequence[str]], sums: Sequence[str] = ()) -> xs.Layout:
    """Axes that cut every dim, outermost first, and axes that hold addends -> a layout of dims d0, d1, ..."""
    dims = tuple(
        Dim(f"d{i}", tuple(Shard((axis,)) for axis in axes)) for i, axes in enumerate(cuts)
    )
    return xs.Layout(dims, (("sum", tuple(sums)),))


def is_in_order(layout: xs.Layout, mesh: xs.Mesh) -> bool:
    """Whether the axes that cut a dim come in the mesh's order."""
    return all(list(dim.axes) == sorted(dim.axes, key=mesh.position) for dim in layout.dims)
