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
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from xshard.arguments import parse_number
from xshard.cost.model import FREE, PEAK_EFFICIENCY, RANKS, Addends, Link, Profile, ProfileLike
from xshard.errors import PlanError, ProfileError, api_boundary
from xshard.layout import Mesh
from xshard.layout.sub_axes import Refinement
from xshard.signatures import did_you_mean, short_repr

AUTO = "auto"
IN_ORDER = ":ranks"  # ends the name of a machine that adds in the order of ranks
AUTOS = (AUTO, AUTO + IN_ORDER)  # the machine is that of the devices
DEFAULT = "h100"
VARIABLE = "XSHARD_PROFILE"

# A part of the name of a kind of device -> its profile. The first match counts: GB200 comes before B200.
# "gloo" and "host" are CPUs, with processes of torch and with devices of JAX.
KINDS = {
    "GB200": "gb200",
    "B200": "b200",
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
    "MI300X": "mi300x",
    "TPU v5 lite": "tpu_v5e",
    "TPU v5e": "tpu_v5e",
    "TPU v5": "tpu_v5p",
    "TPU v6 lite": "tpu_v6e",
    "TPU v6e": "tpu_v6e",
    "gloo": "gloo",
    "host": "host",
}

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

    Args:
        profile: A shipped name, a path, or a Profile, which is returned. A file that was rewritten is
            read again.

    Returns:
        The profile.

    Raises:
        ProfileError: There is no such profile, or its file is malformed.

    Examples:
        >>> load_profile("h100:4").node_devices  # h100 with nodes of 4
        4
    """
    if isinstance(profile, Profile):
        return profile
    if str(profile).endswith(IN_ORDER):
        return in_order(load_profile(str(profile).removesuffix(IN_ORDER)))
    changed_ns = 0
    # A shipped name wins over a file of that name, and costs no look at the disk.
    if str(profile).partition(":")[0] not in shipped() and os.path.isfile(profile):
        changed_ns = os.stat(profile).st_mtime_ns
    return _load(str(profile), changed_ns)


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
    """Load a profile by a shipped name ("h100", or "h100:4" with nodes of 4) or from a file's path.

    _changed_ns: when the file was last changed. It is not used, but as a part of the cache's key it
    makes a file that was rewritten be read again. Raises ProfileError.
    """
    # A path may have a colon in it: "h100:4" counts as a size of nodes after shipped names only.
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


def _with_nodes_of(base: str, node_size: str) -> Profile:
    """Return a shipped profile with nodes of another size: "h100" and "4" -> nodes of 4 devices.

    Raises ProfileError if `node_size` is no number above 0, or if the machine has
    no link between nodes.
    """
    name = f"{base}:{node_size}"
    machine = _load(base, 0)
    if machine.across is None or not parse_number(node_size):
        nodes_text = f"nodes of {machine.node_devices}" if machine.node_devices else "one node"
        hint = f"'h100:4' has nodes of 4; {base} has {nodes_text}"
        raise ProfileError(f"no profile {name!r}", hint=hint)
    return replace(machine, name=name, node_devices=int(node_size))


def profile_of(name: str, text: str) -> Profile:
    """Parse the JSON text of a profile, as `Profile.to_json` writes it.

    name: what errors call the profile. Raises ProfileError, whatever is wrong with the text.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        if not data.get("default"):
            reason = f"profile {name!r} lacks a link for axes that it does not name"
            hint = 'give "default", as in {"latency_s": 3e-6, "bytes_per_s": 4e11}'
            raise ProfileError(reason, hint=hint)
        return _profile_of_values(data)
    except ProfileError:
        raise
    except Exception as error:  # a value of a wrong type may raise anything: a user sees one error
        raise ProfileError(f"profile {name!r} is malformed: {error}") from None


