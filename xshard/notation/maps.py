"""Maps: lists of rows per part that no formula gives, as values with a name in the notation and a digest."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard.arguments import did_you_mean, shown
from xshard.errors import NotationError, ShapeError

Numbers = NDArray[np.int64]
MOST_ROWS = 2**31  # in all parts of a map together
MOST_NEW_ROWS = (
    2**22
)  # of new maps; then all caches are emptied: at 60 to 80 bytes a row they hold 0.3 GiB
HOLD_MAPS = (
    "xshard",
    "torch_bridge.calls",
    "torch_bridge.lower.rules",
    "torch_bridge.contractions",
)
DIGEST = r"@[0-9a-f]{16}"  # how a text names the content of a map

_KNOWN: WeakValueDictionary[str, RowMap] = (
    WeakValueDictionary()
)  # by digest: maps that texts may name


class RowMap:
    """For every part a list of rows; equal by content. `str` is its text in a layout: a name and a digest."""

    name = "map"
    _new_rows = 0  # in new maps since the caches were empty

    def __init__(self, rows: Numbers, starts: Numbers) -> None:
        self.rows = rows
        self.starts = starts  # the rows of all parts, and the place where each part begins
        for array in (rows, starts):
            array.setflags(write=False)
        content = blake2b(type(self).__name__.encode(), digest_size=8)
        for array in (starts, rows):
            content.update(np.ascontiguousarray(array, "<i8").data)
        self.digest = content.hexdigest()
        self._first = None
        if (
            first := _KNOWN.setdefault(self.digest, self)
        ) is not self:  # known as long as either lives
            self._first = first
            self.rows = first.rows
            self.starts = first.starts
            return
        RowMap._new_rows += len(rows)
        if RowMap._new_rows > MOST_NEW_ROWS:
            empty_caches()

    @classmethod
    def of_rows(cls, rows: Any) -> Self:
        """A list of rows per part, in their local order -> the map. Raises ShapeError."""
        lists = [_whole_rows(each) for each in rows]
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls._checked(np.concatenate([np.zeros(0, np.int64), *lists]), starts)

    @classmethod
    def _checked(cls, rows: Numbers, starts: Numbers) -> Self:
        checked: Self = cls.__new__(cls)
        RowMap.__init__(checked, rows, starts)
        checked.check()
        return checked

    def check(self) -> None:
        """Raise ShapeError unless the rows are what this class promises."""

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of every part."""
        return tuple(np.diff(self.starts).tolist())

    def part(self, index: int) -> Numbers:
        """The rows of one part, in their local order."""
        return self.rows[self.starts[index] : self.starts[index + 1]]

    @cached_property
    def part_of_row(self) -> Numbers:
        """The part of every entry of `rows`."""
        return np.repeat(np.arange(self.parts), np.diff(self.starts))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self)._checked, (np.array(self.rows), np.array(self.starts))

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self.parts} parts, {len(self.rows)} rows, {self.digest}>"
        )


