"""Collectives over links of several speeds, as phases: one collective for every kind of link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from xshard.layout import Mesh
from xshard.steps.traffic import LinkSpans


@dataclass(frozen=True)
class Phases:
    """The groups of a collective along axes; levels: the spans of each kind of link, the fastest first."""

    mesh: Mesh
    axes: tuple[str, ...]
    levels: tuple[LinkSpans, ...]
    numbers: Sequence[int]

    @classmethod
    def along(cls, mesh: Mesh, axes: Sequence[str], spans: LinkSpans, numbers: Sequence[int]) -> Phases:
        """spans: the spans of all axes of the mesh, the slowest first."""
        known = reversed([span for span in spans if span.axis in axes and span.size > 1])
        levels = tuple(tuple(level) for _, level in groupby(known, key=lambda span: span.level))
        return cls(mesh, tuple(axes), levels, numbers)

    @property
    def are_several(self) -> bool:
        """Whether there are links of several speeds."""
        return len(self.levels) > 1

    def members(self, device: int, level: int) -> tuple[int, ...]:
        """The devices that a device meets in the phase of a level, itself among them."""
        here = self._place(device, level)
        alike = (d for d in self.mesh.group(device, self.axes) if self._place(d, level) == here)
        return tuple(sorted(alike, key=self.numbers.__getitem__))

    def reached(self, device: int, level: int = 0) -> tuple[int, ...]:
        """The devices reached by the links of a level and slower ones, in the order of their blocks."""
        if level == len(self.levels):
            return (device,)
        return tuple(d for near in self.members(device, level) for d in self.reached(near, level + 1))

    def _place(self, device: int, left_out: int) -> list[int]:
        """Coordinates of a device along the spans of all levels but one."""
        spans = (s for level, spans in enumerate(self.levels) if level != left_out for s in spans)
        return [self.mesh.index(device, (s.axis,)) // s.stride % s.size for s in spans]
