"""Prices of moves by the thousand: a bound for all pairs of layouts at once, the planner's price for a few.

A layout here is a row of numbers, one per mesh axis: the dim that the axis shards, or a tag (`op`). Several axes
shard a dim in the order of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from xshard.cost.model import LOCAL, Link, Profile
from xshard.dtypes import itemsize
from xshard.layout import Layout, Mesh
from xshard.notation.parser import Dim, Shard
from xshard.plans.plan import find_plan
from xshard.search.request import Request
from xshard.step.op import COPY, REPLICAS, SUM

Ways = NDArray[np.int64]  # [layouts, axes]
Floats = NDArray[np.float64]
LEADING = 64  # rows of the dims before those that a move is about
OCTAVES = 3  # prices are planned for 2**0, 2**3, 2**6, ... elements, and lines between


def dual(ways: Ways) -> Ways:
    """The layouts of cotangents."""
    return np.where(ways == SUM, COPY, np.where(ways == COPY, SUM, ways))


def layout_of(ways: Sequence[int], names: Sequence[str], axes: Sequence[str]) -> Layout:
    """One row as a layout of dims with these names."""
    pairs = list(zip(axes, ways, strict=True))
    dims = (Dim(n, tuple(Shard((a,)) for a, way in pairs if way == d)) for d, n in enumerate(names))
    tags = ((kind, (a,)) for a, way in pairs for tag, kind in ((SUM, "sum"), (COPY, "copy")) if way == tag)
    return Layout(tuple(dims), tuple(tags))


@dataclass(eq=False)
class Moves:
    """The seconds of moves on one mesh, each planned once."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _known: dict[tuple[object, ...], tuple[int, float]] = field(default_factory=dict)

    def price(self, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]) -> float:
        """Seconds of a move of an array of global lengths, by the planner."""
        pairs = [tuple(REPLICAS if way == COPY else int(way) for way in ways) for ways in (src, dst)]
        ends = list(zip(*pairs, strict=True))
        if pairs[0] == pairs[1]:
            return 0.0
        apart = {a for a, (here, there) in enumerate(ends) if here == there == SUM}
        for d in range(
            len(lengths)
        ):  # outermost axes that shard a dim at both ends: nothing moves along them
            touching = [a for a, pair in enumerate(ends) if d in pair]
            differ = next((i for i, a in enumerate(touching) if ends[a] != (d, d)), len(touching))
            apart |= set(touching[:differ])
        elements = math.prod(lengths) / math.prod(self.mesh.sizes[a] for a in apart if ends[a][0] >= 0)
        left = {self.mesh.axes[a]: pair for a, pair in enumerate(ends) if a not in apart}
        low = max(0, int(math.log2(max(elements, 1))) // OCTAVES * OCTAVES)
        first = all(
            lengths[d] == 1 for d in range(min((d for e in left.values() for d in e if d >= 0), default=0))
        )
        (n, a), (m, b) = (self._planned(left, first, octave) for octave in (low, low + OCTAVES))
        return a + (b - a) * max(elements - n, 0) / (m - n)

    def _planned(self, ends: dict[str, tuple[int, int]], first: bool, octave: int) -> tuple[int, float]:
        """Elements and seconds of the move that only these axes take part in."""
        key = (*ends.items(), first, octave)
        if key not in self._known:
            axes = tuple(ends)
            mesh = Mesh({axis: self.mesh.size(axis) for axis in axes})
            touched = sorted({d for pair in ends.values() for d in pair if d >= 0})
            shape = [math.prod(mesh.size(a) for a, e in ends.items() if d in e) for d in touched]
            shape = [*([] if first else [LEADING]), *shape]
            shape.append(max(1, 2**octave // math.prod(shape)))
            place = {d: i + (not first) for i, d in enumerate(touched)}
            names = [f"d{i}" for i in range(len(shape))]
            src, dst = (
                layout_of([place.get(e[i], e[i]) for e in ends.values()], names, axes) for i in (0, 1)
            )
            machine, devices = self.profile.along(axes, self.mesh), range(mesh.n_devices)
            request = Request(src, dst, mesh, mesh, devices, devices, tuple(shape), self.dtype, machine)
            self._known[key] = math.prod(shape), find_plan(request).cost
        return self._known[key]

    def bounds(self, src: Ways, dst: Ways) -> tuple[Floats, Floats]:
        """For all pairs of layouts the fewest seconds of a move: at once, and per global element.

        A device receives what it needs and lacks, or all addends but one in the mean; a part of that comes from
        other nodes, through the links of all devices of its node.
        """
        src, dst = (np.where(ways == COPY, REPLICAS, ways) for ways in (src, dst))
        far = np.array([link != self._near for link in self._links])
        received, across = self._received(src, dst), np.zeros((len(src), len(dst)))
        if far.any() and not far.all():
            across = self._received(np.where(far, src, REPLICAS), np.where(far, dst, REPLICAS))
            across /= math.prod(n for n, is_far in zip(self.mesh.sizes, far, strict=True) if not is_far)
        elif far.all():
            across = received
        slow = max(
            (link for link in self._links if link != self._near),
            key=lambda link: link.bytes_per_s,
            default=self._near,
        )
        per_byte = across / slow.bytes_per_s + np.maximum(received - across, 0) / self._near.bytes_per_s
        launch = min((s for kind, s in self.profile.launch_s if kind not in LOCAL), default=0.0)
        return (received > 0) * (launch + self._near.latency_s), per_byte * itemsize(self.dtype)

    @cached_property
    def _links(self) -> list[Link]:
        """The fastest link along each axis."""
        fabric = self.profile.fabric(self.mesh)
        levels = {span.axis: span.level for span in fabric.spans}  # the slowest span comes first
        return [fabric.links[levels[axis]] for axis in self.mesh.axes]

    @cached_property
    def _near(self) -> Link:
        return max([self.profile.default, *self._links], key=lambda link: link.bytes_per_s)

    def _received(self, src: Ways, dst: Ways) -> Floats:
        """The share of an array that the busiest device receives at least."""
        axes, sizes = range(src.shape[1]), np.array(self.mesh.sizes, dtype=float)
        overlap = np.ones((len(src), len(dst)))
        for d in range(max(src.max(initial=0), dst.max(initial=0)) + 1):
            here, there = (src == d)[:, None], (dst == d)[None]
            longer = np.maximum(np.prod(np.where(here, sizes, 1), -1), np.prod(np.where(there, sizes, 1), -1))
            only_here, only_there, diverge = (np.zeros(overlap.shape, bool) for _ in range(3))
            for a in axes:
                one, other = here[..., a], there[..., a]
                diverge |= one & other & (only_here | only_there)
                only_here |= one & ~other
                only_there |= other & ~one
            overlap *= np.where(diverge | (only_here & only_there), 0, 1 / longer)
        block = np.prod(np.where(dst >= 0, 1 / sizes, 1), -1)[None]
        reduced = (src == SUM)[:, None] & (dst != SUM)[None]
        addends = np.prod(np.where(reduced, sizes, 1), -1)
        groups = np.prod(np.where((src == SUM)[:, None] & ~reduced, sizes, 1), -1)
        copies = np.prod(np.where(dst == REPLICAS, sizes, 1), -1)[None]
        summed = groups * (addends - 1 + copies - 1) / sizes.prod()
        begun = np.prod(np.where((dst == SUM)[None] & (src != SUM)[:, None], sizes, 1), -1)
        held = np.prod(np.where(src >= 0, 1 / sizes, 1), -1)[:, None]
        moved = np.where(begun > 1, np.maximum(block / begun - held, 0), block - overlap)
        return np.where(addends > 1, summed, moved)
