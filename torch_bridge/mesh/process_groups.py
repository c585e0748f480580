"""Process groups that only their members make, named by ranks.

`dist.new_group` has to be called by all processes of the world, and names groups by a count that
members would not share. So groups are made with c10d's own functions, which are private.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _register_process_group
from torch.distributed import distributed_c10d as c10d

from torch_bridge.mesh.failures import call_backend, check_store, timeout_of


def group_of(ranks: tuple[int, ...], world: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the process group of these ranks, ascending; its members alone call this.

    The first call waits for them. world: the group that counts the ranks, which may have two
    programs. Raises CollectiveError if a member does not come.
    """
    if world is None:
        world = dist.group.WORLD
    assert world is not None  # whoever has a mesh of processes has initialised the world
    if len(ranks) == world.size():
        return world
    return call_backend("the making of a group", ranks, _group_of, ranks, world)


def rank_in(world: dist.ProcessGroup) -> int:
    """Return the global rank of this process; in a group of two programs, its rank there."""
    return dist.get_global_rank(world, world.rank())


def group_of_programs(
    store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Return the group of processes of several programs that meet in a store.

    All of them call this.
    """
    world = dist.group.WORLD
    assert world is not None
    backend, _ = _backend_and_store(world)
    return _new_group(tuple(range(size)), rank, name, store, backend, timeout)


def ranks_digest(ranks: tuple[int, ...]) -> str:
    """Return a short name for some ranks, different for different ranks."""
    return hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()


# Cached by the world too: its groups end with it, and threads may each have their own.
@functools.cache
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    backend, store = _backend_and_store(world)
    name = f"xshard/{ranks_digest(ranks)}"
    if world is not dist.group.WORLD:
        name = f"{world.group_name}/{name}"
    return _new_group(ranks, rank_in(world), name, store, backend, timeout_of(world))


def _backend_and_store(world: dist.ProcessGroup) -> tuple[str, Any]:
    """Return the backend of a group, by kind of device, and its store.

    `_world` is c10d's private record of all groups; `dist.get_backend` lacks the store and the
    kinds.
    """
    backend, store = c10d._world.pg_map[world]
    return backend, store


def _new_group(
    ranks: tuple[int, ...],
    rank: int,
    name: Any,
    store: Any,
    backend: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make a group, in which all members meet in the store under its name.

    rank: this process's among `ranks`. `_new_process_group_helper` is what `dist.new_group` itself
    calls on members; without it every group would take all processes of the world.
    """
    check_store(store, timeout)  # a store without an answer would hold this process for ever
    # torch must not take ranks of another program for global ones.
    global_ranks = list(ranks) if dist.get_rank() in ranks else []
    group: Any
    with _without_bound_device():
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            global_ranks,
            backend,
            store,
            name,
            timeout=timeout,
            group_desc="xshard",
        )
    # `dist.get_process_group_ranks` and collectives with a root look ranks up here.
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Inside, the world is bound to no device.

    With a bound device, torch makes a group by splitting the world's NCCL communicator, for which
    it waits for all ranks of the world.
    """
    world = dist.group.WORLD
    assert world is not None
    bound_device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound_device


class _Work(dist.Work):
    """The messages of a step under way; errors while it waits for them name the step."""

    def __init__(self, work: dist.Work, group: StepGroup) -> None:
        super().__init__()
        self.work = work
        self.group = group

    def wait(self, *timeout: Any) -> Any:
        return call_backend(self.group.place, self.group.ranks, self.work.wait, *timeout)


class StepGroup(dist.ProcessGroup):
    """A group that passes its calls on to another; its errors name a place.

    `graph_name`: the name by which functional collectives of a compiled graph find it.
    """

    def __init__(self, place: str, group: dist.ProcessGroup, tensor_device: torch.device) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # stubs lack it
        self.place = place
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.graph_name = f"{place}, in {group.group_name}"
        self._register(tensor_device)

    def _register(self, tensor_device: torch.device) -> None:
        """Tell torch of the group's backend and of its name.

        Both ways are private. Without the backend torch refuses tensors on the device; without the
        name a compiled graph does not find the group.
        """
        backend = self.group._get_backend(tensor_device)
        self._register_backend(tensor_device, dist.ProcessGroup.BackendType.GLOO, backend)
        _register_process_group(self.graph_name, self)  # type: ignore[arg-type]  # stubs: a C class

    def _call(self, method: str, *args: Any) -> _Work:
        """Begin a collective of the other group."""
        work = call_backend(self.place, self.ranks, getattr(self.group, method), *args)
        return _Work(work, self)


# What functional collectives call, in old and new releases. Others run too; their errors do not say
# where.
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "reduce_scatter_tensor_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall_base",
)
for _method in _COLLECTIVES:
    setattr(StepGroup, _method, functools.partialmethod(StepGroup._call, _method))


# A group for graphs, cached as long as graphs are: torch itself does not keep what it finds by
# name.
step_group = functools.cache(StepGroup)
