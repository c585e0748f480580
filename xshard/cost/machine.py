"""Profiles by name and file, the machine for `profile="auto"`, and links between devices by number."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import did_you_mean, parse_number, shown
from xshard.cost.model import Link, Profile, ProfileLike
from xshard.errors import ProfileError, api_boundary
from xshard.layout import Mesh
from xshard.layout.sub_axes import Refinement


@api_boundary
def load_profile(profile: ProfileLike) -> Profile:
    """A shipped name, a file or a Profile -> Profile; `h100:4`: with nodes of 4. Raises ProfileError.

    A file that was rewritten is read again.
    """
    if isinstance(profile, Profile):
        return profile
    name: Any = profile
    if not isinstance(name, str | Path):
        raise ProfileError(
            f"profile is {shown(name)}", hint=f"one of {', '.join(shipped())}, or a file"
        )
    is_file = str(name).partition(":")[0] not in shipped() and os.path.isfile(name)
    return _load(str(name), os.stat(name).st_mtime_ns if is_file else 0)


@lru_cache(maxsize=1)
def shipped() -> tuple[str, ...]:
    """The names of profiles that come with the package."""
    files = (resources.files("xshard.cost") / "profiles").iterdir()
    return tuple(
        sorted(file.name[: -len(".json")] for file in files if file.name.endswith(".json"))
    )


@lru_cache(maxsize=64)
def _load(name: str, _: int) -> Profile:
    known = shipped()
    base, colon, nodes = name.rpartition(":")
    if colon and base in known:
        machine = _load(base, 0)
        if machine.across is None or not parse_number(nodes):
            own = f"nodes of {machine.node_devices}" if machine.node_devices else "one node"
            hint = f"'h100:4' has nodes of 4; {base} has {own}"
            raise ProfileError(f"no profile {name!r}", hint=hint)
        return replace(machine, name=name, node_devices=int(nodes))
    if name in known:
        return profile_of(
            name, (resources.files("xshard.cost") / "profiles" / f"{name}.json").read_text()
        )
    try:
        text = Path(name).read_text() if Path(name).is_file() else None
    except (OSError, ValueError):  # a name that no file can have, or no text
        text = None
    if text is None:
        hint = f"{did_you_mean(name, known)}shipped are: {', '.join(known)}; or give a file"
        raise ProfileError(f"no profile {shown(name)}", hint=hint)
    return profile_of(name, text)


def profile_of(name: str, text: str) -> Profile:
    """Text of `Profile.to_json` -> the profile; name: its name in errors. Raises ProfileError."""
    try:
        data: dict[str, Any] = json.loads(text)
        if not data.get("default"):
            hint = 'give "default", as in {"latency_s": 3e-6, "bytes_per_s": 4e11}'
            raise ProfileError(
                f"profile {name!r} lacks a link for axes that it does not name", hint=hint
            )
        return Profile(
            name=data["name"],
            source=data["source"],
            default=Link(**data["default"]),
            across=Link(**data["across"]) if data.get("across") else None,
            node_devices=data.get("node_devices"),
            axes=tuple(sorted((axis, Link(**link)) for axis, link in data["axes"].items())),
            launch_s=tuple(sorted(data["launch_s"].items())),
            copy_bytes_per_s=data["copy_bytes_per_s"] or math.inf,
            inside=tuple(sorted(data.get("inside", {}).items())),
            rounds=data.get("rounds", False),
            flops_per_s=tuple(sorted(data.get("flops_per_s", {}).items())),
            disk=Link(**data["disk"]) if data.get("disk") else None,
            ring_s=tuple(sorted(data.get("ring_s", {}).items())),
        )
    except ProfileError:
        raise
    except Exception as error:  # a file may have any value in any place
        raise ProfileError(f"profile {name!r} is malformed: {error}") from None


AUTO = "auto"
DEFAULT = "h100"
VARIABLE = "XSHARD_PROFILE"

# A part of the name of a kind of device -> its profile; the first match counts. "gloo" and "host" are CPUs.
KINDS = (
    *(("GB200", "gb200"), ("B200", "b200"), ("H200", "h200"), ("H100", "h100"), ("A100", "a100")),
    *(
        ("MI300X", "mi300x"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5e", "tpu_v5e"),
        ("TPU v5", "tpu_v5p"),
    ),
    *(("TPU v6 lite", "tpu_v6e"), ("TPU v6e", "tpu_v6e"), ("gloo", "gloo"), ("host", "host")),
)

# Number of processes on a node: torchrun and Ray, DeepSpeed, Open MPI, Intel MPI and MPICH.
LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

RACKS = ("gb200",)  # their nodes are larger than the hosts of a launcher

_USED: ContextVar[ProfileLike | None] = ContextVar("xshard_profile", default=None)


@contextmanager
def use_profile(profile: ProfileLike) -> Iterator[Profile]:
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


def asked_for(profile: ProfileLike) -> ProfileLike:
    """The profile itself, a file's read; for "auto" the one of `use_profile` or XSHARD_PROFILE, if any."""
    asked = profile if profile != AUTO else _USED.get() or os.environ.get(VARIABLE) or AUTO
    return (
        asked if isinstance(asked, Profile) or asked in (AUTO, *shipped()) else load_profile(asked)
    )


