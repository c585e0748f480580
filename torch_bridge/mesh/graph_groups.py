"""Process groups as graphs of a compiler name them: by the step of the plan that a collective belongs to.

In a graph torch runs the collectives by itself, and finds their group by its name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torch_bridge.mesh.failures import call_backend


class _Work(dist.Work):
    """The messages of a step under way."""

    def __init__(self, work: dist.Work, group: StepGroup) -> None:
        super().__init__()
        self.work, self.group = work, group

    def wait(self, *timeout: Any) -> Any:
        return call_backend(self.group.place, self.group.ranks, self.work.wait, *timeout)


class StepGroup(dist.ProcessGroup):
    """A group that passes its calls on to another; its errors name a place."""

    def __init__(self, place: str, group: dist.ProcessGroup, tensor_device: torch.device) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(tensor_device, gloo, group._get_backend(tensor_device))
        self.place, self.group, self.ranks = place, group, dist.get_process_group_ranks(group)
        self.graph_name = f"{place}, in {group.group_name}"
        c10d._register_process_group(self.graph_name, self)  # type: ignore[arg-type]

    def _call(self, method: str, *args: Any) -> _Work:
        return _Work(call_backend(self.place, self.ranks, getattr(self.group, method), *args), self)


# What functional collectives call, in old and new releases. Others run too; their errors do not say where.
for _method in (
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall_base",
    "reduce_scatter_tensor_coalesced",
):
    setattr(StepGroup, _method, functools.partialmethod(StepGroup._call, _method))


@functools.cache
def step_group(place: str, group: dist.ProcessGroup, tensor_device: torch.device) -> StepGroup:
    """A group for graphs. Cached, as long as graphs are: torch itself does not keep what it finds by name."""
    return StepGroup(place, group, tensor_device)
