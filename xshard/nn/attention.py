"""Attention over sharded sequences: shardings, and scores that count; (*batch, heads, sequence, width)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import shown, whole_number
from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError, XshardError
from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.layout.runs import row_numbers
from xshard.nn.windows import interval_frame
from xshard.notation.parser import Dim, Shard

AUTO = "auto"
GATHER, ULYSSES, RING, REDUCE = METHODS = "gather", "ulysses", "ring", "reduce"
HEADS = -3
SEQUENCE = -2
WIDTH = -1
ALL = "all"
CAUSAL = "causal"
SOME = "some"  # kinds of tiles
FIRST_DERIVATIVES = RING, REDUCE  # only these, and in reverse mode
BITS = 2**31 - 1
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
    """An attention of sharded arrays by one of `METHODS`. kv: sharding of the keys with the values,
    `value_width` wide, beside them. A query stands at its number plus `offset` among the keys, and sees
    `left` keys before that place and `right` after it; None: all.
    """

    q: Sharding
    kv: Sharding
    value_width: int
    how: str
    left: int | None = None
    right: int | None = None
    offset: int = 0

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the work: the axes of queries, else of keys; in "reduce" first of keys."""
        own, keys = (x.layout.dims[SEQUENCE].axes for x in (self.q, self.kv))
        taken = {axis for dim in self.q.layout.dims[:SEQUENCE] for axis in dim.axes}
        free = tuple(axis for axis in keys if axis not in taken)
        return (free or own) if self.how == REDUCE else (own or free)

    @cached_property
    def queries(self) -> Sharding:
        """The sharding under which queries are used."""
        dims = [*self.q.layout.dims]
        tags = self.q.layout.tags
        rows = dims[SEQUENCE]
        if self.how == ULYSSES and self.axes:
            dims[HEADS] = replace(
                dims[HEADS], shards=(*dims[HEADS].shards, Shard(self.axes, "balanced"))
            )
            dims[SEQUENCE] = Dim(rows.name)
        elif self.how == RING and not rows.axes:
            dims[SEQUENCE] = Dim(rows.name, (Shard(self.axes),))
        elif self.how == REDUCE:
            dims[SEQUENCE] = Dim(rows.name) if {*rows.axes} & {*self.axes} else rows
            tags = (("copy", self.axes),)
        return self.q.with_layout(Layout(tuple(dims), tags))

    @cached_property
    def keys(self) -> Sharding:
        """The sharding under which keys and values are used; in a ring, in its first round."""
        queries = self.queries.layout
        dims = (*queries.dims[:HEADS], self._key_heads(), self._key_rows(), queries.dims[WIDTH])
        sharding_axes = {axis for dim in dims for axis in dim.axes}
        copies = tuple(axis for axis in queries.axes if axis not in sharding_axes)
        return self.kv.with_layout(Layout(dims, (("copy", copies),) if copies else ()))

    @property
    def result(self) -> Sharding:
        """The sharding under which the result is computed."""
        tags = (("sum", self.axes),) if self.how == REDUCE else ()
        layout = Layout(self.queries.layout.dims, tags)
        return replace(self.queries, layout=layout, shape=(*self.q.shape[:WIDTH], self.value_width))

    @property
    def target(self) -> Sharding:
        """The sharding of the returned result: under the layout of the queries."""
        return self.result.with_layout(self.q.layout)

    def sees_some(self, has_documents: bool) -> bool:
        """True if masks leave each query a key: rows of one sequence see themselves."""
        is_one = self.q.layout.names == self.kv.layout.names and not self.offset
        is_masked = has_documents or self.left is not None or self.right is not None
        return self.kv.shape[SEQUENCE] > 0 and (is_one or not is_masked)

    @property
    def group(self) -> int:
        """The number of heads of queries that share a head of keys."""
        return self.q.shape[HEADS] // self.kv.shape[HEADS]

    def _key_rows(self) -> Dim:
        """The rows of keys on a device: all, or in a ring and in "reduce" a part."""
        rows = self.queries.layout.dims[SEQUENCE]
        own = self.kv.layout.dims[SEQUENCE]
        if self.how not in FIRST_DERIVATIVES:
            return Dim(own.name)
        if self.how == RING and rows.name == own.name:
            return rows
        return own if own.axes == self.axes else Dim(own.name, (Shard(self.axes),))

    def _key_heads(self) -> Dim:
        """The heads of keys that each part's heads of queries read, as an overlap."""
        queries = self.queries
        n = self.kv.shape[HEADS]
        group = self.group
        dim = queries.layout.dims[HEADS]
        if group == 1 or not dim.axes:
            return dim
        if any(shard.numbers for shard in dim.shards):
            hint = f"as in {dim.name}/balanced({','.join(dim.axes)})"
            raise NotationError(
                "heads in groups, sharded by numbers", text=str(queries.layout), hint=hint
            )
        sizes = queries.mesh.sizes_of(dim.axes)
        reads = queries.shape[HEADS], lambda a, b: (a // group, (b - 1) // group + 1)
        return interval_frame(dim, n, sizes, *reads).source

    def heads_read(self, device: int) -> Rows:
        """The local head of keys that each of a device's heads of queries reads."""
        q, k = (
            row_numbers(x.held(len(x.shape) + HEADS, device)) for x in (self.queries, self.keys)
        )
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
        if self.left is None:
            return n
        return 1 + max(
            t for t in range(n) if t == 0 or any(tiles(self, d, t) for d in self.devices)
        )

    def visible(self, q: Rows, k: Rows) -> NDArray[np.bool_]:
        """Rows of queries (n, 1) and of keys (m,) -> (n, m): scores that count; -1 stands for no row."""
        visible = (k >= 0) & (q >= 0)
        place = q + self.offset
        if self.right is not None:
            visible = visible & (k - place <= self.right)
        if self.left is not None:
            visible = visible & (place - k <= self.left)
        return visible

    @property
    def block_rows(self) -> int:
        """The rows of every block of keys that a ring passes on: shorter blocks are padded."""
        return self.keys.max_local_shape[SEQUENCE]

    def rotation(
        self, block: Sequence[int], by: int = 1
    ) -> tuple[tuple[Layout, Layout], Sequence[int]]:
        """The layouts and the global shape of a move of each device's block to the device `by` further on."""
        n, (batch, heads, rows, width) = len(self.devices), block
        shards = Shard(self.axes), rotated(self.axes, n, self.block_rows, by)
        before, after = (
            Layout((Dim("b"), Dim("h"), Dim("s", (shard,)), Dim("k"))) for shard in shards
        )
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
            why = (
                "the last dim is the width of a head"
                if name in layout.names
                else f"no dim {name!r}"
            )
            raise NotationError(
                why, text=str(layout), hint=f"{option}= names the dim, as in b s/cp h k"
            )
    if layout.dims[-1].axes:
        what = "the width of heads is sharded"
        raise NotationError(what, text=str(layout), hint="products are sums over it")
    batch = (name for name in layout.names[:-1] if name not in (sequence, heads))
    return (*batch, heads, sequence, layout.names[-1])


def key_order(kv_layout: Layout, names: tuple[str, ...]) -> tuple[str, ...]:
    """The dims of keys in the order of the queries' `names`: rows of keys may have a name of their own."""
    others = [name for name in kv_layout.names if name not in names]
    rows = others[0] if len(others) == 1 else names[SEQUENCE]
    order = (*names[:SEQUENCE], rows, names[WIDTH])
    if sorted(order) != sorted(kv_layout.names):
        hint = f"the dims of queries, {' '.join(names)}; rows of keys may have another name, as in b t/cp h k"
        raise NotationError("other dims of keys than of queries", text=str(kv_layout), hint=hint)
    return order


def key_lengths(
    q: Sharding, kv_layout: Layout, heads: str, kv_heads: int | None, kv_length: int | None
) -> list[int | None]:
    """The global lengths of dims of keys and values; the width is the blocks' own, and so is None."""
    shared = dict(zip(q.layout.names[:-1], q.shape[:-1], strict=True))
    rows = {name: kv_length for name in kv_layout.names[:-1] if name not in shared}
    if kv_length is not None and not rows:
        hint = "rows of keys that are others than the queries' rows have another name, as in b t/cp h k"
        raise XshardError(f"kv_length={kv_length}", text=str(kv_layout), hint=hint)
    lengths = {**shared, **rows, heads: kv_heads}
    return [lengths.get(name) for name in kv_layout.names]


def attention(
    *qkv: Sharding, how: str = AUTO, causal: bool = False, window: Any = None, offset: int = 0
) -> Attention:
    """The attention of queries, keys and values, all of them in `dim_order`. Raises if they do not fit."""
    q, k, v = qkv
    text = str(k.layout)
    if how not in (AUTO, *METHODS):
        raise XshardError(f"unknown how={how!r}", hint=f"there are: {', '.join((AUTO, *METHODS))}")
    left, right = _sight(window)
    if k.shape[:HEADS] != q.shape[:HEADS] or k.shape[WIDTH] != q.shape[WIDTH]:
        hint = "keys have the batch and the width of queries"
        raise ShapeError(
            f"queries of shape {q.shape}, keys of shape {k.shape}", text=text, hint=hint
        )
    if v.shape[:WIDTH] != k.shape[:WIDTH]:
        raise ShapeError(f"keys of shape {k.shape}, values of shape {v.shape}", text=text)
    if q.shape[HEADS] % (k.shape[HEADS] or 1):
        hint = "each head of keys is for equally many heads of queries"
        raise ShapeError(
            f"{q.shape[HEADS]} heads of queries, {k.shape[HEADS]} of keys", text=text, hint=hint
        )
    kv = replace(k, shape=(*k.shape[:WIDTH], k.shape[WIDTH] + v.shape[WIDTH]))
    attn = Attention(q, kv, v.shape[WIDTH], how, left, 0 if causal else right, offset)
    # There is nothing to gather if no axis shares a sequence out.
    return attn if q.mesh.size(*attn.axes) > 1 else replace(attn, how=GATHER)


def _sight(window: Any) -> tuple[int | None, int | None]:
    """The rows that a query sees before and after its own: a window of 3 is (2, 2)."""
    both = window if isinstance(window, tuple | list) and len(window) == 2 else (window, window)
    less = 0 if both is window else 1
    sides = [None if n is None else whole_number(n) for n in both]
    if any(n is not None and (m is None or m < less) for n, m in zip(both, sides, strict=True)):
        hint = "3: rows fewer than 3 away; (2, 0): 2 rows before and its own; None: to the end"
        raise XshardError(f"window={shown(window)}", hint=hint)
    left, right = (None if n is None else n - less for n in sides)
    return left, right


def dropped(seed: Any, *numbers: Any, part: float) -> Any:
    """Whether weights are dropped, by the bits of their numbers: int64 and uint32 give the same ones."""
    bits = seed & BITS
    for each in (0, *numbers):  # the seed first: near ones share no masks
        bits = ((bits ^ each) + 0x1E3779B9) & BITS
        for _ in range(2):
            bits = ((bits >> 16 ^ bits) * 0x45D9F3B) & BITS
        bits = bits >> 16 ^ bits
    return bits < round(part * BITS)


def document_move(
    attn: Attention, layout: Layout, ndim: int, of_keys: bool = False
) -> tuple[tuple[Layout, Layout], list[int], list[int]]:
    """The move that unshards document numbers: layouts, shape, the order that puts the sequence last."""
    array = attn.kv if of_keys else attn.q
    names = array.layout.names
    kept = names[SEQUENCE:WIDTH] if ndim == 1 else (*names[:HEADS], names[SEQUENCE])
    sharded = tuple(dim for dim in layout.dims if dim.name in kept)
    batch = {dim.name: dim for dim in attn.q.layout.dims[:HEADS]}
    whole = tuple(batch.get(dim.name, Dim(dim.name)) for dim in sharded)
    shape = [array.shape[array.dim_index(dim.name)] for dim in sharded]
    order = [dim.name for dim in sharded]
    return (Layout(sharded), Layout(whole)), shape, [*map(order.index, kept)]


@layout_cache(maxsize=4096)
def tiles(attn: Attention, device: int, turn: int = 0) -> tuple[Tile, ...]:
    """The tiles of a device's scores that count, in the order of its queries; masked rows are left out."""
    q = attn.query_rows(device)
    k = attn.key_rows(device, turn)
    candidates = (_tile(attn, q, k, a, b) for a in _runs(q) for b in _runs(k))
    return tuple(tile for tile in candidates if tile is not None)


def run_starts(attn: Attention, array: Sharding) -> tuple[int, ...]:
    """The starts of runs of rows in an array's blocks, if few and on all devices equal; else 0 alone."""
    held = (array.held(len(array.shape) + SEQUENCE, device) for device in attn.devices)
    starts = {tuple(run.start for run in _runs(row_numbers(each))) for each in held}
    return starts.pop() if len({*array.local_sizes[SEQUENCE]}) == len(starts) == 1 else (0,)


def _runs(rows: Rows) -> list[slice]:
    """The intervals of consecutive rows; all rows as one if there are many."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    if len(starts) > MOST_RUNS + 1:
        return [slice(0, len(rows))]
    return [slice(a, b) for a, b in itertools.pairwise(starts) if a < b]


def _tile(attn: Attention, q: Rows, k: Rows, mine: slice, theirs: slice) -> Tile | None:
    """The part that counts of the scores of a run of queries and a run of keys."""
    far = int(k.max()) + int(q.max()) + abs(attn.offset) + 1
    left, right = (far if n is None else n for n in (attn.left, attn.right))
    (a, b), (c, d) = ((int(x[r].min()), int(x[r].max()) + 1) for x, r in ((q, mine), (k, theirs)))
    a = a + attn.offset
    b = b + attn.offset
    first = max(c, a - left)
    last = min(d, b + right)
    if first >= last:
        return None
    if b - a != mine.stop - mine.start or d - c != theirs.stop - theirs.start:
        return Tile(mine, theirs, SOME)  # rows with others between them
    low = max(a, first - right)
    high = min(b, last + left)
    rows = slice(mine.start + low - a, mine.start + high - a)
    keys = slice(theirs.start + first - c, theirs.start + last - c)
    reaches_back = high - first <= left + 1
    if last - low <= right + 1 and reaches_back:
        kind = ALL
    else:
        kind = CAUSAL if attn.right is not None and last - high == right and reaches_back else SOME
    return Tile(rows, keys, kind)
