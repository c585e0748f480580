"""Attention over a sharded sequence, equal to attention on one device, inside `jax.shard_map`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.context import AnyMesh, check_block_here, machine_here
from jax_bridge.nn.ring import DeviceAttention, ring
from xshard import Layout, Mesh, Profile, Sharding
from xshard.contractions.prices import fastest_attention
from xshard.errors import DtypeError
from xshard.layout.lengths import global_shape
from xshard.nn import attention as core
from xshard.nn.attention import AUTO, METHODS, RING, SEQUENCE

Implementation = Literal["xla", "cudnn"] | None


def attention(
    q: Array,
    k: Array,
    v: Array,
    layout: Layout | str,
    mesh: AnyMesh | None = None,
    *,
    how: str = AUTO,
    causal: bool = False,
    documents: Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    kv_layout: Layout | str | None = None,
    shape: Sequence[int | None] | None = None,
    kv_heads: int | None = None,
    sequence: str = "s",
    heads: str = "h",
    profile: str | Path | Profile = "auto",
    implementation: Implementation = None,
) -> Array:
    """Blocks of queries, keys and values -> this device's block of `softmax(q @ k * scale) @ v`.

    Blocks have the dims of `layout`, the width of heads last. The sequence may be sharded in any order, and
    heads and batch too: masks follow from the positions of the rows.

    how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
    sequence; "ring" passes blocks of keys and values on, so that no device holds all of them, and has first
    derivatives in reverse mode only; "auto" takes the cheapest on the machine of `profile`.
    causal: a row sees none after it. documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded
    like the dims of `q`: rows see only their own document. window: rows see only rows fewer than that away.
    scale: by default `width ** -0.5`. kv_layout: layout of keys and values, by default the queries' layout;
    they may have fewer heads, each for a group of queries' heads, also fewer than there are devices.
    mesh: by default the one of the context. shape, kv_heads: the global shape of `q` and the number of heads
    of keys, if blocks differ in size; a length of None is the block's, times the number of parts. sequence,
    heads: the names of these dims. implementation: passed to `jax.nn.dot_product_attention`.

    Raises as `redistribute` does; XshardError for another method or window.

    >>> row = jnp.arange(8.0).reshape(1, 1, 8, 1, 1)  # one block on one device
    >>> means = jax.pmap(lambda v: attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", causal=True), "cp")
    >>> means(row).ravel().tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    """
    layout, kv_layout = Layout.parse(layout), Layout.parse(kv_layout or layout)
    text, names = str(layout), core.dim_order(layout, sequence, heads)
    q, k, v = (as_array(x, text) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    here, machine = machine_here(mesh, (layout, kv_layout), text, profile)
    shardings = [_sharding(q, layout, here, dict(zip(layout.names, shape or (), strict=bool(shape))))]
    lengths = core.key_lengths(shardings[0], kv_layout, heads, kv_heads, None)
    shardings += [_sharding(x, kv_layout, here, lengths) for x in (k, v)]
    q, k, v = (
        without_padding(x, s).transpose(*map(s.layout.names.index, names))
        for x, s in zip((q, k, v), shardings, strict=True)
    )
    in_order = (s.in_order(names) for s in shardings)
    attn = core.attention(*in_order, how=how, causal=causal, window=window)
    attn = fastest_attention(attn, q.dtype.name, machine, METHODS[:3])
    if documents is not None:
        layouts, whole, order = core.document_move(attn, layout, documents.ndim)
        documents = redistribute(documents, layouts, here, shape=whole).transpose(order)
        documents = documents.reshape(-1, documents.shape[-1])
    blocks = DeviceAttention(attn, q.shape[-1] ** -0.5 if scale is None else scale)
    batch = q.shape[:-3]
    q = _flat(_moved(q, attn.q, attn.queries))
    kv = _flat(_moved(jnp.concatenate((k, v), -1), attn.kv, attn.keys))
    if attn.how == RING:
        y = ring(blocks, q, kv, documents)
    else:
        y = _attended(blocks, q, kv, documents, implementation)
    y = _moved(y.reshape(*batch, *y.shape[1:]), attn.result, attn.target)
    return without_padding(y, attn.target).transpose(*map(names.index, layout.names))


def _sharding(x: Array, layout: Layout, mesh: Mesh, known: Mapping[str, int | None]) -> Sharding:
    """The sharding of the global array of a block. known: global lengths by dim, None if not known."""
    text = str(layout)
    sharding = Sharding(layout, mesh, global_shape(layout, mesh, x.shape, text, known))
    check_block_here(x.shape, sharding, text, inferred=not known)
    return sharding


def _flat(x: Array) -> Array:
    """All batch dims as one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _moved(x: Array, src: Sharding, dst: Sharding) -> Array:
    if src.layout == dst.layout:
        return x
    return redistribute(x, (src.layout, dst.layout), src.mesh, shape=src.shape)


def _attended(
    blocks: DeviceAttention, q: Array, kv: Array, documents: Array | None, implementation: Implementation
) -> Array:
    """Queries and all keys that they may see -> the result."""
    k, v = blocks.read(kv)
    rows = blocks.rows() if blocks.attn.queries.layout.dims[SEQUENCE].axes else jnp.arange(q.shape[2])
    visible = blocks.visible(rows, jnp.arange(k.shape[2]), documents)
    if q.dtype == jnp.float64 or k.shape[-1] != v.shape[-1]:
        weights = jax.nn.softmax(blocks.scores(q, k, visible)).astype(v.dtype)
        return jnp.einsum("bhqs,bhsk->bhqk", weights, v)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, mask=visible, scale=blocks.scale, implementation=implementation)
    return y.swapaxes(1, 2)
