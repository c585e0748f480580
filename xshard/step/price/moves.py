"""Moves between layouts: bounds for all pairs at once, the planner's price for few; moves of one array."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from xshard.cost.model import LOCAL, Link, Profile
from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.plans.plan import find_plan
from xshard.search.request import Request
from xshard.step.price.options import Flags, Floats, Ints, Placements, product_over, without_copies
from xshard.step.record.arrays import COPY, REPLICAS, SUM, layout_of

Ends = tuple[
    tuple[int, tuple[int, int]], ...
]  # an axis, and what it does before a move and after it
Line = tuple[int, float, int, float]  # elements and seconds at both ends of a range
LEADING = 64  # rows of the dims before those that a move is about
OCTAVES = 3  # one plan, and one line of prices, from 2**0 to 2**3 elements, to 2**6, ...


def dual(ways: Placements) -> Placements:
    """The layouts of cotangents."""
    return np.where(ways == SUM, COPY, np.where(ways == COPY, SUM, ways))


@dataclass(eq=False)
class MovePrices:
    """The seconds of moves on one mesh."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _tables: dict[tuple[object, ...], tuple[Floats, Flags]] = field(default_factory=dict)

    def price(
        self, src: Iterable[int], dst: Iterable[int], lengths: Sequence[int], share: float = 1.0
    ) -> float:
        """Seconds of a move of an array of global lengths, by the planner. share: its part of the move."""
        pairs = [tuple(map(int, without_copies(list(ways)))) for ways in (src, dst)]
        endpoints = list(zip(*pairs, strict=True))
        if pairs[0] == pairs[1]:
            return 0.0
        apart = {a for a, (here, there) in enumerate(endpoints) if here == there == SUM}
        for d in range(
            len(lengths)
        ):  # nothing moves along the outermost axes that shard a dim at both ends
            touching = [a for a, pair in enumerate(endpoints) if d in pair]
            differ = next(
                (i for i, a in enumerate(touching) if endpoints[a] != (d, d)), len(touching)
            )
            apart |= set(touching[:differ])
        blocks = math.prod(self.mesh.sizes[a] for a in apart if endpoints[a][0] >= 0)
        elements = math.prod(lengths) / share / blocks
        left = {a: pair for a, pair in enumerate(endpoints) if a not in apart}
        moving = {a for a, pair in left.items() if pair != (REPLICAS, REPLICAS)}
        axes, _, _, far = self._levels
        if moving & {a for a, is_far in zip(axes, far, strict=True) if is_far}:
            # Devices with replicas help where a node has several links to others.
            moving |= {a for a, is_far in zip(axes, far, strict=True) if not is_far}
        left = {a: pair for a, pair in left.items() if a in moving}
        before = range(min((d for pair in left.values() for d in pair if d >= 0), default=0))
        octave = max(0, int(math.log2(max(elements, 1))) // OCTAVES * OCTAVES)
        move = tuple(left.items()), share == 1 and all(lengths[d] == 1 for d in before), octave
        n, low, m, high = _line(self.mesh, self.dtype, self.profile, *move)
        return share * (low + (high - low) * max(elements - n, 0) / (m - n))

    def table(
        self, src: Placements, dst: Placements, shape: tuple[int, ...], is_linear: bool, share: float
    ) -> tuple[Floats, Flags]:
        """Seconds of an array's moves forward and backward, and which are planned; others are bounds.

        All moves between the same layouts have one table, whatever the step and the number of micro-batches.
        """
        key = (src.tobytes(), dst.tobytes(), shape, is_linear, share)
        elements = math.prod(shape)
        if key not in self._tables:
            start, each = self.bounds(src, dst)
            back, each_back = self.bounds(dual(dst), dual(src))
            forward = share * start + each * elements
            backward = share * back + each_back * elements
            seconds = np.stack([forward, backward.T * is_linear])
            self._tables[key] = seconds, np.zeros(start.shape, bool)
        return self._tables[key]

    def bounds(self, src: Placements, dst: Placements) -> tuple[Floats, Floats]:
        """For all pairs of layouts the fewest seconds of a move: at once, and per global element.

        A device receives what it needs and lacks, or all addends but one in the mean; a part of that comes
        from other nodes, through the links of all devices of its node.
        """
        axes, sizes, links, far = self._levels
        src, dst = (without_copies(ways)[:, axes] for ways in (src, dst))
        received = _received(src, dst, sizes)
        across = np.zeros((len(src), len(dst)))
        if far.any():
            here, there = (np.where(far, ways, REPLICAS) for ways in (src, dst))
            across = _received(here, there, np.where(far, sizes, 1)) / np.prod(sizes[~far])
        near = links[int(far.argmin())]
        slow = max((x for x in links if x != near), key=lambda link: link.bytes_per_s, default=near)
        per_byte = across / slow.bytes_per_s + np.maximum(received - across, 0) / near.bytes_per_s
        launch = min((s for kind, s in self.profile.launch_s if kind not in LOCAL), default=0.0)
        return np.where(received > 0, launch + near.latency_s, 0.0), per_byte * itemsize(self.dtype)

    @cached_property
    def far(self) -> Flags:
        """Which axes are over slower links than others."""
        axes, *_, far = self._levels
        return np.isin(range(len(self.mesh.axes)), np.array(axes)[far])

    @cached_property
    def _levels(self) -> tuple[list[int], Floats, list[Link], Flags]:
        """For every axis, in parts if some of its devices share a node: number, size, link, is it slow."""
        fabric = self.profile.fabric(self.mesh)
        axes = self.mesh.axes
        spans = sorted(fabric.spans, key=lambda span: (axes.index(span.axis), -span.stride))
        links = [fabric.links[span.level] for span in spans]
        fastest = max(link.bytes_per_s for link in links)
        far = np.array([link.bytes_per_s < fastest for link in links])
        sizes = np.array([span.size for span in spans], dtype=float)
        return [axes.index(span.axis) for span in spans], sizes, links, far


@lru_cache(maxsize=2**14)
def _line(mesh: Mesh, dtype: str, profile: Profile, ends: Ends, first: bool, octave: int) -> Line:
    """A move that only some axes take part in. first: nothing but dims of length 1 is before its dims."""
    axes = tuple(mesh.axes[a] for a, _ in ends)
    part = Mesh({axis: mesh.size(axis) for axis in axes})
    sizes = [mesh.sizes[a] for a, _ in ends]
    touched = sorted({d for _, pair in ends for d in pair if d >= 0})
    shape = [math.prod(n for n, (_, e) in zip(sizes, ends, strict=True) if d in e) for d in touched]
    shape = [*([] if first else [LEADING]), *shape]
    place = {d: i + (not first) for i, d in enumerate(touched)}
    names = [f"d{i}" for i in range(len(shape) + 1)]
    src, dst = (
        layout_of([place.get(pair[i], pair[i]) for _, pair in ends], names, axes) for i in (0, 1)
    )
    each = math.prod(shape) * part.n_devices  # so many rows of another dim fit all axes
    rows = (max(1, 2 ** (octave + i) // each) * part.n_devices for i in (0, OCTAVES // 2, OCTAVES))
    small, middle, large = ((*shape, n) for n in rows)
    plan = find_plan(Request.on(part, src, dst, middle, dtype, profile.along(axes, mesh)))
    low, high = (replace(plan, shape=each).cost for each in (small, large))
    n = math.prod(small)
    return n, low, max(math.prod(large), n + 1), high


def _received(src: Placements, dst: Placements, sizes: Floats) -> Floats:
    """The share of an array that the busiest device receives at least."""
    overlap = np.ones((len(src), len(dst)))
    for d in range(max(src.max(initial=0), dst.max(initial=0)) + 1):
        here = (src == d)[:, None]
        there = (dst == d)[None]
        longer = np.maximum(product_over(here, sizes), product_over(there, sizes))
        only_here = here & ~there
        only_there = there & ~here
        one_alone = np.logical_or.accumulate(only_here | only_there, -1)  # at this axis or before
        apart = (here & there & one_alone).any(-1) | (only_here.any(-1) & only_there.any(-1))
        overlap *= np.where(apart, 0, 1 / longer)
    before = (src == SUM)[:, None]
    after = (dst == SUM)[None]
    addends = product_over(before & ~after, sizes)
    copies = product_over(dst == REPLICAS, sizes)[None]
    summed = product_over(before & after, sizes) * (addends - 1 + copies - 1) / sizes.prod()
    begun = product_over(after & ~before, sizes)
    block = 1 / product_over(dst >= 0, sizes)[None]
    held = 1 / product_over(src >= 0, sizes)[:, None]
    moved = np.where(begun > 1, np.maximum(block / begun - held, 0), block - overlap)
    return np.where(addends > 1, summed, moved)


@dataclass(eq=False)
class Edge:
    """The moves of an array from the options of one node to the options of another.

    indices: for every option of each node its row, or its column. layouts: for rows and columns. moved: the
    parts of the cost with seconds; shares: how much they get of the forward and of the backward ones, by
    rows. more: tables of other parts. share: its part of the elements that move in one collective. A
    linear move has a backward pass. place: the module or array at which a rule can say it, as it enters or
    leaves; "": only equal layouts, others are `banned`.
    """

    nodes: tuple[int, int]
    indices: tuple[Ints, Ints]
    layouts: tuple[Placements, Placements]
    shape: tuple[int, ...]
    moves: MovePrices
    moved: InitVar[tuple[int, int]]
    shares: Floats
    more: InitVar[Mapping[int, Floats]]
    share: float = 1.0
    is_linear: bool = True
    place: str = ""
    enters: bool = False
    parts: Ints = field(init=False)
    banned: Flags = field(init=False)

    def __post_init__(self, moved: tuple[int, int], more: Mapping[int, Floats]) -> None:
        src, dst = self.layouts
        self._seconds, self._planned = self.moves.table(
            src, dst, self.shape, self.is_linear, self.share
        )
        self.parts = np.array([*more, *moved])
        self._more = np.array([*more.values()]).reshape(-1, *self._planned.shape)
        plain = dst if self.is_linear else without_copies(dst)
        self.banned = (src[:, None] != plain).any(-1) & (not self.place)

    @property
    def used(self) -> Placements:
        """The layout in which each option of the second node takes the array."""
        return self.layouts[1][self.indices[1]]

    def of(self, i: Ints, j: Ints) -> Floats:
        """The parts of moves from rows to columns."""
        return np.concatenate(
            [self._more[:, i, j], (self.shares[:, :, i] * self._seconds[:, i, j]).sum(1)]
        )

    def plan(self, i: int, j: int) -> float:
        """Plan the move from option i to option j; by how many seconds it is more than was known."""
        i = int(self.indices[0][i])
        j = int(self.indices[1][j])
        if self._planned[i, j] or self.banned[i, j]:
            return 0.0
        src = self.layouts[0][i]
        dst = self.layouts[1][j]
        forward = self.moves.price(src, dst, self.shape, self.share)
        back = (
            self.moves.price(dual(dst), dual(src), self.shape, self.share)
            if self.is_linear
            else 0.0
        )
        late = forward + back - self._seconds[:, i, j].sum()
        self._seconds[:, i, j] = (forward, back)
        self._planned[i, j] = True
        return float(late)

    def weighed(self, weights: Floats, i: Ints, j: Ints) -> Floats:
        """The weighted sum of all parts, for every pair of some options; infinite where nothing can move."""
        more, moved = np.split(weights[self.parts], [len(self._more)])
        total = ((moved @ self.shares.reshape(2, -1)).reshape(2, -1, 1) * self._seconds).sum(0)
        total += (more @ self._more.reshape(len(more), total.size)).reshape(total.shape)
        return np.where(self.banned, np.inf, total)[self.indices[0][i]][:, self.indices[1][j]]
