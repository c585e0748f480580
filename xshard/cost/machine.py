"""Profiles by name and file, the machine for `profile="auto"`, and links between devices by number."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import did_you_mean, parse_number, short_repr
from xshard.cost.model import Link, Profile, ProfileLike
from xshard.errors import ProfileError, api_boundary
from xshard.layout import Mesh
from xshard.layout.sub_axes import Refinement

AUTO = "auto"
DEFAULT = "h100"
VARIABLE = "XSHARD_PROFILE"

# A part of the name of a kind of device -> its profile. The first match counts: GB200 comes before B200.
# "gloo" and "host" are CPUs, with processes of torch and with devices of JAX.
KINDS = (
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100", "a100"),
    ("MI300X", "mi300x"),
    ("TPU v5 lite", "tpu_v5e"),
    ("TPU v5e", "tpu_v5e"),
    ("TPU v5", "tpu_v5p"),
    ("TPU v6 lite", "tpu_v6e"),
    ("TPU v6e", "tpu_v6e"),
    ("gloo", "gloo"),
    ("host", "host"),
)

# Variables with the number of processes on a node, by launcher.
LAUNCHERS = (
    "LOCAL_WORLD_SIZE",  # torchrun and Ray
    "LOCAL_SIZE",  # DeepSpeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # Intel MPI and MPICH
)

RACKS = ("gb200",)  # their nodes are larger than the hosts of a launcher

_USED: ContextVar[ProfileLike | None] = ContextVar("xshard_profile", default=None)


@api_boundary
def load_profile(profile: ProfileLike) -> Profile:
    """Return the profile of a machine, by the name of a shipped one or from a file.

        load_profile("h100:4").node_devices   # 4: h100 with nodes of 4

    Args:
        profile: A shipped name, a path, or a Profile, which is returned. A file that was rewritten is
            read again.

    Returns:
        The profile.

    Raises:
        ProfileError: There is no such profile, or its file is malformed.
    """
    if isinstance(profile, Profile):
        return profile
    name: Any = profile
    if not isinstance(name, str | Path):
        hint = f"one of {', '.join(shipped())}, or a file"
        raise ProfileError(f"profile is {short_repr(name)}", hint=hint)
    changed_ns = 0
    # A shipped name wins over a file of that name, and costs no look at the disk.
    if str(name).partition(":")[0] not in shipped() and os.path.isfile(name):
        changed_ns = os.stat(name).st_mtime_ns
    return _load(str(name), changed_ns)


@lru_cache(maxsize=1)
def shipped() -> tuple[str, ...]:
    """Return the names of profiles that come with the package."""
    names = []
    for file in _shipped_folder().iterdir():
        name, dot, ending = file.name.rpartition(".")
        if dot and ending == "json":
            names.append(name)
    return tuple(sorted(names))


def _shipped_folder() -> Any:
    return resources.files("xshard.cost") / "profiles"


@lru_cache(maxsize=64)
def _load(name: str, _changed_ns: int) -> Profile:
    """Read a profile. The time of its last change is a part of the cache's key."""
    # Only shipped names may say the size of nodes: a path may have a colon in it.
    base, colon, nodes = name.rpartition(":")
    if colon and base in shipped():
        return _with_nodes_of(base, nodes)
    if name in shipped():
        return profile_of(name, (_shipped_folder() / f"{name}.json").read_text())
    text = None
    with suppress(OSError, ValueError):  # a name that no file can have, or no text
        if Path(name).is_file():  # not a device or a pipe, which may never end
            text = Path(name).read_text()
    if text is None:
        hint = f"{did_you_mean(name, shipped())}shipped are: {', '.join(shipped())}; or give a file"
        raise ProfileError(f"no profile {short_repr(name)}", hint=hint)
    return profile_of(name, text)


def _with_nodes_of(base: str, nodes: str) -> Profile:
    """Return a shipped profile with nodes of another size: `h100` with "4". Raises ProfileError."""
    name = f"{base}:{nodes}"
    machine = _load(base, 0)
    if machine.across is None or not parse_number(nodes):
        has = "one node"
        if machine.node_devices:
            has = f"nodes of {machine.node_devices}"
        hint = f"'h100:4' has nodes of 4; {base} has {has}"
        raise ProfileError(f"no profile {name!r}", hint=hint)
    return replace(machine, name=name, node_devices=int(nodes))


