"""The redistributions of a run as they were recorded: the input of each, and the cotangent of its result."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from xshard import reference
from xshard.errors import ReplicaError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim, Shard
from xshard.plans.expression import sides
from xshard.replicas import ReplicaCheck
from xshard.steps.base import Block
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.diagnosis.evidence import Case, in_double
from xshard.testing.mismatch import Mismatch, Subject, located
from xshard.testing.pickling import OURS
from xshard.testing.question import Side

Arrays = Mapping[str, Block]
# Orders of a cut along an axis that an expression does not name.
_HIDDEN_ORDERS = ("block", "zigzag")


@dataclass(frozen=True, eq=False)
class Seen:
    """The input of a redistribution, or the cotangent of its result.

    Attributes:
        check: What the redistribution says of its blocks.
        where: The user's file and line: " (model.py:12)".
        blocks: By device.
    """

    check: ReplicaCheck
    where: str
    blocks: dict[int, Block] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.check.text!r}{self.where}"

    @property
    def replica_fault(self) -> ReplicaError | None:
        """The error that `check_replicated=True` would have raised."""
        mesh = self.check.mesh
        axes = self.check.axes
        # [devices, axes, 2]: the largest difference and the largest value in each device's group.
        differences = np.zeros((mesh.n_devices, len(axes), 2))
        for device in range(mesh.n_devices):
            for a, axis in enumerate(axes):
                differences[device, a] = self._difference_in_group(mesh.group(device, (axis,)))
        return self.check.fault(differences)

    def _difference_in_group(self, devices: Sequence[int]) -> tuple[float, float]:
        """Measure the largest difference between blocks of some devices, and their largest value."""
        # NaN in all copies is no difference between them.
        blocks = np.nan_to_num([in_double(self.blocks[device]) for device in devices])
        differences = np.abs(blocks[:, None] - blocks)
        return float(differences.max(initial=0)), float(np.abs(blocks).max(initial=0))


class Recorder:
    """Record the blocks of all redistributions of a run, as a watcher for `replicas.watch_checks`."""

    def __init__(self, as_array: Callable[[Any], Block] = np.array) -> None:
        """as_array: converts a framework's block to numpy."""
        self.seen: list[Seen] = []
        self._as_array = as_array

    def __call__(self, check: ReplicaCheck) -> Callable[[int, Any], Block]:
        seen = Seen(check, _users_line())
        self.seen.append(seen)

        def record(device: int, block: Any) -> Block:
            # If a compiled call runs again, the first time counts.
            return seen.blocks.setdefault(device, self._as_array(block))

        return record


def merged(ranks: Iterable[Sequence[Seen]]) -> list[Seen]:
    """Merge what every rank recorded, each with its own blocks -> calls with the blocks of all."""
    calls = []
    # Not strict: ranks may have failed after different calls.
    for seen_by_ranks in zip(*ranks, strict=False):
        blocks: dict[int, Block] = {}
        for seen in reversed(seen_by_ranks):  # the first rank's come last, and stay
            blocks.update(seen.blocks)
        calls.append(replace(seen_by_ranks[0], blocks=blocks))
    return calls


def calls_in_order(seen: Iterable[Seen], n_devices: int, cotangents: bool) -> list[Seen]:
    """List calls of one direction, in the order in which they ran, that have blocks of all devices."""
    calls = []
    for call in seen:
        if call.check.cotangents == cotangents and len(call.blocks) == n_devices:
            calls.append(call)
    # They are recorded in the order of the forward pass: cotangents come back the other way.
    return calls[::-1] if cotangents else calls


def find_wrong_input(
    on_one: Seen, on_mesh: Seen, mesh: Mesh, runtime: Side, arguments: Arrays
) -> Mismatch | None:
    """Compare what a call of `redistribute` is given on a mesh with its input on one device.

    Its source layout says how the blocks make up an array, which should be the one that the same
    call is given on one device. Where the layout does not mention an axis of the mesh, blocks may be
    replicas, addends or shards along it: "n" on an axis a may stand for "n | copy(a)",
    "n | sum(a)" or "n/a". All of these are tried, and one that fits is enough.

    Args:
        on_one: The call on one device.
        on_mesh: The same call on the mesh.
        mesh: The mesh.
        runtime: The framework, for the report.
        arguments: Whole arguments of the function by name: some causes are found by them.

    Returns:
        The mismatch; None if the arrays are equal, or if it cannot be told.
    """
    layout = on_mesh.check.sharding.layout
    try:
        right = _meant_on_one_device(on_one, on_mesh, mesh)
        # A case has the blocks beside those that are right under a layout, or is None if the shapes
        # of the blocks do not fit the layout.
        case_under = partial(_case, on_mesh, right, mesh, arguments)
        tried = map(case_under, _readings(layout, _hidden_axes(on_mesh, mesh)))
        cases = [case for case in tried if case is not None]
    # The function may use a mesh of its own, or be mapped over a batch by vmap. Then the calls cannot
    # be compared, which is no mistake of the user.
    except XshardError:
        return None
    if any(case.agrees for case in cases):
        return None

    subject = Subject("block", str(on_mesh), runtime, mesh, f"{runtime} on one device")
    mismatches = [located(subject, case) for case in cases]
    # Each layout that was tried gives another mismatch: one with a known cause is the likeliest.
    for mismatch in mismatches:
        if mismatch.cause is not None:
            return mismatch
    cause = _other_layout(layout, mesh.long_axes, case_under)
    # Without any case, the blocks have shapes that fit no layout, and there is no wrong element to
    # name: 0 is the device.
    first = mismatches[0] if mismatches else Mismatch(subject, 0)
    return replace(first, cause=cause)


