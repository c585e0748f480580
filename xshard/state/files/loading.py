"""The plan of a load: the layout of every array, and the layout under which it is read. Devices that need the
same rows all read them, or read a part each and share it, if a profile's disk is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.cost.machine import load_profile
from xshard.cost.model import Link, Profile, ProfileLike
from xshard.errors import DtypeError, ShapeError, XshardError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Shard
from xshard.plans.plan import find_plan
from xshard.rules import Rules, RulesLike
from xshard.search.request import Request
from xshard.state.files.checkpoint import Checkpoint, box_pairs, check_whole
from xshard.state.names import SAME, Names
from xshard.state.relations import TargetArray


class Load(NamedTuple):
    """The load of an array: from the dtype `stored`, under the sharding `source` when read, to `target`."""

    array: TargetArray
    stored: str
    source: Sharding
    target: Sharding

    @property
    def is_shared(self) -> bool:
        """True if devices send each other rows that they have read."""
        return self.source != self.target


def plan_load(
    checkpoint: Checkpoint,
    rules: RulesLike | None,
    mesh: Mesh,
    names: Names | None = None,
    *,
    dtype: object = None,
    like: Mapping[str, Any] | None = None,
    strict: bool = True,
    profile: ProfileLike = "h100",
) -> dict[str, Load]:
    """Plan the load of every array of a checkpoint. rules: layouts by the names in this program, to which
    `names` maps stored names; None: replicated. dtype: for all floats. like: the arrays to fill. strict:
    every array of `like` has to be stored, and no other.
    """
    rules = Rules({"**": "..."} if rules is None else rules)
    machine = load_profile(profile)
    loads = {}
    floats = None if dtype is None else dtypes.name_of(dtype)
    arrays = stored_as(checkpoint, names)
    loaded = arrays if like is None else in_both(arrays, [(name,) for name in like], strict)
    for name, text in rules.match(
        [name for name in loaded if name is not None], what="array"
    ).items():
        array = arrays[name]
        shape = array.shape if like is None else tuple(like[name].shape)
        with located(name):
            kind = floats if floats is not None and _kind(array.dtype) == 1 else array.dtype
            kind = kind if like is None else dtypes.name_of(like[name].dtype)
            loads[name] = load_of(
                checkpoint, array, kind, Sharding(Layout.parse(text), mesh, shape), machine
            )
    return loads


def stored_as(checkpoint: Checkpoint, names: Names | None) -> dict[str, TargetArray]:
    """The arrays of a checkpoint under the names in this program."""
    return (names or SAME).resolve(checkpoint.shapes, checkpoint.dtypes)


def load_of(
    opened: Checkpoint, array: TargetArray, dtype: str, target: Sharding, profile: Profile
) -> Load:
    """The load of one array. Raises DtypeError if floats would become whole numbers, ShapeError."""
    if _kind(array.dtype) > _kind(dtype):
        raise DtypeError(
            f"{array.dtype} in the checkpoint, {dtype} here", hint="names= may cast it"
        )
    if array.shape != target.shape:
        hint = "names= maps arrays"
        raise ShapeError(f"shape {array.shape} in the checkpoint, {target.shape} here", hint=hint)
    check_whole(target)
    stored = opened[array.pieces[0].src.name].dtype
    return Load(
        array._replace(dtype=dtype), stored, source_sharding(target, dtype, profile), target
    )


def source_sharding(target: Sharding, dtype: str, profile: Profile) -> Sharding:
    """The cheapest sharding to read: the target's, or one that shards its longest dim over replicas too."""
    mesh = target.mesh
    layout = target.layout
    devices = range(target.mesh.n_devices)
    idle = [axis for axis in mesh.long_axes if axis not in layout.cut_axes]
    if profile.disk is None or not idle or not target.shape or 0 in target.shape:
        return target
    in_node = tuple(a for a in idle if profile.link(a, mesh) == profile.default)
    longest = target.max_local_shape.index(max(target.max_local_shape))
    candidates = [(_reading_s(target, dtype, profile.disk, profile), target)]
    for axes in filter(None, dict.fromkeys((in_node, tuple(idle)))):
        dims = list(layout.dims)
        dims[longest] = replace(dims[longest], shards=(*dims[longest].shards, Shard(axes)))
        source = target.with_layout(Layout(tuple(dims)))
        layouts = source.layout, Layout(layout.dims)
        request = Request(*layouts, mesh, mesh, devices, devices, target.shape, dtype, profile)
        reading_s = _reading_s(source, dtype, profile.disk, profile)
        candidates.append((find_plan(request).cost + reading_s, source))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def in_both(
    stored: Collection[str],
    leaves: Sequence[Sequence[str]],
    strict: bool,
    places: tuple[str, str] = ("tree", "checkpoint"),
) -> list[str | None]:
    """The first name of every array of a tree that is stored, or None. strict: raise XshardError instead for
    an array that is in one of the two places alone.
    """
    firsts = [next((name for name in names if name in stored), None) for names in leaves]
    in_tree = {name for names in leaves for name in names}
    in_one = [
        (names[0], places[0]) for names, name in zip(leaves, firsts, strict=True) if name is None
    ]
    in_one += [(name, places[1]) for name in stored if name not in in_tree]
    if strict and in_one:
        hint = "names= maps stored names; strict=False skips arrays that are not in both"
        raise XshardError("{} is in the {} alone".format(*in_one[0]), hint=hint)
    return firsts


def read_block(
    opened: Checkpoint, load: Load, device: int, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Read a device's block under the source sharding, as the carrier of the stored dtype, into `out`."""
    if out is None:
        out = np.empty(load.source.local_shape(device), dtypes.carrier(load.stored))
    for pair in box_pairs(load.array.pieces, load.source, device):
        opened.read(pair.name, pair.box, pair.view(out))
    return out


def _kind(dtype: str) -> int:
    """0 for whole numbers, 1 for floats, 2 for complex numbers."""
    return (dtypes.precision(dtype) > 0) + ("complex" in dtype)


def _reading_s(sharding: Sharding, dtype: str, disk: Link, profile: Profile) -> float:
    """Seconds in which the devices of a node read their blocks from its disk."""
    n_devices = min(profile.node_devices or sharding.mesh.n_devices, sharding.mesh.n_devices)
    return (
        disk.latency_s
        + n_devices * dtypes.n_bytes(sharding.max_local_shape, dtype) / disk.bytes_per_s
    )
