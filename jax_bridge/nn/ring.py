"""Attention in blocks, merged by log-sum-exps. In every round of a ring a device uses the keys and values of
another, while the next ones are sent; the backward pass sends the blocks again, and their gradients
with them: a rule for reverse mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import redistribute
from jax_bridge.lower.row_tables import mine, table
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.ops import positions
from xshard.nn.attention import HEADS, SEQUENCE, Attention, dropped, run_starts


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DeviceAttention:
    """This device's part of an attention; softcap, alibi, dropout and seed as in `attention`.

    documents: numbers for all rows of queries, and of keys: `[batch or 1, rows]`.
    """

    attn: Attention = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    softcap: float | None = field(metadata={"static": True})
    dropout: float = field(metadata={"static": True})
    documents: tuple[jax.Array, jax.Array] | None
    alibi: jax.Array | None
    seed: jax.Array | None

    def held(self, dim: int) -> jax.Array:
        """The numbers of this device's queries, or their heads or batches; -1 in padding."""
        queries = self.attn.queries
        return positions(queries.layout, queries.mesh, shape=queries.shape, dim=dim)

    def key_rows(self, turn: int = 0) -> jax.Array:
        """The numbers of the rows of keys in a round; -1 in padding."""
        attn = self.attn
        rows_of = partial(attn.key_rows, turn=turn)
        return mine(table(attn.q.mesh, attn.axes, attn.block_rows, rows_of), attn.axes)

    def visible(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """The scores that count, `[batch or 1, 1, rows, keys]`."""
        visible: Any = self.attn.visible(rows[:, None], keys)[None]  # type: ignore[arg-type]
        if self.documents is not None:
            pairs = zip(self.documents, (rows, keys), strict=True)
            of_rows, of_keys = (documents.take(x, 1, mode="clip") for documents, x in pairs)
            visible &= of_rows[:, :, None] == of_keys[:, None]
        return visible[:, None]

    @property
    def heads_read(self) -> jax.Array | None:
        """The head of keys that each head of queries reads; None if there are as many of both."""
        queries = self.attn.queries
        if self.attn.group == 1:
            return None
        axes, width = queries.layout.dims[HEADS].axes, queries.max_local_shape[HEADS]
        return jnp.maximum(mine(table(queries.mesh, axes, width, self.attn.heads_read), axes), 0)

    def read(self, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values, for every head of queries."""
        reads = self.heads_read
        return self.attn.split(kv if reads is None else kv.take(reads, 1))

    def bias(self, rows: jax.Array, keys: jax.Array, dtype: Any) -> jax.Array | None:
        """`[1, heads, rows, keys]`: minus the slope of a head times the distance."""
        if self.alibi is None:
            return None
        slopes = lax.stop_gradient(self.alibi).astype(dtype)[self.held(HEADS), None, None]
        return -slopes[None] * abs(rows[:, None] + self.attn.offset - keys)

    def scores(
        self, q: jax.Array, k: jax.Array, rows: jax.Array, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        """The scores, masked ones finite, and their derivative by the products."""
        dtype: Any = wide_dtype(q)
        slope: Any = self.scale
        scores = jnp.einsum("bhqk,bhsk->bhqs", q, k, preferred_element_type=dtype) * slope
        if self.softcap is not None:
            part = jnp.tanh(scores / self.softcap)
            scores, slope = part * self.softcap, (1 - part**2) * slope
        if (bias := self.bias(rows, keys, dtype)) is not None:
            scores += bias
        return jnp.where(self.visible(rows, keys), scores, empty(dtype)), slope

    def kept(self, rows: jax.Array, keys: jax.Array) -> jax.Array | float:
        """The factors of weights, `[batch, heads, rows, keys]`, some of them dropped."""
        if self.seed is None:
            return 1.0
        cells: Any = jnp.zeros((), jnp.uint32)
        for dim, length in enumerate(self.attn.q.shape[:SEQUENCE]):
            cells = cells[..., None] * length + self.held(dim).astype(jnp.uint32)
        numbers = cells.reshape(-1, cells.shape[-1], 1, 1), rows[:, None], keys
        drop = dropped(self.seed, *(x.astype(jnp.uint32) for x in numbers), part=self.dropout)
        return jnp.where(drop, 0.0, 1 / (1 - self.dropout))

    def attend(
        self, q: jax.Array, kv: jax.Array, rows: jax.Array, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The result of a block, and the log-sum-exps; a row that sees nothing has 0 and -inf."""
        (k, v), sees = self.read(kv), self.visible(rows, keys).any(-1)
        scores, _ = self.scores(q, k, rows, keys)
        log_sum = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - log_sum[..., None]) * self.kept(rows, keys)
        y = jnp.einsum("bhqs,bhsk->bhqk", weights.astype(v.dtype), v, preferred_element_type=scores.dtype)
        return jnp.where(sees[..., None], y, 0), jnp.where(sees, log_sum, -jnp.inf)

    def pairs(self) -> Sequence[tuple[slice, slice]]:
        """Runs of queries, and of keys."""
        arrays = self.attn.queries, self.attn.keys
        starts = ((*run_starts(self.attn, x), x.max_local_shape[SEQUENCE]) for x in arrays)
        rows, keys = ([slice(a, b) for a, b in itertools.pairwise(each)] for each in starts)
        return [*itertools.product(rows, keys)]

    def send(self, block: jax.Array, by: int = 1) -> Callable[[], jax.Array]:
        layouts, shape = self.attn.rotation(block.shape, by)
        arrived = redistribute(block, layouts, self.attn.q.mesh, shape=shape)
        return lambda: arrived


def wide_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def empty(dtype: Any) -> float:
    return float(jnp.finfo(dtype).min) / 2


def ring(blocks: DeviceAttention, q: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries, and keys beside values -> the result for the device's queries, and their log-sum-exps."""
    arrays = jax.tree.leaves((blocks, q, kv))
    axes = frozenset(blocks.attn.q.layout.axes).union(blocks.attn.axes, *map(varying_axes, arrays))
    return _ring(blocks, as_varying(q, axes), as_varying(kv, axes))


@jax.custom_vjp
def _ring(blocks: DeviceAttention, q: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward(blocks, q, kv)[0]


def _forward(blocks: DeviceAttention, q: jax.Array, kv: jax.Array) -> tuple[Any, Any]:
    wide, own_rows = wide_dtype(q), blocks.held(SEQUENCE)
    y, log_sum = jnp.zeros((*q.shape[:3], blocks.attn.value_width)), jnp.full(q.shape[:3], -jnp.inf)
    sums = tuple(as_varying(x.astype(wide), varying_axes(q)) for x in (y, log_sum))
    for turn, block in blocks.attn.in_turn(kv, blocks.send):
        their_rows = blocks.key_rows(turn)
        for rows, keys in blocks.pairs():
            numbers = own_rows[rows], their_rows[keys]

            def merged(y, log_sum, block=block, rows=rows, keys=keys, numbers=numbers):
                part, added = blocks.attend(q[:, :, rows], block[:, :, keys], *numbers)
                before = log_sum[:, :, rows]
                after = jnp.logaddexp(before, added)
                finite = jnp.maximum(after, empty(wide))  # -inf for rows that have seen nothing so far
                part *= jnp.exp(added - finite)[..., None]
                part += y[:, :, rows] * jnp.exp(before - finite)[..., None]
                return y.at[:, :, rows].set(part), log_sum.at[:, :, rows].set(after)

            sums = lax.cond(blocks.visible(*numbers).any(), merged, lambda *same: same, *sums)
    y = sums[0].astype(q.dtype)
    return (y, sums[1]), (blocks, q, kv, y, sums[1])


def _backward(saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    blocks, q, kv, y, log_sum = saved
    cotangent, of_log_sum = cotangents
    wide, own_rows, reads = log_sum.dtype, blocks.held(SEQUENCE), blocks.heads_read
    arrived: Any = None
    share = ((cotangent.astype(wide) * y).sum(-1) - of_log_sum)[..., None]
    # Weights are exp(score - log_sum): none for rows that see nothing.
    log_sum = jnp.where(jnp.isinf(log_sum), jnp.inf, log_sum)[..., None]
    product = partial(jnp.einsum, preferred_element_type=wide)
    q_gradient, nothing = (as_varying(jnp.zeros_like(x, wide), varying_axes(q)) for x in (q, kv))
    for turn, block in blocks.attn.in_turn(kv, blocks.send):
        their_rows, kv_gradient = blocks.key_rows(turn), nothing
        for rows, keys in blocks.pairs():
            numbers = own_rows[rows], their_rows[keys]

            def added(q_gradient, kv_gradient, block=block, rows=rows, keys=keys, numbers=numbers):
                k, v = blocks.read(block[:, :, keys])
                queries, dy = q[:, :, rows], cotangent[:, :, rows]
                scores, slope = blocks.scores(queries, k, *numbers)
                weights, kept = jnp.exp(scores - log_sum[:, :, rows]), blocks.kept(*numbers)
                change = weights * (product("bhqk,bhsk->bhqs", dy, v) * kept - share[:, :, rows]) * slope
                change, weights = change.astype(q.dtype), (weights * kept).astype(q.dtype)
                pairs = (change, queries), (weights, dy)
                of_kv = jnp.concatenate([product("bhqs,bhqk->bhsk", *pair) for pair in pairs], -1)
                if reads is not None:
                    of_kv = jnp.zeros_like(block[:, :, keys], wide).at[:, reads].add(of_kv)
                of_q = product("bhqs,bhsk->bhqk", change, k)
                return q_gradient.at[:, :, rows].add(of_q), kv_gradient.at[:, :, keys].add(of_kv)

            is_seen = blocks.visible(*numbers).any()
            q_gradient, kv_gradient = lax.cond(is_seen, added, lambda *same: same, q_gradient, kv_gradient)
        kv_gradient = kv_gradient if arrived is None else arrived + kv_gradient
        arrived = blocks.send(kv_gradient, -turn if turn + 1 == blocks.attn.rounds else 1)()
    return None, q_gradient.astype(q.dtype), arrived.astype(kv.dtype)


_ring.defvjp(_forward, _backward)
