"""Attention over a sharded sequence, in blocks merged by log-sum-exps.

In a ring, blocks of keys travel.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import (
    group_table,
    row_of_this_device,
    rows_of_this_device,
    with_zero_padding,
)
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.mesh.context import AnyMesh, block_sharding, mesh_and_machine
from xshard import Layout, Sharding
from xshard.contractions.attention import AttentionCall, Verb, merged
from xshard.contractions.joint_attention import JointVerb
from xshard.contractions.prices import fastest_attention
from xshard.errors import api_boundary
from xshard.nn.attention import (
    BITS,
    HEADS,
    REDUCE,
    RING,
    SEQUENCE,
    Attention,
    run_starts,
)


class Tile(NamedTuple):
    """A run of a device's queries and a run of keys.

    `queries` and `keys` are indices of the runs in blocks [batch, heads, rows, ...]. Rows are
    global numbers, -1 in padding.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    query_rows: Array
    key_rows: Array


Update = Callable[[Array, Array], tuple[Array, Array]]


def _unchanged(a: Array, b: Array) -> tuple[Array, Array]:
    """Leave running sums as they are."""
    return a, b


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceAttention(AttentionCall):
    """Attention of this device's blocks, as `AttentionCall` drives it.

    Blocks are [batch, heads, rows, width].
    """

    dtype: Any
    implementation: Any  # of `jax.nn.dot_product_attention`
    mesh: Any = None
    machine: Any = None
    xp = jnp

    # The flow: what `AttentionCall.run` calls in turn.

    def enter(
        self, x: Array, layout: Layout, shape: Sequence[int | None] | None
    ) -> tuple[Array, Sharding]:
        """Return a block with zeros in its padding, and its sharding."""
        sharding = block_sharding(x, layout, self.mesh, shape)
        return with_zero_padding(x, sharding), sharding

    def move(self, x: Array, layouts: tuple[Layout, Layout], shape: Sequence[int]) -> Array:
        """Redistribute a block."""
        return redistribute(x, layouts, self.mesh, shape=shape)

    def choose(self, attn: Attention, is_plain: bool) -> Attention:
        """Choose the fastest method on this machine, if the user has left it open."""
        return fastest_attention(attn, self.dtype.name, self.machine)

    def compute(self, q: Array, kv: Array, is_plain: bool) -> tuple[Array, Array]:
        """Attend from this device's queries to all keys, by a ring, JAX's kernel, or in one piece.

        Args:
            q: Queries: [batch, heads, rows, width].
            kv: Keys with the values beside them: [batch, heads, rows, width + value width].
            is_plain: Whether JAX's own attention can do all that the call asks for.

        Returns:
            The result, [batch, heads, rows, value width], and log-sum-exps, [batch, heads, rows].
        """
        if self.attn.method == RING:
            return ring(self, q, kv)
        query_rows = self.global_positions(SEQUENCE)
        key_rows = self.key_rows()
        # JAX's own attention computes in float32 at most, and takes values as wide as keys.
        has_one_width = q.shape[-1] == self.attn.value_width
        has_kernel = has_one_width and self.dtype != jnp.float64
        # "reduce" merges results by log-sum-exps, which the kernel does not return.
        if is_plain and has_kernel and self.attn.method != REDUCE:
            return self._by_kernel(q, kv, query_rows, key_rows)
        return self.attend(q, kv, query_rows, key_rows)

    def _by_kernel(
        self, q: Array, kv: Array, query_rows: Array, key_rows: Array
    ) -> tuple[Array, Array]:
        """Compute attention by `jax.nn.dot_product_attention`, which returns no log-sum-exps.

        Arguments are as of `compute`, with the global positions of queries and keys for masks.

        Returns:
            The result, and a placeholder of the shape of log-sum-exps, which nobody reads.
        """
        k, v = self.read(kv)
        bias = None
        if self.alibi is not None:
            bias = self.bias(query_rows, key_rows).astype(q.dtype)
        y = jax.nn.dot_product_attention(
            q.swapaxes(1, 2),  # JAX takes [batch, rows, heads, width]
            k.swapaxes(1, 2),
            v.swapaxes(1, 2),
            scale=self.scale,
            mask=self.visible(query_rows, key_rows),
            bias=bias,
            implementation=self.implementation,
        ).swapaxes(1, 2)
        placeholder = y[..., 0]  # of the right shape and type; its numbers mean nothing
        return y, placeholder

    # What `AttentionCall` asks of a framework.

    @property
    def masked_score(self) -> float:
        """The score of a key that does not count: very low, but finite, as are derivatives."""
        return float(jnp.finfo(self.score_dtype).min) / 2

    def global_positions(self, dim: int) -> Array:
        """Return the global numbers of this device's queries, or their heads or batches.

        -1 in padding.
        """
        return rows_of_this_device(self.attn.queries, dim)

    def product(self, q: Array, k: Array) -> Array:
        """Multiply queries by keys: [batch, heads, queries, keys]."""
        return jnp.einsum("bhqk,bhsk->bhqs", q, k, preferred_element_type=self.score_dtype)

    def in_score_dtype(self, x: Any) -> Array:
        """Return constants in the dtype of scores."""
        return lax.stop_gradient(jnp.asarray(x)).astype(self.score_dtype)

    def as_integers(self, x: Any) -> Array:
        """Return whole numbers for the random bits of dropout."""
        return jnp.asarray(x).astype(jnp.uint32)

    # Blocks of keys.

    def key_rows(self, round_number: int = 0) -> Array:
        """Return the global rows of the keys that are here in a round of the ring.

        -1 in padding.
        """
        attn = self.attn
        rows_of = partial(attn.key_rows, round_index=round_number)
        table = group_table(attn.q.mesh, attn.axes, attn.block_rows, rows_of)
        return row_of_this_device(table, attn.axes)

    @property
    def heads_read(self) -> Array | None:
        """The head of keys that each head of queries reads; None if there are as many of both."""
        queries = self.attn.queries
        if self.attn.query_heads_per_key_head == 1:
            return None
        axes = queries.layout.dims[HEADS].axes
        n_heads = queries.max_local_shape[HEADS]
        heads = group_table(queries.mesh, axes, n_heads, self.attn.heads_read)
        return jnp.maximum(row_of_this_device(heads, axes), 0)  # padding reads any head

    def read(self, kv: Array) -> tuple[Array, Array]:
        """Split keys from values, with a head for every head of queries."""
        heads = self.heads_read
        if heads is not None:
            kv = kv.take(heads, 1)
        return self.attn.split(kv)

    def send(self, block: Array, by: int, after: Array | None = None) -> Callable[[], Array]:
        """Send a block to the device `by` further on in the ring, once `after` has been computed.

        Returns:
            A function that returns the block that arrived: XLA itself decides when to wait.
        """
        if after is not None:
            block, _ = lax.optimization_barrier((block, after))
        layouts, shape = self.attn.rotation(block.shape, by)
        arrived = redistribute(block, layouts, self.attn.q.mesh, shape=shape)
        return lambda: arrived

    # Scores.

    def attend(
        self, q: Array, kv: Array, query_rows: Array, key_rows: Array
    ) -> tuple[Array, Array]:
        """Attend to one block of keys: softmax(q . k) v, and the log-sum-exp of each row's scores.

        With log-sum-exps the results of several blocks of keys can be merged. A row that sees no
        key has the result 0 and the log-sum-exp -inf.

        Args:
            q: Queries: [batch, heads, rows, width].
            kv: Keys with the values beside them: [batch, heads, keys, width + value width].
            query_rows: The queries' global positions, for masks: [rows].
            key_rows: The keys' global positions: [keys].

        Returns:
            [batch, heads, rows, value width] and [batch, heads, rows].
        """
        k, v = self.read(kv)  # [batch, heads of queries, keys, width]
        has_key = self.visible(query_rows, key_rows).any(-1)
        scores, _ = self.scores(q, k, query_rows, key_rows)
        log_sum = jax.nn.logsumexp(scores, -1)  # [batch, heads, queries]
        weights = jnp.exp(scores - log_sum[..., None])  # [batch, heads, queries, keys]
        weights = weights * self.dropout_factors(query_rows, key_rows)
        # Products in the arrays' short dtype are fast; they are added up in the dtype of scores.
        y = jnp.einsum(
            "bhqs,bhsk->bhqk", weights.astype(v.dtype), v, preferred_element_type=scores.dtype
        )
        y = jnp.where(has_key[..., None], y, 0)
        return y, jnp.where(has_key, log_sum, -jnp.inf)

    def tiles(self, query_rows: Array, key_rows: Array) -> list[Tile]:
        """Cut a device's scores into tiles, runs of queries by runs of keys.

        In zigzag order with a causal mask, half of the four tiles see nothing and can be skipped.
        """
        tiles = []
        for queries in self._runs(self.attn.queries):
            for keys in self._runs(self.attn.keys):
                q_rows = query_rows[queries]
                tiles.append(
                    Tile(jnp.s_[:, :, queries], jnp.s_[:, :, keys], q_rows, key_rows[keys])
                )
        return tiles

    def _runs(self, array: Sharding) -> list[slice]:
        """Return the runs of consecutive rows in a device's block: in zigzag order two halves."""
        bounds = (*run_starts(self.attn, array), array.max_local_shape[SEQUENCE])
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def if_visible(self, tile: Tile, update: Update, a: Array, b: Array) -> tuple[Array, Array]:
        """Update two running sums by a tile, unless masks hide all of it from this device."""
        is_visible = self.visible(tile.query_rows, tile.key_rows).any()
        # A branch at run time: which tiles a mask hides differs between devices.
        return lax.cond(is_visible, update, _unchanged, a, b)


