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
from torch_bridge.nn.attention_kernels import bias_of
from torch_bridge.nn.placed import placed_as
from torch_bridge.nn.ring import BlockAttention, ProcessAttention
from torch_bridge.redistribution import redistribute
from xshard import Layout, Profile, Sharding, load_profile
from xshard.contractions.prices import fastest_attention
from xshard.dtypes import name_of
from xshard.errors import DtypeError, XshardError
from xshard.nn import attention as core
from xshard.nn.attention import AUTO, FIRST_DERIVATIVES, METHODS, REDUCE, RING, tiles


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
    kv_documents: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    kv_layout: Layout | str | None = None,
    shape: Sequence[int | None] | None = None,
    kv_heads: int | None = None,
    kv_length: int | None = None,
    sequence: str = "s",
    heads: str = "h",
    profile: str | Path | Profile = "auto",
) -> Any:
    """Blocks of queries, keys and values -> this process's block of `softmax(q @ k * scale) @ v`.

    All processes of the mesh call it. Blocks have the dims of `layout`, the width of heads last. Sequences
    may be sharded in any order, and heads and batch too: masks follow from the positions of the rows.

    how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
    sequence; "ring" passes blocks of keys and values on, so that no device holds all of them; "reduce" brings
    all queries to a device's keys and adds the results up, for few queries and many keys; "auto" takes the
    cheapest on the machine of `profile`.
    kv_layout: layout of keys and values, by default as of queries. Rows of another sequence have another
    name, as in `b t/cp h k`, and their own length. Keys may have fewer heads, each for a group of queries'
    heads, also fewer than there are devices.
    causal: a row sees no later row. window: a row sees rows fewer than that away; (left, right): so many rows
    before and after its own, None: all. offset: row i of queries stands at row i + offset of keys.
    documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded like the dims of `q`: rows see only
    their own document. kv_documents: documents of keys, sharded like `k`, if keys are another sequence.
    scale: by default `width ** -0.5`. softcap: scores become `softcap * tanh(score / softcap)`. alibi: slopes
    `[heads]` of the whole array, times the distance of rows and subtracted from scores (Press et al. 2021).
    dropout: the part of weights that is dropped, by `seed` and positions: the same on any devices.
    return_lse: return `(y, lse)`, lse `[*batch, heads, sequence]` in the order of `layout`: the natural
    logarithm of the sum of the exponentials of scores, in float32 or wider.
    shape, kv_heads, kv_length: global shape of `q`, heads and rows of keys, if blocks differ in size.
    sequence, heads: the names of these dims.

    A row that sees nothing has 0 and -inf. "ring", "reduce", softcap, dropout, return_lse, and masks between
    two sequences have first derivatives, none under torch.func. Slopes of alibi are constants. Under
    torch.compile it runs between two graphs.

    Raises as `redistribute` does; XshardError for options that make no sense, or miss each other.

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
        options |= {"heads": heads, "causal": causal, "profile": profile, "kv_documents": kv_documents}
        options |= {"offset": offset, "softcap": softcap, "alibi": alibi, "dropout": dropout, "seed": seed}
        options |= {"return_lse": return_lse, "kv_length": kv_length}
        return compiled.eagerly(attention, q, k, v, layout, mesh, **options)
    q, k, v = (as_tensor(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    layout = Layout.parse(layout)
    kv_layout, names = Layout.parse(kv_layout or layout), core.dim_order(layout, sequence, heads)
    placement = placed_as(q, layout, mesh, shape)
    processes, kv_names = placement.processes, core.key_order(kv_layout, names)
    lengths = core.key_lengths(placement.sharding, kv_layout, heads, kv_heads, kv_length)
    kv_shape = [lengths.get(name) for name in kv_layout.names]
    shardings = [placed_as(x, kv_layout, mesh, kv_shape).sharding for x in (k, v)]
    q = q.permute([*map(layout.names.index, names)])
    k, v = (x.permute([*map(kv_layout.names.index, kv_names)]) for x in (k, v))
    in_order = placement.sharding.in_order(names), *(s.in_order(kv_names) for s in shardings)
    attn = core.attention(*in_order, how=how, causal=causal, window=window, offset=offset)
    core.check_options(attn, softcap, alibi, dropout, seed, (documents, kv_documents))
    is_plain = attn.sees_some(documents is not None) and not (softcap or dropout or return_lse)
    methods = tuple(m for m in METHODS if m not in FIRST_DERIVATIVES or not is_transformed())
    if is_transformed() and (how in FIRST_DERIVATIVES or not is_plain):
        what = f"a {how}" if how in FIRST_DERIVATIVES else "softcap, dropout, return_lse, blind rows"
        raise XshardError(f"{what} under torch.func", hint='how="gather" or "ulysses", without these options')
    attn = fastest_attention(attn, name_of(q.dtype), load_profile(machine(profile, q.device)), methods)

    def of_whole(numbers: Tensor, layout: Layout, of_keys: bool) -> Tensor:
        layouts, whole, order = core.document_move(attn, layout, numbers.ndim, of_keys)
        numbers = redistribute(numbers, layouts, processes, shape=whole).permute(order)
        return numbers.reshape(-1, numbers.shape[-1])

    both = None
    if documents is not None:
        of_rows = of_whole(documents, layout, False)
        both = of_rows, of_rows if kv_documents is None else of_whole(kv_documents, kv_layout, True)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    slopes = None if alibi is None else alibi.detach().to(q.device)
    blocks = ProcessAttention(attn, scale, processes, q.new_empty(0), both, softcap, slopes, dropout, seed)
    batch = q.shape[:-3]
    q = _flat(_moved(q, attn.q, attn.queries, processes))
    kv = _flat(_moved(torch.cat((k, v), -1), attn.kv, attn.keys, processes))
    if attn.how == RING:  # every block is as long as the longest
        kv = F.pad(kv, (0, 0, 0, attn.block_rows - kv.shape[2]))
    if is_plain and attn.how not in FIRST_DERIVATIVES:
        y, lse = _attended(blocks, q, kv), q[..., 0]  # lse is not returned
    else:
        y, lse = BlockAttention.apply(blocks, q, kv)
    y, lse = (x.reshape(*batch, *x.shape[1:]) for x in (y, lse[..., None]))
    if attn.how == REDUCE:
        y, lse = _merged(attn, y, lse, processes)
    else:
        y = _moved(y, attn.result, attn.target, processes)
        lse = _moved(lse, attn.result, attn.target, processes) if return_lse else lse
    y, lse = (x.permute([*map(names.index, layout.names)]) for x in (y, lse))
    return (y, lse.squeeze(-1)) if return_lse else y


def _merged(attn: core.Attention, y: Tensor, lse: Tensor, processes: ProcessMesh) -> tuple[Tensor, Tensor]:
    """Results and log-sum-exps of queries by each device's keys -> by all keys, under the queries' layout."""
    result, whole = attn.result, Layout(attn.result.layout.dims)
    highest = result.with_layout(Layout(whole.dims, (("max", attn.axes),)))
    top = _moved(lse.detach(), highest, result.with_layout(whole), processes)
    top = top.clamp(min=torch.finfo(lse.dtype).min)
    weight = (lse - top).exp()
    total = _moved(torch.cat((y * weight, weight), -1), result, attn.target, processes)
    total, share = total[..., :-1], total[..., -1:]
    top = _moved(top, result.with_layout(whole), attn.target, processes)
    counted = share.clamp(min=torch.finfo(lse.dtype).tiny)
    lse = (top + counted.log()).masked_fill(share == 0, float("-inf"))
    return (total / counted).to(y.dtype), lse


def _flat(x: Tensor) -> Tensor:
    """All batch dims as one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _moved(x: Tensor, src: Sharding, dst: Sharding, processes: ProcessMesh) -> Tensor:
    """An array of any width."""
    if src.layout == dst.layout:
        return x
    return redistribute(x, (src.layout, dst.layout), processes, shape=(*src.shape[:-1], x.shape[-1]))


def _attended(blocks: ProcessAttention, q: Tensor, kv: Tensor) -> Tensor:
    """Queries and all keys that they may see -> the result."""
    k, v = blocks.read(kv)
    parts = []
    for tile in tiles(blocks.attn, blocks.device):
        rows, keys, values = q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k]
        mask = blocks.mask(tile, any_length=True)
        bias, is_causal = mask.visible if mask.bias is None else bias_of(mask, q.dtype), mask.is_causal
        if is_causal and rows.shape[2] != keys.shape[2]:
            from torch.nn.attention.bias import causal_lower_right  # slow: it imports torch._dynamo

            with _disable_current_modes():  # a mode makes a plain tensor of it
                bias, is_causal = causal_lower_right(rows.shape[2], keys.shape[2]), False
        options: Any = {"is_causal": is_causal, "scale": blocks.scale}
        parts.append(F.scaled_dot_product_attention(rows, keys, values, bias, **options))
    if not parts:  # without queries, too, the keys have a gradient, that other devices wait for
        return q @ k.mT @ v
    return torch.cat(parts, 2)