def _profile_of_values(data: dict[str, Any]) -> Profile:
    """Build a profile from the dict of its JSON file.

    A missing key raises KeyError, and a value of a wrong type may raise anything: the caller turns
    that into one error.
    """
    copy_bytes_per_s = data["copy_bytes_per_s"]
    if not copy_bytes_per_s:  # null: JSON has no number for infinity
        copy_bytes_per_s = math.inf
    # Keys that older versions did not write have defaults, so that old files can still be read.
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
        addends=data.get("addends", FREE),
        call_s=data.get("call_s", 0.0),
        compiled_overlap=data.get("compiled_overlap", 0.0),
        eager_overlap=data.get("eager_overlap", 1.0),
        layer_efficiency=data.get("layer_efficiency", PEAK_EFFICIENCY),
        step_slowdown=data.get("step_slowdown", 1.0),
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
    """Find which machine a call's `profile=` means.

    "auto" becomes what `use_profile` says, else what the variable XSHARD_PROFILE says, and stays
    "auto" if neither says anything: the caller then looks at the devices. The name of a shipped
    profile is returned as it is, and of a file the Profile that is in it.
    """
    machine = profile
    if profile in AUTOS:
        # Hot: every call asks. In a function of its own this would be one more call.
        override: ProfileLike | None = _USED.get()
        if override is None:
            override = os.environ.get(VARIABLE)
        if not override:  # unset, or set to nothing
            return profile
        machine = override if profile == AUTO else with_order_of(profile, override)
    if isinstance(machine, Profile) or machine in (*AUTOS, *shipped()):
        return machine
    return load_profile(machine)


def with_addends(
    profile: ProfileLike, addends: Addends, plan_or_expression: object = None
) -> ProfileLike:
    """Return the same machine, which adds as `addends` says: "h100" with "ranks" -> "h100:ranks".

    plan_or_expression: what is to be planned, or a plan, whose order is settled. Raises ProfileError
    for another word, PlanError for a plan in another order.
    """
    if addends not in get_args(Addends):
        raise ProfileError(f"addends is {short_repr(addends)}", hint="'free' or 'ranks'")
    planned = getattr(plan_or_expression, "profile", None)
    if addends == RANKS and planned is not None and not planned.adds_in_order:
        raise PlanError("the plan adds in any order", hint='xshard.plan(..., addends="ranks")')
    if addends == FREE or str(profile).endswith(IN_ORDER):
        return profile
    return in_order(profile) if isinstance(profile, Profile) else f"{profile}{IN_ORDER}"


def in_order(machine: Profile) -> Profile:
    """Return the same machine, which adds in the order of ranks."""
    if machine.adds_in_order:
        return machine
    return replace(machine, name=f"{machine.name}{IN_ORDER}", addends=RANKS)


def machine_of_plan(written: str, override: ProfileLike | None) -> Profile:
    """Return the machine of a plan that is read: the one that it names, or `override` in its order."""
    if override is None:
        return load_profile(written)
    machine = load_profile(override)
    return in_order(machine) if written.endswith(IN_ORDER) else machine


def with_order_of(requested: ProfileLike, machine: ProfileLike) -> ProfileLike:
    """Return the machine found for "auto", adding in order for "auto:ranks"."""
    return with_addends(machine, RANKS if requested == AUTO + IN_ORDER else FREE)


def node_processes(n_processes: int) -> int | None:
    """Find out how many of `n_processes` processes run on each node, from environment variables of launchers.

    LOCAL_WORLD_SIZE=4, as torchrun sets it, and 8 processes -> 4. If nodes differ, it is a number
    that divides all of theirs, so that no group of that many consecutive processes leaves a node:
    4, 4 and 6 processes -> 2. None if no variable says it.
    """
    for variable in LAUNCHERS:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            # The variable is about this node only; n = 14 with 4 on this one means that others
            # differ. The common divisor, 2, is then the best guess.
            return math.gcd(int(value), n_processes)
    counts = _processes_by_node()
    # If the total is not n, the variables describe another job, or only a part of this one.
    return math.gcd(*counts) if sum(counts) == n_processes else None


def _processes_by_node() -> list[int]:
    """List the processes of all nodes, as Slurm or PyTorchJob tells them: `4(x2),3` -> [4, 4, 3].

    Empty if neither does.
    """
    counts_text = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    if counts_text is None:
        # A pod of a PyTorchJob has two variables, which are put into Slurm's form. There "auto"
        # means one process.
        per_pod = os.environ.get("PET_NPROC_PER_NODE", "").replace("auto", "1")
        counts_text = f"{per_pod}(x{os.environ.get('PET_NNODES')})"
    counts: list[int] = []
    for item in counts_text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match:
            processes, n_nodes = map(int, match.groups("1"))  # `3` is 3 processes on 1 node
            counts += [processes] * n_nodes
    return counts


