"""The plan of a load: the layout of every array, and the layout under which it is read.

Devices that need the same rows all read them, or read a part each and share it, if the disk of the
profile is slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.cost.machine import load_profile
from xshard.cost.model import Link, Profile, ProfileLike
from xshard.errors import DtypeError, ShapeError, XshardError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Shard
from xshard.plans.plan import find_plan
from xshard.rules import Rules, RulesLike, listed_names
from xshard.search.request import Request
from xshard.state.files.boxes import check_whole, common_boxes
from xshard.state.files.checkpoint import Checkpoint
from xshard.state.names import SAME, Names
from xshard.state.parts import TargetArray
from xshard.steps.base import with_inner
from xshard.trees import children, joined


class LoadKeywords(TypedDict, total=False):
    """The keywords of `load` in both bridges on which the type of its result does not depend."""

    names: Names | None
    strict: bool
    profile: ProfileLike
    verify: bool


class Load(NamedTuple):
    """The load of one array.

    Attributes:
        array: The array under its name in this program, with the dtype that it is to have.
        stored: The dtype in the checkpoint.
        source: The sharding under which it is read.
        target: The sharding that it is to have.
    """

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
    """Plan how the devices of a mesh load the arrays of a checkpoint, each with its own layout.

    For each array: its dtype, the sharding that it gets, and the sharding in which devices read it
    from disk, which may be finer, so that replicas share the reading. No data is read yet.

    Args:
        checkpoint: What is stored.
        rules: Layouts by patterns of the names in this program. None: every array is replicated.
        mesh: The mesh of this program.
        names: Maps stored names to the names in this program. None: they are the same.
        dtype: The dtype of all floats; other arrays keep theirs. Default: as stored.
        like: The arrays to fill, which decide dtypes and shapes.
        strict: Every array of `like` has to be stored, and no other.
        profile: The machine, whose disk decides whether devices share what they read.

    Returns:
        A load for each array, by name.
    """
    rules = Rules({"**": "..."} if rules is None else rules)
    machine = load_profile(profile)
    float_dtype = None if dtype is None else dtypes.name_of(dtype)
    arrays = stored_as(checkpoint, names)  # by their names in this program
    chosen = list(arrays)
    if like is not None:  # only the arrays that are in `like` and stored
        stored_names = in_both(arrays, [(name,) for name in like], strict)
        chosen = [name for name in stored_names if name is not None]
    loads = {}
    for name, layout in rules.match(chosen, what="array").items():
        array = arrays[name]
        shape = array.shape
        target_dtype = array.dtype
        with located(name):
            if like is not None:
                shape = tuple(like[name].shape)
                target_dtype = dtypes.name_of(like[name].dtype)
            elif float_dtype is not None and _kind(array.dtype) == FLOAT:
                target_dtype = float_dtype
            target = Sharding(Layout.parse(layout), mesh, shape)
            loads[name] = load_of(checkpoint, array, target_dtype, target, machine)
    return loads


def stored_as(checkpoint: Checkpoint, names: Names | None) -> dict[str, TargetArray]:
    """Return the arrays of a checkpoint under the names in this program."""
    return (names or SAME).resolve(checkpoint.shapes, checkpoint.dtypes)


def load_of(
    opened: Checkpoint, array: TargetArray, dtype: str, target: Sharding, profile: Profile
) -> Load:
    """Plan how the devices load one array: what they read, and the dtype and sharding that it gets.

    Args:
        opened: The checkpoint.
        array: The array under its name in this program.
        dtype: The dtype that it is to have.
        target: The sharding that it is to have.
        profile: The machine.

    Raises:
        DtypeError: Floats would become whole numbers, or complex numbers real ones.
        ShapeError: The array in the checkpoint has another shape.
        PlanError: The blocks of `target` are not parts of the array.
    """
    # Kinds are in the order whole numbers, floats, complex numbers: a cast to an earlier one loses
    # values, and is refused.
    if _kind(array.dtype) > _kind(dtype):
        reason = f"{array.dtype} in the checkpoint, {dtype} here"
        raise DtypeError(reason, hint="names= may cast it")
    if array.shape != target.shape:
        reason = f"shape {array.shape} in the checkpoint, {target.shape} here"
        raise ShapeError(reason, hint="names= maps arrays")
    check_whole(target)
    return Load(
        array=array._replace(dtype=dtype),
        stored=opened[array.pieces[0].src.name].dtype,
        source=source_sharding(target, dtype, profile),
        target=target,
    )


def source_sharding(target: Sharding, dtype: str, profile: Profile) -> Sharding:
    """Choose what each device reads from disk: its whole block, or a part that replicas exchange.

    For an array [8, c] that is replicated on 4 devices, every device reads 8 rows (`target` itself),
    or each reads 2 rows, and an all-gather brings the others. Sharing is tried among the replicas
    on one node, and among all replicas.

    Args:
        target: The sharding that the array is to have.
        dtype: Its dtype.
        profile: The machine: the speeds of its disk and of its links.

    Returns:
        The sharding of what devices read that takes the least time, with the all-gather.
    """
    mesh = target.mesh
    replica_axes = [axis for axis in mesh.long_axes if axis not in target.layout.sharding_axes]
    # Without a price of the disk, without replicas, or without rows there is nothing to choose.
    if profile.disk is None or not replica_axes or not target.shape or 0 in target.shape:
        return target
    # Axes whose link is the default one lead to devices of the same node.
    in_node = tuple(axis for axis in replica_axes if profile.link(axis, mesh) == profile.default)
    best = target  # every device reads its whole block
    best_s = _reading_s(target, dtype, profile.disk, profile)
    for axes in dict.fromkeys((in_node, tuple(replica_axes))):
        if not axes:
            continue
        source = _sharded_further(target, axes)
        # Without tags: what is read is the values themselves, not addends or copies of them.
        gathered_layout = Layout(target.layout.dims)
        gather = Request.on_mesh(mesh, source.layout, gathered_layout, target.shape, dtype, profile)
        seconds = find_plan(gather).cost + _reading_s(source, dtype, profile.disk, profile)
        if seconds < best_s:
            best = source
            best_s = seconds
    return best


def _sharded_further(target: Sharding, axes: tuple[str, ...]) -> Sharding:
    """Shard the dim with the longest blocks over these axes, too."""
    block_shape = target.max_local_shape
    longest_dim = block_shape.index(max(block_shape))
    untagged = Layout(target.layout.dims)
    return target.with_layout(with_inner(untagged, untagged.names[longest_dim], (Shard(axes),)))


def in_both(
    stored: Collection[str],
    leaves: Sequence[Sequence[str]],
    strict: bool,
    places: tuple[str, str] = ("tree", "checkpoint"),
    *,
    needs_one: bool = True,
) -> list[str | None]:
    """Find under which name each array of a tree of parameters is stored in a checkpoint.

    `stored` {"embed", "norm"} and `leaves` [("head", "embed"), ("norm",)] -> ["embed", "norm"]: the
    first array has two names in the tree, and is stored under one of them.

    Args:
        stored: The names in the checkpoint.
        leaves: For each array of the tree its names. A shared array, as of tied weights, has
            several.
        strict: Whether every array has to be in both places. If not, a warning names what is not.
        places: The words for the two places in errors.
        needs_one: Whether one has to be in both places even so: else nothing at all would be loaded.

    Returns:
        For each array the first of its names that is stored, or None if none is.

    Raises:
        XshardError: With `strict`, for an array that is in one of the two places alone.
    """
    stored_names = [_first_stored(names, stored) for names in leaves]
    has_none = all(name is None for name in stored_names)
    if needs_one and not strict and leaves and stored and has_none:
        reason = (
            f"nothing of the {places[0]} is in the {places[1]}, which has {listed_names([*stored])}"
        )
        hint = (
            "names= maps stored names; what was saved as {'model': model} has like={'model': ...}"
        )
        raise XshardError(reason, hint=hint)
    in_tree_alone = [leaves[i][0] for i, name in enumerate(stored_names) if name is None]
    in_tree = set(chain.from_iterable(leaves))
    stored_alone = [name for name in stored if name not in in_tree]
    for place_name, names in zip(places, (in_tree_alone, stored_alone), strict=True):
        reason = f"in the {place_name} alone: {listed_names(names)}"
        if names and strict:
            hint = "names= maps stored names; strict=False skips what is not in both"
            raise XshardError(reason, hint=hint)
        if names:
            warnings.warn(f"{reason}, and skipped", stacklevel=2)
    return stored_names


def stored_constants(
    opened: Checkpoint,
    tree_constants: Mapping[str, Any],
    names: Names | None,
    strict: bool,
    is_taken: Callable[[str], bool] = lambda _: False,
) -> dict[str, Any]:
    """Return the stored numbers and texts for the leaves of a tree; one that is not stored stays.

    Stored {"step": 20, "lr": [0.1, 0.2]}, and a tree with the leaves "step", "lr.0" and "lr.1" -> 20,
    0.1 and 0.2.

    Args:
        opened: The checkpoint.
        tree_constants: The numbers and texts of the tree, by name.
        names: What maps arrays. Numbers and texts have the same names in both, so that some of the
            checkpoint may have no place in the tree then.
        strict: Whether every number and text has to be in both places.
        is_taken: Whether an object of the tree takes what is stored under a name.

    Raises:
        XshardError: As `in_both` does.
    """
    stored: list[str] = []
    for name in opened.constants:
        # A list may be one value there, as in DCP, and leaves here.
        is_whole = not any(leaf.startswith(f"{name}.") for leaf in tree_constants)
        stored += [name] if is_whole else _leaf_names(name, opened.value(name, {}))
    if names is not None:
        stored = [name for name in stored if name in tree_constants]
    stored = [name for name in stored if name in tree_constants or not is_taken(name)]
    # JAX, where None is an empty tree, stores none.
    needed = [name for name, x in tree_constants.items() if x is not None or name in stored]
    in_both(stored, [(name,) for name in needed], strict, needs_one=False)
    return {name: opened.constant(name, x) for name, x in tree_constants.items()}


def _leaf_names(name: str, value: Any) -> list[str]:
    """Return the names of all items inside of lists and dicts; the name itself for another value."""
    items = children(value)
    if items is None:
        return [name]
    names = []
    for key, item in items.items():
        names += _leaf_names(joined(name, str(key)), item)
    return names


def _first_stored(names: Sequence[str], stored: Collection[str]) -> str | None:
    """Return the first of an array's names that is stored."""
    for name in names:
        if name in stored:
            return name
    return None


def read_block(
    opened: Checkpoint, load: Load, device: int, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Read a device's block under the source sharding, as the carrier of the stored dtype, into `out`."""
    if out is None:
        out = np.empty(load.source.local_shape(device), dtypes.carrier(load.stored))
    for common_box in common_boxes(load.array.pieces, load.source, device):
        opened.read(common_box.name, common_box.box, common_box.view(out))
    return out


# Kinds of numbers: values of one kind fit into the next.
WHOLE_NUMBER = 0
FLOAT = 1
COMPLEX = 2


def _kind(dtype: str) -> int:
    """Return the kind of a dtype's numbers."""
    if "complex" in dtype:
        return COMPLEX
    return FLOAT if dtypes.precision(dtype) > 0 else WHOLE_NUMBER


def _reading_s(sharding: Sharding, dtype: str, disk: Link, profile: Profile) -> float:
    """Return the seconds in which the devices of a node read their blocks from its disk."""
    n_devices = min(profile.node_devices or sharding.mesh.n_devices, sharding.mesh.n_devices)
    node_bytes = n_devices * dtypes.n_bytes(sharding.max_local_shape, dtype)
    return disk.latency_s + node_bytes / disk.bytes_per_s