def _meant_on_one_device(one: Seen, many: Seen, mesh: Mesh) -> Block:
    """Return the array that a call on a mesh should be given, from the call on one device."""
    source = one.check.sharding
    right: Block = reference.gather([one.blocks[0]], source.layout, source.mesh, source.shape)
    if many.check.cotangents:
        # The cotangent of a mean over n devices is 1/n on each; on one device n is 1.
        _, dst, _ = sides(many.check.text)
        mean_axes = dst.tagged("mean")
        if mean_axes:
            right = np.divide(right, mesh.size(*mean_axes))
    return right


def _hidden_axes(many: Seen, mesh: Mesh) -> list[str]:
    """List the long mesh axes that a call's expression does not name."""
    src, dst, _ = sides(many.check.text)
    named = {*src.axes, *dst.axes}  # along these the layout says what blocks are
    return [axis for axis in mesh.long_axes if axis not in named]


def _other_layout(
    layout: Layout, axes: Sequence[str], case_under: Callable[[Layout], Case | None]
) -> Cause | None:
    """Find another layout under which the recorded blocks are right, as a cause."""
    unsharded = Layout(tuple(map(Dim, layout.names)))
    for other in _readings(unsharded, axes):
        case = case_under(other)
        if case is not None and case.agrees:
            return Cause(
                "another layout", f"blocks of '{other}' are taken for blocks of '{layout}'"
            )
    return None


def _case(many: Seen, right: Block, mesh: Mesh, arguments: Arrays, layout: Layout) -> Case | None:
    """Put the recorded blocks beside the blocks that they should be under a layout.

    Args:
        many: The recorded call, with its block on each device.
        right: The whole array as it should be.
        mesh: The mesh.
        arguments: Whole arguments of the function by name, which help to find the cause.
        layout: The layout that the blocks are taken to have.

    Returns:
        Both sets of blocks, ready to compare; None if the shapes do not fit the layout.
    """
    try:
        sharding = Sharding(layout, mesh, right.shape)
    except XshardError:
        return None
    blocks = [many.blocks[device] for device in range(mesh.n_devices)]
    want = reference.scatter(right, layout, mesh)
    # JAX pads uneven blocks with rows at the end, so that all have the shape of the largest.
    if all(block.shape == sharding.max_local_shape for block in blocks):
        for device, wanted in enumerate(want):
            blocks[device] = blocks[device][tuple(map(slice, wanted.shape))]
    if [block.shape for block in blocks] != [wanted.shape for wanted in want]:
        return None
    return Case(tuple(blocks), tuple(want), sharding, arguments=arguments).settled()


class _Cut(NamedTuple):
    """A cut that an axis may stand for: the order of its shards, and the number of the dim."""

    order: str
    dim: int


def _readings(layout: Layout, axes: Sequence[str]) -> Iterator[Layout]:
    """Yield the layouts that blocks may really have, if the given one leaves out some mesh axes.

    Along each of `axes`, blocks may be replicas, addends of a sum, or shards of a dim:
    "n" with axis "a" -> "n | copy(a)", "n | sum(a)", "n/a", "n/zigzag(a)".
    """
    cuts = itertools.product(_HIDDEN_ORDERS, range(len(layout.dims)))
    meanings: list[str | _Cut] = ["copy", "sum", *itertools.starmap(_Cut, cuts)]
    for choice in itertools.product(meanings, repeat=len(axes)):
        dims = list(layout.dims)
        tags = layout.tags
        for axis, meaning in zip(axes, choice, strict=True):
            if isinstance(meaning, _Cut):
                # Outermost, as if the function had cut the array along it before.
                shards = (Shard((axis,), meaning.order), *dims[meaning.dim].shards)
                dims[meaning.dim] = replace(dims[meaning.dim], shards=shards)
            else:  # a tag
                tags = (*tags, (meaning, (axis,)))
        yield Layout(tuple(dims), tags)


def _users_line() -> str:
    """Return the file and line of the user's call, as in ` (model.py:12)`: the first frame not ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
