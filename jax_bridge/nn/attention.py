"""Attention over a sharded sequence, in blocks merged by log-sum-exps; in a ring, blocks of keys travel.

>>> row = jnp.arange(8.0).reshape(1, 1, 8, 1, 1)  # one block on one device
>>> means = jax.pmap(lambda v: attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", causal=True), "cp")
>>> [round(mean, 4) for mean in means(row).ravel().tolist()]
[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import mine, table, without_padding
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.mesh.context import AnyMesh, block_sharding, machine_here
from jax_bridge.ops import positions
from xshard import Layout, Sharding
from xshard.contractions.attention import AttentionCall, Verb
from xshard.contractions.prices import fastest_attention
from xshard.errors import DtypeError
from xshard.nn.attention import (
    BITS,
    HEADS,
    REDUCE,
    RING,
    SEQUENCE,
    Attention,
    dim_order,
    run_starts,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceAttention(AttentionCall):
    """A call on this device, of arrays of a dtype."""

    dtype: Any
    implementation: Any  # of JAX's own attention
    mesh: Any = None
    machine: Any = None
    xp = jnp

    def enter(
        self, x: Array, layout: Layout, shape: Sequence[int | None] | None
    ) -> tuple[Array, Sharding]:
        sharding = block_sharding(x, layout, self.mesh, shape)
        return without_padding(x, sharding), sharding

    def move(self, x: Array, layouts: tuple[Layout, Layout], shape: Sequence[int]) -> Array:
        return redistribute(x, layouts, self.mesh, shape=shape)

    def choose(self, attn: Attention, is_plain: bool) -> Attention:
        return fastest_attention(attn, self.dtype.name, self.machine)

    def compute(self, q: Array, kv: Array, is_plain: bool) -> tuple[Array, Array]:
        if self.attn.how == RING:
            return ring(self, q, kv)
        rows = self.held(SEQUENCE)
        keys = self.key_rows()
        width = self.attn.value_width
        how = self.attn.how
        if not is_plain or how == REDUCE or self.dtype == jnp.float64 or q.shape[-1] != width:
            return self.attend(q, kv, rows, keys)
        bias = None if self.alibi is None else self.bias(rows, keys).astype(q.dtype)
        q, k, v = (x.swapaxes(1, 2) for x in (q, *self.read(kv)))
        options: Any = {
            "mask": self.visible(rows, keys),
            "bias": bias,
            "implementation": self.implementation,
        }
        y = jax.nn.dot_product_attention(q, k, v, scale=self.scale, **options).swapaxes(1, 2)
        return y, y[..., 0]  # log-sum-exps are not returned

    @property
    def wide_dtype(self) -> Any:
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def empty(self) -> float:  # finite: all derivatives are
        return float(jnp.finfo(self.wide_dtype).min) / 2

    def held(self, dim: int) -> Array:
        """The numbers of this device's queries, or their heads or batches; -1 in padding."""
        queries = self.attn.queries
        return positions(queries.layout, queries.mesh, shape=queries.shape, dim=dim)

    def product(self, q: Array, k: Array) -> Array:
        return jnp.einsum("bhqk,bhsk->bhqs", q, k, preferred_element_type=self.wide_dtype)

    def wide(self, x: Any) -> Array:
        return lax.stop_gradient(jnp.asarray(x)).astype(self.wide_dtype)

    def whole(self, x: Any) -> Array:
        return jnp.asarray(x).astype(jnp.uint32)

    def key_rows(self, turn: int = 0) -> Array:
        """The numbers of the rows of keys in a round; -1 in padding."""
        attn = self.attn
        rows_of = partial(attn.key_rows, turn=turn)
        return mine(table(attn.q.mesh, attn.axes, attn.block_rows, rows_of), attn.axes)

    @property
    def heads_read(self) -> Array | None:
        """The head of keys that each head of queries reads; None if there are as many of both."""
        queries = self.attn.queries
        if self.attn.group == 1:
            return None
        axes = queries.layout.dims[HEADS].axes
        width = queries.max_local_shape[HEADS]
        return jnp.maximum(mine(table(queries.mesh, axes, width, self.attn.heads_read), axes), 0)

    def read(self, kv: Array) -> tuple[Array, Array]:
        """Keys and values, for every head of queries."""
        reads = self.heads_read
        return self.attn.split(kv if reads is None else kv.take(reads, 1))

    def attend(self, q: Array, kv: Array, rows: Array, keys: Array) -> tuple[Array, Array]:
        """The result of a block, and the log-sum-exps; a row that sees nothing has 0 and -inf."""
        (k, v), sees = self.read(kv), self.visible(rows, keys).any(-1)
        scores, _ = self.scores(q, k, rows, keys)
        log_sum = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - log_sum[..., None]) * self.kept(rows, keys)
        y = jnp.einsum(
            "bhqs,bhsk->bhqk", weights.astype(v.dtype), v, preferred_element_type=scores.dtype
        )
        return jnp.where(sees[..., None], y, 0), jnp.where(sees, log_sum, -jnp.inf)

    def pairs(self) -> Sequence[tuple[slice, slice]]:
        """Runs of queries, and of keys."""
        arrays = self.attn.queries, self.attn.keys
        starts = ((*run_starts(self.attn, x), x.max_local_shape[SEQUENCE]) for x in arrays)
        rows, keys = ([slice(a, b) for a, b in itertools.pairwise(each)] for each in starts)
        return [*itertools.product(rows, keys)]

    def send(self, block: Array, by: int = 1) -> Callable[[], Array]:
        layouts, shape = self.attn.rotation(block.shape, by)
        arrived = redistribute(block, layouts, self.attn.q.mesh, shape=shape)
        return lambda: arrived


