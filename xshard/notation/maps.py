"""Maps: lists of rows per part that no formula gives, as values with a name in the notation and a digest.

`n/by(gp,cells)` shards `n` over gp by the map `cells`, which lists the rows of each part. A *part* is
what one device along these axes has. A text names a map by a word, and by a digest of its content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from xshard.caches import empty_layout_caches
from xshard.errors import NotationError, ShapeError, api_boundary
from xshard.notation.row_arrays import Groups, Numbers, grouped, unique_rows
from xshard.signatures import did_you_mean, short_repr

MAX_ROWS = 2**31  # in all parts of a map together
# Rows in new maps, after which all caches of results for layouts are emptied: they keep old maps.
# At 60 to 80 bytes a row they hold 0.3 GiB then.
MAX_NEW_ROWS = 2**22
DIGEST = r"@[0-9a-f]{16}"  # how a text names the content of a map

# Maps that live in this process, by digest: a text may name them without `maps=`.
_KNOWN: WeakValueDictionary[str, RowMap] = WeakValueDictionary()


class RowMap:
    """A list of rows for every part of a dim, as a value: equal by content.

    `str` of a map is how a layout names it, by a word and a digest of the content.

    Attributes:
        rows: The rows of all parts, one part after the other, `[rows]`.
        starts: Where the rows of each part begin, and the number of all rows, `[parts + 1]`.
        digest: 16 hexadecimal digits of the content.
    """

    name = "map"
    _new_rows = 0  # in all new maps since the caches were emptied

    def __init__(self, rows: Numbers, starts: Numbers) -> None:
        self.rows = rows
        self.starts = starts
        for array in (rows, starts):
            array.setflags(write=False)  # the digest is of these values, so they must not change
        content = blake2b(type(self).__name__.encode(), digest_size=8)
        for array in (starts, rows):
            # As little-endian bytes on every machine, because ranks compare digests.
            content.update(np.ascontiguousarray(array, "<i8").data)
        self.digest = content.hexdigest()
        self._first: RowMap | None = None
        first = _KNOWN.setdefault(self.digest, self)
        if first is self:
            self._count_new_rows()
        else:
            # Equal maps share the arrays of the first one. A reference to it keeps it in `_KNOWN`
            # as long as any of them lives.
            self._first = first
            self.rows = first.rows
            self.starts = first.starts

    def _count_new_rows(self) -> None:
        """Empty the caches of results for layouts once many rows of new maps have come."""
        RowMap._new_rows += len(self.rows)
        if RowMap._new_rows > MAX_NEW_ROWS:
            empty_caches()

    @classmethod
    @api_boundary
    def of_rows(cls, rows: Any) -> Self:
        """Make a map from a list of rows for each part: `Owners.of_rows([[1], [0, 2, 3]])`.

        Here part 0 has row 1, and part 1 has rows 0, 2, 3. They are kept as one array of rows, 1 0
        2 3, and the position at which each part begins, 0 1 4.

        Args:
            rows: The rows of each part, in their local order.

        Returns:
            The map.

        Raises:
            ShapeError: The rows are not what the class needs: in `Owners` each row comes once.
        """
        lists = [_whole_rows(part_rows) for part_rows in rows]
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        # Empty rows first, because numpy concatenates no empty list of arrays.
        return cls._checked(np.concatenate([np.zeros(0, np.int64), *lists]), starts)

    @classmethod
    def _checked(cls, rows: Numbers, starts: Numbers) -> Self:
        """Make a map of its arrays, past the arguments of a subclass."""
        row_map: Self = cls.__new__(cls)
        RowMap.__init__(row_map, rows, starts)
        row_map.check()
        return row_map

    def check(self) -> None:
        """Raise ShapeError unless the rows are what the class promises."""

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of every part."""
        return tuple(np.diff(self.starts).tolist())

    def part(self, index: int) -> Numbers:
        """Return the rows of one part, in their local order."""
        return self.rows[self.starts[index] : self.starts[index + 1]]

    @cached_property
    def part_of_row(self) -> Numbers:
        """The part of every entry of `rows`."""
        return np.repeat(np.arange(self.parts), np.diff(self.starts))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, ...]:  # the same map, and checked, in another process
        return type(self)._checked, (np.array(self.rows), np.array(self.starts))

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"

    def __repr__(self) -> str:
        class_name = type(self).__name__
        return f"<{class_name} of {self.parts} parts, {len(self.rows)} rows, {self.digest}>"


