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

    level: how fast the link is, 0 for the slowest. size: positions along the span. stride: how far
    apart they are along the axis. origin: the axis that this one is a part of, if it is one.
    """

    axis: str
    size: int
    level: int = 0
    stride: int = 1
    origin: str = ""


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


def slowest_first(mesh: Mesh, axes: Sequence[str], spans: LinkSpans) -> LinkSpans:
    """The spans of some axes, the slowest first."""
    if not spans:
        return tuple(LinkSpan(a, mesh.size(a)) for a in axes)
    return tuple(span for span in spans if span.axis in axes)


def rings(group: LinkSpans) -> LinkSpans:
    """The spans, parts of one axis on one level taken together: they are one ring, as the whole axis is."""
    if not any(span.origin for span in group):
        return group
    found = []
    for _, alike in groupby(group, key=lambda span: (span.origin or span.axis, span.level)):
        spans = tuple(alike)
        found.append(spans[0]._replace(size=math.prod(span.size for span in spans)))
    return tuple(found)