def ring(blocks: DeviceAttention, q: Array, kv: Array) -> tuple[Array, Array]:
    """Queries, and keys beside values -> the result for the device's queries, and their log-sum-exps."""
    constants = {name: getattr(blocks, name) for name in ("documents", "alibi", "seed")}
    arrays = jax.tree.leaves((constants, q, kv))
    axes = frozenset(blocks.attn.q.layout.axes).union(blocks.attn.axes, *map(varying_axes, arrays))

    @jax.custom_vjp
    def run(constants: Any, q: Array, kv: Array) -> tuple[Array, Array]:
        return _forward(replace(blocks, **constants), q, kv)

    def forward(constants: Any, q: Array, kv: Array) -> tuple[Any, Any]:
        outputs = _forward(replace(blocks, **constants), q, kv)
        return outputs, (constants, q, kv, *outputs)

    run.defvjp(
        forward, lambda saved, of: (None, *_backward(replace(blocks, **saved[0]), *saved[1:], *of))
    )
    return run(constants, as_varying(q, axes), as_varying(kv, axes))


def _forward(blocks: DeviceAttention, q: Array, kv: Array) -> tuple[Array, Array]:
    wide = blocks.wide_dtype
    own_rows = blocks.held(SEQUENCE)
    y = jnp.zeros((*q.shape[:3], blocks.attn.value_width))
    log_sum = jnp.full(q.shape[:3], -jnp.inf)
    sums = tuple(as_varying(x.astype(wide), varying_axes(q)) for x in (y, log_sum))
    for turn, block in blocks.attn.in_turn(kv, blocks.send):
        their_rows = blocks.key_rows(turn)
        for rows, keys in blocks.pairs():
            numbers = own_rows[rows], their_rows[keys]

            def merged(y, log_sum, block=block, rows=rows, keys=keys, numbers=numbers):
                part, added = blocks.attend(q[:, :, rows], block[:, :, keys], *numbers)
                before = log_sum[:, :, rows]
                after = jnp.logaddexp(before, added)
                finite = jnp.maximum(
                    after, blocks.empty
                )  # -inf for rows that have seen nothing so far
                part *= jnp.exp(added - finite)[..., None]
                part += y[:, :, rows] * jnp.exp(before - finite)[..., None]
                return y.at[:, :, rows].set(part), log_sum.at[:, :, rows].set(after)

            sums = lax.cond(blocks.visible(*numbers).any(), merged, lambda *same: same, *sums)
    return sums[0].astype(q.dtype), sums[1]


