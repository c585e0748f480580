"""Attention over a sharded sequence, equal to attention on one device, inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_bridge.calls import as_array
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.context import AnyMesh, machine_here
from jax_bridge.nn.ring import DeviceAttention, Implementation
from xshard import Layout, Profile
from xshard.errors import DtypeError
from xshard.nn.attention import AUTO, BITS, dim_order


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
    kv_documents: jax.Array | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: jax.Array | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    return_lse: bool = False,
    kv_layout: Layout | str | None = None,
    shape: Sequence[int | None] | None = None,
    kv_heads: int | None = None,
    kv_length: int | None = None,
    sequence: str = "s",
    heads: str = "h",
    profile: str | Path | Profile = "auto",
    implementation: Implementation = None,
) -> Any:
    """Blocks of queries, keys and values -> this device's block of `softmax(q @ k * scale) @ v`.

    Blocks have the dims of `layout`, the width of heads last. Sequences, heads and batch may be sharded in
    any order: masks follow from the positions of the rows.

    how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
    sequence; "ring" passes blocks of keys and values on, with first derivatives in reverse mode only;
    "reduce", for few queries and many keys, brings all queries to a device's keys and adds results up; "auto"
    takes the cheapest on the machine of `profile`.
    kv_layout: layout of keys and values, by default as of queries. Rows of another sequence have another
    name, as in `b t/cp h k`, and their own length. Keys may have fewer heads, also fewer than devices.
    causal: a row sees no later row. window: a row sees rows fewer than that away; (left, right): so many rows
    before and after its own, None: all. offset: row i of queries stands at row i + offset of keys.
    documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded like the dims of `q`: rows see only
    their own document. kv_documents: of keys, sharded like `k`, if they are another sequence.
    scale: by default `width ** -0.5`. softcap: scores become `softcap * tanh(score / softcap)`. alibi: slopes
    `[heads]` of the whole array, times the distance of rows and subtracted from scores (Press et al. 2021),
    constants. dropout: the part of weights that is dropped, by `seed` and positions: as in torch.
    return_lse: return `(y, lse)`, lse `[*batch, heads, sequence]` in the order of `layout`: the natural
    logarithm of the sum of the exponentials of scores, in float32 or wider; y = 0 and lse = -inf if a row
    sees nothing.
    mesh: by default the one of the context. shape, kv_heads, kv_length: global shape of `q`, heads and rows
    of keys, if blocks differ in size; None: equal blocks. sequence, heads: the names of these dims.
    implementation: of `jax.nn.dot_product_attention`, which "gather" and "ulysses" use unless in float64 or
    with softcap, dropout, return_lse or masks of two sequences.

    Raises as `redistribute` does; XshardError for options that make no sense.

    >>> row = jnp.arange(8.0).reshape(1, 1, 8, 1, 1)  # one block on one device
    >>> means = jax.pmap(lambda v: attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", causal=True), "cp")
    >>> [round(mean, 4) for mean in means(row).ravel().tolist()]
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    """
    layout = Layout.parse(layout)
    text, layouts = str(layout), (layout, Layout.parse(kv_layout or layout))
    q, k, v = (as_array(x, text) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    dim_order(layout, sequence, heads)
    here, machine = machine_here(mesh, layouts, text, profile)
    alibi = None if alibi is None else jnp.asarray(alibi)
    seed = None if seed is None else jnp.asarray(seed & BITS, jnp.uint32)
    call = DeviceAttention(
        how, causal, (documents, kv_documents), window, offset, scale, softcap, alibi, dropout, seed,
        return_lse, kv_layout, shape, kv_heads, kv_length, sequence, heads, None, here, machine, q.dtype,
        implementation,
    )  # fmt: skip
    results, (_, sharding) = call.run(q, k, v, layout), call.enter(q, layout, shape)
    of_results = (replace(sharding, shape=(*sharding.shape[:-1], x.shape[-1])) for x in results)
    y, *lse = map(without_padding, results, of_results)
    return (y.astype(q.dtype), lse[0].squeeze(-1)) if lse else y.astype(q.dtype)
