"""Common redistributions by their usual names: expressions for `redistribute`, and its errors.

>>> import torch, torch_bridge as xt, xshard as xs
>>> def turn():
...     block, mesh = torch.arange(2) + 2 * torch.distributed.get_rank(), xs.Mesh(sp=2)
...     wide = xt.ops.halo_exchange(block, 1, 0, "sp", mesh, boundary="edge")
...     return xt.ops.all_gather(block, 0, "sp", mesh, grad="sum").tolist(), wide.tolist()
>>> xt.testing.run_ranks(2, turn)
[([0, 1, 2, 3], [0, 0, 1, 2]), ([0, 1, 2, 3], [1, 2, 3, 3])]
"""

from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.redistribution import redistribute
from xshard.ops import Operations, Shape, Side, move

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "copy_to", "halo_exchange", "reduce_scatter", "shard",
    "trim_halo",
]  # fmt: skip


def _redistribute(x: Tensor, src: Side, dst: Side, mesh: MeshLike | None, shape: Shape) -> Tensor:
    """Redistribute a tensor, as all operations of the table do; only the layouts differ."""
    return redistribute(x, move(as_tensor(x).shape, src, dst), mesh, shape=shape)


# Names and docstrings are in `xshard.ops`, once for both bridges.
_operations = Operations(_redistribute)
all_gather = _operations.all_gather
all_reduce = _operations.all_reduce
all_to_all = _operations.all_to_all
copy_to = _operations.copy_to
halo_exchange = _operations.halo_exchange
trim_halo = _operations.trim_halo
reduce_scatter = _operations.reduce_scatter
shard = _operations.shard