def ring(call: DeviceAttention, q: Array, kv: Array) -> tuple[Array, Array]:
    """Compute ring attention: keys and values pass from device to device, queries stay.

    In each round a device attends to the block that is there and merges the result. The gradient is
    another ring, which computes scores again instead of saving them.

    Args:
        call: The attention.
        q: This device's queries: [batch, heads, rows, width].
        kv: This device's keys with the values beside them: [batch, heads, rows, width + value
            width].

    Returns:
        The result for this device's queries, and their log-sum-exps.
    """
    # `custom_vjp` must not close over tracers, so that these fields are passed as arguments.
    constants = {"documents": call.documents, "alibi": call.alibi, "seed": call.seed}

    def forward(constants: dict[str, Any], q: Array, kv: Array) -> tuple[Any, SavedForBackward]:
        y, log_sum = _ring_forward(replace(call, **constants), q, kv)
        return (y, log_sum), SavedForBackward(constants, q, kv, y, log_sum)

    @jax.custom_vjp
    def run(constants: dict[str, Any], q: Array, kv: Array) -> tuple[Array, Array]:
        results, _ = forward(constants, q, kv)
        return results

    def backward(saved: SavedForBackward, cotangents: Any) -> tuple[None, Array, Array]:
        rows = _rows_for_backward(saved, *cotangents)
        q_gradient, kv_gradient = _ring_backward(replace(call, **saved.constants), rows, saved.kv)
        return None, q_gradient, kv_gradient

    run.defvjp(forward, backward)
    # All values get one type, varying along all these axes.
    axes = {*call.attn.q.layout.axes, *call.attn.axes}
    for array in jax.tree.leaves((constants, q, kv)):
        axes |= varying_axes(array)
    # The order of a set of strings differs between processes, which compile the same program.
    sorted_axes = sorted(axes)
    return run(constants, as_varying(q, sorted_axes), as_varying(kv, sorted_axes))