@api_boundary
class Owners(RowMap):
    """Which part owns each row of a dim, as data: `n/by(gp,cells)` with `maps={"cells": owners}`.

    `Owners([1, 0, 1, 1])`: part 0 owns row 1, part 1 owns rows 0, 2 and 3.

    `Owners.of_rows(lists)` takes each part's rows in their local order instead. Owners are values:
    equal by content. Their `str` has a digest of the content, which stands in texts of layouts and
    plans: f"n/by(gp,{cells}) d" needs no `maps` as long as the map lives.

    Args:
        owner: For every row its part, `[rows]`. A part's rows keep their order in the array.
        parts: The number of parts; by default one more than the last in `owner`.

    Attributes:
        rows: The rows of all parts, one part after the other, `[rows]`.
        starts: Where the rows of each part begin, and the number of all rows, `[parts + 1]`.

    Raises:
        ShapeError: A row has no part, or several.

    Examples:
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
        owner_of_row = _whole_rows(owner)
        if len(owner_of_row) and owner_of_row.min() < 0:
            reason = f"row {int(owner_of_row.argmin())} has part {owner_of_row.min()}"
            raise ShapeError(reason, hint="parts are 0, 1, ...")
        last_part = int(owner_of_row.max(initial=-1))
        if parts is None:
            parts = last_part + 1
        if last_part >= parts:
            reason = f"a row has part {last_part}, there are {parts} parts"
            raise ShapeError(reason, hint="leave out parts=")
        groups = grouped(owner_of_row, parts)
        super().__init__(groups.items, groups.starts)

    def check(self) -> None:
        """Raise ShapeError unless each row has one part."""
        n_rows = len(self.rows)
        hint = "each row has one owner: 0, 1, ... in any order"
        out_of_range = self.rows[(self.rows < 0) | (self.rows >= n_rows)]
        if len(out_of_range):
            reason = f"{n_rows} rows in all parts, and row {int(out_of_range[0])} is out of range"
            raise ShapeError(reason, hint=hint)
        n_owners = np.bincount(self.rows, minlength=n_rows)
        miscounted = np.flatnonzero(n_owners != 1)
        if len(miscounted):
            reason = (
                f"{n_rows} rows in all parts, and row {miscounted[0]} is {n_owners[miscounted[0]]}"
            )
            raise ShapeError(reason, hint=hint)

    @cached_property
    def owner(self) -> Numbers:
        """For every row its part."""
        owner = np.empty(len(self.rows), np.int64)
        owner[self.rows] = self.part_of_row
        return owner

    @api_boundary
    def moved(self, rows: ArrayLike, to: ArrayLike) -> Owners:
        """Return a new map in which some rows are owned by other parts, as when particles migrate.

        A row that moves comes after the rows that stay, in the order of `rows`. Migration is a
        redistribution between both maps: `"n/by(gp,before) d -> n/by(gp,after) d"`.

        Args:
            rows: The rows that move, `[moved]`.
            to: The new part of each, `[moved]`, or of all.

        Returns:
            The new map; this one is unchanged.

        Raises:
            ShapeError: A row or a part does not exist, or a row moves twice.

        Examples:
            >>> Owners([0, 0, 1]).moved([0], to=1).part(1).tolist()
            [2, 0]
        """
        moving_rows = _whole_rows(rows)
        new_parts = np.broadcast_to(np.asarray(to, np.int64), moving_rows.shape)
        _check_known("row", moving_rows, len(self.rows))
        _check_known("part", new_parts, self.parts)
        if len(np.unique(moving_rows)) < len(moving_rows):
            raise ShapeError("a row moves twice", hint="each row of `rows` once")
        # A row that is moved to the part that it has stays in its place.
        is_leaving = self.owner[moving_rows] != new_parts  # [moved]
        leaving_rows = moving_rows[is_leaving]
        stays = np.ones(len(self.rows), bool)  # [rows], by the number of the row
        stays[leaving_rows] = False
        # The same in the order of `self.rows` and `self.part_of_row`, which list part after part.
        is_staying = stays[self.rows]

        # Grouping by part is stable: in each part the rows that stay come first.
        all_rows = np.concatenate([self.rows[is_staying], leaving_rows])
        all_parts = np.concatenate([self.part_of_row[is_staying], new_parts[is_leaving]])
        groups = grouped(all_parts, self.parts)
        return Owners._checked(all_rows[groups.items], groups.starts)


def _check_known(noun: str, indices: Numbers, count: int) -> None:
    """Raise ShapeError for a number of a row or a part that a map of `count` of them lacks."""
    unknown = indices[(indices < 0) | (indices >= count)]
    if len(unknown):
        raise ShapeError(f"no {noun} {unknown[0]}", hint=f"the map has {count} {noun}s")


class Edges(NamedTuple):
    """The edges of one part of a graph.

    Attributes:
        number: Their numbers in the graph.
        sender: The local row that each edge leaves.
        receiver: The local row that each edge enters.
    """

    number: Numbers
    sender: Numbers
    receiver: Numbers


@api_boundary
class Needs(RowMap):
    """The rows that each part reads beyond its own: `n/by(gp,cells):reads(near)`.

    With `maps={"cells": owners, "near": needs}`. The layout's block has a part's own rows, then
    these. `Needs.of_edges` finds them for a graph. A value, like `Owners`.

    Args:
        rows: The rows that each part reads, in their local order, each once.

    Attributes:
        rows: The rows of all parts, one part after the other, `[rows]`.
        starts: Where the rows of each part begin, and the number of all rows, `[parts + 1]`.

    Raises:
        ShapeError: A part reads a row twice.

    Examples:
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
    @api_boundary
    def of_edges(
        cls, owners: Owners, senders: ArrayLike, receivers: ArrayLike, hops: int = 1
    ) -> tuple[Needs, list[Edges]]:
        """Find which rows each part of a graph reads from others, and its edges in local numbers.

        Rows are the nodes of the graph. A part has the edges into its own rows; with `hops`, also
        the edges into rows one hop away, two, ..., so that as many layers need no exchange in
        between. It reads the nearest rows first, in ascending order; local rows are a part's own,
        then these. With one hop each edge belongs to one part, its receiver's:
        `Owners.of_rows([e.number for e in edges])` cuts arrays of edges.

        Args:
            owners: The part that owns each row.
            senders: The row that each edge leaves, `[edges]`.
            receivers: The row that each edge enters, `[edges]`. An edge may come twice, and lead
                from a row to itself.
            hops: How many layers run between two exchanges.

        Returns:
            The rows that each part reads from others, and the edges of each part: their numbers,
            and their senders and receivers as rows of its block.

        Raises:
            ShapeError: An edge lacks an end, or has a row that does not exist.

        Examples:
            >>> needs, (first, second) = Needs.of_edges(Owners([0, 0, 1, 1]), [1, 2, 2], [0, 1, 3])
            >>> needs.part(0).tolist(), needs.part(1).tolist()
            ([2], [])
            >>> first.number.tolist(), first.sender.tolist(), first.receiver.tolist()
            ([0, 1], [1, 2], [0, 1])
            >>> second.sender.tolist()
            [0]
        """
        sender = _whole_rows(senders)
        receiver = _whole_rows(receivers)
        n_rows = len(owners.rows)
        if len(sender) != len(receiver) or hops < 1:
            reason = f"{len(sender)} senders, {len(receiver)} receivers, {hops} hops"
            raise ShapeError(reason, hint="an edge has both ends, and hops are 1 or more")
        for ends in (sender, receiver):
            if len(ends) and not 0 <= ends.min() <= ends.max() < n_rows:
                reason = f"an edge of rows {ends.min()} to {ends.max()}"
                raise ShapeError(reason, hint=f"there are {n_rows} rows")
        into_part = grouped(owners.owner[receiver], owners.parts)
        into_row = grouped(receiver, n_rows) if hops > 1 else None  # one hop needs no sort by rows
        graph = _Graph(owners, sender, receiver, into_part, into_row)
        local_row = np.full(n_rows, -1)
        rows_read = []
        edges_of_parts = []
        for part_index in range(owners.parts):
            rows, edges = _read_by_part(graph, part_index, hops, local_row)
            rows_read.append(rows)
            edges_of_parts.append(edges)
        return cls.of_rows(rows_read), edges_of_parts

    def check(self) -> None:
        """Raise ShapeError unless a part reads each row once."""
        if len(self.rows) and self.rows.min() < 0:
            raise ShapeError(f"row {self.rows.min()} in a need", hint="rows are 0, 1, ...")
        position = np.empty(int(self.rows.max(initial=0)) + 1, np.int64)
        for part_index in range(self.parts):
            rows = self.part(part_index)
            # Of a row that comes twice, the later position stays.
            position[rows] = np.arange(len(rows))
            repeated = rows[position[rows] != np.arange(len(rows))]
            if len(repeated):
                reason = f"part {part_index} reads row {repeated[0]} twice"
                raise ShapeError(reason, hint="list each row of a part once")


