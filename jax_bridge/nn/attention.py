"""Attention over a sequence that is cut, equal to that of the whole arrays.

Decides how the moves that `xshard.nn.attention` names become redistributions inside `jax.shard_map`, and what
computes the part of a device: `jax.nn.dot_product_attention`, in float64 plain products, and `ring` where
blocks come one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jax_bridge.lower.row_tables import without_padding
from jax_bridge.nn.ring import Blocks, ring
from jax_bridge.planning import AnyMesh, as_array, check_block_here, machine_here
from jax_bridge.redistribution import redistribute
from xshard import Layout, Profile, Sharding
from xshard.contractions.attention import chosen
from xshard.errors import DtypeError
from xshard.layout.lengths import global_shape
from xshard.nn import attention as core
from xshard.nn.attention import AUTO, RING, SEQUENCE

Implementation = Literal["xla", "cudnn"] | None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: Layout | str,
    mesh: AnyMesh | None = None,
    *,
    how: str = AUTO,
    causal: bool = False,
    documents: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    kv_layout: Layout | str | None = None,
    shape: Sequence[int] | None = None,
    kv_heads: int | None = None,
    sequence: str = "s",
    heads: str = "h",
    profile: str | Path | Profile = "auto",
    implementation: Implementation = None,
) -> jax.Array:
    """Blocks of queries, keys and values -> this device's block of `softmax(q @ k * scale) @ v`.

    The dims of blocks are those of `layout`, in any order but that the width of heads is last; the result has
    those of `q`, and the width of `v`. The sequence may be cut in any order, and heads and batch too. Masks
    follow from the positions of the rows, whatever the order.

    how: "gather" brings all keys and values to the queries of a device; "ulysses" cuts heads instead of the
    sequence and back, also into unequal parts; "ring" passes blocks of keys and values on from device to
    device, also in the backward pass, so that no device holds all of them; "auto" takes the one that is
    cheapest on the machine of `profile`. A ring has first derivatives in reverse mode, the others have all.
    causal: a row sees none after it. documents: whole numbers `[*batch, sequence]` or `[sequence]`, cut as
    the dims of `q`: rows see those of their own document. window: rows see those fewer than so many away.
    scale: by default `width ** -0.5`. kv_layout: of keys and values, by default that of queries: they may
    have fewer heads, each for a group of queries' heads, also fewer than there are devices.
    mesh: by default the one of the context. shape, kv_heads: the global shape of `q`, and heads of keys; by
    default inferred, assuming all blocks are equal. sequence, heads: the names of these dims.
    implementation: that of `jax.nn.dot_product_attention`.

    Raises as `redistribute` does; XshardError for another way or window.

    >>> row = jnp.arange(8.0).reshape(1, 1, 8, 1, 1)  # one block on one device
    >>> means = jax.pmap(lambda v: attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", causal=True), "cp")
    >>> means(row).ravel().tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    """
    layout = Layout.parse(layout)
    kv_layout, text = Layout.parse(kv_layout or layout), str(layout)
    q, k, v = (as_array(x, text) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    names = core.order(layout, sequence, heads)
    here, machine = machine_here(mesh, (layout, kv_layout), text, profile)
    whole = dict(zip(layout.names, shape or global_shape(layout, here, q.shape, text), strict=True))
    ends, turned = list[Sharding](), list[jax.Array]()
    for x, at in ((q, layout), (k, kv_layout), (v, kv_layout)):
        known = whole if x is q else {**whole, heads: kv_heads, names[-1]: x.shape[-1]}
        end = Sharding(at, here, global_shape(at, here, x.shape, str(at), known))
        check_block_here(x.shape, end, str(at), inferred=shape is None)
        ends.append(end.in_order(names))
        turned.append(without_padding(x, end).transpose(*map(at.names.index, names)))
    asked = core.attention(ends[0], ends[1], ends[2], how, causal, window)
    given = chosen(asked, q.dtype.name, machine)
    blocks = Blocks(given, q.shape[-1] ** -0.5 if scale is None else scale)
    batch = turned[0].shape[:-3]
    q = _flat(_moved(turned[0], given.q, given.queries))
    kv = _flat(_moved(jnp.concatenate(turned[1:], -1), given.kv, given.keys))
    if documents is not None:
        documents = _whole_documents(documents, given.q, names, layout)
    if given.how == RING:
        y = ring(blocks, q, kv, documents)
    else:
        y = _attended(blocks, q, kv, documents, implementation)
    y = _moved(y.reshape(*batch, *y.shape[1:]), given.result, given.target)
    return without_padding(y, given.target).transpose(*map(names.index, layout.names))


def _flat(x: jax.Array) -> jax.Array:
    """All batch dims as one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _moved(x: jax.Array, src: Sharding, dst: Sharding) -> jax.Array:
    if src.layout == dst.layout:
        return x
    return redistribute(x, (src.layout, dst.layout), src.mesh, shape=src.shape)


def _whole_documents(x: jax.Array, q: Sharding, names: tuple[str, ...], layout: Layout) -> jax.Array:
    """The documents of the sequence: of the rows of the device's batches, or `[1, rows]` for all of them."""
    ends = core.document_layouts(layout, names, x.ndim)
    x = redistribute(x, ends, q.mesh, shape=[q.shape[q.dim_index(name)] for name in ends[0].names])
    return jnp.moveaxis(x, ends[0].names.index(names[SEQUENCE]), -1).reshape(-1, q.shape[SEQUENCE])


def _attended(
    blocks: Blocks, q: jax.Array, kv: jax.Array, documents: jax.Array | None, implementation: Implementation
) -> jax.Array:
    """Queries and all keys that they may see -> the result."""
    (k, v), given = blocks.read(kv), blocks.given
    rows = blocks.rows() if given.queries.layout.dims[SEQUENCE].axes else jnp.arange(q.shape[2])
    seen = blocks.seen(rows, jnp.arange(k.shape[2]), documents)
    if q.dtype == jnp.float64 or k.shape[-1] != v.shape[-1]:
        weights = jax.nn.softmax(blocks.scores(q, k, seen)).astype(v.dtype)
        return jnp.einsum("bhqs,bhsk->bhqk", weights, v)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, mask=seen, scale=blocks.scale, implementation=implementation)
    return y.swapaxes(1, 2)
