"""Drop-ins for `poptorch_experimental_addons.collectives`: a replica of a program is a process.

A loss that all replicas compute equally counts once in `..._identical_grads_in` and
`all_reduce_cross_replica_sum`; in the other functions the losses of all are added, as in the
original. Better here: any backend and graph, any group (`group=`), derivatives of any order. All
functions raise MeshError if the group has another number of processes than `replication_factor`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike, group_mesh, mesh_of
from torch_bridge.ops import all_gather, all_reduce, all_to_all, copy_to
from xshard import compat
from xshard.errors import MeshError, api_boundary
from xshard.signatures import Count

AXIS = "replica"
Group = dist.ProcessGroup | int | None  # a number on processes outside of the group


@api_boundary
def all_gather_cross_replica(
    x: Tensor, replication_factor: Count, *, group: Group = None
) -> Tensor:
    """Gather every replica's tensor on all of them: [...] -> [N, ...].

    The gradient is the sum over replicas (reduce-scatter).

    Args:
        x: This replica's tensor.
        replication_factor: N.
        group: The replicas. None: all processes.
    """
    mesh = _replicas(replication_factor, group)
    return all_gather(x.unsqueeze(0), 0, AXIS, mesh, grad="sum")


@api_boundary
def all_gather_cross_replica_identical_grads_in(
    x: Tensor, replication_factor: Count, *, group: Group = None
) -> Tensor:
    """Gather every replica's tensor on all of them: [...] -> [N, ...].

    The gradient is this replica's slice of equal cotangents: nothing is sent.

    Args:
        x: This replica's tensor.
        replication_factor: N.
        group: The replicas. None: all processes.
    """
    mesh = _replicas(replication_factor, group)
    return all_gather(x.unsqueeze(0), 0, AXIS, mesh, grad="replicated")


@api_boundary
def all_reduce_cross_replica_sum(
    x: Tensor, replication_factor: Count, insert_in_grad_graph: bool = False, *, group: Group = None
) -> Tensor:
    """Sum over replicas by an all-reduce, either values or their gradients: [...] -> [...].

    Args:
        x: This replica's tensor.
        replication_factor: The number of replicas.
        insert_in_grad_graph: Sum the gradients; values pass unchanged. Else values are summed, and
            gradients pass unchanged.
        group: The replicas. None: all processes.

    Examples:
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
    if insert_in_grad_graph:
        return copy_to(x, AXIS, mesh)
    return all_reduce(x, AXIS, mesh, grad="replicated")


@api_boundary
def all_to_all_single_cross_replica(
    x: Tensor, replication_factor: Count, *, group: Group = None
) -> Tensor:
    """Exchange parts of the leading dim: part j of replica i becomes part i of replica j.

    [N k, ...] -> [N k, ...] on N replicas. With N=2, replicas with [a, b] and [c, d] get [a, c] and
    [b, d]. The gradient is the same exchange.

    Args:
        x: This replica's tensor.
        replication_factor: N.
        group: The replicas. None: all processes.

    Raises:
        ShapeError: N does not divide the leading dim.
    """
    mesh = _replicas(replication_factor, group)
    parts = x.reshape(compat.equal_parts(tuple(x.shape), replication_factor))  # [N, k, ...]
    return all_to_all(parts, 1, 0, AXIS, mesh).reshape(x.shape)


def _replicas(replication_factor: Count, group: Group) -> MeshLike:
    """Return the processes of a group. Raises MeshError for another number of them."""
    mesh = group_mesh(group, AXIS)
    n_processes = mesh_of(mesh).n_devices
    if replication_factor != n_processes:
        reason = f"replication_factor {replication_factor}, the group has {n_processes} processes"
        raise MeshError(reason, hint="as many")
    return mesh