def profile_of(name: str, text: str) -> Profile:
    """Read the text of `Profile.to_json`. name: its name in errors. Raises ProfileError."""
    try:
        data: dict[str, Any] = json.loads(text)
        if not data.get("default"):
            what = f"profile {name!r} lacks a link for axes that it does not name"
            hint = 'give "default", as in {"latency_s": 3e-6, "bytes_per_s": 4e11}'
            raise ProfileError(what, hint=hint)
        return _profile_of_values(data)
    except ProfileError:
        raise
    except Exception as error:  # a file may have any value in any place
        raise ProfileError(f"profile {name!r} is malformed: {error}") from None


def _profile_of_values(data: dict[str, Any]) -> Profile:
    """Build a profile from the values of its file. It may raise anything, for values of wrong types."""
    copy_bytes_per_s = data["copy_bytes_per_s"]
    if not copy_bytes_per_s:  # null: JSON has no number for infinity
        copy_bytes_per_s = math.inf
    # Keys that came later have defaults, so that old files stay good.
    return Profile(
        name=data["name"],
        source=data["source"],
        default=Link(**data["default"]),
        across=_link_of(data.get("across")),
        node_devices=data.get("node_devices"),
        axes=tuple(sorted((axis, Link(**link)) for axis, link in data["axes"].items())),
        launch_s=_pairs(data["launch_s"]),
        copy_bytes_per_s=copy_bytes_per_s,
        inside=_pairs(data.get("inside", {})),
        rounds=data.get("rounds", False),
        flops_per_s=_pairs(data.get("flops_per_s", {})),
        disk=_link_of(data.get("disk")),
        ring_s=_pairs(data.get("ring_s", {})),
    )


def _link_of(values: dict[str, Any] | None) -> Link | None:
    return Link(**values) if values else None


