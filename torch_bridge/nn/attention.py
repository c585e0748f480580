"""Attention over a sharded sequence, equal to attention on one device, by torch's fused kernels.

>>> import torch_bridge as xt
>>> from xshard import Mesh
>>> def means():
...     v = xt.positions("b s/zigzag(cp)", Mesh(cp=2), shape=(1, 8), dim="s").reshape(1, 4, 1, 1).double()
...     return xt.nn.attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", Mesh(cp=2), causal=True)
>>> [y.flatten().tolist() for y in xt.testing.run_ranks(2, means)]
[[0.0, 0.5, 3.0, 3.5], [1.0, 1.5, 2.0, 2.5]]
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike, process_mesh
from torch_bridge.nn.attention_blocks import ProcessAttention
from xshard import Layout
from xshard.contractions.attention import Verb
from xshard.errors import DtypeError, XshardError


@between_graphs
def _attention(
    qkv: Sequence[Tensor], layout: Layout | str, mesh: Any, profile: Any, kernel: str | None, *options: Any
) -> Any:
    if kernel is not None:
        hint = "it is JAX's: torch.nn.attention.sdpa_kernel() chooses torch's"
        raise XshardError(f"implementation={kernel!r}", hint=hint)
    q, k, v = (as_tensor(x, name) for x, name in zip(qkv, "qkv", strict=True))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype")
    like = q.new_empty(0)
    call = ProcessAttention(*options, processes=process_mesh(mesh), profile=profile, like=like)
    y, *lse = call.run(q, k, v, layout)
    return (y.to(q.dtype), lse[0].squeeze(-1)) if lse else y.to(q.dtype)


attention = Verb[Tensor, MeshLike](_attention).attention
