"""Links and exchanges between even shards, shared by all searches for one shape on one mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

from xshard.cost.model import Fabric, Profile
from xshard.layout import Mesh, Sharding
from xshard.notation.parser import Shard
from xshard.steps import Traffic
from xshard.steps.exchange.even_traffic import LinkCuts, digit_traffic, node_lack
from xshard.steps.exchange.messages import MAX_PAIRED
from xshard.steps.exchange.sources import DimEnd
from xshard.steps.exchange.traffic import Received, SpanAxes, span_axes, spans_by_axis
from xshard.steps.traffic import LinkSpans

Cuts = tuple[tuple[int, ...], ...]  # per dim, the axes that shard it, outermost first


MAX_SHARDS = 4096  # shards that a grid numbers: documents have other lengths at every step of a training


class Shards:
    """The shards that searches on one mesh have met, by number; the first are the axes' own."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes = tuple(a for a in mesh.axes if mesh.size(a) > 1)
        self.known: list[Shard] = []
        self.axes_of: list[tuple[int, ...]] = []
        self.sizes: list[int] = []
        self._numbers: dict[Shard, int] = {}
        self._lock = Lock()  # threads share the planner's caches
        for axis in self.axes:
            self.number(Shard((axis,)))

    def number(self, shard: Shard) -> int:
        """The number of a shard, now and as long as this object lives."""
        if (number := self._numbers.get(shard)) is None:
            with self._lock:
                if shard in self._numbers:
                    return self._numbers[shard]
                self.known.append(shard)
                self.axes_of.append(tuple(self.axes.index(a) for a in shard.axes))
                self.sizes.append(self.mesh.size(*shard.axes))
                number = self._numbers[shard] = len(self.known) - 1
        return number


@dataclass(frozen=True)
class Tables:
    """Facts about states and moves, by the numbers of shards; `remaining`: by goal, then by state."""

    lengths: dict[Any, tuple[int, bool]] = field(default_factory=dict)
    blocks: dict[Any, int] = field(default_factory=dict)
    regular: dict[Any, bool] = field(default_factory=dict)
    shardings: dict[Any, Sharding] = field(default_factory=dict)
    received: dict[Any, Received] = field(default_factory=dict)
    dim_ends: dict[Any, DimEnd] = field(default_factory=dict)
    roles: dict[Any, dict[int, Any]] = field(default_factory=dict)
    costs: dict[Any, Any] = field(default_factory=dict)
    remaining: dict[Any, dict[Any, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """The axes of a mesh and the links along them, for arrays of one shape."""

    mesh: Mesh
    shape: tuple[int, ...]
    itemsize: int
    profile: Profile
    _exchanges: dict[tuple[Cuts, Cuts, tuple[int, ...]], Traffic | None] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], LinkSpans] = field(default_factory=dict)
    tables: Tables = field(default_factory=Tables)
    shards: Shards = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", Shards(self.mesh))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return self.shards.axes

    @cached_property
    def fabric(self) -> Fabric:
        return self.profile.fabric(self.mesh)

    @cached_property
    def nodes(self) -> int | None:
        """Devices of a node, if exchanges choose node-local senders."""
        splits = self.mesh.n_devices <= MAX_PAIRED and self.profile.splits_groups(self.mesh)
        return self.profile.node_devices if splits else None

    @cached_property
    def span_axes(self) -> SpanAxes:
        return span_axes(self.mesh, self.fabric.spans)

    @cached_property
    def _spans(self) -> tuple[LinkSpans, ...]:
        """The spans of every axis, the outermost first."""
        spans = spans_by_axis(self.mesh, self.fabric.spans)
        return tuple(spans[axis] for axis in self.axes)

    def group(self, axes: Iterable[int]) -> LinkSpans:
        """The spans of some axes, the slowest first."""
        key = tuple(axes)
        if (spans := self._groups.get(key)) is None:
            names = {self.axes[a] for a in key}
            spans = self._groups[key] = tuple(span for span in self.fabric.spans if span.axis in names)
        return spans

    def exchange(self, before: Cuts, after: Cuts, ended: tuple[int, ...]) -> Traffic | None:
        """Traffic of an exchange that ends sums over some axes; None if shards do not divide each other."""
        key = before, after, ended
        if key not in self._exchanges:
            addends = [span for a in ended for span in self._spans[a]]
            cuts = self._link_cuts(before), self._link_cuts(after)
            self._exchanges[key] = digit_traffic(self.shape, *cuts, addends)
        return self._exchanges[key]

    def crossing(self, before: Cuts, after: Cuts) -> float:
        """Fewest elements that some device must receive over the slowest links."""
        near = math.prod(span.size for span in self.fabric.spans if span.level)
        return node_lack(self.shape, self._link_cuts(before), self._link_cuts(after)) / near

    def _link_cuts(self, cuts: Cuts) -> LinkCuts:
        return tuple([tuple([span for a in cut for span in self._spans[a]]) for cut in cuts])


def grid(mesh: Mesh, shape: tuple[int, ...], itemsize: int, profile: Profile) -> Grid:
    """The one grid of a shape on a mesh; a new one once it has numbered too many shards."""
    cached = _grid(mesh, shape, itemsize, profile)
    if len(cached.shards.known) > MAX_SHARDS:
        _grid.cache_clear()
        cached = _grid(mesh, shape, itemsize, profile)
    return cached


_grid = lru_cache(maxsize=1024)(Grid)