class Owners(RowMap):
    """Which part owns each row of a dim, as data: `n/by(gp,cells)` with `maps={"cells": Owners(owner)}`.

    owner: for every row its part, `[rows]`; a part's rows keep the order that they have in the array.
    `Owners.of_rows(lists)` takes each part's rows in their local order instead. parts: the number of parts,
    by default one more than the last in `owner`. Owners are values: equal by content. Their `str` has a
    digest of the content, which stands in texts of layouts and plans: f"n/by(gp,{cells}) d" needs no `maps`
    as long as the map lives. Raises ShapeError unless each row has one part.

    >>> cells = Owners([1, 0, 1, 1])
    >>> cells.part(1).tolist(), cells.sizes, cells == Owners.of_rows([[1], [0, 2, 3]])
    ([0, 2, 3], (1, 3), True)
    >>> from xshard import Layout, Mesh
    >>> layout = Layout.parse("n/by(gp,cells) d", maps={"cells": cells})
    >>> layout.positions(Mesh(gp=2), (4, 8), "n", device=1).tolist()
    [0, 2, 3]
    """

    name = "owners"

    def __init__(self, owner: ArrayLike, parts: int | None = None) -> None:
        of_row = _whole_rows(owner)
        if len(of_row) and of_row.min() < 0:
            what = f"row {int(of_row.argmin())} has part {of_row.min()}"
            raise ShapeError(what, hint="parts are 0, 1, ...")
        least = int(of_row.max(initial=-1)) + 1
        parts = least if parts is None else parts
        if parts < least:
            raise ShapeError(
                f"a row has part {least - 1}, there are {parts} parts", hint="leave out parts="
            )
        super().__init__(*_grouped(of_row, parts))

    def check(self) -> None:
        n = len(self.rows)
        inside = (self.rows >= 0) & (self.rows < n)
        often = np.bincount(self.rows[inside], minlength=n)
        if not inside.all() or (often != 1).any():
            row = int(np.argmax(often != 1)) if inside.all() else int(self.rows[~inside][0])
            times = int(often[row]) if inside.all() else "out of range"
            hint = "each row has one owner: 0, 1, ... in any order"
            raise ShapeError(f"{n} rows in all parts, and row {row} is {times}", hint=hint)

    @cached_property
    def owner(self) -> Numbers:
        """For every row its part."""
        owner = np.empty(len(self.rows), np.int64)
        owner[self.rows] = self.part_of_row
        return owner

    def moved(self, rows: ArrayLike, to: ArrayLike) -> Owners:
        """The map after some rows have moved to other parts.

        rows: which rows, `[moved]`; to: the new part of each, or of all. A row that moves comes after the
        rows that stay, in the order of `rows`. Migration is a redistribution between both maps:
        `"n/by(gp,before) d -> n/by(gp,after) d"`. Raises ShapeError for a row or a part that does not exist
        or a row that moves twice.

        >>> Owners([0, 0, 1]).moved([0], to=1).part(1).tolist()
        [2, 0]
        """
        moving = _whole_rows(rows)
        goes = np.broadcast_to(np.asarray(to, np.int64), moving.shape)
        for what, values, n in (("row", moving, len(self.rows)), ("part", goes, self.parts)):
            if len(values) and not 0 <= values.min() <= values.max() < n:
                odd = next(v for v in values.tolist() if not 0 <= v < n)
                raise ShapeError(f"no {what} {odd}", hint=f"the map has {n} {what}s")
        if len(np.unique(moving)) < len(moving):
            raise ShapeError("a row moves twice", hint="each row of `rows` once")
        stays = np.ones(len(self.rows), bool)
        stays[moving[self.owner[moving] != goes]] = False
        leaves = ~stays[moving]
        kept = stays[self.rows]
        order, starts = _grouped(np.concatenate([self.part_of_row[kept], goes[leaves]]), self.parts)
        return Owners._checked(np.concatenate([self.rows[kept], moving[leaves]])[order], starts)


class Edges(NamedTuple):
    """The edges of one part: their numbers in the graph, and the local rows at both ends."""

    number: Numbers
    sender: Numbers
    receiver: Numbers


