"""Attention over a sequence that is cut: what every device reads, and which scores of it are not empty.

Decides the layouts of three ways to compute it. `gather`: a device has its own queries and all keys and
values. `ulysses`: it has all rows of some heads. `ring`: it has its own queries, and in every round the keys
and values of another device. Which rows a device has, and so every mask, comes from positions, whatever the
order of the sequence is called. Knows no framework; dims are in the order (*batch, heads, sequence, width).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import NotationError, ShapeError, XshardError
from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.layout.runs import row_numbers
from xshard.nn.windows import interval_frame
from xshard.notation.parser import Dim, Shard

AUTO = "auto"
GATHER, ULYSSES, RING = WAYS = "gather", "ulysses", "ring"
HEADS, SEQUENCE, WIDTH = -3, -2, -1
ALL, CAUSAL, SOME = "all", "causal", "some"  # of a piece: which scores are not empty
MOST_RUNS = 4  # blocks of more runs, as under `cyclic`, are one piece: many small products are slow

Rows = NDArray[np.int64]


class Piece(NamedTuple):
    """Local rows of queries and of keys, and which scores between them are not empty.

    kind: `all`; `causal`: a key for each query, up to the last, so that the last query sees all keys; `some`.
    """

    q: slice
    k: slice
    kind: str


@dataclass(frozen=True)
class Attention:
    """An attention of cut arrays.

    q: where queries are. kv: where keys are, with the values beside them: as wide as both. wide: how wide
    values are. how: one of `WAYS`. causal: a query sees no key after it. window: it sees keys fewer than so
    many rows away.

    >>> from xshard import Mesh
    >>> cut = Layout.parse("b h s/zigzag(cp) k")
    >>> q, kv = (Sharding(cut, Mesh(cp=4), shape) for shape in [(1, 6, 64, 8), (1, 2, 64, 16)])
    >>> ulysses = Attention(q, kv, 8, "ulysses", causal=True)
    >>> str(ulysses.queries.layout), str(ulysses.keys.layout)
    ('b h/balanced(cp) s k', 'b h/balanced(cp):halo([0,1,1,1],[0,0,0,0],none) s k')
    >>> str(replace(ulysses, how="gather").keys.layout)
    'b h s k | copy(cp)'
    """

    q: Sharding
    kv: Sharding
    wide: int
    how: str
    causal: bool = False
    window: int | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that cut the sequence."""
        return self.q.layout.dims[SEQUENCE].axes

    @cached_property
    def queries(self) -> Sharding:
        """Where queries are used."""
        dims = list(self.q.layout.dims)
        if self.how == ULYSSES and self.axes:
            dims[HEADS] = replace(dims[HEADS], shards=(*dims[HEADS].shards, Shard(self.axes, "balanced")))
            dims[SEQUENCE] = Dim(dims[SEQUENCE].name)
        return self.q.with_layout(replace(self.q.layout, dims=tuple(dims)))

    @cached_property
    def keys(self) -> Sharding:
        """Where keys and values are used; in a ring, in its first round."""
        dims = [*self.queries.layout.dims[:HEADS], self._read_heads(), *self.queries.layout.dims[SEQUENCE:]]
        if self.how != RING:
            dims[SEQUENCE] = Dim(dims[SEQUENCE].name)
        cut = {axis for dim in dims for axis in dim.axes}
        copies = tuple(axis for axis in self.queries.layout.axes if axis not in cut)
        return self.kv.with_layout(Layout(tuple(dims), (("copy", copies),) if copies else ()))

    @property
    def result(self) -> Sharding:
        """Where the result is computed."""
        return replace(self.queries, shape=(*self.q.shape[:WIDTH], self.wide))

    @property
    def target(self) -> Sharding:
        """Where the result ends: under the layout of the queries."""
        return self.result.with_layout(self.q.layout)

    @property
    def group(self) -> int:
        """How many heads of queries share a head of keys."""
        return self.q.shape[HEADS] // self.kv.shape[HEADS]

    def _read_heads(self) -> Dim:
        """The heads of keys that the heads of queries of every part share, as an overlap."""
        queries, n, group = self.queries, self.kv.shape[HEADS], self.group
        dim = queries.layout.dims[HEADS]
        if group == 1 or not dim.axes:
            return dim
        if any(shard.numbers for shard in dim.shards):
            way = f"as in {dim.name}/balanced({','.join(dim.axes)})"
            raise NotationError("heads in groups, cut by numbers", text=str(queries.layout), hint=way)
        sizes = queries.mesh.sizes_of(dim.axes)
        needs = queries.shape[HEADS], lambda a, b: (a // group, (b - 1) // group + 1)
        return interval_frame(dim, n, sizes, *needs).source

    def heads_read(self, device: int) -> Rows:
        """For every head of queries that a device has, which of its heads of keys it reads."""
        q, k = (row_numbers(x.held(len(x.shape) + HEADS, device)) for x in (self.queries, self.keys))
        return np.arange(len(q)) if self.group == 1 else q // self.group - k[:1]

    # -- rows ----------------------------------------------------------------------------------------------

    def query_rows(self, device: int) -> Rows:
        """The global numbers of the rows of a device's queries."""
        return row_numbers(self.queries.held(len(self.q.shape) + SEQUENCE, device))

    def key_rows(self, device: int, turn: int = 0) -> Rows:
        """Those of its keys; turn: in which round of a ring, where they come from a device so far back."""
        if turn:
            ring = self.q.mesh.group(device, self.axes)
            device = ring[(self.q.mesh.index(device, self.axes) - turn) % len(ring)]
        return row_numbers(self.keys.held(len(self.kv.shape) + SEQUENCE, device))

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices along the axes that cut the sequence: what they have stands for that of all others."""
        return self.q.mesh.group(0, self.axes)

    @cached_property
    def rounds(self) -> int:
        """How many blocks of keys a device sees: later ones are beyond the window of all devices."""
        n = len(self.devices) if self.how == RING else 1
        if self.window is None:
            return n
        return 1 + max(t for t in range(n) if t == 0 or any(pieces(self, d, t) for d in self.devices))

    def sees(self, q: Rows, k: Rows) -> NDArray[np.bool_]:
        """Rows of queries (n, 1) and of keys (m,) -> (n, m), which scores are not empty; -1 is no row."""
        seen = (k >= 0) & (q >= 0)
        if self.causal:
            seen = seen & (k <= q)
        if self.window is not None:
            seen = seen & (q - k < self.window) & (k - q < self.window)
        return seen

    # -- the ring ------------------------------------------------------------------------------------------

    @property
    def block_rows(self) -> int:
        """Rows of every block that travels in a ring: shorter ones are padded."""
        return self.q.max_local_shape[SEQUENCE]

    def passed_on(self, by: int = 1) -> tuple[Layout, Layout]:
        """The layouts between which blocks go to the device `by` further on: of all, side by side.

        The blocks have dims (batch, heads, `block_rows`, width); batch and heads are those of the device.
        """
        shards = Shard(self.axes), rotated(self.axes, len(self.devices), self.block_rows, by)
        before, after = (Layout((Dim("b"), Dim("h"), Dim("s", (shard,)), Dim("k"))) for shard in shards)
        return before, after


def order(layout: Layout, sequence: str, heads: str) -> tuple[str, ...]:
    """The names of the dims in the order (*batch, heads, sequence, width). The width is the last dim.

    Raises NotationError if one of them is missing or the width is cut.
    """
    for name, option in ((sequence, "sequence"), (heads, "heads")):
        if name not in layout.names[:-1]:
            where = "the last dim is the width of a head" if name in layout.names else f"no dim {name!r}"
            raise NotationError(where, text=str(layout), hint=f"{option}= names the dim, as in b s/cp h k")
    if layout.dims[-1].axes:
        raise NotationError("the width of heads is cut", text=str(layout), hint="products are sums over it")
    batch = (name for name in layout.names[:-1] if name not in (sequence, heads))
    return (*batch, heads, sequence, layout.names[-1])


def attention(
    q: Sharding, k: Sharding, v: Sharding, how: str = AUTO, causal: bool = False, window: int | None = None
) -> Attention:
    """An attention of queries, keys and values, all of them in `order`. Raises where they do not fit."""
    text = str(k.layout)
    if how not in (AUTO, *WAYS):
        raise XshardError(f"no way how={how!r}", hint=f"there are: {', '.join((AUTO, *WAYS))}")
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


def document_layouts(layout: Layout, names: tuple[str, ...], ndim: int) -> tuple[Layout, Layout]:
    """The layouts in which documents are given, and used: for each batch, or, of one dim, for all of them.

    names: of the dims of `layout`, in `order`.
    """
    kept = names[SEQUENCE:WIDTH] if ndim == 1 else (*names[:HEADS], names[SEQUENCE])
    given = tuple(dim for dim in layout.dims if dim.name in kept)
    whole = tuple(Dim(dim.name) if dim.name == names[SEQUENCE] else dim for dim in given)
    return Layout(given), Layout(whole)


@lru_cache(maxsize=4096)
def pieces(given: Attention, device: int, turn: int = 0) -> tuple[Piece, ...]:
    """The pieces of a device's scores that are not empty, in the order of its queries.

    Runs of rows are clipped to what they see of each other: what a mask empties is not computed.

    >>> from xshard import Mesh
    >>> q = Sharding(Layout.parse("h s/cp k"), Mesh(cp=2), (1, 8, 8))
    >>> [(p.q, p.k, p.kind) for p in pieces(attention(q, q, q, "gather", causal=True), 1)]
    [(slice(0, 4, None), slice(0, 8, None), 'causal')]
    >>> pieces(attention(q, q, q, "ring", causal=True), 0, turn=1)  # keys of device 1, all after its queries
    ()
    """
    q, k = given.query_rows(device), given.key_rows(device, turn)
    found = (_piece(given, q, k, a, b) for a in _runs(q) for b in _runs(k))
    return tuple(piece for piece in found if piece is not None)


def splits(given: Attention) -> tuple[int, ...]:
    """Where runs of rows begin in the blocks of all devices, if those are few and alike; else 0 alone."""
    starts = {tuple(run.start for run in _runs(given.query_rows(device))) for device in given.devices}
    return starts.pop() if len(starts) == 1 and given.queries.is_even else (0,)


def _runs(rows: Rows) -> list[slice]:
    """The intervals of consecutive rows; all rows if there are many."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    if len(starts) > MOST_RUNS + 1:
        return [slice(0, len(rows))]
    return [slice(a, b) for a, b in itertools.pairwise(starts) if a < b]


def _piece(given: Attention, q: Rows, k: Rows, mine: slice, theirs: slice) -> Piece | None:
    """The part of the scores of a run of queries and a run of keys that is not empty."""
    window = len(q) + int(k.max()) + int(q.max()) + 1 if given.window is None else given.window
    after = 1 if given.causal else window  # keys are at most so many rows less one after a query
    (a, b), (c, d) = ((int(x[r].min()), int(x[r].max()) + 1) for x, r in ((q, mine), (k, theirs)))
    if max(c, a - window + 1) >= min(d, b - 1 + after):
        return None
    if b - a != mine.stop - mine.start or d - c != theirs.stop - theirs.start:
        return Piece(mine, theirs, SOME)  # rows with others between them
    first, last = max(c, a - window + 1), min(d, b - 1 + after)
    low, high = max(a, first - after + 1), min(b, last - 1 + window)
    rows = slice(mine.start + low - a, mine.start + high - a)
    keys = slice(theirs.start + first - c, theirs.start + last - c)
    if last - low <= after and high - first <= window:
        kind = ALL
    else:
        kind = CAUSAL if given.causal and last == high and high - first <= window else SOME
    return Piece(rows, keys, kind)
