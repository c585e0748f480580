"""The traffic of a step on the busiest device, and collectives as one phase for every kind of link."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from xshard.layout import Mesh


class LinkSpan(NamedTuple):
    """The positions along an axis that one kind of link connects: all, or some if nodes end half-way."""

    axis: str
    size: int  # number of positions
    level: int = 0  # speed of the link, 0 for the slowest
    stride: int = 1  # distance of the positions along the axis
    origin: str = ""  # the axis that contains the sub-axis `axis`


LinkSpans = tuple[LinkSpan, ...]  # usually of all axes of a mesh, the slowest first


class Hop(NamedTuple):
    """One phase of a step: elements and messages received over links of one level, along one axis."""

    axis: str
    received: int  # elements that the busiest device receives
    messages: int
    level: int = 0
    slack: int = 0  # how many fewer its neighbors, within links of this level, receive on average


class Traffic(NamedTuple):
    """The demands of a step on its busiest device, in elements.

    received: elements that arrive from other devices.
    copied: elements packed or unpacked locally, in addition to those that the collective moves.
    kept: elements of `copied` that a runtime saves if it puts the device's own rows into place directly.
    hops: the phases over links; none for a local step.
    rounds: how many messages follow each other, if the devices of each level of links are one ring.
    """

    received: int = 0
    copied: int = 0
    hops: tuple[Hop, ...] = ()
    kept: int = 0
    rounds: int = 0


class PairTraffic(NamedTuple):
    """Elements that one device sends another in a step; an addend counts as often as it is sent."""

    src: int
    dst: int
    elements: int


def pairs_in_groups(mesh: Mesh, axes: Sequence[str], elements: int) -> tuple[PairTraffic, ...]:
    """Every device of a group along `axes` sends as many elements to every other."""
    pairs = (pair for group in mesh.groups(axes) for pair in itertools.permutations(group, 2))
    return tuple(PairTraffic(src, dst, elements) for src, dst in pairs)


def slowest_first(mesh: Mesh, axes: Sequence[str], spans: LinkSpans) -> LinkSpans:
    """The spans of these axes, the slowest first."""
    if not spans:
        return tuple(LinkSpan(a, mesh.size(a)) for a in axes)
    return tuple(span for span in spans if span.axis in axes)


def rings(group: LinkSpans) -> LinkSpans:
    """The spans, with the sub-axes of one axis on one level merged: together they are one ring."""
    if not any(span.origin for span in group):
        return group
    merged = []
    for _, alike in groupby(group, key=lambda span: (span.origin or span.axis, span.level)):
        spans = tuple(alike)
        merged.append(spans[0]._replace(size=math.prod(span.size for span in spans)))
    return tuple(merged)


@dataclass(frozen=True)
class Phases:
    """The groups of a collective along axes; levels: the spans of each kind of link, the fastest first."""

    mesh: Mesh
    axes: tuple[str, ...]
    levels: tuple[LinkSpans, ...]
    numbers: Sequence[int]

    @classmethod
    def along(
        cls, mesh: Mesh, axes: Sequence[str], spans: LinkSpans, numbers: Sequence[int]
    ) -> Phases:
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
        return tuple(
            d for near in self.members(device, level) for d in self.reached(near, level + 1)
        )

    def _place(self, device: int, left_out: int) -> list[int]:
        """Coordinates of a device along the spans of all levels but one."""
        spans = (s for level, spans in enumerate(self.levels) if level != left_out for s in spans)
        return [self.mesh.index(device, (s.axis,)) // s.stride % s.size for s in spans]