class Needs(RowMap):
    """The rows that each part reads beyond its own: `n/by(gp,cells):reads(near)` with `maps={"near": needs}`.

    `Needs.of_rows(lists)`: each part's rows in their local order, each once; its own rows come before them.
    `Needs.of_edges` finds them for a graph. A value, as `Owners`. Raises ShapeError for a row twice.

    >>> from xshard import Layout, Mesh
    >>> maps = {"cells": Owners([1, 0, 1, 1]), "near": Needs.of_rows([[3], []])}
    >>> layout = Layout.parse("n/by(gp,cells):reads(near) d", maps)
    >>> [layout.positions(Mesh(gp=2), (4, 8), "n", device).tolist() for device in (0, 1)]
    [[1, 3], [0, 2, 3]]
    """

    name = "needs"

    def __init__(self, rows: Any) -> None:
        lists = type(self).of_rows(rows)
        super().__init__(lists.rows, lists.starts)

    @classmethod
    def of_edges(
        cls, owners: Owners, senders: ArrayLike, receivers: ArrayLike, hops: int = 1
    ) -> tuple[Needs, list[Edges]]:
        """The rows that each part reads along directed edges, and each part's edges in local rows.

        senders, receivers: rows, `[edges]`; an edge may come twice, and lead from a row to itself. A part has
        the edges into its own rows; with `hops`, also the edges into rows one hop away, two, ..., so that as
        many layers need no exchange in between. It reads the nearest rows first, in ascending order; local
        rows are a part's own, then these. With one hop each edge belongs to one part, its receiver's:
        `Owners.of_rows([e.number for e in edges])` cuts arrays of edges. Raises ShapeError.

        >>> needs, (first, second) = Needs.of_edges(Owners([0, 0, 1, 1]), [1, 2, 2], [0, 1, 3])
        >>> (
        ...     needs.part(0).tolist(),
        ...     first.number.tolist(),
        ...     first.sender.tolist(),
        ...     first.receiver.tolist(),
        ... )
        ([2], [0, 1], [1, 2], [0, 1])
        >>> needs.part(1).tolist(), second.sender.tolist()
        ([], [0])
        """
        sender = _whole_rows(senders)
        receiver = _whole_rows(receivers)
        n = len(owners.rows)
        if len(sender) != len(receiver) or hops < 1:
            what = f"{len(sender)} senders, {len(receiver)} receivers, {hops} hops"
            raise ShapeError(what, hint="an edge has both ends, and hops are 1 or more")
        for rows in (sender, receiver):
            if len(rows) and not 0 <= rows.min() <= rows.max() < n:
                raise ShapeError(
                    f"an edge of rows {rows.min()} to {rows.max()}", hint=f"there are {n} rows"
                )
        into_part, part_starts = _grouped(owners.owner[receiver], owners.parts)
        into_row, row_starts = _grouped(receiver, n) if hops > 1 else (into_part, part_starts)
        local = np.full(n, -1)
        lists = list[Numbers]()
        edges = list[Edges]()
        for part in range(owners.parts):
            rings = [owners.part(part)]
            reached = [into_part[part_starts[part] : part_starts[part + 1]]]
            for hop in range(hops):
                ring = rings[hop]
                held = sum(map(len, rings))
                local[ring] = np.arange(held - len(ring), held)
                if hop:
                    begin = row_starts[ring]
                    many = row_starts[ring + 1] - row_starts[ring]
                    places = np.arange(many.sum()) + np.repeat(begin - np.cumsum(many) + many, many)
                    reached.append(into_row[places])
                near = sender[reached[hop]]
                rings.append(unique_rows(near[local[near] < 0]))
            number = np.sort(np.concatenate(reached))
            own = len(rings[0])
            lists = [*lists, np.concatenate(rings[1:])]
            local[lists[-1]] = np.arange(own, own + len(lists[-1]))
            edges.append(Edges(number, local[sender[number]], local[receiver[number]]))
            local[np.concatenate(rings)] = -1
        return cls.of_rows(lists), edges

    def check(self) -> None:
        if len(self.rows) and self.rows.min() < 0:
            raise ShapeError(f"row {self.rows.min()} in a need", hint="rows are 0, 1, ...")
        place = np.empty(int(self.rows.max(initial=0)) + 1, np.int64)
        for part in range(self.parts):
            rows = self.part(part)
            place[rows] = numbers = np.arange(len(rows))
            if (twice := place[rows] != numbers).any():
                reason = f"part {part} reads row {int(rows[twice][0])} twice"
                raise ShapeError(reason, hint="list each row of a part once")


@dataclass(frozen=True)
class NamedMap:
    """A map as a layout holds it: with the name that the text gave it."""

    name: str
    map: Any

    def __str__(self) -> str:
        return f"{self.name}@{self.map.digest}"


Maps = Mapping[str, RowMap]


