"""Lower bounds for any plan, beyond the bound that every plan carries (`Plan.bytes_lower_bound`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import xshard as xs
from benchmarks.cases import Case
from xshard.cost import bounds


def total_elements(case: Case) -> int:
    """Elements that all devices together must receive."""
    src, dst = (xs.Sharding(end, case.mesh, case.shape) for end in (case.src, case.dst))
    return bounds.total_elements(src.with_layout(src.normal), dst.with_layout(dst.normal))


def node_elements(case: Case, node_devices: int) -> NDArray[np.int64]:
    """Elements that must enter every node, because its devices need them and do not have them.

    For contiguous cuts without partial sums.
    """
    shardings = [xs.Sharding(layout, case.mesh, case.shape) for layout in (case.src, case.dst)]
    grid, needed = Grid.of(shardings), []
    for first in range(0, case.mesh.n_devices, node_devices):
        devices = range(first, min(first + node_devices, case.mesh.n_devices))
        have, want = (grid.covered(sharding, devices) for sharding in shardings)
        needed.append(grid.volume(want & ~have))
    return np.array(needed)


@dataclass(frozen=True)
class Grid:
    """An array cut wherever a block of some sharding begins or ends: the elements of a cell move together."""

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
    return np.unique([mark for run in runs for mark in (run.start, run.start + run.length)])