class _Graph(NamedTuple):
    """The owners of rows, and directed edges between rows."""

    owners: Owners
    sender: Numbers  # [edges]
    receiver: Numbers  # [edges]
    into_part: Groups  # the edges into the rows of each part
    into_row: Groups | None  # the edges into each row; only for several hops


def _read_by_part(
    graph: _Graph, part_index: int, hops: int, local_row: Numbers
) -> tuple[Numbers, Edges]:
    """Find the rows of other parts that one part of a graph needs, and its edges in local numbers.

    A part owns rows (nodes of the graph) and needs the senders of all edges into its own rows. With
    2 hops it also needs the senders of edges into those rows, and so on. Rows 0 1 on part 0, 2 3 on
    part 1, an edge from row 3 to row 0: part 0 reads row 3. Its block is rows 0 1 3, so that the
    edge leads from 2 to 0 in local numbers. Nearest rows come first.

    Args:
        graph: The graph.
        part_index: The part.
        hops: How many edges away the rows are that it needs.
        local_row: `[rows]`, scratch space, -1 for all rows before and after the call: one array
            serves all parts, because a new one for each would take parts x rows of time.
    """
    own_rows = graph.owners.part(part_index)
    block_rows = own_rows  # own rows, then those found after one hop, after two, ...
    local_row[own_rows] = np.arange(len(own_rows))  # where each row of the block is in it
    hop_edges = graph.into_part.of_key(part_index)  # their indices in the graph
    all_edges = hop_edges
    for hop in range(hops):
        senders = graph.sender[hop_edges]
        new_rows = unique_rows(senders[local_row[senders] < 0])  # not in the block yet
        local_row[new_rows] = np.arange(len(block_rows), len(block_rows) + len(new_rows))
        block_rows = np.concatenate([block_rows, new_rows])
        if hop + 1 < hops and graph.into_row is not None:
            hop_edges = graph.into_row.of_keys(new_rows)
            all_edges = np.concatenate([all_edges, hop_edges])

    # Edges keep the order of the graph, so that sums over them add in one order on any number of
    # parts.
    edge_indices = np.sort(all_edges)
    local_edges = Edges(
        number=edge_indices,
        sender=local_row[graph.sender[edge_indices]],
        receiver=local_row[graph.receiver[edge_indices]],
    )
    local_row[block_rows] = -1  # as it was, for the next part
    return block_rows[len(own_rows) :], local_edges