def node_processes(n: int) -> int | None:
    """How many of `n` processes share a node, by the launcher; a divisor if unequal, None if unknown."""
    own = next(filter(str.isdecimal, (os.environ.get(name, "") for name in LAUNCHERS)), None)
    if own is not None:
        return math.gcd(int(own), n)
    # Slurm's list of all nodes, as in `4(x2),3`; else pods of a PyTorchJob, where "auto" is one process.
    per_pod = os.environ.get("PET_NPROC_PER_NODE", "").replace("auto", "1")
    listed = os.environ.get(
        "SLURM_STEP_TASKS_PER_NODE", f"{per_pod}(x{os.environ.get('PET_NNODES')})"
    )
    nodes = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", node.strip()) for node in listed.split(",")]
    runs = [(int(node[1]), int(node[2] or 1)) for node in nodes if node]
    return (
        math.gcd(*(size for size, _ in runs))
        if sum(size * times for size, times in runs) == n
        else None
    )


@lru_cache(maxsize=64)
def machine_of(kind: str, node_devices: int | None) -> Profile:
    """The profile for a kind as `TPU v5 lite`; DEFAULT, with a warning, for others."""
    name = next((profile for part, profile in KINDS if part.lower() in kind.lower()), None)
    if name is None:
        reason = f"no profile for devices of the kind '{kind}': plans are priced for {DEFAULT}. "
        hint = f"`xshard calibrate` measures one; {VARIABLE} or xshard.use_profile names it"
        warnings.warn(reason + hint, stacklevel=2)
    profile = load_profile(name or DEFAULT)
    if node_devices in (None, profile.node_devices) or profile.across is None or name in RACKS:
        return profile
    return load_profile(f"{profile.name}:{node_devices}")


def without_devices(profile: ProfileLike) -> ProfileLike:
    """The profile itself; for "auto", without a known device, the overriding one, else DEFAULT."""
    asked = asked_for(profile)
    return DEFAULT if asked == AUTO else asked


def are_across(profile: Profile, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pairs of devices are on two nodes."""
    nodes = profile.node_devices if profile.across else None
    return (
        (a // nodes != b // nodes)
        if nodes
        else np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)
    )


def located(profile: Profile, mesh: Mesh, devices: Sequence[int]) -> Profile:
    """The profile for a mesh of these devices: an axis that leaves a node anywhere is across nodes."""
    if profile.across is None or profile.node_devices is None or isinstance(devices, range):
        return profile
    links = dict.fromkeys(mesh.axes, profile.default)
    for axis in mesh.axes:
        groups = np.array(devices)[np.array(mesh.groups((axis,)))]
        if are_across(profile, groups[:, :1], groups).any():
            links[axis] = profile.across
    links |= dict(profile.axes)
    nodes = profile.node_devices or 1
    in_step = all(
        device // nodes - devices[0] // nodes == i // nodes for i, device in enumerate(devices)
    )
    if in_step and all(profile.link(axis, mesh) == links[axis] for axis in mesh.axes):
        return profile
    return replace(profile, axes=tuple(sorted(links.items())))


def refined(profile: Profile, refinement: Refinement) -> Profile:
    """The profile with the link of every axis given to its factors; of two links the slower counts."""
    links: dict[str, Link] = {}
    for axis, link in profile.axes:
        for factor in (*dict(refinement.src).get(axis, ()), *dict(refinement.dst).get(axis, ())):
            links[factor] = min(links.get(factor, link), link, key=lambda x: x.bytes_per_s)
    return replace(profile, axes=tuple(sorted(links.items())), inside=()) if links else profile
