"""Ring attention: in every round a device uses the keys and values of another, while the next ones are sent.
The backward pass sends the blocks again, and their gradients with them: a rule for reverse mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import redistribute
from jax_bridge.lower.row_tables import mine, table
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from xshard.nn.attention import HEADS, SEQUENCE, Attention, run_starts


@dataclass(frozen=True)
class DeviceAttention:
    """This device's part of an attention."""

    attn: Attention
    scale: float

    def rows(self, turn: int = 0) -> jax.Array:
        """The numbers of the rows of queries, or of keys in a later round; -1 in padding."""
        axes = self.attn.axes
        rows_of = partial(self.attn.key_rows, turn=turn) if turn else self.attn.query_rows
        return mine(table(self.attn.q.mesh, axes, self.attn.q.max_local_shape[SEQUENCE], rows_of), axes)

    def visible(self, rows: jax.Array, keys: jax.Array, documents: jax.Array | None) -> jax.Array:
        """The scores that count, `[batch or 1, 1, rows, keys]`. documents: `[batch or 1, all rows]`."""
        visible: Any = self.attn.visible(rows[:, None], keys)[None]  # type: ignore[arg-type]
        if documents is not None:
            of_rows, of_keys = (documents.take(x, 1, mode="clip") for x in (rows, keys))
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

    def scores(self, q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
        """Scores; masked ones are finite, and every row of an array sees itself."""
        scores = jnp.einsum("bhqk,bhsk->bhqs", q, k, preferred_element_type=wide_dtype(q)) * self.scale
        return jnp.where(visible, scores, empty(scores.dtype))

    def pairs(self) -> Sequence[tuple[slice, slice]]:
        """Runs of queries, and of keys."""
        starts = (*run_starts(self.attn), self.attn.block_rows)
        runs = [slice(a, b) for a, b in itertools.pairwise(starts)]
        return [(rows, keys) for rows in runs for keys in runs]

    def send(self, block: jax.Array, by: int = 1) -> Callable[[], jax.Array]:
        layouts, shape = self.attn.rotation(block.shape, by)
        arrived = redistribute(block, layouts, self.attn.q.mesh, shape=shape)
        return lambda: arrived


def wide_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def empty(dtype: Any) -> float:
    return float(jnp.finfo(dtype).min) / 2


def ring(blocks: DeviceAttention, q: jax.Array, kv: jax.Array, documents: jax.Array | None) -> jax.Array:
    """Queries, and keys beside values -> the result for the device's queries."""
    axes = frozenset(blocks.attn.q.layout.axes).union(*map(varying_axes, (q, kv)))
    return _ring(blocks, as_varying(q, axes), as_varying(kv, axes), documents)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(blocks: DeviceAttention, q: jax.Array, kv: jax.Array, documents: jax.Array | None) -> jax.Array:
    return _forward(blocks, q, kv, documents)[0]


def _forward(
    blocks: DeviceAttention, q: jax.Array, kv: jax.Array, documents: jax.Array | None
) -> tuple[jax.Array, Any]:
    wide, own_rows = wide_dtype(q), blocks.rows()
    like = q[..., :1].astype(wide)
    y, log_sum = like.repeat(blocks.attn.value_width, -1) * 0, jnp.full_like(like[..., 0], empty(wide))
    sums = tuple(as_varying(x, varying_axes(q)) for x in (y, log_sum))
    for turn, block in blocks.attn.in_turn(kv, blocks.send):
        their_rows = blocks.rows(turn)
        for rows, keys in blocks.pairs():
            visible = blocks.visible(own_rows[rows], their_rows[keys], documents)

            def merged(y, log_sum, block=block, rows=rows, keys=keys, visible=visible):
                k, v = blocks.read(block[:, :, keys])
                scores = blocks.scores(q[:, :, rows], k, visible)
                before = log_sum[:, :, rows]
                after = jnp.logaddexp(before, jax.nn.logsumexp(scores, -1))
                weights = jnp.exp(scores - after[..., None]).astype(v.dtype)
                part = jnp.einsum("bhqs,bhsk->bhqk", weights, v, preferred_element_type=wide)
                part += y[:, :, rows] * jnp.exp(before - after)[..., None]
                return y.at[:, :, rows].set(part), log_sum.at[:, :, rows].set(after)

            sums = lax.cond(visible.any(), merged, lambda *same: same, *sums)
    y = sums[0].astype(q.dtype)
    return y, (q, kv, documents, y, sums[1])


def _backward(blocks: DeviceAttention, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    q, kv, documents, y, log_sum = saved
    wide, own_rows, reads = log_sum.dtype, blocks.rows(), blocks.heads_read
    arrived: Any = None
    share = (cotangent.astype(wide) * y).sum(-1, keepdims=True)
    product = partial(jnp.einsum, preferred_element_type=wide)
    q_gradient, nothing = (as_varying(jnp.zeros_like(x, wide), varying_axes(q)) for x in (q, kv))
    for turn, block in blocks.attn.in_turn(kv, blocks.send):
        their_rows, kv_gradient = blocks.rows(turn), nothing
        for rows, keys in blocks.pairs():
            visible = blocks.visible(own_rows[rows], their_rows[keys], documents)

            def added(q_gradient, kv_gradient, block=block, rows=rows, keys=keys, visible=visible):
                k, v = blocks.read(block[:, :, keys])
                queries, dy = q[:, :, rows], cotangent[:, :, rows]
                weights = jnp.exp(blocks.scores(queries, k, visible) - log_sum[:, :, rows, None])
                change = weights * (product("bhqk,bhsk->bhqs", dy, v) - share[:, :, rows]) * blocks.scale
                change, weights = change.astype(q.dtype), weights.astype(q.dtype)
                pairs = (change, queries), (weights, dy)
                of_kv = jnp.concatenate([product("bhqs,bhqk->bhsk", *pair) for pair in pairs], -1)
                if reads is not None:
                    of_kv = jnp.zeros_like(block[:, :, keys], wide).at[:, reads].add(of_kv)
                of_q = product("bhqs,bhsk->bhqk", change, k)
                return q_gradient.at[:, :, rows].add(of_q), kv_gradient.at[:, :, keys].add(of_kv)

            gradients = lax.cond(visible.any(), added, lambda *same: same, q_gradient, kv_gradient)
            q_gradient, kv_gradient = gradients
        kv_gradient = kv_gradient if arrived is None else arrived + kv_gradient
        arrived = blocks.send(kv_gradient, -turn if turn + 1 == blocks.attn.rounds else 1)()
    return q_gradient.astype(q.dtype), arrived.astype(kv.dtype), None


_ring.defvjp(_forward, _backward)
