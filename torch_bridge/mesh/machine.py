"""The kind of a world's devices, and how many a node has.

The first process that asks tells the store, and all others plan for the same.
"""

from __future__ import annotations

import functools
import json

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_bridge.errors import CollectiveError
from torch_bridge.mesh.failures import call_within, timeout_of
from torch_bridge.versions.process_groups import default_store
from xshard import Profile, ProfileLike
from xshard.cost.machine import AUTOS, machine_of, node_processes, resolve_profile, with_order_of


def machine_profile(profile: ProfileLike, device: torch.device | None = None) -> ProfileLike:
    """Return the profile, or for "auto" the profile of the devices.

    Args:
        profile: A profile, its name, or "auto".
        device: Where the blocks are, if this process has any.
    """
    asked = resolve_profile(profile)
    if asked not in AUTOS:
        return asked
    if device is not None:
        device_type = device.type
    else:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return with_order_of(asked, _agreed_profile(device_type, dist.group.WORLD))


# Cached by the world too: its store ends with it.
@functools.lru_cache(maxsize=64)
def _agreed_profile(device_type: str, world: dist.ProcessGroup | None) -> Profile:
    """Agree on the machine profile (speeds of links and chips) that all processes plan for.

    The process that asks first writes what it detects to the store, and all others read it:
    processes that planned for different machines would send different messages, and hang. Raises
    CollectiveError if the store fails.

    Args:
        device_type: "cuda", "cpu", ...
        world: None if there is no process group; then the profile is this process's own.
    """
    n_processes = 1 if world is None else world.size()
    machine_text = json.dumps(_detect(device_type, n_processes))
    try:
        # `compare_set` writes only if the key is not set yet, and returns its value.
        compare_set = default_store().compare_set
        timeout = c10d.default_pg_timeout if world is None else timeout_of(world)
        key = f"xshard/machine/{device_type}"
        machine_text = call_within(timeout, compare_set, key, "", machine_text).decode()
    except dist.DistError as error:
        raise CollectiveError("the ranks cannot agree on the machine", hint=str(error)) from error
    except (NotImplementedError, RuntimeError, ValueError):
        pass  # there are no processes, or none that exist, as with a fake backend
    kind, node_devices = json.loads(machine_text)
    return machine_of(kind, node_devices)


def _detect(device_type: str, n_processes: int) -> tuple[str, int | None]:
    """Return the kind of device, and the processes of a node.

    The processes are the common divisor of those of all nodes, and None for one node.
    """
    kind = "gloo"
    if device_type == "cuda" and torch.cuda.is_available():
        kind = torch.cuda.get_device_name()
    n_node_processes = node_processes(n_processes)
    return kind, None if n_node_processes == n_processes else n_node_processes