# ---- maps and texts


@dataclass(frozen=True)
class NamedMap:
    """A map as a layout holds it: with the name that the text gave it.

    Attributes:
        name: The name, as in `maps={"cells": ...}`.
        map: The `Owners` or `Needs`.
    """

    name: str
    map: Any

    def __str__(self) -> str:
        return f"{self.name}@{self.map.digest}"


Maps = Mapping[str, RowMap]


def named_maps(maps: Any) -> tuple[tuple[str, RowMap], ...]:
    """Return `maps=` of a verb as a key of caches: pairs of name and map.

    Raises:
        NotationError: It is no dict of maps.
    """
    if not maps:
        return ()
    if not isinstance(maps, Mapping) or not all(isinstance(m, RowMap) for m in maps.values()):
        raise NotationError(f"maps={short_repr(maps)}", hint="a dict of names to Owners and Needs")
    return tuple(maps.items())


def find_map(text: str, maps: Maps, map_class: type[RowMap]) -> NamedMap:
    """Find the map of rows that a layout text names, as `cells` in `n/by(x,cells)`.

    A map lists the rows of each part. A name alone is looked up in the user's `maps`. With a
    digest, `cells@0123456789abcdef`, as layouts print, it is looked up among all maps that are
    alive in this process.

    Raises:
        NotationError: There is no such map, or it is no `map_class`. The caller adds the user's text
            to the error.
    """
    name, _, digest = text.partition("@")
    if digest:
        row_map = _KNOWN.get(digest)
        if row_map is None:
            reason = f"the map '{text}' is not in this process"
            raise NotationError(reason, hint=f"pass maps={{'{name}': ...}}")
    else:
        row_map = maps.get(name)
        if row_map is None:
            suggestion = did_you_mean(name, tuple(maps))
            hint = f"{suggestion}pass maps={{'{name}': xs.{map_class.__name__}(...)}}"
            raise NotationError(f"no map {name!r}", hint=hint)
    if not isinstance(row_map, map_class):
        actual = type(row_map).__name__ if isinstance(row_map, RowMap) else short_repr(row_map)
        reason = f"{name!r} is {actual}, not {map_class.__name__}"
        raise NotationError(reason, hint="by(gp,OWNERS):reads(NEEDS)")
    return NamedMap(name, row_map)


