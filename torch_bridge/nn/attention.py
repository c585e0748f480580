"""Attention over a sequence that is cut, equal to that of one device.

Decides how the moves that `xshard.nn.attention` names become redistributions, and which of torch's functions
computes what a device has: `scaled_dot_product_attention` where that is all of its keys, `ring` where blocks
come one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
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
from torch_bridge.nn.ring import Blocks, Ring
from torch_bridge.redistribution import redistribute
from xshard import Layout, Profile, Sharding, XshardError, dtypes, load_profile
from xshard.contractions.attention import chosen
from xshard.errors import DtypeError
from xshard.nn import attention as core
from xshard.nn.attention import AUTO, RING, SEQUENCE, WAYS, pieces


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: MeshLike,
    layout: Layout | str,
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

    All processes of the mesh call it. The dims of blocks are those of `layout`, in any order but that the
    width of heads is last; the result has those of `q`, and the width of `v`. The sequence may be cut in
    any order, and heads and batch too. Masks follow from the positions of the rows, whatever the order.

    how: "gather" brings all keys and values to the queries of a device; "ulysses" cuts heads instead of the
    sequence and back, also into unequal parts; "ring" passes blocks of keys and values on from device to
    device, also in the backward pass, so that no device holds all of them; "auto" takes the one that is
    cheapest on the machine of `profile`. A ring has first derivatives, and none under torch.func.
    causal: a row sees none after it. documents: whole numbers `[*batch, sequence]` or `[sequence]`, cut as
    the dims of `q`: rows see those of their own document. window: rows see those fewer than so many away.
    scale: by default `width ** -0.5`. kv_layout: of keys and values, by default that of queries: they may
    have fewer heads, each for a group of queries' heads, also fewer than there are devices.
    shape, kv_heads: the global shape of `q`, and heads of keys, where blocks differ in size; a length that is
    None is the block's, times the number of parts. sequence, heads: the names of these dims.
    Under torch.compile it runs between two graphs.

    Raises as `redistribute` does; XshardError for another way or window.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def means():
    ...     v = xt.positions("b s/zigzag(cp)", Mesh(cp=2), (1, 8), "s").reshape(1, 4, 1, 1).double()
    ...     return xt.nn.attention(0 * v, 0 * v, v, Mesh(cp=2), "b s/zigzag(cp) h k", causal=True)
    >>> [y.flatten().tolist() for y in xt.testing.run_ranks(2, means)]
    [[0.0, 0.5, 3.0, 3.5], [1.0, 1.5, 2.0, 2.5]]
    """
    if torch.compiler.is_dynamo_compiling():
        from torch_bridge import compiled  # slow: it imports torch._dynamo, half a second

        options: dict[str, Any] = {"documents": documents, "window": window, "scale": scale, "how": how}
        options |= {"kv_layout": kv_layout, "shape": shape, "kv_heads": kv_heads, "sequence": sequence}
        options |= {"heads": heads, "causal": causal, "profile": profile}
        return compiled.eagerly(attention, q, k, v, mesh, layout, **options)
    q, k, v = (as_tensor(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    layout = Layout.parse(layout)
    names, kv_layout = core.order(layout, sequence, heads), Layout.parse(kv_layout or layout)
    placed = placed_as(q, layout, mesh, shape)
    known = dict(zip(layout.names, placed.shape, strict=True)) | {heads: kv_heads, names[-1]: None}
    kv_shape = [known.get(name) for name in kv_layout.names]
    ends = [placed.sharding, *(placed_as(x, kv_layout, mesh, kv_shape).sharding for x in (k, v))]
    turned = [x.permute(*map(end.layout.names.index, names)) for x, end in zip((q, k, v), ends, strict=True)]
    q_end, k_end, v_end = (end.in_order(names) for end in ends)
    given = core.attention(q_end, k_end, v_end, how, causal, window)
    if is_transformed() and how == RING:
        raise XshardError("a ring under torch.func", hint='how="gather" and "ulysses" have all derivatives')
    ways = tuple(way for way in WAYS if way != RING or not is_transformed())
    given = chosen(given, dtypes.name_of(q.dtype), load_profile(machine(profile, q.device)), ways)
    processes = placed.processes
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    move = partial(_moved, processes=processes)
    batch = turned[0].shape[:-3]
    q = _flat(move(turned[0], given.q, given.queries))
    kv = _flat(move(torch.cat(turned[1:], -1), given.kv, given.keys))
    if documents is not None:
        documents = _whole_documents(documents, given.q, names, layout, processes)
    blocks = Blocks(given, processes, documents, scale)
    y = Ring.apply(blocks, q, blocks.padded(kv)) if given.how == RING else _attended(blocks, q, kv)
    y = move(y.reshape(*batch, *y.shape[1:]), given.result, given.target)
    return y.permute(*map(names.index, layout.names))


def _flat(x: Tensor) -> Tensor:
    """All batch dims as one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _moved(x: Tensor, src: Sharding, dst: Sharding, processes: ProcessMesh) -> Tensor:
    if src.layout == dst.layout:
        return x
    return redistribute(x, (src.layout, dst.layout), processes, shape=src.shape)


def _whole_documents(
    x: Tensor, q: Sharding, names: tuple[str, ...], layout: Layout, processes: ProcessMesh
) -> Tensor:
    """The documents of the sequence: of the rows of the device's batches, or `[1, rows]` for all of them."""
    ends = core.document_layouts(layout, names, x.ndim)
    shape = [q.shape[q.dim_index(name)] for name in ends[0].names]
    x = redistribute(x, ends, processes, shape=shape)
    return x.movedim(ends[0].names.index(names[SEQUENCE]), -1).reshape(-1, q.shape[SEQUENCE])


def _attended(blocks: Blocks, q: Tensor, kv: Tensor) -> Tensor:
    """Queries and all keys that they may see -> the result."""
    given, (k, v) = blocks.given, blocks.read(kv)
    found = []
    for piece in pieces(given, blocks.device):
        rows, keys, values = q[:, :, piece.q], k[:, :, piece.k], v[:, :, piece.k]
        mask, is_causal = blocks.mask(piece)
        if is_causal and rows.shape[2] != keys.shape[2]:
            from torch.nn.attention.bias import causal_lower_right  # slow: it imports torch._dynamo

            with _disable_current_modes():  # a mode makes a plain tensor of it
                mask, is_causal = causal_lower_right(rows.shape[2], keys.shape[2]), False
        found.append(
            F.scaled_dot_product_attention(rows, keys, values, mask, is_causal=is_causal, scale=blocks.scale)
        )
    if not q.numel():  # without queries, too, the keys have a gradient, that other devices wait for
        return q @ k.mT @ v
    return torch.cat(found, 2)
