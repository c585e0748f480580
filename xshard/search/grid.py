"""Links and exchanges between even shards, shared by all searches for one shape on one mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from xshard.cost.model import Fabric, Profile
from xshard.layout import Mesh
from xshard.steps import Traffic
from xshard.steps.exchange.even_traffic import LinkCuts, digit_traffic, node_lack
from xshard.steps.exchange.messages import MAX_PAIRED
from xshard.steps.exchange.traffic import spans_by_axis
from xshard.steps.traffic import LinkSpans

Cuts = tuple[tuple[int, ...], ...]  # per dim, the axes that shard it, outermost first


@dataclass(frozen=True)
class Tables:
    """Facts about states and moves, by the numbers of shards; `remaining`: by goal, then by state."""

    lengths: dict[Any, tuple[int, bool]] = field(default_factory=dict)
    blocks: dict[Any, int] = field(default_factory=dict)
    regular: dict[Any, bool] = field(default_factory=dict)
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

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.mesh.axes if self.mesh.size(a) > 1)

    @cached_property
    def fabric(self) -> Fabric:
        return self.profile.fabric(self.mesh)

    @cached_property
    def nodes(self) -> int | None:
        """Devices of a node, if exchanges choose node-local senders."""
        splits = self.mesh.n_devices <= MAX_PAIRED and self.profile.splits_groups(self.mesh)
        return self.profile.node_devices if splits else None

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


@lru_cache(maxsize=1024)
def grid(mesh: Mesh, shape: tuple[int, ...], itemsize: int, profile: Profile) -> Grid:
    """The one grid of a shape on a mesh."""
    return Grid(mesh, shape, itemsize, profile)
