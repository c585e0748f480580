"""The halo exchange as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.ops import halo_exchange, trim_halo
from xshard import Mesh
from xshard.errors import MeshError
from xshard.ops import Axes, HaloWidth


class HaloExchange(nn.Module):
    """Widens blocks by rows of their neighbours; `trim` drops them again.

    halo_width: rows at both sides, or before and after. dim: the dim that `axis` of `mesh` shards; without a
    mesh, all processes of the world shard it, in their order. boundary: the values beyond the edges of the
    array, as in a layout. shape: the global shape, if blocks differ in size.

    >>> import torch, torch_bridge as xt
    >>> def turn():
    ...     halo = xt.nn.HaloExchange(halo_width=1, dim=-2, boundary="periodic")
    ...     x = torch.tensor([[1], [2]]) + 2 * torch.distributed.get_rank()
    ...     return halo(x).flatten().tolist(), torch.equal(halo.trim(halo(x)), x)
    >>> xt.testing.run_ranks(2, turn)
    [([4, 1, 2, 3], True), ([2, 3, 4, 1], True)]
    """

    def __init__(
        self,
        halo_width: HaloWidth,
        dim: int = -2,
        *,
        axis: Axes = "sp",
        mesh: MeshLike | None = None,
        boundary: str = "zero",
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.halo_width, self.dim, self.axis, self.mesh = halo_width, dim, axis, mesh
        self.options: Any = {"boundary": boundary, "shape": shape}
        if mesh is None and not isinstance(axis, str):
            raise MeshError(f"axes {axis} without a mesh", hint="pass mesh=, or one axis for all processes")

    def forward(self, x: Tensor) -> Tensor:
        """`n/axis -> n/axis:halo(...)`; the gradients of copied rows are added at their owner."""
        return halo_exchange(x, self.halo_width, self.dim, self.axis, self._mesh(), **self.options)

    def trim(self, x: Tensor) -> Tensor:
        """`n/axis:halo(...) -> n/axis`."""
        return trim_halo(x, self.halo_width, self.dim, self.axis, self._mesh(), **self.options)

    def _mesh(self) -> MeshLike:
        return Mesh({str(self.axis): dist.get_world_size()}) if self.mesh is None else self.mesh

    def extra_repr(self) -> str:
        return f"{self.halo_width}, dim={self.dim}, axis={self.axis!r}, boundary={self.options['boundary']!r}"