class SavedForBackward(NamedTuple):
    """What the forward pass of ring attention keeps: its arguments and its results."""

    constants: dict[str, Any]
    q: Array
    kv: Array
    y: Array
    log_sum: Array


def _ring_forward(call: DeviceAttention, q: Array, kv: Array) -> tuple[Array, Array]:
    """Attend to one block of keys per round, and merge the results into that of all keys.

    Returns:
        The result [batch, heads, rows, value width] and its log-sum-exps [batch, heads, rows].
    """
    dtype = call.score_dtype
    query_rows = call.global_positions(SEQUENCE)
    rows_shape = q.shape[:3]  # [batch, heads, rows]
    y = jnp.zeros((*rows_shape, call.attn.value_width), dtype)
    log_sum = jnp.full(rows_shape, -jnp.inf, dtype)
    # `lax.cond` wants one type of both branches: what is computed from q differs between devices,
    # and so these constants are declared to.
    y = as_varying(y, varying_axes(q))
    log_sum = as_varying(log_sum, varying_axes(q))

    def send(block: Array, by: int) -> Callable[[], Array]:
        # In the round that has begun. XLA would send all blocks first, and then compute all rounds.
        return call.send(block, by, after=log_sum)

    for round_number, block in call.attn.blocks_by_round(kv, send):
        for tile in call.tiles(query_rows, call.key_rows(round_number)):
            merge = partial(_merge_tile, call, q, block, tile)
            y, log_sum = call.if_visible(tile, merge, y, log_sum)
    return y.astype(q.dtype), log_sum


