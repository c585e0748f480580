"""What JAX runs on: the kind of device, and how many of them a node has.

Every process knows all devices, so that all of them find the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from xshard import Profile
from xshard.cost.machine import AUTO, asked_for, machine_of


def machine(profile: str | Path | Profile, mesh: Any = None) -> str | Path | Profile:
    """The profile, or for "auto" that of the mesh's devices; of JAX's own where the mesh has none."""
    asked = asked_for(profile)
    if asked != AUTO:
        return asked
    device = mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else jax.devices()[0]
    if device.platform == "cpu":
        return machine_of("host", None)
    of_process = sum(other.process_index == device.process_index for other in jax.devices())
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # on a node, as a launcher of torch tells
    if processes.isdecimal():
        return machine_of(device.device_kind, max(1, int(processes)) * of_process)
    return machine_of(device.device_kind, of_process if of_process > 1 else None)
