"""Attention over a sharded sequence, equal to attention on one device, by torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.function import is_transformed
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh
from torch_bridge.nn.placed import placed_as
from torch_bridge.nn.ring import ProcessAttention, RingAttention
from torch_bridge.redistribution import redistribute
from xshard import Layout, Profile, Sharding, load_profile
from xshard.contractions.prices import fastest_attention
from xshard.dtypes import name_of
from xshard.errors import DtypeError, XshardError
from xshard.nn import attention as core
from xshard.nn.attention import AUTO, METHODS, RING, tiles


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | str,
    mesh: MeshLike,
    *,
    how: str = AUTO,
    causal: bool = False,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    kv_layout: Layout | str | None = None,
    shape: Sequence[int | None] | None = None,
    kv_heads: int | None = None,
    sequence: str = "s",
    heads: str = "h",
    profile: str | Path | Profile = "auto",
) -> Tensor:
    """Blocks of queries, keys and values -> this process's block of `softmax(q @ k * scale) @ v`.

    All processes of the mesh call it. Blocks have the dims of `layout`, the width of heads last. The sequence
    may be sharded in any order, and heads and batch too: masks follow from the positions of the rows.

    how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
    sequence; "ring" passes blocks of keys and values on, so that no device holds all of them, and has first
    derivatives only, none under torch.func; "auto" takes the cheapest on the machine of `profile`.
    causal: a row sees none after it. documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded
    like the dims of `q`: rows see only their own document. window: rows see only rows fewer than that away.
    scale: by default `width ** -0.5`. kv_layout: layout of keys and values, by default the queries' layout;
    they may have fewer heads, each for a group of queries' heads, also fewer than there are devices.
    shape, kv_heads: the global shape of `q` and the number of heads of keys, if blocks differ in size; a
    length of None is the block's, times the number of parts. sequence, heads: the names of these dims.
    Under torch.compile it runs between two graphs.

    Raises as `redistribute` does; XshardError for another method or window.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def means():
    ...     v = xt.positions("b s/zigzag(cp)", Mesh(cp=2), shape=(1, 8), dim="s").reshape(1, 4, 1, 1).double()
    ...     return xt.nn.attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", Mesh(cp=2), causal=True)
    >>> [y.flatten().tolist() for y in xt.testing.run_ranks(2, means)]
    [[0.0, 0.5, 3.0, 3.5], [1.0, 1.5, 2.0, 2.5]]
    """
    if torch.compiler.is_dynamo_compiling():
        from torch_bridge.calls import compiled  # slow: it imports torch._dynamo, half a second

        options: dict[str, Any] = {"documents": documents, "window": window, "scale": scale, "how": how}
        options |= {"kv_layout": kv_layout, "shape": shape, "kv_heads": kv_heads, "sequence": sequence}
        options |= {"heads": heads, "causal": causal, "profile": profile}
        return compiled.eagerly(attention, q, k, v, layout, mesh, **options)
    q, k, v = (as_tensor(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    layout = Layout.parse(layout)
    kv_layout, names = Layout.parse(kv_layout or layout), core.dim_order(layout, sequence, heads)
    placement = placed_as(q, layout, mesh, shape)
    processes, lengths = placement.processes, core.key_lengths(placement.sharding, heads, kv_heads)
    kv_shape = [lengths.get(name) for name in kv_layout.names]
    shardings = [placement.sharding, *(placed_as(x, kv_layout, mesh, kv_shape).sharding for x in (k, v))]
    orders = ([*map(s.layout.names.index, names)] for s in shardings)
    q, k, v = map(torch.permute, (q, k, v), orders)
    in_order = (s.in_order(names) for s in shardings)
    attn = core.attention(*in_order, how=how, causal=causal, window=window)
    if is_transformed() and how == RING:
        raise XshardError("a ring under torch.func", hint='how="gather" and "ulysses" have all derivatives')
    methods = tuple(method for method in METHODS if method != RING or not is_transformed())
    attn = fastest_attention(attn, name_of(q.dtype), load_profile(machine(profile, q.device)), methods)
    if documents is not None:
        layouts, whole, dim = core.document_move(attn, layout, documents.ndim)
        documents = redistribute(documents, layouts, processes, shape=whole)
        documents = documents.movedim(dim, -1).reshape(-1, whole[dim])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    blocks, batch = ProcessAttention(attn, scale, processes, documents), q.shape[:-3]
    q = _flat(_moved(q, attn.q, attn.queries, processes))
    kv = _flat(_moved(torch.cat((k, v), -1), attn.kv, attn.keys, processes))
    if attn.how == RING:  # every block is as long as the longest
        y = RingAttention.apply(blocks, q, F.pad(kv, (0, 0, 0, attn.block_rows - kv.shape[2])))
    else:
        y = _attended(blocks, q, kv)
    y = _moved(y.reshape(*batch, *y.shape[1:]), attn.result, attn.target, processes)
    return y.permute(*map(names.index, layout.names))


def _flat(x: Tensor) -> Tensor:
    """All batch dims as one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _moved(x: Tensor, src: Sharding, dst: Sharding, processes: ProcessMesh) -> Tensor:
    if src.layout == dst.layout:
        return x
    return redistribute(x, (src.layout, dst.layout), processes, shape=src.shape)


def _attended(blocks: ProcessAttention, q: Tensor, kv: Tensor) -> Tensor:
    """Queries and all keys that they may see -> the result."""
    k, v = blocks.read(kv)
    parts = []
    for tile in tiles(blocks.attn, blocks.device):
        rows, keys, values = q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k]
        mask, is_causal = blocks.mask(tile)
        if is_causal and rows.shape[2] != keys.shape[2]:
            from torch.nn.attention.bias import causal_lower_right  # slow: it imports torch._dynamo

            with _disable_current_modes():  # a mode makes a plain tensor of it
                mask, is_causal = causal_lower_right(rows.shape[2], keys.shape[2]), False
        options: Any = {"is_causal": is_causal, "scale": blocks.scale}
        parts.append(F.scaled_dot_product_attention(rows, keys, values, mask, **options))
    if not q.numel():  # without queries, too, the keys have a gradient, that other devices wait for
        return q @ k.mT @ v
    return torch.cat(parts, 2)
