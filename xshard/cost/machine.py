"""The machine for `profile="auto"`: what overrides what, and the profile of a kind of device."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from xshard.cost.model import Profile
from xshard.cost.profile_files import load_profile

AUTO, DEFAULT = "auto", "h100"
VARIABLE = "XSHARD_PROFILE"

# A part of the name of a kind of device -> its profile; the first match counts. "gloo" and "host" are CPUs.
KINDS = (
    *(("GB200", "gb200"), ("B200", "b200"), ("H200", "h200"), ("H100", "h100"), ("A100", "a100")),
    *(("MI300X", "mi300x"), ("TPU v5 lite", "tpu_v5e"), ("TPU v5e", "tpu_v5e"), ("TPU v5", "tpu_v5p")),
    *(("TPU v6 lite", "tpu_v6e"), ("TPU v6e", "tpu_v6e"), ("gloo", "gloo"), ("host", "host")),
)

# Number of processes on a node: torchrun and Ray, DeepSpeed, Open MPI, Intel MPI and MPICH.
LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

RACKS = ("gb200",)  # their nodes are larger than the hosts of a launcher

_USED: ContextVar[str | Path | Profile | None] = ContextVar("xshard_profile", default=None)


@contextmanager
def use_profile(profile: str | Path | Profile) -> Iterator[Profile]:
    """Plan for this machine wherever `profile="auto"` would look for one, also with XSHARD_PROFILE set.

    Raises ProfileError for one that does not exist. All processes use the same.

    >>> import xshard as xs
    >>> with xs.use_profile("a100:4"):
    ...     print(xs.plan("n/a d -> n d", xs.Mesh(a=8), (8, 4), profile="auto").profile.name)
    a100:4
    """
    machine = load_profile(profile)
    token = _USED.set(machine)
    try:
        yield machine
    finally:
        _USED.reset(token)


def asked_for(profile: str | Path | Profile) -> str | Path | Profile:
    """The profile itself, or for "auto" the one of `use_profile`, if any."""
    return profile if profile != AUTO else _USED.get() or AUTO


def node_processes(n: int) -> int | None:
    """How many of `n` processes share a node, by the launcher; a divisor if unequal, None if unknown."""
    own = next(filter(str.isdecimal, (os.environ.get(name, "") for name in LAUNCHERS)), None)
    if own is not None:
        return math.gcd(int(own), n)
    # Slurm's list of all nodes, as in `4(x2),3`; else pods of a PyTorchJob, where "auto" is one process.
    per_pod = os.environ.get("PET_NPROC_PER_NODE", "").replace("auto", "1")
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE", f"{per_pod}(x{os.environ.get('PET_NNODES')})")
    nodes = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", node.strip()) for node in listed.split(",")]
    runs = [(int(node[1]), int(node[2] or 1)) for node in nodes if node]
    return math.gcd(*(size for size, _ in runs)) if sum(size * times for size, times in runs) == n else None


def machine_of(kind: str, node_devices: int | None) -> Profile:
    """The profile for a kind as `TPU v5 lite`, XSHARD_PROFILE first; DEFAULT, with a warning, for others."""
    named = os.environ.get(VARIABLE)
    return load_profile(named) if named else _machine_of(kind, node_devices)


@lru_cache(maxsize=64)
def _machine_of(kind: str, node_devices: int | None) -> Profile:
    name = next((profile for part, profile in KINDS if part.lower() in kind.lower()), None)
    if name is None:
        warnings.warn(
            f"no profile for devices of the kind '{kind}': plans are priced for {DEFAULT}. "
            f"`xshard calibrate` measures one; {VARIABLE} or xshard.use_profile names it",
            stacklevel=3,
        )
    profile = load_profile(name or DEFAULT)
    if node_devices in (None, profile.node_devices) or profile.across is None or name in RACKS:
        return profile
    return load_profile(f"{profile.name}:{node_devices}")


def without_devices(profile: str | Path | Profile) -> str | Path | Profile:
    """The profile itself; for "auto", without a known device, the overriding one, else DEFAULT."""
    asked = asked_for(profile)
    return os.environ.get(VARIABLE) or DEFAULT if asked == AUTO else asked
