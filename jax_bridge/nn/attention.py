"""Attention over a sharded sequence, equal to attention on one device, inside `jax.shard_map`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import without_padding
from jax_bridge.mesh.context import AnyMesh, machine_here
from jax_bridge.nn.ring import DeviceAttention, ring
from jax_bridge.nn.sharded import block_sharding
from xshard import Layout, Profile, Sharding
from xshard.contractions.prices import fastest_attention
from xshard.errors import DtypeError
from xshard.nn import attention as core
from xshard.nn.attention import AUTO, BITS, REDUCE, RING, SEQUENCE

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
    kv_documents: Array | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
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

    Blocks have the dims of `layout`, the width of heads last. Sequences may be sharded in any order, and
    heads and batch too: masks follow from the positions of the rows.

    how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
    sequence; "ring" passes blocks of keys and values on, so that no device holds all of them, and has first
    derivatives in reverse mode only; "reduce" brings all queries to a device's keys and adds the results up,
    for few queries and many keys; "auto" takes the cheapest on the machine of `profile`.
    kv_layout: layout of keys and values, by default the queries' layout. Keys of another sequence have
    another name for their rows, as in `b t/cp h k`, and a length of their own. They may have fewer heads,
    each for a group of queries' heads, also fewer than there are devices.
    causal: a row sees none after it. window: rows see only rows fewer than that away; (left, right): only so
    many rows before and after their own, None: all. offset: row i of queries is row i + offset of keys.
    documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded like the dims of `q`: rows see only
    their own document. kv_documents: the same of keys, if they are not one sequence.
    scale: by default `width ** -0.5`. softcap: scores become `softcap * tanh(score / softcap)`. alibi: slopes
    `[heads]` of the whole array, times the distance of rows and subtracted from scores (Press et al. 2021);
    without a gradient. dropout: the part of weights that is dropped, by numbers from `seed` and positions:
    equal on any devices, and in torch.
    return_lse: return `(y, lse)`, lse `[*batch, heads, sequence]` in the order of `layout`: the natural
    logarithm of the sum of the exponentials of scores, in float32 or wider. A row that sees nothing has y = 0
    and lse = -inf.
    mesh: by default the one of the context. shape, kv_heads, kv_length: the global shape of `q`, the heads
    and the rows of keys, if blocks differ in size; a length of None is the block's, times the number of
    parts. sequence, heads: the names of these dims. implementation: passed to
    `jax.nn.dot_product_attention`, which "gather" and "ulysses" use unless in float64 or with softcap,
    dropout, return_lse or masks of two sequences.

    Raises as `redistribute` does; XshardError for options that make no sense.

    >>> row = jnp.arange(8.0).reshape(1, 1, 8, 1, 1)  # one block on one device
    >>> means = jax.pmap(lambda v: attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", causal=True), "cp")
    >>> [round(mean, 4) for mean in means(row).ravel().tolist()]
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    """
    layout, kv_layout = Layout.parse(layout), Layout.parse(kv_layout or layout)
    text, names = str(layout), core.dim_order(layout, sequence, heads)
    q, k, v = (as_array(x, text) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    here, machine = machine_here(mesh, (layout, kv_layout), text, profile)
    shardings = [block_sharding(q, layout, here, shape)]
    lengths = core.key_lengths(shardings[0], kv_layout, heads, kv_heads, kv_length)
    kv_shape = [lengths.get(name) for name in kv_layout.names]
    shardings += [block_sharding(x, kv_layout, here, kv_shape) for x in (k, v)]
    orders = names, *[core.key_order(kv_layout, names)] * 2
    q, k, v = (
        without_padding(x, s).transpose([*map(s.layout.names.index, order)])
        for x, s, order in zip((q, k, v), shardings, orders, strict=True)
    )
    in_order = (s.in_order(order) for s, order in zip(shardings, orders, strict=True))
    attn = core.attention(*in_order, how=how, causal=causal, window=window, offset=offset)
    core.check_options(attn, softcap, alibi, dropout, seed, (documents, kv_documents))
    is_plain = attn.sees_some(documents is not None) and not (softcap or dropout or return_lse)
    attn = fastest_attention(attn, q.dtype.name, machine)

    def of_whole(numbers: Array, layout: Layout, of_keys: bool) -> Array:
        layouts, whole, order = core.document_move(attn, layout, numbers.ndim, of_keys)
        numbers = redistribute(numbers, layouts, here, shape=whole).transpose(order)
        return numbers.reshape(-1, numbers.shape[-1])

    both = None
    if documents is not None:
        of_rows = of_whole(documents, layout, False)
        both = of_rows, of_rows if kv_documents is None else of_whole(kv_documents, kv_layout, True)
    number = seed & BITS if isinstance(seed, int) else seed
    bits = jnp.asarray(number, jnp.uint32) if dropout else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    slopes = None if alibi is None else jnp.asarray(alibi)
    blocks = DeviceAttention(attn, scale, softcap, dropout, both, slopes, bits)
    batch = q.shape[:-3]
    q = _flat(_moved(q, attn.q, attn.queries))
    kv = _flat(_moved(jnp.concatenate((k, v), -1), attn.kv, attn.keys))
    if attn.how == RING:
        y, lse = ring(blocks, q, kv)
    else:
        y, lse = _attended(blocks, q, kv, is_plain and attn.how != REDUCE, implementation)
    y, lse = (x.reshape(*batch, *x.shape[1:]) for x in (y, lse[..., None]))
    if attn.how == REDUCE:
        y, lse = _merged(attn, y, lse)
    else:
        y = _moved(y, attn.result, attn.target)
        lse = _moved(lse, attn.result, attn.target) if return_lse else lse
    order, of_lse = [*map(names.index, layout.names)], replace(attn.target, shape=(*attn.q.shape[:-1], 1))
    y = without_padding(y.astype(v.dtype), attn.target).transpose(order)
    return (y, without_padding(lse, of_lse).transpose(order).squeeze(-1)) if return_lse else y


def _merged(attn: core.Attention, y: Array, lse: Array) -> tuple[Array, Array]:
    """Results and log-sum-exps of queries by each device's keys -> by all keys, under the queries' layout."""
    result, whole = attn.result, Layout(attn.result.layout.dims)
    highest = result.with_layout(Layout(whole.dims, (("max", attn.axes),)))
    top = _moved(lax.stop_gradient(lse), highest, result.with_layout(whole))
    top = jnp.maximum(top, jnp.finfo(lse.dtype).min)
    weight = jnp.exp(lse - top)
    total = _moved(jnp.concatenate((y * weight, weight), -1), result, attn.target)
    total, share = total[..., :-1], total[..., -1:]
    top = _moved(top, result.with_layout(whole), attn.target)
    counted = jnp.where(share == 0, 1, share)
    return total / counted, jnp.where(share == 0, -jnp.inf, top + jnp.log(counted))


def _flat(x: Array) -> Array:
    """All batch dims as one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _moved(x: Array, src: Sharding, dst: Sharding) -> Array:
    """An array of any width."""
    if src.layout == dst.layout:
        return x
    return redistribute(x, (src.layout, dst.layout), src.mesh, shape=(*src.shape[:-1], x.shape[-1]))


def _attended(
    blocks: DeviceAttention, q: Array, kv: Array, is_plain: bool, implementation: Implementation
) -> tuple[Array, Array]:
    """Queries and all keys that they may see -> the result, and log-sum-exps unless it is plain."""
    rows, keys, value_width = blocks.held(SEQUENCE), blocks.key_rows(), blocks.attn.value_width
    if not is_plain or q.dtype == jnp.float64 or q.shape[-1] != value_width:
        return blocks.attend(q, kv, rows, keys)
    q, k, v = (x.swapaxes(1, 2) for x in (q, *blocks.read(kv)))
    options: Any = {"mask": blocks.visible(rows, keys), "bias": blocks.bias(rows, keys, q.dtype)}
    options |= {"scale": blocks.scale, "implementation": implementation}
    y = jax.nn.dot_product_attention(q, k, v, **options).swapaxes(1, 2)
    return y, y[..., 0]