def _merge_tile(
    call: DeviceAttention, q: Array, block: Array, tile: Tile, y: Array, log_sum: Array
) -> tuple[Array, Array]:
    """Merge the attention to one run of keys into the result of the keys so far.

    Args:
        call: The attention.
        q: All queries of this device: [batch, heads, rows, width].
        block: The keys and values that are here in this round.
        tile: The runs of queries and keys.
        y: The result so far: [batch, heads, rows, value width].
        log_sum: Its log-sum-exps: [batch, heads, rows].
    """
    tile_y, tile_log_sum = call.attend(
        q[tile.queries], block[tile.keys], tile.query_rows, tile.key_rows
    )
    so_far = (y[tile.queries], log_sum[tile.queries][..., None])
    merged_y, merged_log_sum = merged(jnp, so_far, (tile_y, tile_log_sum[..., None]))
    return y.at[tile.queries].set(merged_y), log_sum.at[tile.queries].set(
        merged_log_sum.squeeze(-1)
    )


class BackwardRows(NamedTuple):
    """What the backward pass needs of each query: [batch, heads, rows, width or 1]."""

    q: Array
    dy: Array
    log_sum: Array  # inf for rows that see no key: their weights exp(score - log_sum) are then 0
    shared: Array  # of the gradient of each score: what all scores of the row have in common


def _rows_for_backward(
    saved: SavedForBackward, dy: Array, log_sum_cotangent: Array
) -> BackwardRows:
    """Prepare the backward pass: the gradient of score s is weight_s * (dy . v_s - shared)."""
    log_sum = saved.log_sum
    along_dy = (dy.astype(log_sum.dtype) * saved.y).sum(-1)
    shared = along_dy - log_sum_cotangent
    log_sum = jnp.where(jnp.isinf(log_sum), jnp.inf, log_sum)
    return BackwardRows(saved.q, dy, log_sum[..., None], shared[..., None])


def _ring_backward(call: DeviceAttention, rows: BackwardRows, kv: Array) -> tuple[Array, Array]:
    """Compute the gradients of ring attention, of queries and of keys with values.

    Blocks of keys pass around the ring once more. The gradient of each block travels one round
    behind it: every device adds its part and sends it on, and the last message takes it home.

    Args:
        call: The attention.
        rows: What each query needs: see `BackwardRows`.
        kv: This device's keys with the values beside them.
    """
    dtype = rows.log_sum.dtype
    query_rows = call.global_positions(SEQUENCE)
    # As in `_ring_forward`, zeros get the type of what is added to them.
    q_gradient = as_varying(jnp.zeros_like(rows.q, dtype), varying_axes(rows.q))
    kv_zeros = as_varying(jnp.zeros_like(kv, dtype), varying_axes(kv))
    # What arrived from the previous device: the gradient of the block that is now here, summed over
    # the devices that it has visited so far.
    arrived: Array | None = None  # before the first round

    def send(block: Array, by: int) -> Callable[[], Array]:
        return call.send(block, by, after=q_gradient)  # as in the forward pass

    for round_number, block in call.attn.blocks_by_round(kv, send):
        kv_gradient = kv_zeros
        for tile in call.tiles(query_rows, call.key_rows(round_number)):
            add_tile = partial(_add_tile_gradients, call, rows, block, tile)
            q_gradient, kv_gradient = call.if_visible(tile, add_tile, q_gradient, kv_gradient)
        if arrived is not None:
            kv_gradient = arrived + kv_gradient
        # After the last round the sum goes straight home.
        arrived = call.send(kv_gradient, call.attn.distance_after(round_number))()
    assert arrived is not None  # a ring has a round or more
    return q_gradient.astype(rows.q.dtype), arrived.astype(kv.dtype)


def _add_tile_gradients(
    call: DeviceAttention,
    rows: BackwardRows,
    block: Array,
    tile: Tile,
    q_gradient: Array,
    kv_gradient: Array,
) -> tuple[Array, Array]:
    """Add a tile's gradients to the gradients of queries, and of keys with values."""
    tile_rows = BackwardRows._make(x[tile.queries] for x in rows)
    dq, dkv = _tile_gradients(call, tile_rows, block[tile.keys], tile)
    return q_gradient.at[tile.queries].add(dq), kv_gradient.at[tile.keys].add(dkv)


