"""The plan of a save: assigns arrays to files and blocks to writers; every element is written once.

It depends on names, layouts and shapes only, so all processes agree.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from xshard import dtypes
from xshard.arguments import limit_of
from xshard.errors import XshardError, located
from xshard.layout import Sharding
from xshard.state.files.boxes import BoxPair, box_pairs, check_whole
from xshard.state.files.folder import KEY
from xshard.state.files.header import write_header
from xshard.state.names import SAME, Names, names_to_json
from xshard.state.relations import PartMapping, TargetArray
from xshard.trees import groups


class Source(NamedTuple):
    """An array of the program: its sharding, its dtype, and the process of every device of its mesh."""

    sharding: Sharding
    dtype: str
    processes: Sequence[int]


class Write(NamedTuple):
    """A device's block of an array, and the boxes of stored arrays that it fills."""

    name: str
    device: int
    pairs: tuple[BoxPair, ...]


@dataclass(frozen=True)
class ShardFile:
    """A file: its name, its header, and the offset of every array's bytes."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Saving:
    """The plan of a save. sources: the arrays of the program. arrays: the stored arrays."""

    sources: Mapping[str, Source]
    arrays: Mapping[str, TargetArray]
    shards: tuple[ShardFile, ...]
    metadata: Mapping[str, Any]
    _owned: Mapping[int, list[tuple[str, int]]] = field(repr=False)

    def writes(self, process: int) -> Iterator[Write]:
        """The blocks that one process writes."""
        for name, device in self._owned.get(process, ()):
            pairs = box_pairs(self._pieces[name], self.sources[name].sharding, device)
            yield Write(name, device, tuple(pairs))

    @cached_property
    def _pieces(self) -> dict[str, list[PartMapping]]:
        """The parts of every source in stored arrays."""
        pieces: dict[str, list[PartMapping]] = {name: [] for name in self.sources}
        for array in self.arrays.values():
            for piece in array.pieces:
                pieces[piece.src.name].append(piece.inverse)
        return pieces

    @cached_property
    def digest(self) -> str:
        """A checksum of the plan, equal on processes that plan the same save."""
        content = [*((s.name, s.header) for s in self.shards), self.metadata, self._owned]
        return f"{zlib.crc32(repr(content).encode()):08x}"


def plan_save(
    sources: Mapping[str, Source],
    names: Names | None = None,
    *,
    shard_bytes: int | str | None = "5GiB",
    constants: Mapping[str, Any] | None = None,
) -> Saving:
    """Plan a save of the arrays of a program.

    names: maps this program's names to stored names. shard_bytes: the most bytes of a file, unless one array
    is larger; None: no limit. constants: the other leaves, as JSON. Raises PlanError for sums and halos,
    DtypeError for dtypes that safetensors lacks.

    >>> from xshard import Layout, Mesh
    >>> sharded = Source(Sharding(Layout("o/tp i"), Mesh(dp=2, tp=2), (8, 4)), "float32", range(4))
    >>> saving = plan_save({"w": sharded})
    >>> [[(write.device, write.pairs[0].box[0]) for write in saving.writes(process)] for process in range(4)]
    [[(0, slice(0, 4, None))], [(1, slice(4, 8, None))], [], []]
    """
    for name, source in sources.items():
        with located(name):
            check_whole(source.sharding)
    shapes = {name: source.sharding.shape for name, source in sources.items()}
    arrays = (names or SAME).resolve(shapes, {n: s.dtype for n, s in sources.items()})
    meshes = {str(source.sharding.mesh) for source in sources.values() if source.sharding.layout.axes}
    mesh = min(meshes) if len(meshes) == 1 else None
    common = {"mesh": mesh, "names": None if names is None else names_to_json(names)}
    sizes = {name: dtypes.n_bytes(array.shape, array.dtype) for name, array in arrays.items()}
    in_files = groups(list(sizes.values()), limit_of(shard_bytes, "shard_bytes")) or [[]]
    files: list[ShardFile] = []
    for i, numbers in enumerate(in_files):
        group = [list(sizes)[n] for n in numbers]
        group.sort(key=lambda name: -dtypes.itemsize(arrays[name].dtype))  # so that every array is aligned
        layouts = {name: text for name in group if (text := _layout(arrays[name], sources)) is not None}
        notes = {**common, "layouts": layouts if mesh else None}
        metadata = {"format": "pt", KEY: json.dumps({k: v for k, v in notes.items() if v})}
        header = write_header({name: arrays[name][:2] for name in group}, metadata)
        starts, size = {}, len(header)
        for name in group:
            starts[name], size = size, size + sizes[name]
        files.append(ShardFile(f"{i + 1:05}-of-{len(in_files):05}.safetensors", header, starts, size))
    try:
        noted = {"constants": json.dumps(dict(constants or {}))}  # as text: JSON itself has no infinity
    except TypeError as error:
        raise XshardError(f"constants: {error}", hint="numbers and texts, in lists and dicts") from None
    return Saving(dict(sources), arrays, tuple(files), noted, _owners(sources))


def _owners(sources: Mapping[str, Source]) -> dict[int, list[tuple[str, int]]]:
    """The blocks that each process writes: a block goes to the holder with the fewest bytes so far."""
    owned: dict[int, list[tuple[str, int]]] = {}
    written: dict[int, int] = {}
    for name, (sharding, dtype, processes) in sources.items():
        mesh = sharding.mesh
        sharded = [axis for dim in sharding.layout.dims for axis in dim.axes]
        for holders in mesh.groups([axis for axis in mesh.axes if axis not in sharded]):
            n = dtypes.n_bytes(sharding.local_shape(holders[0]), dtype)
            device = min(holders, key=lambda d: written.get(processes[d], 0))
            owned.setdefault(processes[device], []).append((name, device))
            written[processes[device]] = written.get(processes[device], 0) + n
    return owned


def _layout(array: TargetArray, sources: Mapping[str, Source]) -> str | None:
    """The layout of a stored array that is one sharded source with its dims in some order, else None."""
    src, dst, order = array.pieces[0]
    if len(array.pieces) > 1 or src.dim is not None or dst.dim is not None:
        return None
    layout = sources[src.name].sharding.layout
    return str(layout.in_order([layout.names[i] for i in order])) if layout.axes else None
