"""Process groups that only their members make, named by ranks: members may not share a count."""

from __future__ import annotations

import functools
import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _register_process_group
from torch.distributed import distributed_c10d as c10d

from torch_bridge.mesh.failures import call_backend, check_store, timeout_of


def group_of(ranks: tuple[int, ...], world: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The process group of these ranks, ascending; its members alone call this, and the first call waits for
    them. Raises CollectiveError. world: the group that counts the ranks, which may have two programs.
    """
    world = world or dist.group.WORLD
    assert world is not None  # whoever has a mesh of processes has initialised the world
    if len(ranks) == world.size():
        return world
    return call_backend("the making of a group", ranks, _group_of, ranks, world)


def rank_in(world: dist.ProcessGroup) -> int:
    """The global rank of this process; in a group of two programs, its rank there."""
    return dist.get_global_rank(world, world.rank())


def group_of_programs(
    store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """The group of processes of several programs that meet in a store; all of them call this."""
    world = dist.group.WORLD
    assert world is not None
    backend, _ = c10d._world.pg_map[world]
    return _made(tuple(range(size)), rank, name, store, backend, timeout)


def ranks_digest(ranks: tuple[int, ...]) -> str:
    """A short name for some ranks, different for different ranks."""
    return hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()


@functools.cache
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Cached by the world too: its groups end with it, and threads may each have their own."""
    backend, store = c10d._world.pg_map[world]
    name = f"xshard/{ranks_digest(ranks)}"
    if world is not dist.group.WORLD:
        name = f"{world.group_name}/{name}"
    return _made(ranks, rank_in(world), name, store, backend, timeout_of(world))


def _made(
    ranks: tuple[int, ...], rank: int, name: Any, store: Any, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    group: Any  # a group, since this process is one of its ranks
    world = dist.group.WORLD
    assert world is not None
    check_store(store, timeout)  # there they meet
    # torch must not take ranks of another program for global ones.
    known = list(ranks) if dist.get_rank() in ranks else []
    # With a device, torch splits the world's communicator, which takes all ranks.
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            known,
            backend,
            store,
            name,
            timeout=timeout,
            group_desc="xshard",
        )
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


class _Work(dist.Work):
    """The messages of a step under way."""

    def __init__(self, work: dist.Work, group: StepGroup) -> None:
        super().__init__()
        self.work = work
        self.group = group

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
        _register_process_group(self.graph_name, self)  # type: ignore[arg-type]

    def _call(self, method: str, *args: Any) -> _Work:
        return _Work(call_backend(self.place, self.ranks, getattr(self.group, method), *args), self)


# What functional collectives call, in old and new releases. Others run too; their errors do not say where.
_REDUCTIONS = ("allreduce", "allreduce_coalesced", "reduce_scatter_tensor_coalesced")
for _method in (*_REDUCTIONS, "allgather_into_tensor_coalesced", "alltoall_base"):
    setattr(StepGroup, _method, functools.partialmethod(StepGroup._call, _method))


# A group for graphs, cached as long as graphs are: torch itself does not keep what it finds by name.
step_group = functools.cache(StepGroup)
