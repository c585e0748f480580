"""Attention over a sharded sequence, equal to attention on one device, by torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike, process_mesh
from torch_bridge.nn.attention_blocks import ProcessAttention
from xshard import Layout, Profile
from xshard.errors import DtypeError
from xshard.nn.attention import AUTO


@between_graphs
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

    All processes of the mesh call it. Blocks have the dims of `layout`, the width of heads last. Sequences,
    heads and batch may be sharded in any order: masks follow from the positions of the rows.

    how: "gather" brings all keys and values to a device's queries; "ulysses" shards heads instead of the
    sequence; "ring" passes blocks of keys and values on; "reduce", for few queries and many keys, brings all
    queries to a device's keys and adds results up; "auto" takes the cheapest on the machine of `profile`.
    kv_layout: layout of keys and values, by default as of queries. Rows of another sequence have another
    name, as in `b t/cp h k`, and their own length. Keys may have fewer heads, also fewer than devices.
    causal: a row sees no later row. window: a row sees rows fewer than that away; (left, right): so many rows
    before and after its own, None: all. offset: row i of queries stands at row i + offset of keys.
    documents: whole numbers `[*batch, sequence]` or `[sequence]`, sharded like the dims of `q`: rows see only
    their own document. kv_documents: of keys, sharded like `k`, if they are another sequence.
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
    q, k, v = (as_tensor(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    call = ProcessAttention(
        how, causal, (documents, kv_documents), window, offset, scale, softcap, alibi, dropout, seed,
        return_lse, kv_layout, shape, kv_heads, kv_length, sequence, heads, None, process_mesh(mesh), profile,
        q.new_empty(0),
    )  # fmt: skip
    y, *lse = call.run(q, k, v, layout)
    return (y.to(q.dtype), lse[0].squeeze(-1)) if lse else y.to(q.dtype)
