"""What a save writes where: every element once, by one process, all processes at once.

Decides, from names, layouts and shapes and so alike on all processes, which arrays are in which file, and
whose block of which array is written. Writes nothing.
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
from xshard.state.names import SAME, Names
from xshard.state.relations import Made, Piece
from xshard.state.text import names_to_json
from xshard.trees import groups


class Source(NamedTuple):
    """An array of the program: how it is cut, its dtype, and the process of every device of its mesh."""

    sharding: Sharding
    dtype: str
    processes: Sequence[int]


class Write(NamedTuple):
    """A device's block of an array, and the parts of stored arrays that are made of it."""

    name: str
    device: int
    pairs: tuple[BoxPair, ...]


@dataclass(frozen=True)
class Shard:
    """A file: its name, what it begins with, and where every array's bytes begin."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Saving:
    """All that a save writes. made: every stored array, and the arrays here that it is made of."""

    sources: Mapping[str, Source]
    made: Mapping[str, Made]
    shards: tuple[Shard, ...]
    metadata: Mapping[str, Any]
    _owned: Mapping[int, list[tuple[str, int]]] = field(repr=False)

    def writes(self, process: int) -> Iterator[Write]:
        """What one process writes."""
        for name, device in self._owned.get(process, ()):
            pairs = box_pairs(self._pieces[name], self.sources[name].sharding, device)
            yield Write(name, device, tuple(pairs))

    @cached_property
    def _pieces(self) -> dict[str, list[Piece]]:
        """Of every array here, the stored arrays that it goes to: those are read backwards."""
        back: dict[str, list[Piece]] = {name: [] for name in self.sources}
        for made in self.made.values():
            for piece in made.pieces:
                back[piece.src.name].append(piece.inverse)
        return back

    @cached_property
    def digest(self) -> str:
        """A number that is equal where two processes plan the same save."""
        all_of_it = [*((s.name, s.header) for s in self.shards), self.metadata, self._owned]
        return f"{zlib.crc32(repr(all_of_it).encode()):08x}"


def plan_save(
    sources: Mapping[str, Source],
    names: Names | None = None,
    *,
    shard_bytes: int | str | None = "5GiB",
    constants: Mapping[str, Any] | None = None,
) -> Saving:
    """Arrays here by name -> what a save of them writes.

    names: what is stored, of what is here. shard_bytes: of a file, unless one array is larger; None: of any
    size. constants: leaves that are no arrays, as JSON. Raises PlanError for sums and halos, DtypeError for
    dtypes that safetensors lacks.

    >>> from xshard import Layout, Mesh
    >>> cut = Source(Sharding(Layout("o/tp i"), Mesh(dp=2, tp=2), (8, 4)), "float32", range(4))
    >>> saving = plan_save({"w": cut})
    >>> [[(write.device, write.pairs[0].box[0]) for write in saving.writes(process)] for process in range(4)]
    [[(0, slice(0, 4, None))], [(1, slice(4, 8, None))], [], []]
    """
    for name, source in sources.items():
        with located(name):
            check_whole(source.sharding)
    shapes = {name: source.sharding.shape for name, source in sources.items()}
    made = (names or SAME).resolve(shapes, {n: s.dtype for n, s in sources.items()})
    meshes = {str(source.sharding.mesh) for source in sources.values() if source.sharding.layout.axes}
    mesh = min(meshes) if len(meshes) == 1 else None
    said = {"mesh": mesh, "names": None if names is None else names_to_json(names)}
    sizes = {name: dtypes.n_bytes(*each[:2]) for name, each in made.items()}
    in_files = groups(list(sizes.values()), limit_of(shard_bytes, "shard_bytes")) or [[]]
    files: list[Shard] = []
    for i, numbers in enumerate(in_files):
        group = [list(sizes)[n] for n in numbers]
        group.sort(key=lambda name: -dtypes.itemsize(made[name].dtype))  # so that every array is aligned
        layouts = {name: text for name in group if (text := _layout(made[name], sources)) is not None}
        ours = {**said, "layouts": layouts if mesh else None}
        metadata = {"format": "pt", KEY: json.dumps({k: v for k, v in ours.items() if v})}
        header = write_header({name: made[name][:2] for name in group}, metadata)
        starts, at = {}, len(header)
        for name in group:
            starts[name], at = at, at + sizes[name]
        files.append(Shard(f"{i + 1:05}-of-{len(in_files):05}.safetensors", header, starts, at))
    try:
        noted = {"constants": json.dumps(dict(constants or {}))}  # as text: JSON itself has no infinity
    except TypeError as error:
        raise XshardError(f"constants: {error}", hint="numbers and texts, in lists and dicts") from None
    return Saving(dict(sources), made, tuple(files), noted, _owners(sources))


def _owners(sources: Mapping[str, Source]) -> dict[int, list[tuple[str, int]]]:
    """By process, the blocks it writes: each goes to the holder that has least to write so far."""
    owned: dict[int, list[tuple[str, int]]] = {}
    written: dict[int, int] = {}
    for name, (sharding, dtype, processes) in sources.items():
        mesh = sharding.mesh
        cuts = [axis for dim in sharding.layout.dims for axis in dim.axes]
        for holders in mesh.groups([axis for axis in mesh.axes if axis not in cuts]):
            n = dtypes.n_bytes(sharding.local_shape(holders[0]), dtype)
            device = min(holders, key=lambda d: written.get(processes[d], 0))
            owned.setdefault(processes[device], []).append((name, device))
            written[processes[device]] = written.get(processes[device], 0) + n
    return owned


def _layout(made: Made, sources: Mapping[str, Source]) -> str | None:
    """How a stored array was cut, where it was, and is one array here with its dims in some order."""
    src, dst, order = made.pieces[0]
    if len(made.pieces) > 1 or src.dim is not None or dst.dim is not None:
        return None
    layout = sources[src.name].sharding.layout
    return str(layout.in_order([layout.names[i] for i in order])) if layout.axes else None
