"""TODO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from xshard.layout.mesh import Mesh


class LinkSpan(NamedTuple):
    """What one kind of link connects along an axis: all of it, or a part where nodes end half-way.

    level: how fast the link is, 0 for the slowest. size: positions along the lane. stride: how far
    apart they are along the axis. whole: the axis that this one is a part of, if it is one.
    """

    axis: str
    size: int
    level: int = 0
    stride: int = 1
    whole: str = ""


LinkSpans = tuple[LinkSpan, ...]  # of all axes of a mesh, the slowest first


class Hop(NamedTuple):
    """One phase of a step: elements received and latencies paid over the links of a level, along an axis."""

    axis: str
    received: int
    messages: int
    level: int = 0


@dataclass(frozen=True)
class Traffic:
    """What a step asks of the machine, in elements, for its busiest device.

    received: elements that arrive from other devices.
    copied: elements packed or unpacked locally, beyond what the collective itself moves.
    kept: how many fewer these are where what a device has already is put into place at once.
    hops: what travels over which axis; none for a local step.
    """

    received: int = 0
    copied: int = 0
    hops: tuple[Hop, ...] = ()
    kept: int = 0


def slow_first(mesh: Mesh, axes: Sequence[str], lanes: LinkSpans) -> LinkSpans:
    """The lanes of some axes, the slowest first."""
    if not lanes:
        return tuple(LinkSpan(a, mesh.size(a)) for a in axes)
    return tuple(lane for lane in lanes if lane.axis in axes)


def rings(group: LinkSpans) -> LinkSpans:
    """The lanes, parts of one axis on one level taken together: they are one ring, as the whole axis is."""
    if not any(lane.whole for lane in group):
        return group
    found = []
    for _, alike in groupby(group, key=lambda lane: (lane.whole or lane.axis, lane.level)):
        lanes = tuple(alike)
        found.append(lanes[0]._replace(size=math.prod(lane.size for lane in lanes)))
    return tuple(found)
