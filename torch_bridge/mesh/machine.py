"""The kind of a world's devices, and how many a node has, as the first process that asks tells the store."""

from __future__ import annotations

import functools
import json

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_bridge.errors import CollectiveError
from torch_bridge.mesh.failures import timeout_of, within
from xshard import Profile, ProfileLike
from xshard.cost.machine import AUTO, asked_for, machine_of, node_processes


def machine(profile: ProfileLike, device: torch.device | None = None) -> ProfileLike:
    """The profile, or for "auto" the devices' own. device: the blocks', if any is here."""
    asked = asked_for(profile)
    if asked != AUTO:
        return asked
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return _agreed(kind, dist.group.WORLD)


@functools.lru_cache(maxsize=64)
def _agreed(device_type: str, world: dist.ProcessGroup | None) -> Profile:
    """Cached by the world too: its store ends with it."""
    machine = json.dumps(_found(device_type, 1 if world is None else world.size()))
    try:
        ask = c10d._get_default_store().compare_set
        timeout = timeout_of(world) if world else c10d.default_pg_timeout
        machine = within(timeout, ask, f"xshard/machine/{device_type}", "", machine).decode()
    except dist.DistError as error:
        raise CollectiveError("the ranks cannot agree on the machine", hint=str(error)) from error
    except (NotImplementedError, RuntimeError, ValueError):  # no processes, or none that exist
        pass
    kind, node_devices = json.loads(machine)
    return machine_of(kind, node_devices)


def _found(device_type: str, n_processes: int) -> tuple[str, int | None]:
    """The kind of device, and the processes of a node: their common divisor, None for one node."""
    kind = (
        torch.cuda.get_device_name()
        if device_type == "cuda" and torch.cuda.is_available()
        else "gloo"
    )
    local = node_processes(n_processes)
    return kind, None if local == n_processes else local
