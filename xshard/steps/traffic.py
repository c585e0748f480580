"""The traffic of a step on the busiest device, and collectives as one phase for each kind of link.

All counts are elements and messages. Seconds are the business of `xshard.cost`, which knows the
links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from xshard.layout import Mesh


class LinkSpan(NamedTuple):
    """The positions along a mesh axis that one kind of link connects.

    They are all, or some if nodes end half-way.

    Axis x of 8 devices, 4 in a node -> `LinkSpan("x", 2, level=0, stride=4)` between nodes, and
    `LinkSpan("x", 4, level=1)` inside them.
    """

    axis: str
    size: int  # number of positions
    level: int = 0  # speed of the link, 0 for the slowest
    stride: int = 1  # distance of the positions along the axis
    origin: str = ""  # the axis that contains the sub-axis `axis`


LinkSpans = tuple[LinkSpan, ...]  # usually of all axes of a mesh, the slowest first


class Hop(NamedTuple):
    """One phase of a step: what arrives over links of one level, along one axis."""

    axis: str
    received: int  # elements that the busiest device receives
    messages: int
    level: int = 0
    # How many elements fewer its neighbors, within links of this level, receive on average.
    mean_shortfall: int = 0


class Traffic(NamedTuple):
    """The demands of a step on its busiest device, in elements.

    received: elements that arrive from other devices.
    copied: elements packed or unpacked locally, in addition to those that the collective moves.
    saved_copies: elements of `copied` that a runtime saves if it puts the device's own rows into place
        directly.
    hops: the phases over links; none for a local step.
    ring_rounds: how many messages follow each other, if the devices of each level of links are one ring.
    """

    received: int = 0
    copied: int = 0
    hops: tuple[Hop, ...] = ()
    saved_copies: int = 0
    ring_rounds: int = 0


class PairTraffic(NamedTuple):
    """Elements that one device sends another in a step; an addend counts as often as it is sent."""

    src: int
    dst: int
    elements: int


def pairs_in_groups(mesh: Mesh, axes: Sequence[str], elements: int) -> tuple[PairTraffic, ...]:
    """List the pairs of a collective in which each member sends `elements` to each other one."""
    device_pairs = []
    for group in mesh.groups(axes):
        for src, dst in itertools.permutations(group, 2):
            device_pairs.append(PairTraffic(src, dst, elements))
    return tuple(device_pairs)


def slowest_first(mesh: Mesh, axes: Sequence[str], spans: LinkSpans) -> LinkSpans:
    """Select the spans of some axes, slowest links first; without spans, each axis is one span."""
    if not spans:
        return tuple(LinkSpan(axis, mesh.size(axis)) for axis in axes)
    return tuple(span for span in spans if span.axis in axes)


def rings(group: LinkSpans) -> LinkSpans:
    """Merge the sub-axes of one axis on one level, which together are one ring."""
    if not any(span.origin for span in group):
        return group
    merged = []
    for _, sub_axes in groupby(group, key=lambda span: (span.origin or span.axis, span.level)):
        spans = tuple(sub_axes)
        merged.append(spans[0]._replace(size=math.prod(span.size for span in spans)))
    return tuple(merged)


def ring_rounds(group: LinkSpans) -> int:
    """Count the rounds of a gather in which the devices of each level form one ring.

    In each round a device passes on what it has received: n - 1 rounds among n devices of a level.
    """
    rounds = 0
    for _, spans in groupby(group, key=lambda span: span.level):
        rounds += math.prod(span.size for span in spans) - 1
    return rounds


@dataclass(frozen=True)
class Phases:
    """A collective over some axes as one collective per kind of link, each over smaller groups.

    mesh: The mesh of all devices.
    axes: The axes over which the whole collective runs.
    levels: The spans of each kind of link, the fastest kind first: `LinkSpan.level` counts the other way.
    block_indices: For each device, the position of its block among those of its group.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    levels: tuple[LinkSpans, ...]
    block_indices: Sequence[int]

    @classmethod
    def of_axes(
        cls, mesh: Mesh, axes: Sequence[str], spans: LinkSpans, block_indices: Sequence[int]
    ) -> Phases:
        """Divide a collective over `axes` by the links of the mesh, `spans`, the slowest first."""
        fastest_first = [span for span in reversed(spans) if span.axis in axes and span.size > 1]
        by_level = groupby(fastest_first, key=lambda span: span.level)
        return cls(mesh, tuple(axes), tuple(tuple(level) for _, level in by_level), block_indices)

    @property
    def has_several_speeds(self) -> bool:
        """Whether there are links of several speeds."""
        return len(self.levels) > 1

    def members(self, device: int, level: int) -> tuple[int, ...]:
        """List the devices that a device meets in the phase of a level, itself among them."""
        position = self._coords_on_other_levels(device, level)
        group = self.mesh.group(device, self.axes)
        members = [
            member for member in group if self._coords_on_other_levels(member, level) == position
        ]
        return tuple(sorted(members, key=self.block_indices.__getitem__))

    def devices_reached(self, device: int, level: int = 0) -> tuple[int, ...]:
        """List the devices that links of a level and slower ones reach, in the order of blocks."""
        if level == len(self.levels):
            return (device,)
        devices: list[int] = []
        for member in self.members(device, level):
            devices += self.devices_reached(member, level + 1)
        return tuple(devices)

    def _coords_on_other_levels(self, device: int, level: int) -> list[int]:
        """Return a device's coordinates along the spans of all levels except one."""
        position = []
        for other_level, spans in enumerate(self.levels):
            if other_level == level:
                continue
            for span in spans:
                coordinate = self.mesh.index(device, (span.axis,))
                position.append(coordinate // span.stride % span.size)
        return position
