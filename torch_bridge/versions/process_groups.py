"""Process groups: c10d's records of them, their methods, and groups that only members make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_bridge.versions.support import private_names

with private_names():
    # Names of groups, as compiled graphs have them -> groups, and back. Without them a graph would
    # not find a group whose errors name a step, and nobody could tell the size of a group from what
    # a graph calls.
    from torch._C._distributed_c10d import _register_process_group as register_name
    from torch._C._distributed_c10d import _resolve_process_group as group_by_name

    # The store of the world, in which its processes met when they began. Without it, ranks could
    # compare only by a collective, which hangs if one of them makes another call.
    default_store = c10d._get_default_store

    # What `dist.new_group` itself calls on members; without it every group would take all processes
    # of the world.
    _make_group: Any = c10d._new_process_group_helper

    c10d._world  # noqa: B018  # asked for at each use: ranks as threads put another in its place

    # The operators that compilers record. `torch.distributed._functional_collectives` wraps them,
    # in private too. Without them a collective would break a graph in two.
    functional_collectives = torch.ops._c10d_functional

__all__ = [
    "METHODS", "backend_and_store", "default_store", "functional_collectives", "group_by_name",
    "new_group", "register_backend", "register_name", "timeouts_of",
]  # fmt: skip


def _method_name(kind: str, old_name: str) -> str:
    """Return the name of a process group's method: torch 2.13 has new ones, 2.11 only the old."""
    new_name = f"{kind}_single"
    name = new_name if hasattr(dist.ProcessGroup, new_name) else old_name
    with private_names():
        getattr(dist.ProcessGroup, name)
    return name


# Methods of a process group, called directly: the checks of `dist` take as long as the rest of a
# small call. They are looked up on the group itself, which may be of a subclass: ranks as threads
# have another.
METHODS = {
    "all_gather": _method_name("all_gather", "_allgather_base"),
    "all_to_all": _method_name("all_to_all", "alltoall_base"),
    "reduce_scatter": _method_name("reduce_scatter", "_reduce_scatter_base"),
}


def backend_and_store(world: dist.ProcessGroup) -> tuple[str, Any]:
    """Return the backend of a group, by kind of device, and its store.

    c10d's record of all groups has them; `dist.get_backend` lacks the store and the kinds. Without
    them, a new group could not be like the world.
    """
    backend, store = c10d._world.pg_map[world]
    return backend, store


def new_group(
    ranks: tuple[int, ...],
    rank: int,
    name: Any,
    store: Any,
    backend: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make a group that its members alone call for; they meet in the store under its name.

    `dist.new_group` has to be called by all processes of the world, and names groups by a count
    that members would not share.

    Args:
        ranks: The ranks of the members.
        rank: The position of this process among `ranks`.
        name: The name of the group.
        store: Where the members meet.
        backend: The backend of each kind of device, as "cpu:gloo,cuda:nccl".
        timeout: How long collectives of the group wait.
    """
    # torch must not take ranks of another program for global ones.
    global_ranks = list(ranks) if dist.get_rank() in ranks else []
    group: Any
    with _without_bound_device():
        group, _ = _make_group(
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


def register_backend(
    group: dist.ProcessGroup, other: dist.ProcessGroup, tensor_device: torch.device
) -> None:
    """Give a group of a class of ours the backend that another has for a device.

    Without it torch refuses tensors on the device.
    """
    backend = other._get_backend(tensor_device)
    group._register_backend(tensor_device, dist.ProcessGroup.BackendType.GLOO, backend)


def timeouts_of(group: dist.ProcessGroup) -> list[timedelta]:
    """Return how long the collectives of a group wait, for each of its backends that tells it.

    Without it, ranks that compare their calls would give up before or after the collectives that
    they announce.
    """
    timeouts: list[timedelta] = []
    for device in sorted(group._device_types, key=str):
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:  # a fake backend has none
            timeouts.append(options._timeout)
    return timeouts