def _tile_gradients(
    call: DeviceAttention, rows: BackwardRows, block: Array, tile: Tile
) -> tuple[Array, Array]:
    """Compute the gradients of a run of queries and of a run of keys with values.

    Scores are computed again. The softmax's gradient of score s is weight_s * (dy . v_s - shared),
    where `shared` is one number per query. As usual, dx is the gradient of x.

    Args:
        call: The attention.
        rows: What the tile's queries need: see `BackwardRows`.
        block: The tile's keys with the values beside them.
        tile: The global rows of both.

    Returns:
        The gradients of the queries, and of the keys with the values beside them.
    """
    product = partial(jnp.einsum, preferred_element_type=rows.log_sum.dtype)
    k, v = call.read(block)
    # slope: of a score, along the product of query and key that it is made of
    scores, slope = call.scores(rows.q, k, tile.query_rows, tile.key_rows)
    weights = jnp.exp(scores - rows.log_sum)  # [batch, heads, queries, keys]
    dropout_factors = call.dropout_factors(tile.query_rows, tile.key_rows)
    dweights = product("bhqk,bhsk->bhqs", rows.dy, v) * dropout_factors
    dscores = weights * (dweights - rows.shared)
    dproducts = (dscores * slope).astype(rows.q.dtype)
    dropped_weights = (weights * dropout_factors).astype(rows.q.dtype)

    dq = product("bhqs,bhsk->bhqk", dproducts, k)
    dk = product("bhqs,bhqk->bhsk", dproducts, rows.q)
    dv = product("bhqs,bhqk->bhsk", dropped_weights, rows.dy)
    dkv = jnp.concatenate([dk, dv], -1)
    heads = call.heads_read
    if heads is not None:
        # Several heads of queries read one head of keys: its gradient is their sum.
        zeros = jnp.zeros_like(block, dkv.dtype)
        dkv = zeros.at[:, heads].add(dkv)
    return dq, dkv


def _attention(
    qkv: Sequence[Array], layout: Layout | str, mesh: Any, profile: Any, kernel: Any, *options: Any
) -> Any:
    """Check the arguments of `nn.attention`, compute it on this device's blocks, and zero padding.

    Args:
        qkv: The blocks of queries, keys and values.
        layout: The layout of all three.
        mesh: The mesh; None for the one of the context.
        profile: The machine to plan for.
        kernel: As `implementation` of `jax.nn.dot_product_attention`.
        options: The other arguments of `nn.attention`, in the order of `AttentionCall`'s fields.
    """
    layout = Layout.parse(layout)
    text = str(layout)
    q, k, v = (as_array(x, text) for x in qkv)
    call = DeviceAttention(*options, dtype=q.dtype, implementation=kernel)
    kv_layout = Layout.parse(call.kv_layout) if call.kv_layout else layout
    context = mesh_and_machine(mesh, (layout, kv_layout), text, profile)
    arrays: dict[str, Any] = {}
    if call.alibi is not None:
        arrays["alibi"] = jnp.asarray(call.alibi)
    if call.seed is not None:
        arrays["seed"] = jnp.asarray(call.seed & BITS, jnp.uint32)
    call = replace(call, mesh=context.mesh, machine=context.machine, **arrays)

    results = call.run(q, k, v, layout)  # the result, and log-sum-exps if they are asked for
    q_sharding = block_sharding(q, layout, call.mesh, call.shape)
    y = _with_zero_rows(results[0], q_sharding).astype(q.dtype)
    if not call.return_lse:
        return y
    return y, _with_zero_rows(results[1], q_sharding).squeeze(-1)


def _with_zero_rows(x: Array, q_sharding: Sharding) -> Array:
    """Set rows of padding to zero, which have computed something, too.

    Args:
        x: A result, of any width: values may have another one than queries.
        q_sharding: The sharding of the queries.
    """
    shape = (*q_sharding.shape[:-1], x.shape[-1])
    return with_zero_padding(x, replace(q_sharding, shape=shape))


attention = api_boundary(Verb[Array, AnyMesh](_attention).attention)
joint_attention = JointVerb[Array, AnyMesh](
    attention, jnp, lax.convert_element_type
).joint_attention
