"""Which global rows this process's block holds, as a tensor: for rotary embeddings and causal masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.mesh.process_mesh import MeshLike, process_mesh
from xshard import Layout


def positions(
    layout: Layout | str,
    mesh: MeshLike,
    *,
    shape: Sequence[int],
    dim: int | str,
    device: torch.device | str | None = None,
) -> Tensor:
    """The global index of every row that this process's block holds along a dim: `[rows]`, int64.

    -1 stands for a row beyond the ends of the array, which holds a constant. Nothing is sent.
    shape: global. dim: its name or its index. device: the result's; default: the
    `DeviceMesh`'s, else the CPU.

    Raises as `xshard.Layout.positions` and `redistribute` (MeshError) do.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> xt.testing.run_ranks(
    ...     2, lambda: xt.positions("b s/zigzag(cp)", Mesh(cp=2), shape=(3, 8), dim="s").tolist()
    ... )
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if device is None:
        device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    processes = process_mesh(mesh)
    rows = Layout.parse(layout).positions(processes.mesh, shape, dim, processes.device)
    return torch.from_numpy(rows).to(device)
