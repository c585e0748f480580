"""Process groups that only their members make, named by ranks.

`dist.new_group` has to be called by all processes of the world, and names groups by a count that
members would not share. So groups are made by `new_group` of `versions`, with c10d's own functions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, and in no `__all__`

from torch_bridge.mesh.failures import call_backend, can_ask_store, raise_if_peer_lost, timeout_of
from torch_bridge.versions.process_groups import (
    backend_and_store,
    new_group,
    register_backend,
    register_name,
)

T = TypeVar("T")


def process_group_of(
    ranks: tuple[int, ...], world: dist.ProcessGroup | None = None, use: str = ""
) -> dist.ProcessGroup:
    """Return the process group of these ranks; its members alone call this.

    The first call waits for them. Raises CollectiveError if a member does not come.

    Args:
        ranks: The ranks.
        world: The group that counts the ranks, which may have two programs.
        use: What the group is for, where the ranks have another one for all else.
    """
    if world is None:
        world = dist.group.WORLD
    assert world is not None  # whoever has a mesh of processes has initialised the world
    if len(ranks) == world.size() and not use:
        return world
    return call_backend("the making of a group", ranks, _group_of, ranks, world, use)


def rank_in(world: dist.ProcessGroup) -> int:
    """Return the global rank of this process; in a group of two programs, its rank there."""
    return dist.get_global_rank(world, world.rank())


def group_of_programs(
    store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Return the group of processes of several programs that meet in a store.

    All of them call this. Raises CollectiveError if one does not come, by its rank in the group.
    """
    world = dist.group.WORLD
    assert world is not None
    backend, _ = backend_and_store(world)
    ranks = tuple(range(size))
    group = functools.partial(new_group, ranks, rank, name, store, backend, timeout)
    return naming_who_has_not_come(name, ranks, rank, store, timeout, group)


def ranks_digest(ranks: tuple[int, ...]) -> str:
    """Return a short name for some ranks, different for different ranks."""
    return hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()


# Cached by the world too: its groups end with it, and threads may each have their own.
@functools.cache
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup, use: str) -> dist.ProcessGroup:
    backend, store = backend_and_store(world)
    name = f"xshard/{use}{ranks_digest(ranks)}"
    if world is not dist.group.WORLD:
        name = f"{world.group_name}/{name}"
    timeout = timeout_of(world)
    rank = rank_in(world)
    group = functools.partial(new_group, ranks, rank, name, store, backend, timeout)
    return naming_who_has_not_come(name, ranks, rank, store, timeout, group)


def naming_who_has_not_come(
    name: str,
    ranks: Sequence[int],
    rank: int,
    store: Any,
    timeout: timedelta,
    meet: Callable[[], T],
) -> T:
    """Call a function that waits for all ranks; its CollectiveError names those that have not come.

    Args:
        name: By which ranks tell each other, in the store, that they are there.
        ranks: All of them.
        rank: The one of this process.
        store: Where they meet.
        timeout: How long they wait.
        meet: Waits for the others.
    """
    # Without an answer, the others would be waited for for ever.
    if not can_ask_store(store, timeout):
        return meet()
    store.set(f"{name}/{rank} has come", "")
    try:
        return meet()
    except RuntimeError as error:
        missing = [other for other in ranks if not store.check([f"{name}/{other} has come"])]
        if missing:
            raise_if_peer_lost(error, "the first meeting", missing, timeout)
        raise


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
        register_backend(self, group, tensor_device)
        register_name(self.graph_name, self)  # type: ignore[arg-type]  # stubs: a C class

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