@lru_cache(maxsize=64)
def machine_of(device_kind: str, node_devices: int | None) -> Profile:
    """Return the shipped profile for a kind of devices: "NVIDIA H100 80GB HBM3" -> h100.

    device_kind: the name that torch or JAX gives the device. An unknown one gets the profile of an H100,
    with a warning. node_devices: how many devices share a node; None if that is not known.
    """
    name = _profile_name(device_kind)
    if name is None:
        reason = (
            f"no profile for devices of the kind '{device_kind}': plans are priced for {DEFAULT}. "
        )
        hint = f"`xshard calibrate` measures one; {VARIABLE} or xshard.use_profile names it"
        warnings.warn(reason + hint, stacklevel=2)
        name = DEFAULT
    profile = load_profile(name)
    # In a rack (GB200) NVLink connects the devices of several hosts. The number that a launcher
    # tells is of one host, and says nothing about where the slower links begin.
    is_as_shipped = node_devices in (None, profile.node_devices)
    if is_as_shipped or profile.across is None or name in RACKS:
        return profile
    return load_profile(f"{profile.name}:{node_devices}")


def _profile_name(device_kind: str) -> str | None:
    """Return the name of the profile for a kind of devices, or None."""
    for kind_part, name in KINDS.items():
        if kind_part.lower() in device_kind.lower():
            return name
    return None


def without_devices(profile: ProfileLike) -> ProfileLike:
    """Return the profile that a call asks for, where no device is known: DEFAULT if it is "auto"."""
    resolved = resolve_profile(profile)
    return with_order_of(resolved, DEFAULT) if resolved in AUTOS else resolved


def are_on_two_nodes(
    profile: Profile, a: NDArray[np.int64], b: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which pairs of devices are on two nodes; a, b: numbers of devices, which broadcast."""
    node_size = profile.node_devices
    if profile.across is None or not node_size:
        return np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)
    return np.asarray(a // node_size != b // node_size)


def profile_of_devices(profile: Profile, mesh: Mesh, devices: Sequence[int]) -> Profile:
    """Adapt a profile to a mesh whose devices are not numbered 0, 1, 2, ... on the machine.

    A profile finds out which mesh axes stay in a node from positions in the mesh, as if these were
    the numbers of devices. With nodes of 4, mesh axis a of devices (0, 4) reaches over two nodes,
    though its positions 0 and 1 do not: it gets the link across nodes, by name. An axis does so as
    soon as one group of devices along it is on two nodes.

    devices: the machine's number of each device of the mesh, in the mesh's order.
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
    # If nothing would change, return the same profile, so that caches find plans made for it.
    present_links = {axis: profile.link(axis, mesh) for axis in mesh.axes}
    has_these_links = links | present_links == links
    if has_these_links and _begin_nodes_alike(devices, node_size):
        return profile
    return replace(profile, axes=tuple(sorted(links.items())))


def _begin_nodes_alike(devices: Sequence[int], node_size: int) -> bool:
    """Return whether nodes end after the same positions of a mesh as if its devices were 0, 1, 2, ..."""
    node_of_device = np.array(devices) // node_size
    return np.array_equal(node_of_device - node_of_device[0], np.arange(len(devices)) // node_size)


def profile_of_factors(profile: Profile, refinement: Refinement) -> Profile:
    """Rename the links of a profile for a mesh that refines two others.

    Axis x of 8 on one mesh may be y of 2 and z of 4 on the other: then the common mesh has two
    axes, factors of 2 and 4. Each gets the link that the profile names for x, or for y or z; the
    slower one, if it names both.

    refinement: the axes of two meshes, each divided into factors that both meshes have.
    """
    if not profile.axes:
        return profile
    src_factors = dict(refinement.src)
    dst_factors = dict(refinement.dst)
    links: dict[str, Link] = {}
    for axis, link in profile.axes:
        for factor in (*src_factors.get(axis, ()), *dst_factors.get(axis, ())):
            link_of_other = links.get(factor)  # of the axis on the other mesh that has this factor
            if link_of_other is None or link.bytes_per_s < link_of_other.bytes_per_s:
                links[factor] = link
    if not links:
        return profile
    # `inside` is dropped: it is about axes of the two meshes, which the common mesh has no more.
    return replace(profile, axes=tuple(sorted(links.items())), inside=())
