"""The redistributions of a run as they were recorded: the input of each, and the cotangent of its result."""

from __future__ import annotations

import itertools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

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

Arrays = Mapping[str, Block]
_HIDDEN_ORDERS = (
    "block",
    "zigzag",
)  # orders of a cut along an axis that an expression does not name


@dataclass(frozen=True, eq=False)
class Seen:
    """The input of a redistribution, or the cotangent of its result."""

    check: ReplicaCheck
    where: str  # the user's file and line
    blocks: dict[int, Block] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.check.text!r}{self.where}"

    @property
    def replica_fault(self) -> ReplicaError | None:
        """The error that `check_replicated=True` would have raised."""
        mesh = self.check.mesh
        axes = self.check.axes
        differences = np.zeros((mesh.n_devices, len(axes), 2))
        for device, (a, axis) in itertools.product(range(mesh.n_devices), enumerate(axes)):
            group = np.nan_to_num([in_double(self.blocks[d]) for d in mesh.group(device, (axis,))])
            apart = np.abs(group[:, None] - group)
            differences[device, a] = apart.max(initial=0), np.abs(group).max(initial=0)
        return self.check.fault(differences)


class Recorder:
    """Watches the replicas of a run (`replicas.watched`). If a call runs again, the first time counts."""

    def __init__(self, as_array: Callable[[Any], Block] = np.array) -> None:
        self.seen: list[Seen] = []
        self._as_array = as_array

    def __call__(self, check: ReplicaCheck) -> Callable[[int, Any], Block]:
        call = Seen(check, _users_line())
        self.seen.append(call)
        return lambda device, block: call.blocks.setdefault(device, self._as_array(block))


def merged(ranks: Iterable[Sequence[Seen]]) -> list[Seen]:
    """The recorded calls of every rank, with its own blocks -> calls with the blocks of all."""
    calls = zip(*ranks, strict=False)
    return [
        replace(call[0], blocks=dict(ChainMap(*(part.blocks for part in call)))) for call in calls
    ]


def in_turn(seen: Iterable[Seen], n: int, cotangents: bool) -> list[Seen]:
    """The calls of one direction with blocks of all `n` devices, in the order in which they ran."""
    calls = [each for each in seen if each.check.cotangents == cotangents and len(each.blocks) == n]
    return calls[::-1] if cotangents else calls


def find_wrong(
    one: Seen, many: Seen, mesh: Mesh, runtime: str, arguments: Arrays
) -> Mismatch | None:
    """The difference in meaning between one device and a mesh; None if the layout does not say it."""
    source = one.check.sharding
    layout = many.check.sharding.layout
    src, dst, _ = sides(many.check.text)
    named = (*src.axes, *dst.axes)
    mean = dst.tagged("mean") if many.check.cotangents else ()
    hidden = [axis for axis in mesh.long_axes if axis not in named]
    subject = Subject("block", str(many), runtime, mesh, f"{runtime} on one device")
    try:
        whole: Block = reference.gather([one.blocks[0]], source.layout, source.mesh, source.shape)
        whole = np.divide(whole, mesh.size(*mean)) if mean else whole
        cases = [_case(many, whole, each, mesh, arguments) for each in _readings(layout, hidden)]
    except XshardError:  # a mesh of the function's own, or a batch of vmap
        return None
    own = [case for case in cases if case is not None]
    if any(case.agrees for case in own):
        return None
    mismatches = [located(subject, case) for case in own] or [Mismatch(subject, 0)]
    wrong = next((m for m in mismatches if m.cause is not None), mismatches[0])
    plain = Layout(tuple(map(Dim, layout.names)))
    for other in _readings(plain, mesh.long_axes) if wrong.cause is None else ():
        case = _case(many, whole, other, mesh, arguments)
        if case and case.agrees:
            cause = Cause(
                "another layout", f"blocks of '{other}' are taken for blocks of '{layout}'"
            )
            return replace(wrong, cause=cause)
    return wrong


def _case(many: Seen, whole: Block, layout: Layout, mesh: Mesh, arguments: Arrays) -> Case | None:
    """The recorded blocks beside the global array's; None if their shapes do not fit the layout."""
    devices = range(mesh.n_devices)
    try:
        sharding = Sharding(layout, mesh, whole.shape)
    except XshardError:
        return None
    blocks = [many.blocks[d] for d in devices]
    shapes = [sharding.local_shape(d) for d in devices]
    if all(block.shape == sharding.max_local_shape for block in blocks):  # JAX pads
        blocks = [
            block[tuple(map(slice, shape))] for block, shape in zip(blocks, shapes, strict=True)
        ]
    if [block.shape for block in blocks] != shapes:
        return None
    return Case.of(blocks, reference.scatter(whole, layout, mesh), sharding, None, 0.0, arguments)


def _readings(layout: Layout, axes: Sequence[str]) -> Iterator[Layout]:
    """The layout with copies, addends or cuts of a dim along each axis that it leaves out."""
    ways = ("copy", 0), ("sum", 0), *itertools.product(_HIDDEN_ORDERS, range(len(layout.dims)))
    for choice in itertools.product(ways, repeat=len(axes)):
        dims = list(layout.dims)
        tags = layout.tags
        for axis, (way, d) in zip(axes, choice, strict=True):
            if way in _HIDDEN_ORDERS:
                dims[d] = replace(dims[d], shards=(Shard((axis,), way), *dims[d].shards))
            else:
                tags = (*tags, (way, (axis,)))
        yield Layout(tuple(dims), tags)


def _users_line() -> str:
    """The file and line of the user's call, as in ` (model.py:12)`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame = frame.f_back
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame else ""