def _pairs(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what a dict says as a value that can be hashed, in one order."""
    return tuple(sorted(values.items()))


@contextmanager
def use_profile(profile: ProfileLike) -> Iterator[Profile]:
    """Plan for this machine wherever `profile="auto"` would look for one, also with XSHARD_PROFILE set.

    All processes use the same.

    Args:
        profile: A shipped name, a path, or a Profile.

    Yields:
        The profile.

    Raises:
        ProfileError: There is no such profile.

    Examples:
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


def resolve_profile(profile: ProfileLike) -> ProfileLike:
    """Return the profile that a call asks for; for "auto" the one of `use_profile` or XSHARD_PROFILE.

    "auto" if neither says one, a shipped name as it is, and a file as the Profile that it has.
    """
    asked = profile
    if profile == AUTO:
        # Hot: every call asks. In a function of its own this would be one more call.
        override: ProfileLike | None = _USED.get()
        if override is None:
            override = os.environ.get(VARIABLE)
        if not override:  # unset, or set to nothing
            return AUTO
        asked = override
    if isinstance(asked, Profile) or asked in (AUTO, *shipped()):
        return asked
    return load_profile(asked)


def node_processes(n: int) -> int | None:
    """Return how many of `n` processes share a node, by the launcher's environment variables.

    If nodes differ, a number that divides all of theirs: 4, 4 and 6 processes -> 2. None if it is
    not known.
    """
    for variable in LAUNCHERS:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            # Usually the number itself. A divisor keeps nodes whole if this one has fewer or more.
            return math.gcd(int(value), n)
    # Slurm lists all nodes, as in `4(x2),3`. Else this may be a pod of a PyTorchJob, where "auto" is one
    # process: the pods are written like Slurm's nodes.
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    if listed is None:
        per_pod = os.environ.get("PET_NPROC_PER_NODE", "").replace("auto", "1")
        listed = f"{per_pod}(x{os.environ.get('PET_NNODES')})"
    divisor = 0  # gcd(0, n) is n
    total = 0
    for item in listed.split(","):
        # `4(x2)` is 4 processes on each of 2 nodes, `3` is 3 on one.
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match:
            processes = int(match[1])
            n_nodes = 1
            if match[2]:
                n_nodes = int(match[2])
            divisor = math.gcd(divisor, processes)
            total += processes * n_nodes
    # Another total: the variables are of another job, or of a part of it.
    return divisor if total == n else None


@lru_cache(maxsize=64)
def machine_of(kind: str, node_devices: int | None) -> Profile:
    """Return the profile for a kind of devices as `TPU v5 lite`; DEFAULT, with a warning, for others.

    node_devices: how many devices share a node, if that is known.
    """
    name = _profile_name(kind)
    if name is None:
        reason = f"no profile for devices of the kind '{kind}': plans are priced for {DEFAULT}. "
        hint = f"`xshard calibrate` measures one; {VARIABLE} or xshard.use_profile names it"
        warnings.warn(reason + hint, stacklevel=2)
        name = DEFAULT
    profile = load_profile(name)
    # A rack is one domain of NVLink, over several hosts: the launcher's number is no limit of it.
    is_as_shipped = node_devices in (None, profile.node_devices)
    if is_as_shipped or profile.across is None or name in RACKS:
        return profile
    return load_profile(f"{profile.name}:{node_devices}")


def _profile_name(kind: str) -> str | None:
    """Return the name of the profile for a kind of devices, or None."""
    for part, name in KINDS:
        if part.lower() in kind.lower():
            return name
    return None


def without_devices(profile: ProfileLike) -> ProfileLike:
    """Return the profile that a call asks for, where no device is known: DEFAULT if it is "auto"."""
    asked = resolve_profile(profile)
    return DEFAULT if asked == AUTO else asked


def are_on_two_nodes(
    profile: Profile, a: NDArray[np.int64], b: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which pairs of devices are on two nodes; a, b: numbers of devices, which broadcast."""
    nodes = profile.node_devices
    if profile.across is None or not nodes:
        return np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)
    return np.asarray(a // nodes != b // nodes)


def profile_of_devices(profile: Profile, mesh: Mesh, devices: Sequence[int]) -> Profile:
    """Return the profile for a mesh of these devices: an axis that leaves a node anywhere is across nodes.

    devices: the machine's number of each device of the mesh. Profiles take them to be 0, 1, 2, ...
    """
    node_size = profile.node_devices
    if profile.across is None or node_size is None or isinstance(devices, range):
        return profile  # a range: devices in the order of the machine, as profiles take them to be
    links = dict.fromkeys(mesh.axes, profile.default)
    for axis in mesh.axes:
        positions = np.array(mesh.groups((axis,)))  # [groups, devices along the axis]
        groups = np.array(devices)[positions]
        # Whether any device is on another node than the first of its group.
        if are_on_two_nodes(profile, groups[:, :1], groups).any():
            links[axis] = profile.across
    links |= dict(profile.axes)  # what the profile says of an axis wins
    # The same profile, if it says the same: caches then know it.
    has_these_links = all(profile.link(axis, mesh) == links[axis] for axis in mesh.axes)
    if has_these_links and _begin_nodes_alike(devices, node_size):
        return profile
    return replace(profile, axes=tuple(sorted(links.items())))


def _begin_nodes_alike(devices: Sequence[int], nodes: int) -> bool:
    """Return whether nodes end after the same places of a mesh as if its devices were 0, 1, 2, ..."""
    first_node = devices[0] // nodes
    return all(device // nodes - first_node == i // nodes for i, device in enumerate(devices))


def profile_of_factors(profile: Profile, refinement: Refinement) -> Profile:
    """Return the profile with the link of every axis given to its factors; of two links the slower.

    refinement: the axes of two meshes, each divided into factors that both meshes have. An axis x of
    8 that is y and z on the other mesh has two factors, which get the link of x, or that of y or z.
    """
    if not profile.axes:
        return profile
    src_factors = dict(refinement.src)
    dst_factors = dict(refinement.dst)
    links: dict[str, Link] = {}
    for axis, link in profile.axes:
        for factor in (*src_factors.get(axis, ()), *dst_factors.get(axis, ())):
            other = links.get(factor)  # of the axis on the other mesh that has this factor
            if other is None or link.bytes_per_s < other.bytes_per_s:
                links[factor] = link
    if not links:
        return profile
    return replace(profile, axes=tuple(sorted(links.items())), inside=())
