"""Attention over sharded sequences: where blocks are used, and which scores count.

Arrays have the dims (*batch, heads, sequence, width). A query at row i stands at position i + offset of the
keys, and sees the keys from `left` rows before it to `right` rows after it, of its own chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError, XshardError
from xshard.layout import Layout, Sharding
from xshard.layout.partition import rotated
from xshard.layout.runs import row_numbers
from xshard.layout.sub_axes import root_of
from xshard.nn.windows import Interval, ShardedDim, interval_frame
from xshard.notation.parser import Dim, Shard
from xshard.signatures import as_whole_number, short_repr

AUTO: Final = "auto"
GATHER = "gather"
ULYSSES = "ulysses"
RING = "ring"
REDUCE = "reduce"
METHODS = (GATHER, ULYSSES, RING, REDUCE)
Method = Literal["auto", "gather", "ulysses", "ring", "reduce"]
FIRST_DERIVATIVES = (RING, REDUCE)  # methods with only these, and in reverse mode

# The positions of dims, counted from the last.
HEADS = -3
SEQUENCE = -2
WIDTH = -1

# The kinds of tiles: all scores count; the causal mask, aligned at the last query and the last key; a part.
ALL = "all"
CAUSAL = "causal"
SOME = "some"

# Of random numbers: products by 27 bits fit into int64, and uint32 gives the same bits.
BITS = 2**31 - 1
UNLIMITED = 2**31 - 1  # more than the number of any row; JAX compares rows in 32 bits
MAX_RUNS = 4  # blocks of more runs, as under `cyclic`, are one tile: many small products are slow

T = TypeVar("T")
Rows = NDArray[np.int64]


class Tile(NamedTuple):
    """Local rows of queries and of keys, and which scores between them count: a kind of tiles."""

    q: slice
    k: slice
    kind: str


class Rotation(NamedTuple):
    """A move of each device's block to a device further on, as a redistribution."""

    layouts: tuple[Layout, Layout]
    shape: Sequence[int]  # global


