"""The machine of JAX's devices: their kind, and how many a node has. Every process knows all devices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax

from xshard import Profile
from xshard.cost.machine import AUTO, asked_for, machine_of, node_processes


def machine(profile: str | Path | Profile, mesh: Any = None) -> str | Path | Profile:
    """The profile; for "auto" the one of the mesh's devices, or of JAX's own if it lacks devices."""
    asked = asked_for(profile)
    if asked != AUTO:
        return asked
    return _found(mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else jax.devices()[0])


@functools.lru_cache(maxsize=64)
def _found(device: jax.Device) -> Profile:
    """The machine of a device. A node is a process, several of one host, or what NVLink joins."""
    devices = jax.devices(device.platform)
    of_process = sum(other.process_index == device.process_index for other in devices)
    if device.platform == "cpu":  # what leaves a process is sent by gloo, also to one of the same host
        return machine_of("host", None if of_process == len(devices) else of_process)
    island = getattr(device, "slice_index", None)  # of GPUs: their host, or a rack that NVLink joins
    if device.platform == "gpu" and island is not None:
        near = sum(other.slice_index == island for other in devices)
    else:
        near = of_process * (node_processes(len({other.process_index for other in devices})) or 1)
    return machine_of(device.device_kind, near if near > 1 and near < len(devices) else None)
