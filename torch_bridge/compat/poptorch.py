"""Drop-ins for `poptorch_experimental_addons.collectives`: a replica of a program is a process.

A loss that all replicas compute equally counts once in `..._identical_grads_in` and
`all_reduce_cross_replica_sum`; in the other functions the losses of all are added, as in the original.
Better here: any backend and graph, any group (`group=`), derivatives of any order.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike, group_mesh, mesh_of
from torch_bridge.ops import all_gather, all_reduce, all_to_all, copy_to
from xshard import compat
from xshard.errors import MeshError

AXIS = "replica"
Group = dist.ProcessGroup | None


def all_gather_cross_replica(x: Tensor, replication_factor: int, *, group: Group = None) -> Tensor:
    """Every replica's tensor: [...] -> [N, ...]; the gradient is the sum over replicas (reduce-scatter)."""
    return all_gather(x.unsqueeze(0), 0, AXIS, _replicas(replication_factor, group), grad="sum")


def all_gather_cross_replica_identical_grads_in(
    x: Tensor, replication_factor: int, *, group: Group = None
) -> Tensor:
    """Every replica's tensor: [...] -> [N, ...]; the gradient is this replica's slice of equal cotangents."""
    return all_gather(
        x.unsqueeze(0), 0, AXIS, _replicas(replication_factor, group), grad="replicated"
    )


def all_reduce_cross_replica_sum(
    x: Tensor, replication_factor: int, insert_in_grad_graph: bool = False, *, group: Group = None
) -> Tensor:
    """The sum over replicas, or of their gradients if `insert_in_grad_graph`; the other one passes unchanged.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat.poptorch import all_reduce_cross_replica_sum
    >>> def turn(where):
    ...     x = torch.ones(2, requires_grad=True)
    ...     y = all_reduce_cross_replica_sum(x, 2, insert_in_grad_graph=where)
    ...     (y * (1 + torch.distributed.get_rank())).sum().backward()
    ...     return y.tolist(), x.grad.tolist()
    >>> [xt.testing.run_ranks(2, turn, where)[1] for where in (False, True)]
    [([2.0, 2.0], [2.0, 2.0]), ([1.0, 1.0], [3.0, 3.0])]
    """
    mesh = _replicas(replication_factor, group)
    return (
        copy_to(x, AXIS, mesh)
        if insert_in_grad_graph
        else all_reduce(x, AXIS, mesh, grad="replicated")
    )


def all_to_all_single_cross_replica(
    x: Tensor, replication_factor: int, *, group: Group = None
) -> Tensor:
    """Part j of replica i's leading dim becomes part i of replica j's: [N k, ...] -> [N k, ...]. Its own
    adjoint. Raises ShapeError if N does not divide the leading dim.
    """
    mesh = _replicas(replication_factor, group)
    parts = x.reshape(compat.equal_parts(tuple(x.shape), replication_factor))
    return all_to_all(parts, 1, 0, AXIS, mesh).reshape(x.shape)


def _replicas(n: int, group: Group) -> MeshLike:
    mesh = group_mesh(group, AXIS)
    if n != (processes := mesh_of(mesh).n_devices):
        raise MeshError(
            f"replication_factor {n}, the group has {processes} processes", hint="as many"
        )
    return mesh
