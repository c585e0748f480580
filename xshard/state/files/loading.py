"""What a load reads: for every array its layout by rules, and the layout under which it is read.

Decides whether devices that need the same rows all read them, or a part each and share it by the network: the
cheaper, where a profile has a disk. Knows no framework: blocks are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.cost.model import Link, Profile
from xshard.cost.profile_files import load_profile
from xshard.errors import DtypeError, ShapeError, XshardError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Shard
from xshard.plans.plan import find_plan
from xshard.rules import Rules
from xshard.search.request import Request
from xshard.state.files.boxes import box_pairs, check_whole
from xshard.state.files.checkpoint import Checkpoint
from xshard.state.names import SAME, Names
from xshard.state.relations import Made


class Load(NamedTuple):
    """An array that is loaded. stored: its dtype in files. source: how it is read. target: how it ends."""

    made: Made
    stored: str
    source: Sharding
    target: Sharding

    @property
    def is_shared(self) -> bool:
        """Whether what is read goes on by the network."""
        return self.source != self.target


def plan_load(
    checkpoint: Checkpoint,
    rules: Rules | Mapping[Any, Any],
    mesh: Mesh,
    names: Names | None = None,
    *,
    dtype: object = None,
    like: Mapping[str, Any] | None = None,
    strict: bool = True,
    profile: str | Path | Profile = "h100",
) -> dict[str, Load]:
    """Every array that a load makes of a checkpoint.

    rules: layouts, for names here. names: what is here, of what is stored. dtype: of all arrays of floats;
    None: as they are stored. like: the arrays to be made, which have shapes and dtypes. strict: whether each
    has to be stored, and no other. profile: of the machine; without a disk every device reads what it needs.
    Raises XshardError for a name without a rule or a rule without a name, and where a layout or dtype does
    not fit.
    """
    machine, found = load_profile(profile), {}
    floats = None if dtype is None else dtypes.name_of(dtype)
    made = stored_as(checkpoint, names)
    wanted = made if like is None else in_both(made, [(name,) for name in like], strict)
    for name, text in Rules(rules).match([name for name in wanted if name is not None], what="array").items():
        each = made[name]
        shape = each.shape if like is None else tuple(like[name].shape)
        with located(name):
            if like is not None:
                each = cast(each, dtypes.name_of(like[name].dtype))
            elif floats is not None and _kind(each.dtype) == 1:
                each = cast(each, floats)
            found[name] = load_of(checkpoint, each, Sharding(Layout.parse(text), mesh, shape), machine)
    return found


def stored_as(checkpoint: Checkpoint, names: Names | None) -> dict[str, Made]:
    """What a mapping makes of all arrays of a checkpoint."""
    return (names or SAME).resolve(checkpoint.shapes, checkpoint.dtypes)


def load_of(checkpoint: Checkpoint, made: Made, target: Sharding, profile: Profile) -> Load:
    """One array that is to be under one layout. Raises ShapeError where it has another shape."""
    if made.shape != target.shape:
        raise ShapeError(
            f"shape {made.shape} in the checkpoint, {target.shape} here", hint="names= may say why"
        )
    check_whole(target)
    stored = checkpoint[made.pieces[0].src.name].dtype
    return Load(made, stored, read_under(target, made.dtype, profile), target)


def cast(made: Made, dtype: str) -> Made:
    """An array in the dtype of the one it fills. Raises DtypeError where floats would be whole numbers."""
    if _kind(made.dtype) > _kind(dtype):
        raise DtypeError(f"{made.dtype} in the checkpoint, {dtype} here", hint="names= may cast it")
    return made._replace(dtype=dtype)


def read_under(target: Sharding, dtype: str, profile: Profile) -> Sharding:
    """The layout under which an array is read: its own, or one with replicas cut too, which then share.

    >>> from xshard.cost.profile_files import load_profile
    >>> slow = replace(load_profile("h100"), disk=Link(1e-4, 2e9))
    >>> str(read_under(Sharding(Layout("o/tp i"), Mesh(dp=4, tp=2), (8192, 8192)), "bfloat16", slow).layout)
    'o/tp i/dp'
    """
    mesh, layout, devices = target.mesh, target.layout, range(target.mesh.n_devices)
    cuts = [axis for dim in layout.dims for axis in dim.axes]
    idle = [axis for axis in mesh.axes if axis not in cuts and mesh.size(axis) > 1]
    if profile.disk is None or not idle or not target.shape or 0 in target.shape:
        return target
    near = tuple(a for a in idle if profile.link(a, mesh) == profile.default)
    ways = [(_reading_s(target, dtype, profile.disk, profile), target)]
    for axes in dict.fromkeys((near, tuple(idle))):
        if axes:
            source = _cut_further(target, axes)
            ends = source.layout, Layout(layout.dims), mesh, mesh, devices, devices
            sharing = find_plan(Request(*ends, target.shape, dtype, profile)).cost
            ways.append((sharing + _reading_s(source, dtype, profile.disk, profile), source))
    return min(ways, key=lambda way: way[0])[1]


def in_both(
    stored: Collection[str],
    leaves: Sequence[Sequence[str]],
    strict: bool,
    places: tuple[str, str] = ("tree", "checkpoint"),
) -> list[str | None]:
    """Of the names of every array of a tree the first that is stored, or None.

    strict: raise XshardError for an array that is in one of the two places alone.

    >>> in_both({"a": 1, "b": 2}, [("tied", "a"), ("c",)], strict=False)
    ['a', None]
    """
    found = [next((name for name in names if name in stored), None) for names in leaves]
    known = {name for names in leaves for name in names}
    alone = [(names[0], places[0]) for names, name in zip(leaves, found, strict=True) if name is None]
    alone += [(name, places[1]) for name in stored if name not in known]
    if strict and alone:
        hint = "names= says what is stored of what; strict=False passes over what is not in both"
        raise XshardError("{} is in the {} alone".format(*alone[0]), hint=hint)
    return found


def read_block(
    checkpoint: Checkpoint, load: Load, device: int, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """The block of a device under the layout in which it is read, of the carrier of the stored dtype.

    out: where to read it to.
    """
    if out is None:
        out = np.empty(load.source.local_shape(device), dtypes.carrier(load.stored))
    for pair in box_pairs(load.made.pieces, load.source, device):
        checkpoint.read(pair.name, pair.box, pair.of(out))
    return out


def _kind(dtype: str) -> int:
    """0 for whole numbers, 1 for floats, 2 for complex numbers."""
    return (dtypes.precision(dtype) > 0) + ("complex" in dtype)


def _cut_further(sharding: Sharding, axes: tuple[str, ...]) -> Sharding:
    """The sharding with its longest dim cut over more axes; what they copied, they do not any more."""
    longest = max(range(len(sharding.shape)), key=lambda d: sharding.max_local_shape[d])
    dims = list(sharding.layout.dims)
    dims[longest] = replace(dims[longest], shards=(*dims[longest].shards, Shard(axes)))
    return sharding.with_layout(Layout(tuple(dims)))


def _reading_s(sharding: Sharding, dtype: str, disk: Link, profile: Profile) -> float:
    """Seconds in which the devices of a node read their blocks from their one disk."""
    together = min(profile.node_devices or sharding.mesh.n_devices, sharding.mesh.n_devices)
    n_bytes = dtypes.n_bytes(sharding.max_local_shape, dtype)
    return disk.latency_s + together * n_bytes / disk.bytes_per_s
