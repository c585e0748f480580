"""What no plan can go below, beyond the bound that every plan carries (`Plan.bytes_lower_bound`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from planning.cases import Case
from planning.traffic import step_flow
from xshard.steps import Exchange


def total_elements(case: Case) -> int:
    """Elements that all devices together must receive.

    Where a sum of n addends ends in m copies, every element takes n-1 + m-1 messages: n-1 until some
    device has the whole sum, and one more to every other owner, each of which is complete later.
    One more again where no owner of the element holds an addend of it: then either the first to
    complete is no owner, or it had all n addends sent. Once for every addend of the sums that stay.
    Where no sum ends, it is what each device lacks, as a direct exchange sends it.
    """
    mesh, kept = case.mesh, case.dst.tagged("sum")
    ended = [a for a in case.src.tagged("sum") if a not in kept]
    if not ended:
        before = xs.Sharding(case.src, mesh, case.shape)
        return int(step_flow(Exchange(case.dst), before, mesh.n_devices).devices.sum())
    cut = [a for dim in case.dst.dims for a in dim.axes]
    copies = mesh.n_devices // mesh.size(*cut, *kept)
    messages = mesh.size(*kept) * math.prod(case.shape) * (mesh.size(*ended) + copies - 2)
    return messages + sum(_strange(case, fibre) for fibre in _fibres(mesh, kept))


def _fibres(mesh: xs.Mesh, axes: Sequence[str]) -> list[list[int]]:
    """The devices with the same coordinates along the axes, for all coordinates."""
    fibres: dict[int, list[int]] = {}
    for device in range(mesh.n_devices):
        fibres.setdefault(mesh.index(device, axes), []).append(device)
    return list(fibres.values())


def _strange(case: Case, devices: Sequence[int]) -> int:
    """Elements that none of the devices holds at both ends."""
    ends = [xs.Sharding(end, case.mesh, case.shape) for end in (case.src, case.dst)]
    grid = Grid.of(ends)
    met = np.zeros(grid.shape, bool)
    for device in devices:
        met |= grid.covered(ends[0], [device]) & grid.covered(ends[1], [device])
    return grid.volume(~met)


def nodes_are_aligned(mesh: xs.Mesh, node_devices: int) -> bool:
    """Whether every node is a whole block of the mesh: some trailing axes, and a part of one more."""
    reach = 1
    for n in reversed(mesh.sizes):
        if reach * n >= node_devices:
            return reach * n % node_devices == 0 and node_devices % reach == 0
        reach *= n
    return False


def node_elements(case: Case, node_devices: int) -> NDArray[np.int64]:
    """Elements that must enter every node: all that its devices need together and do not have together.

    For contiguous cuts without partial sums.
    """
    ends = [xs.Sharding(end, case.mesh, case.shape) for end in (case.src, case.dst)]
    grid, needed = Grid.of(ends), []
    for first in range(0, case.mesh.n_devices, node_devices):
        devices = range(first, min(first + node_devices, case.mesh.n_devices))
        have, want = (grid.covered(end, devices) for end in ends)
        needed.append(grid.volume(want & ~have))
    return np.array(needed)


@dataclass(frozen=True)
class Grid:
    """An array cut wherever a block of some sharding begins or ends: elements of a cell share their fate."""

    marks: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, shardings: Sequence[xs.Sharding]) -> Grid:
        """The grid of several shardings of one shape, contiguous ones."""
        return cls(tuple(_marks(d, shardings) for d in range(len(shardings[0].shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(marks) - 1 for marks in self.marks)

    def covered(self, sharding: xs.Sharding, devices: Iterable[int]) -> NDArray[np.bool_]:
        """Which cells the devices hold together."""
        covered = np.zeros(self.shape, bool)
        for device in devices:
            held = [sharding.held(d, device) for d in range(len(self.marks))]
            if all(held):
                box = tuple(
                    slice(*np.searchsorted(marks, (runs[0].start, runs[0].start + runs[0].length)))
                    for marks, runs in zip(self.marks, held, strict=True)
                )
                covered[box] = True
        return covered

    def volume(self, cells: NDArray[np.bool_]) -> int:
        """Elements of the cells."""
        total = cells.astype(np.int64)
        for marks in reversed(self.marks):
            total = total @ np.diff(marks)
        return int(total)


def _marks(dim: int, shardings: Sequence[xs.Sharding]) -> NDArray[np.int64]:
    runs = itertools.chain.from_iterable(held for s in shardings for held in s.holders(dim))
    return np.unique([at for run in runs for at in (run.start, run.start + run.length)])