def named_maps(maps: Any) -> tuple[tuple[str, RowMap], ...]:
    """`maps=` of a verb as a key of caches. Raises NotationError."""
    if not isinstance(maps or {}, Mapping) or not all(
        isinstance(m, RowMap) for m in (maps or {}).values()
    ):
        raise NotationError(f"maps={shown(maps)}", hint="a dict of names to Owners and Needs")
    return tuple((maps or {}).items())


def find_map(text: str, maps: Maps, kind: type[RowMap]) -> NamedMap:
    """A name, or a name and a digest, in a text -> the map. Raises NotationError, without the text."""
    name, _, digest = text.partition("@")
    row_map = _KNOWN.get(digest) if digest else maps.get(name)
    if row_map is None and digest:
        raise NotationError(
            f"the map '{text}' is not in this process", hint=f"pass maps={{'{name}': ...}}"
        )
    if row_map is None:
        hint = f"{did_you_mean(name, tuple(maps))}pass maps={{'{name}': xs.{kind.__name__}(...)}}"
        raise NotationError(f"no map {name!r}", hint=hint)
    if not isinstance(row_map, kind):
        what = type(row_map).__name__ if isinstance(row_map, RowMap) else shown(row_map)
        raise NotationError(
            f"{name!r} is {what}, not {kind.__name__}", hint="by(gp,OWNERS):reads(NEEDS)"
        )
    return NamedMap(name, row_map)


def with_values(data: dict[str, Any]) -> dict[str, Any]:
    """Plain data, and the values of the maps that it names by digest, if there are any, under `maps`."""
    maps = [_KNOWN[match[1:]] for match in sorted(set(re.findall(DIGEST, json.dumps(data))))]
    arrays = ((m, {"starts": m.starts.tolist(), "rows": m.rows.tolist()}) for m in maps)
    values = {m.digest: {"kind": type(m).__name__, **lists} for m, lists in arrays}
    return data | {"maps": values} if values else data


def maps_in(data: Mapping[str, Any]) -> list[RowMap]:
    """The maps of `with_values`, which texts may name while the list lives. Raises NotationError."""
    kinds: dict[str, type[RowMap]] = {"Owners": Owners, "Needs": Needs}
    plain = data.get("maps", {})
    maps = [
        kinds[m["kind"]]._checked(*map(_whole_rows, (m["rows"], m["starts"])))
        for m in plain.values()
    ]
    if [m.digest for m in maps] != list(plain):
        raise NotationError("a map differs from its digest", hint="the text was changed")
    return maps


def _grouped(keys: Numbers, n: int) -> tuple[Numbers, Numbers]:
    """Places by key 0 to `n` - 1, ascending within a key, and the begin of each key."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=n))]).astype(np.int64)
    return np.argsort(
        keys.astype(np.min_scalar_type(n)), kind="stable"
    ), starts  # short keys sort fast


def empty_caches() -> None:
    """Empty every cache of results for layouts: an entry keeps the maps of its layouts."""
    RowMap._new_rows, kind = 0, type(lru_cache(len))
    ours = [
        vars(module) for name, module in list(sys.modules.items()) if name.startswith(HOLD_MAPS)
    ]
    for cache in [
        value for names in ours for value in list(names.values()) if isinstance(value, kind)
    ]:
        if cache.__module__.startswith(HOLD_MAPS):  # not an imported one, of process groups
            cache.cache_clear()


def unique_rows(rows: Numbers) -> Numbers:
    """Each row once, in ascending order; several times as fast as `np.unique`."""
    rows = np.sort(rows)
    return rows[np.concatenate([[True], rows[1:] != rows[:-1]])] if len(rows) else rows


def _whole_rows(values: Any) -> Numbers:
    """Whole numbers -> an array of its own. Raises ShapeError."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ShapeError(f"{shown(values)} is not a list of rows", hint="whole numbers in one dim")
    if array.size > MOST_ROWS:
        raise ShapeError(f"{array.size} rows in a map", hint=f"at most {MOST_ROWS}")
    return array.astype(np.int64, copy=False)
