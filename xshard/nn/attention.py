"""Attention over a sharded sequence: the moves around it, and the scores that every device computes.
Dims are in the order (*batch, heads, sequence, width); masks follow from the rows' positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xshard.errors import NotationError, ShapeError, XshardError
from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.layout.runs import row_numbers
from xshard.nn.windows import interval_frame
from xshard.notation.parser import Dim, Shard

AUTO = "auto"
GATHER, ULYSSES, RING = METHODS = "gather", "ulysses", "ring"
HEADS, SEQUENCE, WIDTH = -3, -2, -1
ALL, CAUSAL, SOME = "all", "causal", "some"  # kinds of tiles
MOST_RUNS = 4  # blocks of more runs, as under `cyclic`, are one tile: many small products are slow

T = TypeVar("T")
Rows = NDArray[np.int64]


class Tile(NamedTuple):
    """Local rows of queries and of keys, and which scores between them count: one of the kinds of tiles."""

    q: slice
    k: slice
    kind: str


@dataclass(frozen=True)
class Attention:
    """An attention of sharded arrays by one of `METHODS`. Queries see only keys less than `window` rows away.

    kv: sharding of the keys with the values, `value_width` wide, beside them.
    """

    q: Sharding
    kv: Sharding
    value_width: int
    how: str
    causal: bool = False
    window: int | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the sequence."""
        return self.q.layout.dims[SEQUENCE].axes

    @cached_property
    def queries(self) -> Sharding:
        """The sharding under which queries are used."""
        dims = list(self.q.layout.dims)
        if self.how == ULYSSES and self.axes:
            dims[HEADS] = replace(dims[HEADS], shards=(*dims[HEADS].shards, Shard(self.axes, "balanced")))
            dims[SEQUENCE] = Dim(dims[SEQUENCE].name)
        return self.q.with_layout(replace(self.q.layout, dims=tuple(dims)))

    @cached_property
    def keys(self) -> Sharding:
        """The sharding under which keys and values are used; in a ring, in its first round."""
        dims = [*self.queries.layout.dims[:HEADS], self._key_heads(), *self.queries.layout.dims[SEQUENCE:]]
        if self.how != RING:
            dims[SEQUENCE] = Dim(dims[SEQUENCE].name)
        sharding_axes = {axis for dim in dims for axis in dim.axes}
        copies = tuple(axis for axis in self.queries.layout.axes if axis not in sharding_axes)
        return self.kv.with_layout(Layout(tuple(dims), (("copy", copies),) if copies else ()))

    @property
    def result(self) -> Sharding:
        """The sharding under which the result is computed."""
        return replace(self.queries, shape=(*self.q.shape[:WIDTH], self.value_width))

    @property
    def target(self) -> Sharding:
        """The sharding of the returned result: under the layout of the queries."""
        return self.result.with_layout(self.q.layout)

    @property
    def group(self) -> int:
        """The number of heads of queries that share a head of keys."""
        return self.q.shape[HEADS] // self.kv.shape[HEADS]

    def _key_heads(self) -> Dim:
        """The heads of keys that each part's heads of queries read, as an overlap."""
        queries, n, group = self.queries, self.kv.shape[HEADS], self.group
        dim = queries.layout.dims[HEADS]
        if group == 1 or not dim.axes:
            return dim
        if any(shard.numbers for shard in dim.shards):
            hint = f"as in {dim.name}/balanced({','.join(dim.axes)})"
            raise NotationError("heads in groups, sharded by numbers", text=str(queries.layout), hint=hint)
        sizes = queries.mesh.sizes_of(dim.axes)
        reads = queries.shape[HEADS], lambda a, b: (a // group, (b - 1) // group + 1)
        return interval_frame(dim, n, sizes, *reads).source

    def heads_read(self, device: int) -> Rows:
        """The local head of keys that each of a device's heads of queries reads."""
        q, k = (row_numbers(x.held(len(x.shape) + HEADS, device)) for x in (self.queries, self.keys))
        return np.arange(len(q)) if self.group == 1 else q // self.group - k[:1]

    def query_rows(self, device: int) -> Rows:
        """The global numbers of the rows of a device's queries."""
        return row_numbers(self.queries.held(len(self.q.shape) + SEQUENCE, device))

    def key_rows(self, device: int, turn: int = 0) -> Rows:
        """The global numbers of the rows of the keys that a device uses in round `turn` of a ring."""
        if turn:
            ring = self.q.mesh.group(device, self.axes)
            device = ring[(self.q.mesh.index(device, self.axes) - turn) % len(ring)]
        return row_numbers(self.keys.held(len(self.kv.shape) + SEQUENCE, device))

    @property
    def devices(self) -> tuple[int, ...]:
        """One device for every part of the sequence; other devices hold the same rows."""
        return self.q.mesh.group(0, self.axes)

    @cached_property
    def rounds(self) -> int:
        """The number of blocks of keys that a device uses; no window reaches later ones."""
        n = len(self.devices) if self.how == RING else 1
        if self.window is None:
            return n
        return 1 + max(t for t in range(n) if t == 0 or any(tiles(self, d, t) for d in self.devices))

    def visible(self, q: Rows, k: Rows) -> NDArray[np.bool_]:
        """Rows of queries (n, 1) and of keys (m,) -> (n, m): scores that count; -1 stands for no row."""
        visible = (k >= 0) & (q >= 0)
        if self.causal:
            visible = visible & (k <= q)
        if self.window is not None:
            visible = visible & (q - k < self.window) & (k - q < self.window)
        return visible

    @property
    def block_rows(self) -> int:
        """The rows of every block that a ring passes on: shorter blocks are padded."""
        return self.q.max_local_shape[SEQUENCE]

    def rotation(
        self, block_shape: Sequence[int], by: int = 1
    ) -> tuple[tuple[Layout, Layout], Sequence[int]]:
        """The layouts and the global shape of a move of each device's block to the device `by` further on."""
        n, (batch, heads, rows, width) = len(self.devices), block_shape
        shards = Shard(self.axes), rotated(self.axes, n, self.block_rows, by)
        before, after = (Layout((Dim("b"), Dim("h"), Dim("s", (shard,)), Dim("k"))) for shard in shards)
        return (before, after), (batch, heads, n * rows, width)

    def in_turn(self, kv: T, send: Callable[[T], Callable[[], T]]) -> Iterator[tuple[int, T]]:
        """The blocks of all rounds. send: begins to send a block to the next device -> waits for its own."""
        for turn in range(self.rounds):
            wait = send(kv) if turn + 1 < self.rounds else None
            yield turn, kv
            kv = wait() if wait else kv

    def split(self, kv: Any) -> tuple[Any, Any]:
        """Keys and values of a block of keys with the values beside them."""
        return kv[..., : -self.value_width], kv[..., -self.value_width :]


def dim_order(layout: Layout, sequence: str, heads: str) -> tuple[str, ...]:
    """The names of the dims in order; the width is the last. Raises NotationError unless they are there."""
    for name, option in ((sequence, "sequence"), (heads, "heads")):
        if name not in layout.names[:-1]:
            why = "the last dim is the width of a head" if name in layout.names else f"no dim {name!r}"
            raise NotationError(why, text=str(layout), hint=f"{option}= names the dim, as in b s/cp h k")
    if layout.dims[-1].axes:
        what = "the width of heads is sharded"
        raise NotationError(what, text=str(layout), hint="products are sums over it")
    batch = (name for name in layout.names[:-1] if name not in (sequence, heads))
    return (*batch, heads, sequence, layout.names[-1])


def key_lengths(q: Sharding, heads: str, kv_heads: int | None) -> dict[str, int | None]:
    """The global lengths of dims of keys and values that the queries give; the width is the blocks' own."""
    return {**dict(zip(q.layout.names[:-1], q.shape[:-1], strict=True)), heads: kv_heads}


def attention(
    q: Sharding, k: Sharding, v: Sharding, *, how: str = AUTO, causal: bool = False, window: int | None = None
) -> Attention:
    """The attention of queries, keys and values, all of them in `dim_order`. Raises if they do not fit."""
    text = str(k.layout)
    if how not in (AUTO, *METHODS):
        raise XshardError(f"unknown how={how!r}", hint=f"there are: {', '.join((AUTO, *METHODS))}")
    if window is not None and window < 1:
        raise XshardError(f"window={window}", hint="a query sees itself: 1 or more")
    if k.shape[:HEADS] != q.shape[:HEADS] or k.shape[SEQUENCE:] != q.shape[SEQUENCE:]:
        hint = "keys have the batch, the rows and the width of queries"
        raise ShapeError(f"queries of shape {q.shape}, keys of shape {k.shape}", text=text, hint=hint)
    if v.shape[:WIDTH] != k.shape[:WIDTH]:
        raise ShapeError(f"keys of shape {k.shape}, values of shape {v.shape}", text=text)
    if q.shape[HEADS] % (k.shape[HEADS] or 1):
        hint = "each head of keys is for equally many heads of queries"
        raise ShapeError(f"{q.shape[HEADS]} heads of queries, {k.shape[HEADS]} of keys", text=text, hint=hint)
    if q.mesh.size(*q.layout.dims[SEQUENCE].axes) == 1:
        how = GATHER  # there is nothing to gather
    kv = replace(k, shape=(*k.shape[:WIDTH], k.shape[WIDTH] + v.shape[WIDTH]))
    return Attention(q, kv, v.shape[WIDTH], how, causal, window)


def document_move(attn: Attention, layout: Layout, ndim: int) -> tuple[tuple[Layout, Layout], list[int], int]:
    """The move that unshards the sequence of document numbers: its layouts, the global shape, and that dim.

    layout: orders the dims. ndim: 1 for one sequence that all batches share; else each has its own.
    """
    names = attn.q.layout.names
    kept = names[SEQUENCE:WIDTH] if ndim == 1 else (*names[:HEADS], names[SEQUENCE])
    sharded = tuple(dim for dim in layout.dims if dim.name in kept)
    whole = tuple(Dim(dim.name) if dim.name == names[SEQUENCE] else dim for dim in sharded)
    shape = [attn.q.shape[attn.q.dim_index(dim.name)] for dim in sharded]
    return (Layout(sharded), Layout(whole)), shape, [dim.name for dim in whole].index(names[SEQUENCE])


@lru_cache(maxsize=4096)
def tiles(attn: Attention, device: int, turn: int = 0) -> tuple[Tile, ...]:
    """The tiles of a device's scores that count, in the order of its queries; masked rows are left out."""
    q, k = attn.query_rows(device), attn.key_rows(device, turn)
    candidates = (_tile(attn, q, k, a, b) for a in _runs(q) for b in _runs(k))
    return tuple(tile for tile in candidates if tile is not None)


def run_starts(attn: Attention) -> tuple[int, ...]:
    """The starts of runs of rows in the blocks of all devices, if they are few and equal; else 0 alone."""
    starts = {tuple(run.start for run in _runs(attn.query_rows(device))) for device in attn.devices}
    return starts.pop() if len(starts) == 1 and attn.queries.is_even else (0,)


def _runs(rows: Rows) -> list[slice]:
    """The intervals of consecutive rows; all rows as one if there are many."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    if len(starts) > MOST_RUNS + 1:
        return [slice(0, len(rows))]
    return [slice(a, b) for a, b in itertools.pairwise(starts) if a < b]


def _tile(attn: Attention, q: Rows, k: Rows, mine: slice, theirs: slice) -> Tile | None:
    """The part that counts of the scores of a run of queries and a run of keys."""
    window = len(q) + int(k.max()) + int(q.max()) + 1 if attn.window is None else attn.window
    after = 1 if attn.causal else window  # a key is less than `after` rows behind its query
    (a, b), (c, d) = ((int(x[r].min()), int(x[r].max()) + 1) for x, r in ((q, mine), (k, theirs)))
    first, last = max(c, a - window + 1), min(d, b - 1 + after)
    if first >= last:
        return None
    if b - a != mine.stop - mine.start or d - c != theirs.stop - theirs.start:
        return Tile(mine, theirs, SOME)  # rows with others between them
    low, high = max(a, first - after + 1), min(b, last - 1 + window)
    rows = slice(mine.start + low - a, mine.start + high - a)
    keys = slice(theirs.start + first - c, theirs.start + last - c)
    if last - low <= after and high - first <= window:
        kind = ALL
    else:
        kind = CAUSAL if attn.causal and last == high and high - first <= window else SOME
    return Tile(rows, keys, kind)
