"""What moves cost, as cheaply as the question allows: a bound from numbers alone, or the plan's own price.

Decides nothing about contractions. A move is between two layouts of one array on one mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from xshard import dtypes
from xshard.cost.model import Profile
from xshard.layout import Layout, Mesh
from xshard.layout.partition import block_length
from xshard.plans.plan import Plan, find_plan
from xshard.search.request import Request


class Move(NamedTuple):
    """An array of a shape is to go from one layout to another."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]

    @property
    def dual(self) -> Move:
        """The move of the gradient."""
        return Move(self.dst.dual, self.src.dual, self.shape)


@dataclass(frozen=True)
class Prices:
    """The prices of moves on one mesh, each found once."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _plans: dict[Move, Plan] = field(default_factory=dict)
    _bounds: dict[Move, float] = field(default_factory=dict)

    def plan(self, move: Move) -> Plan:
        """The cheapest plan of a move."""
        found = self._plans.get(move)
        if found is None:
            devices = range(self.mesh.n_devices)
            ends = move.src, move.dst, self.mesh, self.mesh, devices, devices
            found = self._plans[move] = find_plan(Request(*ends, move.shape, self.dtype, self.profile))
        return found

    def is_known(self, move: Move) -> bool:
        """Whether the price of a move is known, not only a bound."""
        return move in self._plans

    def least(self, move: Move) -> float:
        """Seconds that a move takes, if they are known, else the least that it may take."""
        if move in self._plans:
            return self._plans[move].cost
        found = self._bounds.get(move)
        if found is None:
            received = self._received(move)
            found = received * self._second_per_element + self._start if received else 0.0
            self._bounds[move] = found
        return found

    def elements(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Of the largest block."""
        return math.prod(
            block_length(dim, length, self.mesh.sizes_of(dim.axes))[0]
            for dim, length in zip(layout.dims, shape, strict=True)
        )

    def _received(self, move: Move) -> int:
        """Elements that the busiest device must receive, at least."""
        src, dst, shape = move
        old, new = src.tagged("sum", "mean"), dst.tagged("sum", "mean")
        mesh, ended = self.mesh, [a for a in old if a not in new]
        if ended:
            # Each of n addends but one is sent, and the sum to each of m copies but one.
            kept = mesh.size(*(a for a in new if a in old))
            cut = [a for dim in dst.dims for a in dim.axes]
            copies = mesh.n_devices // mesh.size(*cut, *new)
            total = math.prod(shape) * (mesh.size(*ended) + copies - 2) * kept
            return -(-total // mesh.n_devices)
        if any(a not in old for a in new):
            return 0
        needed = held = 1
        for before, after, length in zip(src.dims, dst.dims, shape, strict=True):
            rows = block_length(after, length, mesh.sizes_of(after.axes))[0]
            needed *= rows
            held *= min(rows, block_length(before, length, mesh.sizes_of(before.axes))[0])
        return needed - held

    @cached_property
    def _second_per_element(self) -> float:
        links = self.profile.fabric(self.mesh).links
        return dtypes.itemsize(self.dtype) / max((link.bytes_per_s for link in links), default=1.0)

    @cached_property
    def _start(self) -> float:
        """Seconds before the first byte of any move comes."""
        links = self.profile.fabric(self.mesh).links
        launch = min((s for _, s in self.profile.launch_s), default=0.0)
        return launch + min((link.latency_s for link in links), default=0.0)