def _backward(
    blocks: DeviceAttention,
    q: Array,
    kv: Array,
    y: Array,
    log_sum: Array,
    dy: Array,
    of_log_sum: Array,
) -> tuple[Array, Array]:
    wide = log_sum.dtype
    own_rows = blocks.held(SEQUENCE)
    reads = blocks.heads_read
    arrived: Any = None
    share = ((dy.astype(wide) * y).sum(-1) - of_log_sum)[..., None]
    # Weights are exp(score - log_sum): none for rows that see nothing.
    log_sum = jnp.where(jnp.isinf(log_sum), jnp.inf, log_sum)[..., None]
    product = partial(jnp.einsum, preferred_element_type=wide)
    q_gradient, nothing = (as_varying(jnp.zeros_like(x, wide), varying_axes(q)) for x in (q, kv))
    for turn, block in blocks.attn.in_turn(kv, blocks.send):
        their_rows = blocks.key_rows(turn)
        kv_gradient = nothing
        for rows, keys in blocks.pairs():
            numbers = own_rows[rows], their_rows[keys]

            def added(q_gradient, kv_gradient, block=block, rows=rows, keys=keys, numbers=numbers):
                k, v = blocks.read(block[:, :, keys])
                queries = q[:, :, rows]
                of_y = dy[:, :, rows]
                scores, slope = blocks.scores(queries, k, *numbers)
                weights = jnp.exp(scores - log_sum[:, :, rows])
                kept = blocks.kept(*numbers)
                change = (
                    weights
                    * (product("bhqk,bhsk->bhqs", of_y, v) * kept - share[:, :, rows])
                    * slope
                )
                change = change.astype(q.dtype)
                weights = (weights * kept).astype(q.dtype)
                pairs = (change, queries), (weights, of_y)
                of_kv = jnp.concatenate([product("bhqs,bhqk->bhsk", *pair) for pair in pairs], -1)
                if reads is not None:
                    of_kv = jnp.zeros_like(block[:, :, keys], wide).at[:, reads].add(of_kv)
                of_q = product("bhqs,bhsk->bhqk", change, k)
                return q_gradient.at[:, :, rows].add(of_q), kv_gradient.at[:, :, keys].add(of_kv)

            is_seen = blocks.visible(*numbers).any()
            q_gradient, kv_gradient = lax.cond(
                is_seen, added, lambda *same: same, q_gradient, kv_gradient
            )
        kv_gradient = kv_gradient if arrived is None else arrived + kv_gradient
        arrived = blocks.send(kv_gradient, -turn if turn + 1 == blocks.attn.rounds else 1)()
    return q_gradient.astype(q.dtype), arrived.astype(kv.dtype)


def _attention(
    qkv: Sequence[Array], layout: Layout | str, mesh: Any, profile: Any, kernel: Any, *options: Any
) -> Any:
    layout = Layout.parse(layout)
    q, k, v = (as_array(x, str(layout)) for x in qkv)
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise DtypeError(
            f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype"
        )
    call = DeviceAttention(*options, dtype=q.dtype, implementation=kernel)
    dim_order(layout, call.sequence, call.heads)
    here, machine = machine_here(
        mesh, (layout, Layout.parse(call.kv_layout or layout)), str(layout), profile
    )
    alibi = None if call.alibi is None else jnp.asarray(call.alibi)
    seed = None if call.seed is None else jnp.asarray(call.seed & BITS, jnp.uint32)
    call = replace(call, alibi=alibi, seed=seed, mesh=here, machine=machine)
    results, (_, sharding) = call.run(q, k, v, layout), call.enter(q, layout, call.shape)
    of_results = (replace(sharding, shape=(*sharding.shape[:-1], x.shape[-1])) for x in results)
    y, *lse = map(without_padding, results, of_results)
    return (y.astype(q.dtype), lse[0].squeeze(-1)) if lse else y.astype(q.dtype)


attention = Verb[Array, AnyMesh](_attention).attention