def with_values(data: dict[str, Any]) -> dict[str, Any]:
    """Add the values of the maps that plain data names by digest, under `maps`, if there are any."""
    digests = sorted(set(re.findall(DIGEST, json.dumps(data))))  # in one order on all ranks
    values = {}
    for digest in digests:
        row_map = _KNOWN[digest.removeprefix("@")]
        values[row_map.digest] = {
            "kind": type(row_map).__name__,
            "starts": row_map.starts.tolist(),
            "rows": row_map.rows.tolist(),
        }
    if not values:
        return data
    return data | {"maps": values}


def maps_in(data: Mapping[str, Any]) -> list[RowMap]:
    """Read the maps that `with_values` wrote into the data of a plan, under the key "maps".

    Layout texts name maps by digest, so keep the list while such texts are parsed: a map that no
    one refers to is forgotten.

    Raises:
        NotationError: The values of a map differ from its digest.
    """
    class_by_name: dict[str, type[RowMap]] = {"Owners": Owners, "Needs": Needs}
    maps = []
    for digest, values in data.get("maps", {}).items():
        map_class = class_by_name[values["kind"]]
        row_map = map_class._checked(_whole_rows(values["rows"]), _whole_rows(values["starts"]))
        if row_map.digest != digest:
            raise NotationError("a map differs from its digest", hint="the text was changed")
        maps.append(row_map)
    return maps


def empty_caches() -> None:
    """Empty every cache of results for layouts: an entry keeps the maps of its layouts."""
    RowMap._new_rows = 0
    empty_layout_caches()


def _whole_rows(values: Any) -> Numbers:
    """Return whole numbers in one dim as an array, or raise ShapeError."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ShapeError(
            f"{short_repr(values)} is not a list of rows", hint="whole numbers in one dim"
        )
    if array.size > MAX_ROWS:
        raise ShapeError(f"{array.size} rows in a map", hint=f"at most {MAX_ROWS}")
    return array.astype(np.int64, copy=False)