@dataclass(frozen=True)
class Attention:
    """An attention of sharded arrays by one of `METHODS`.

    q: the sharding of the queries, with dims (*batch, heads, sequence, width).
    kv: the sharding of the keys, with the values, `value_width` wide, beside them.
    left, right: how many keys before and after its position a query sees.
    offset: query i has the position i + offset among the keys.
    chunk: keys 0 ... chunk - 1 are the first chunk; a query sees the chunk of its position. None: all.
    """

    q: Sharding
    kv: Sharding
    value_width: int
    method: str
    left: int = UNLIMITED
    right: int = UNLIMITED
    offset: int = 0
    chunk: int | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the sequence is sharded while attention is computed.

        Those that shard the rows of queries, or else the rows of keys; for "reduce" the other way round.
        `b s/cp h k` for both: (cp,).
        """
        query_axes = self.q.layout.dims[SEQUENCE].axes
        key_axes = self.kv.layout.dims[SEQUENCE].axes
        # An axis that shards batches or heads of queries must shard those of keys,
        # too, and not rows.
        excluded = _sharding_axes(self.q.layout.dims[:SEQUENCE])
        key_axes = tuple(axis for axis in key_axes if axis not in excluded)
        if self.method == REDUCE and key_axes:  # keys stay where they are, and queries move
            return key_axes
        return query_axes if query_axes else key_axes

    @cached_property
    def queries(self) -> Sharding:
        """The sharding that queries are redistributed to before scores are computed.

        For `b h s/cp k`: the same with "gather" and "ring"; `b h/balanced(cp) s k` with "ulysses".
        """
        dims = list(self.q.layout.dims)
        tags = self.q.layout.tags
        heads = dims[HEADS]
        rows = dims[SEQUENCE]
        if self.method == ULYSSES and self.axes:  # whole sequences of some heads
            shards = (*heads.shards, Shard(self.axes, "balanced"))
            dims[HEADS] = replace(heads, shards=shards)
            dims[SEQUENCE] = Dim(rows.name)
        elif self.method == RING and not rows.axes:  # only keys are sharded: queries follow them
            dims[SEQUENCE] = Dim(rows.name, (Shard(self.axes),))
        elif self.method == REDUCE:
            # Each device needs all queries that any device along these axes has.
            if set(rows.axes) & set(self.axes):
                dims[SEQUENCE] = Dim(rows.name)
            tags = (("copy", self.axes),)  # each device uses them for its own keys
        return self.q.with_layout(Layout(tuple(dims), tags))

    @cached_property
    def keys(self) -> Sharding:
        """The sharding under which keys and values are used; in a ring, in its first round."""
        queries = self.queries.layout
        *batch, _, _, width = queries.dims
        dims = (*batch, self._key_heads(), self._key_rows(), width)
        sharding_axes = _sharding_axes(dims)
        # Devices with other queries use the same keys: copies, so that their gradients are summed.
        copies = tuple(axis for axis in queries.axes if axis not in sharding_axes)
        return self.kv.with_layout(Layout(dims, (("copy", copies),)))

    @property
    def result(self) -> Sharding:
        """The sharding under which the result is computed."""
        layout = Layout(self.queries.layout.dims)
        if self.method == REDUCE:  # by each device's own keys
            layout = replace(layout, tags=(("sum", self.axes),))
        shape = (*self.q.shape[:WIDTH], self.value_width)
        return replace(self.queries, layout=layout, shape=shape)

    @property
    def target(self) -> Sharding:
        """The sharding of the returned result: under the layout of the queries."""
        return self.result.with_layout(self.q.layout)

    def sees_some(self, has_documents: bool) -> bool:
        """Return whether masks surely leave each query a key: rows of one sequence see themselves."""
        if self.kv.shape[SEQUENCE] == 0:
            return False
        # Documents of two sequences, or a window that an offset moves away, may leave a query nothing.
        is_masked = has_documents or self.chunk or min(self.left, self.right) < UNLIMITED
        return not is_masked or (self.is_one_sequence and not self.offset)

    @property
    def is_one_sequence(self) -> bool:
        """Whether queries and keys are rows of one sequence."""
        return self.q.layout.names == self.kv.layout.names

    @property
    def query_heads_per_key_head(self) -> int:
        """The number of heads of queries that share a head of keys."""
        return self.q.shape[HEADS] // self.kv.shape[HEADS]

    def _key_rows(self) -> Dim:
        """Return the rows of keys on a device: all of them, or in a ring and in "reduce" a part."""
        query_dim = self.queries.layout.dims[SEQUENCE]
        key_dim = self.kv.layout.dims[SEQUENCE]
        if self.method not in (RING, REDUCE):  # gathered, or whole for some heads
            return Dim(key_dim.name)
        if self.method == RING and query_dim.name == key_dim.name:
            return query_dim
        if key_dim.axes == self.axes:  # they may stay where they are
            return key_dim
        return Dim(key_dim.name, (Shard(self.axes),))

    def _key_heads(self) -> Dim:
        """Return how key heads are sharded, so that each device has those that its queries read.

        With grouped queries, devices may need the same head of keys: 6 heads of queries on 2
        devices, 2 to a head of keys: the devices read heads 0, 1 and heads 1, 2 of keys. The shared
        ones are written as an overlap (halo) of blocks.
        """
        queries = self.queries
        group_size = self.query_heads_per_key_head
        dim = queries.layout.dims[HEADS]
        if group_size == 1 or not dim.axes:
            return dim
        # A shard that lists the numbers of heads may give a device heads 0 and 5: its heads of keys
        # are then not consecutive, and no overlap describes them.
        if any(shard.numbers for shard in dim.shards):
            hint = f"as in {dim.name}/balanced({','.join(dim.axes)})"
            reason = "heads in groups, sharded by numbers"
            raise NotationError(reason, text=str(queries.layout), hint=hint)

        def key_heads_of(start: int, stop: int) -> Interval:
            return start // group_size, (stop - 1) // group_size + 1

        sizes = queries.mesh.sizes_of(dim.axes)
        key_heads = ShardedDim(dim, self.kv.shape[HEADS], sizes)
        return interval_frame(key_heads, queries.shape[HEADS], key_heads_of).source

    def heads_read(self, device: int) -> Rows:
        """Return the local head of keys that each of a device's heads of queries reads: they share heads."""
        query_heads = rows_of(self.queries, HEADS, device)
        key_heads = rows_of(self.keys, HEADS, device)
        # A device's heads of keys are consecutive. Without heads there is no first: nothing to subtract.
        return query_heads // self.query_heads_per_key_head - key_heads[:1]

    def query_rows(self, device: int) -> Rows:
        """Return the global numbers of the rows of a device's queries."""
        return rows_of(self.queries, SEQUENCE, device)

    def key_rows(self, device: int, round_index: int = 0) -> Rows:
        """Return the global rows of the keys that a device uses in round `round_index` of a ring."""
        if not round_index:
            return rows_of(self.keys, SEQUENCE, device)
        # Blocks travel to the next device, so the one in use began `round_index` devices before.
        mesh = self.q.mesh
        ring = mesh.group(device, self.axes)
        origin = mesh.index(device, self.axes) - round_index
        return rows_of(self.keys, SEQUENCE, ring[origin % len(ring)])

    @property
    def devices(self) -> tuple[int, ...]:
        """One device for every part of the sequence; other devices hold the same rows."""
        return self.q.mesh.group(0, self.axes)

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """How many devices before its own the blocks began that a device uses in turn: (0,) unless in a ring.

        In a ring of 8 devices (0, 1, ..., 7), without the rounds in which windows or chunks mask all
        scores of all devices: (0, 1, 7) for a short window in zigzag order.
        """
        n_blocks = len(self.devices) if self.method == RING else 1
        if self.left == UNLIMITED and self.chunk is None:
            return tuple(range(n_blocks))
        used_rounds = [0]  # a device's own block is where it is used
        for round_index in range(1, n_blocks):
            if any(tiles(self, device, round_index) for device in self.devices):
                used_rounds.append(round_index)
        return tuple(used_rounds)

    def distance_after(self, round_index: int) -> int:
        """Return how many devices further on a block is used in the next round; after the last, back home."""
        # Rounds (0, 1, 7) -> {0: 1, 1: 7, 7: 0}.
        next_rounds = dict(itertools.pairwise((*self.rounds, 0)))
        return next_rounds[round_index] - round_index

    def visible(self, query_rows: Rows, key_rows: Rows) -> NDArray[np.bool_]:
        """Return which keys each query sees: rows of queries (n, 1), of keys (m,) -> (n, m).

        -1 stands for no row, in padding.
        """
        is_visible = (key_rows >= 0) & (query_rows >= 0)
        query_position = query_rows + self.offset
        rows_after = key_rows - query_position
        is_visible = is_visible & (rows_after <= self.right) & (-rows_after <= self.left)
        if self.chunk is not None:
            is_visible = is_visible & (query_position // self.chunk == key_rows // self.chunk)
        return is_visible

    def keys_seen(self, first_query: Any, last_query: Any) -> tuple[Any, Any]:
        """Return the interval (start, stop) of keys that queries at two positions and between them see.

        Keys that do not exist count, too: (-3, 5) for a window of 5 rows around position 1.
        """
        start_key = first_query - self.left
        stop_key = last_query + 1 + self.right
        if self.chunk is not None:
            start_key = np.maximum(start_key, first_query // self.chunk * self.chunk)
            stop_key = np.minimum(stop_key, (last_query // self.chunk + 1) * self.chunk)
        return start_key, stop_key

    @property
    def block_rows(self) -> int:
        """The rows of every block of keys that a ring passes on: shorter blocks are padded."""
        return self.keys.max_local_shape[SEQUENCE]

    def rotation(self, block: Sequence[int], n_steps: int = 1) -> Rotation:
        """Describe "pass each block on to the device `n_steps` positions further on" as a redistribution.

        All devices' blocks together are taken as one array `b h s k` that is sharded by rows, s. On
        4 devices x with blocks of 2 rows, device 0 has the rows 0-1 under `s/x`. After one step device
        1 has them: under `s/intervals(x,[6,8],[0,2],[2,4],[4,6])`, the shard that `rotated` returns.

        block: the shape of one padded block, (batch, heads, rows = `block_rows`, width).
        """
        batch, heads, rows, width = block
        n_devices = len(self.devices)

        def sharded_by_rows(shard: Shard) -> Layout:
            return Layout((Dim("b"), Dim("h"), Dim("s", (shard,)), Dim("k")))

        src = sharded_by_rows(Shard(self.axes))
        dst = sharded_by_rows(rotated(self.axes, n_devices, self.block_rows, n_steps))
        return Rotation((src, dst), (batch, heads, n_devices * rows, width))

    def blocks_by_round(
        self, kv: T, send: Callable[[T, int], Callable[[], T]]
    ) -> Iterator[tuple[int, T]]:
        """Yield (number of the round, block of keys and values) for each round of a ring.

        The next block travels while the caller computes with this one.

        kv: this device's own block, which round 0 uses. send: begins to send a block to the device
        so many positions further on, and returns a function that waits for the block that arrives and
        returns it.
        """
        *earlier_rounds, last_round = self.rounds
        for round_index in earlier_rounds:
            # Before the caller gets its turn, so that messages and computing happen
            # at the same time.
            wait = send(kv, self.distance_after(round_index))
            yield round_index, kv
            kv = wait()
        yield last_round, kv  # nobody needs this block any more

    def split(self, kv: Any) -> tuple[Any, Any]:
        """Separate a block of keys and the values beside them."""
        key_width = kv.shape[WIDTH] - self.value_width
        return kv[..., :key_width], kv[..., key_width:]


def rows_of(array: Sharding, dim: int, device: int) -> Rows:
    """Return the global rows of a dim, maybe counted from the last, that a device's block has."""
    return row_numbers(array.held(dim % len(array.shape), device))


def _sharding_axes(dims: Sequence[Dim]) -> set[str]:
    """Return the mesh axes that shard some dims."""
    axes: set[str] = set()
    for dim in dims:
        axes.update(dim.axes)
    return axes


def dim_order(layout: Layout, sequence: str, heads: str) -> tuple[str, ...]:
    """Return the names of a layout's dims in the order (*batch, heads, sequence, width).

    `b s/cp h k` with sequence "s" and heads "h" -> (b, h, s, k). The width is the last dim of the
    layout. Raises NotationError unless the dims are there, and the width is not sharded.
    """
    for name, option in ((sequence, "sequence"), (heads, "heads")):
        if name not in layout.names[:-1]:
            reason = f"no dim {name!r}"
            if name in layout.names:
                reason = "the last dim is the width of a head"
            hint = f"{option}= names the dim, as in b s/cp h k"
            raise NotationError(reason, text=str(layout), hint=hint)
    if layout.dims[-1].axes:
        reason = "the width of heads is sharded"
        raise NotationError(reason, text=str(layout), hint="products are sums over it")
    *leading_names, width = layout.names
    batch = [name for name in leading_names if name not in (sequence, heads)]
    return (*batch, heads, sequence, width)


def key_order(kv_layout: Layout, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dims of keys in the order of the queries' dims `names`.

    Rows of keys may have a name of their own: b t h k, for queries with (b, h, s, k) -> (b, h, t, k).
    """
    # One name that queries lack is the one of the keys' rows; more are an error, found below.
    new_names = [name for name in kv_layout.names if name not in names]
    rows_name = new_names[0] if len(new_names) == 1 else names[SEQUENCE]
    order = (*names[:SEQUENCE], rows_name, names[WIDTH])
    if sorted(order) != sorted(kv_layout.names):
        hint = f"the dims of queries, {' '.join(names)}; rows of keys may have another name, as in b t/cp h k"
        raise NotationError("other dims of keys than of queries", text=str(kv_layout), hint=hint)
    return order


def key_lengths(
    q: Sharding, kv_layout: Layout, heads: str, kv_heads: int | None, kv_length: int | None
) -> list[int | None]:
    """Return the global length of each dim of keys, as far as queries and options tell it.

    None stands for a length that is inferred from the blocks: the width, and heads and rows unless
    `kv_heads` and `kv_length` give them. Batches are as many as of queries.

    heads: the name of the dim of heads.
    """
    # Rows of keys with the name of the queries' rows are as many as those.
    lengths: dict[str, int | None] = dict(zip(q.layout.names, q.shape, strict=True))
    lengths[q.layout.names[WIDTH]] = None
    lengths[heads] = kv_heads  # which may be fewer than of queries
    if kv_length is not None and lengths.keys() >= set(kv_layout.names):
        hint = "rows of keys that are others than the queries' rows have another name, as in b t/cp h k"
        raise XshardError(f"kv_length={kv_length}", text=str(kv_layout), hint=hint)
    return [lengths.get(name, kv_length) for name in kv_layout.names]


def attention(
    q: Sharding,
    k: Sharding,
    v: Sharding,
    *,
    how: str = AUTO,
    causal: bool = False,
    window: Any = None,
    offset: int = 0,
    chunk: int | None = None,
) -> Attention:
    """Describe an attention by the shardings of its arrays and its options; nothing is computed.

    The result says how queries and keys are sharded while scores are computed,
    and which scores count.

    q, k, v: shardings with dims (*batch, heads, sequence, width). how: the method; AUTO leaves it
    open. window, chunk: as in the bridges' `attention`. offset: query i stands at row i +
    offset of the keys.
    Raises XshardError for a wrong window, and ShapeError if arrays do not fit.
    """
    n_before, n_after = _visible_range(window)
    if causal:  # no later rows, also if the window allows some
        n_after = 0
    _check_shapes(q, k, v)
    # Keys and values travel side by side, along the width.
    *lengths, key_width = k.shape
    value_width = v.shape[WIDTH]
    kv = replace(k, shape=(*lengths, key_width + value_width))
    attn = Attention(
        q,
        kv,
        value_width,
        method=how,
        left=n_before,
        right=n_after,
        offset=offset,
        chunk=chunk,
    )
    # The sequence is not sharded, so that all methods are the same: "gather"
    # without anything to send.
    if q.mesh.size(*attn.axes) == 1:
        return replace(attn, method=GATHER)
    return attn


def _check_shapes(q: Sharding, k: Sharding, v: Sharding) -> None:
    """Raise ShapeError unless the shapes of queries, keys and values fit."""
    text = str(k.layout)
    for array in (q, k, v):
        if array.mesh != root_of(array.mesh):
            reason = f"devices share heads of '{array.written}'"
            hint = "blocks of such heads are attended without a layout, as on one device; or move them first"
            raise ShapeError(reason, text=text, hint=hint)
    if k.shape[:HEADS] != q.shape[:HEADS] or k.shape[WIDTH] != q.shape[WIDTH]:
        reason = f"queries of shape {q.shape}, keys of shape {k.shape}"
        raise ShapeError(reason, text=text, hint="keys have the batch and the width of queries")
    if v.shape[:WIDTH] != k.shape[:WIDTH]:
        raise ShapeError(f"keys of shape {k.shape}, values of shape {v.shape}", text=text)
    n_heads = q.shape[HEADS]
    n_key_heads = k.shape[HEADS]
    if n_key_heads and n_heads % n_key_heads:
        reason = f"{n_heads} heads of queries, {n_key_heads} of keys"
        hint = "each head of keys is for equally many heads of queries"
        raise ShapeError(reason, text=text, hint=hint)


def _visible_range(window: Any) -> list[int]:
    """Turn the option `window` into [rows seen before the query's own, rows seen after it].

    3 -> [2, 2], as the number counts the query's own row. (2, 0) -> [2, 0]. None, for no limit ->
    [UNLIMITED, UNLIMITED]. Raises XshardError for other values.
    """
    if isinstance(window, tuple | list) and len(window) == 2:
        limits = window
        n_own_rows = 0  # the query's own row is in neither number
    else:
        limits = (window, window)
        n_own_rows = 1  # it is in the one number
    n_seen = []
    for limit in limits:
        if limit is None:
            n_seen.append(UNLIMITED)
            continue
        rows = as_whole_number(limit)
        if rows is None or rows < n_own_rows:
            hint = "3: rows fewer than 3 away; (2, 0): 2 rows before and its own; None: to the end"
            raise XshardError(f"window={short_repr(window)}", hint=hint)
        n_seen.append(rows - n_own_rows)
    return n_seen


def drop_mask(seed: Any, position: Sequence[Any], *, share: float) -> Any:
    """Decide by a hash of the seed and a weight's position whether dropout drops it.

    No random generator is used: the answer is the same in torch, JAX and numpy, and on any number
    of devices.

    position: the numbers that name a weight (batch and head, query, key), arrays of int64 or uint32
    that broadcast. share: the part of weights that is dropped, as 0.1. Returns booleans of the
    broadcast shape.
    """
    bits = seed & BITS
    # The seed is mixed alone first, with a 0: seeds that are near each other share no masks.
    for word in (0, *position):
        bits = ((bits ^ word) + 0x1E3779B9) & BITS  # the lower bits of 2**32 / golden ratio
        # Thomas Mueller's mixing of 32 bits: each bit of the input changes about half of the output.
        for _ in range(2):
            bits = ((bits >> 16 ^ bits) * 0x45D9F3B) & BITS
        bits = bits >> 16 ^ bits
    return bits < round(share * BITS)


@layout_cache(maxsize=4096)
def tiles(attn: Attention, device: int, round_index: int = 0) -> tuple[Tile, ...]:
    """Cut a device's scores [queries, keys] into rectangles that a kernel computes one by one.

    Each has a kind: all scores count, the causal mask applies, or some other mask. What the causal
    mask, the window or chunks hide altogether is left out. A causal mask, queries of rows 4-7, keys of
    rows 0-3: one rectangle, in which all scores count. They come in the order of the queries.

    round_index: the round of a ring, which decides whose keys the device has.
    """
    q = attn.query_rows(device)
    k = attn.key_rows(device, round_index)
    visible_tiles = []
    # Runs of consecutive rows, since a mask of those is a band, which fused kernels know.
    # Queries of several chunks see no band either.
    q_runs = _runs(q + attn.offset, attn.chunk)
    for q_run, k_run in itertools.product(q_runs, _runs(k)):
        tile = _tile(attn, q, k, q_run, k_run)
        if tile is not None:
            visible_tiles.append(tile)
    return tuple(visible_tiles)


def run_starts(attn: Attention, array: Sharding) -> tuple[int, ...]:
    """Return the local rows at which runs of consecutive global rows start in all devices' blocks.

    8 rows in zigzag order on 2 devices, (0, 1, 6, 7) and (2, 3, 4, 5): the starts differ, (0, 2)
    and (0,). Then, or if blocks differ in size or have many runs, the result is `(0,)`: the whole
    block is treated as one run.
    """
    start_lists = set()
    for device in attn.devices:
        rows = rows_of(array, SEQUENCE, device)
        start_lists.add(tuple(run.start for run in _runs(rows)))
    # One program for all devices, as JAX has it, cannot divide blocks in different ways.
    are_even = len(set(array.local_sizes[SEQUENCE])) == 1
    if are_even and len(start_lists) == 1:
        return start_lists.pop()
    return (0,)


def _runs(rows: Rows, chunk: int | None = None) -> list[slice]:
    """Split rows into intervals of consecutive ones of one chunk; with many gaps, all rows are one."""
    is_break = np.diff(rows) != 1
    if is_break.sum() >= MAX_RUNS:
        return [slice(0, len(rows))]
    if chunk is not None:
        is_break |= np.diff(rows // chunk) != 0
    breaks = np.flatnonzero(is_break) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]


def _tile(attn: Attention, q: Rows, k: Rows, q_run: slice, k_run: slice) -> Tile | None:
    """Find the smallest rectangle with all scores that count between some queries and some keys.

    A causal mask, queries of global rows 4-7 and keys of rows 0-3: all scores. Queries 0-3 and keys
    4-7: None, since all are masked.

    q, k: the global rows of a device's queries and keys. q_run, k_run: the local rows to look at,
    which are consecutive rows of the whole array, or all rows of a block with gaps.
    """
    # Below, a query's position is its row plus the offset: that is a row of the keys. A query at position
    # p sees keys p - left ... p + right. Queries without gaps are of one chunk, as the keys that they see.
    q_start, q_stop = _spanned_interval(q[q_run] + attn.offset)
    k_start, k_stop = _spanned_interval(k[k_run])
    # The keys that some query sees.
    first_seen, stop_seen = attn.keys_seen(q_start, q_stop - 1)
    first_key = max(k_start, int(first_seen))
    stop_key = min(k_stop, int(stop_seen))
    if first_key >= stop_key:
        return None
    has_gaps = q_stop - q_start != q_run.stop - q_run.start
    if has_gaps or k_stop - k_start != k_run.stop - k_run.start:
        # With gaps between rows, a position cannot be turned into a local row by subtraction.
        return Tile(q_run, k_run, SOME)

    # The queries that see some of these keys.
    first_query = max(q_start, first_key - attn.right)
    stop_query = min(q_stop, stop_key + attn.left)

    query_offset = q_run.start - q_start  # from a position to a local row of queries
    key_offset = k_run.start - k_start
    return Tile(
        slice(first_query + query_offset, stop_query + query_offset),
        slice(first_key + key_offset, stop_key + key_offset),
        _mask_kind(attn, (first_query, stop_query), (first_key, stop_key)),
    )


def _mask_kind(attn: Attention, queries: Interval, keys: Interval) -> str:
    """Say which mask the scores of some queries and keys need: none (ALL), CAUSAL, or another (SOME)."""
    first_query, stop_query = queries
    first_key, stop_key = keys
    last_query = stop_query - 1
    last_key = stop_key - 1
    last_query_sees_first_key = last_query - first_key <= attn.left
    first_query_sees_last_key = last_key - first_query <= attn.right
    if last_query_sees_first_key and first_query_sees_last_key:
        return ALL
    # No query is limited on the left, and the last one sees up to the last key, not further: the
    # limit on the right is a diagonal that ends in the corner.
    last_query_sees_up_to_last_key = last_query + attn.right == last_key
    if last_query_sees_first_key and last_query_sees_up_to_last_key:
        return CAUSAL
    return SOME


def _spanned_interval(positions: Rows) -> Interval:
    """Return the interval from the lowest position to the highest: 4 6 5 -> (4, 7)."""
    return int(positions.min()), int(positions.max()) + 1
