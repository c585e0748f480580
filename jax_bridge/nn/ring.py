"""Attention in rounds: in each, a device uses the keys and values of another, while the next ones travel.

Decides what is kept and when blocks travel. The forward pass keeps no block but the device's own; in the
backward pass they travel again, and the sums of their gradients with them, at last home: a rule for reverse
mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.lower.row_tables import Table, mine, table
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.redistribution import redistribute
from xshard.nn.attention import HEADS, Attention, splits


@dataclass(frozen=True)
class Blocks:
    """What a device computes of an attention; all blocks are `[batch, heads, rows, width]`."""

    given: Attention
    scale: float

    def rows(self, turn: int = 0) -> jax.Array:
        """The numbers of the rows of the block of keys in a round, or of queries; -1 in padding."""

        def rows_of(device: int) -> Table:
            return self.given.key_rows(device, turn) if turn else self.given.query_rows(device)

        axes = self.given.axes
        return mine(table(self.given.q.mesh, axes, self.given.block_rows, rows_of), axes)

    def seen(self, rows: jax.Array, keys: jax.Array, documents: jax.Array | None) -> jax.Array:
        """Which scores are not empty, `[batch or 1, 1, rows, keys]`. documents: `[batch or 1, all rows]`."""
        seen: Any = self.given.sees(rows[:, None], keys)[None]  # type: ignore[arg-type]
        if documents is not None:
            of_rows, of_keys = (documents.take(x, 1, mode="clip") for x in (rows, keys))
            seen &= of_rows[:, :, None] == of_keys[:, None]
        return seen[:, None]

    @property
    def heads_read(self) -> jax.Array | None:
        """For every head of queries, the head of keys that it reads; None if they are as many."""
        queries = self.given.queries
        if self.given.group == 1:
            return None
        axes, width = queries.layout.dims[HEADS].axes, queries.max_local_shape[HEADS]
        return jnp.maximum(mine(table(queries.mesh, axes, width, self.given.heads_read), axes), 0)

    def read(self, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values, for every head of queries."""
        reads = self.heads_read
        kv = kv if reads is None else kv.take(reads, 1)
        return kv[..., : -self.given.wide], kv[..., -self.given.wide :]

    def scores(self, q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
        """Empty ones are finite, and no row of an array is empty: it sees itself."""
        found = jnp.einsum("bhqk,bhsk->bhqs", q, k, preferred_element_type=wide_dtype(q)) * self.scale
        return jnp.where(seen, found, empty(found.dtype))

    def pairs(self) -> Sequence[tuple[slice, slice]]:
        """Runs of queries, and of keys."""
        ends = (*splits(self.given), self.given.block_rows)
        runs = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return [(rows, keys) for rows in runs for keys in runs]

    def passed_on(self, x: jax.Array, by: int = 1) -> jax.Array:
        """Send a block on, and get that of a device before this one."""
        shape = (*x.shape[:2], len(self.given.devices) * x.shape[2], x.shape[3])
        return redistribute(x, self.given.passed_on(by), self.given.q.mesh, shape=shape)

    def in_turn(self, kv: jax.Array) -> Iterator[tuple[int, jax.Array]]:
        """The blocks of all rounds; the next one travels while one is used."""
        for turn in range(self.given.rounds):
            yield turn, kv
            kv = self.passed_on(kv) if turn + 1 < self.given.rounds else kv


def wide_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def empty(dtype: Any) -> float:
    return float(jnp.finfo(dtype).min) / 2


def ring(blocks: Blocks, q: jax.Array, kv: jax.Array, documents: jax.Array | None) -> jax.Array:
    """Queries, and keys beside values -> the result for the device's queries."""
    axes = frozenset(blocks.given.q.layout.axes).union(*map(varying_axes, (q, kv)))
    return _ring(blocks, as_varying(q, axes), as_varying(kv, axes), documents)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(blocks: Blocks, q: jax.Array, kv: jax.Array, documents: jax.Array | None) -> jax.Array:
    return _forward(blocks, q, kv, documents)[0]


def _forward(
    blocks: Blocks, q: jax.Array, kv: jax.Array, documents: jax.Array | None
) -> tuple[jax.Array, Any]:
    wide, own_rows = wide_dtype(q), blocks.rows()
    like = q[..., :1].astype(wide)
    y, log_sum = like.repeat(blocks.given.wide, -1) * 0, jnp.full_like(like[..., 0], empty(wide))
    sums = tuple(as_varying(x, varying_axes(q)) for x in (y, log_sum))
    for turn, block in blocks.in_turn(kv):
        their_rows = blocks.rows(turn)
        for rows, keys in blocks.pairs():
            seen = blocks.seen(own_rows[rows], their_rows[keys], documents)

            def merged(y, log_sum, block=block, rows=rows, keys=keys, seen=seen):
                k, v = blocks.read(block[:, :, keys])
                scores = blocks.scores(q[:, :, rows], k, seen)
                before = log_sum[:, :, rows]
                after = jnp.logaddexp(before, jax.nn.logsumexp(scores, -1))
                weights = jnp.exp(scores - after[..., None]).astype(v.dtype)
                part = jnp.einsum("bhqs,bhsk->bhqk", weights, v, preferred_element_type=wide)
                part += y[:, :, rows] * jnp.exp(before - after)[..., None]
                return y.at[:, :, rows].set(part), log_sum.at[:, :, rows].set(after)

            sums = lax.cond(seen.any(), merged, lambda *same: same, *sums)
    y = sums[0].astype(q.dtype)
    return y, (q, kv, documents, y, sums[1])


def _backward(blocks: Blocks, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    q, kv, documents, y, log_sum = saved
    wide, own_rows, reads = log_sum.dtype, blocks.rows(), blocks.heads_read
    passed: Any = None
    share = (cotangent.astype(wide) * y).sum(-1, keepdims=True)
    product = partial(jnp.einsum, preferred_element_type=wide)
    of_q, nothing = (as_varying(jnp.zeros_like(x, wide), varying_axes(q)) for x in (q, kv))
    for turn, block in blocks.in_turn(kv):
        their_rows, of_kv = blocks.rows(turn), nothing
        for rows, keys in blocks.pairs():
            seen = blocks.seen(own_rows[rows], their_rows[keys], documents)

            def added(of_q, of_kv, block=block, rows=rows, keys=keys, seen=seen):
                k, v = blocks.read(block[:, :, keys])
                own, given = q[:, :, rows], cotangent[:, :, rows]
                weights = jnp.exp(blocks.scores(own, k, seen) - log_sum[:, :, rows, None])
                change = weights * (product("bhqk,bhsk->bhqs", given, v) - share[:, :, rows]) * blocks.scale
                change, weights = change.astype(q.dtype), weights.astype(q.dtype)
                pairs = (change, own), (weights, given)
                found = jnp.concatenate([product("bhqs,bhqk->bhsk", *pair) for pair in pairs], -1)
                if reads is not None:
                    found = jnp.zeros_like(block[:, :, keys], wide).at[:, reads].add(found)
                return (
                    of_q.at[:, :, rows].add(product("bhqs,bhsk->bhqk", change, k)),
                    of_kv.at[:, :, keys].add(found),
                )

            of_q, of_kv = lax.cond(seen.any(), added, lambda *same: same, of_q, of_kv)
        of_kv = of_kv if passed is None else passed + of_kv
        passed = blocks.passed_on(of_kv, -turn if turn + 1 == blocks.given.rounds else 1)
    return of_q.astype(q.dtype), passed.astype(kv.dtype), None


_ring.defvjp(_forward, _backward)
