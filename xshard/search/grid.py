"""The states of arrays of one shape on one mesh, as small tuples of numbers that all searches share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from threading import Lock
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from xshard.caches import layout_cache
from xshard.cost.bounds import least_received
from xshard.cost.model import Fabric, Profile
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import factored
from xshard.layout.partition import block_length, misfit
from xshard.notation.parser import Dim, Shard
from xshard.steps import Traffic
from xshard.steps.exchange import traffic
from xshard.steps.exchange.even_traffic import LinkCuts, digit_traffic, node_lack
from xshard.steps.exchange.messages import MAX_PAIRED, node_local_traffic
from xshard.steps.exchange.sources import DimEnd, Received
from xshard.steps.traffic import LinkSpans

Cut = tuple[int, ...]  # the shards of one dim, outermost first, as indices into `Grid.shards`
P = ParamSpec("P")
R = TypeVar("R")


class State(NamedTuple):
    """A layout without copy tags: the shards of every dim, and the axes that hold addends."""

    cuts: tuple[Cut, ...]
    sums: tuple[int, ...]

    def with_cut(self, d: int, cut: Cut) -> State:
        """The state with other shards of one dim."""
        return State((*self.cuts[:d], cut, *self.cuts[d + 1 :]), self.sums)


class remembered(Generic[P, R]):  # noqa: N801, a decorator
    """A method that an object computes once for every argument."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self.method = method

    def __get__(self, owner: Any, _: type) -> Callable[P, R]:
        known = owner.__dict__[self.method.__name__] = cache(partial(self.method, owner))
        return known  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Grid:
    """A mesh, its links, and the shards that searches have met; the first are the axes' own."""

    mesh: Mesh
    shape: tuple[int, ...]
    itemsize: int
    profile: Profile
    shards: list[Shard] = field(default_factory=list)
    shard_axes: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # number of parts of every shard
    costs: dict[Any, Any] = field(default_factory=dict)  # of moves
    _lock: Lock = field(default_factory=Lock)  # threads share the planner's caches

    def __post_init__(self) -> None:
        for axis in self.axes:
            self.number(Shard((axis,)))

    @remembered
    def number(self, shard: Shard) -> int:
        """The number of a shard, now and as long as this object lives."""
        with self._lock:
            if shard not in self.shards:
                self.shard_axes.append(tuple(map(self.axes.index, shard.axes)))
                self.sizes.append(self.mesh.size(*shard.axes))
                self.shards.append(shard)
            return self.shards.index(shard)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return self.mesh.long_axes

    @cached_property
    def fabric(self) -> Fabric:
        return self.profile.fabric(self.mesh)

    @cached_property
    def nodes(self) -> int | None:
        """Devices of a node, if exchanges choose node-local senders."""
        splits = self.mesh.n_devices <= MAX_PAIRED and self.profile.splits_groups(self.mesh)
        return self.profile.node_devices if splits else None

    @remembered
    def group(self, axes: tuple[int, ...]) -> LinkSpans:
        """The spans of some axes, the slowest first."""
        names = set(self.names(axes))
        return tuple(span for span in self.fabric.spans if span.axis in names)

    def levels(self, axis: int) -> tuple[int, ...]:
        """How fast the links along an axis are, the slowest first, 0 for the slowest of the mesh."""
        return tuple(span.level for span in self.group((axis,)))

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.axes[a] for a in axes)

    def cut_by(self, cut: Iterable[int]) -> tuple[Shard, ...]:
        return tuple(self.shards[s] for s in cut)

    def axes_in(self, cut: Iterable[int]) -> tuple[int, ...]:
        return tuple([a for s in cut for a in self.shard_axes[s]])

    def parts(self, cut: Iterable[int]) -> int:
        """Into how many parts shards, or axes, cut together."""
        return math.prod([self.sizes[s] for s in cut])

    @remembered
    def free(self, state: State) -> tuple[int, ...]:
        """The axes that hold replicas."""
        used = {a for cut in state.cuts for a in self.axes_in(cut)} | set(state.sums)
        return tuple(a for a in range(len(self.axes)) if a not in used)

    def is_plain(self, cut: Iterable[int]) -> bool:
        """Whether every shard is contiguous, over one axis."""
        return max(cut, default=0) < len(self.axes)

    @remembered
    def length(self, dim: int, cut: Cut) -> tuple[int, bool]:
        """The longest block of a dim under its shards, and whether all are as long."""
        whole = self.shape[dim]
        parts = self.parts(cut)
        if self.is_plain(cut) and whole % parts == 0:
            return whole // parts, True
        d = Dim("", self.cut_by(cut))
        sizes = self.mesh.sizes_of(d.axes)
        longest, even = block_length(d, whole, sizes)
        # Documents and segments inside another shard would have other lengths: no step leads there.
        return longest, even and misfit(d, whole, sizes) is None

    def is_even(self, dim: int, cut: Cut) -> bool:
        return self.length(dim, cut)[1]

    @remembered
    def block(self, state: State) -> int:
        """Elements of the largest block."""
        return math.prod([self.length(d, cut)[0] for d, cut in enumerate(state.cuts)])

    @remembered
    def is_regular(self, state: State) -> bool:
        """Whether all shards are even, contiguous and over one axis."""
        return all(self.is_plain(cut) and self.is_even(d, cut) for d, cut in enumerate(state.cuts))

    @remembered
    def roles(self, state: State) -> dict[int, tuple[int, Cut]]:
        """Sharding axis -> its dim and the shards down to it."""
        shards = ((d, cut[: i + 1]) for d, cut in enumerate(state.cuts) for i in range(len(cut)))
        return {a: (d, cut) for d, cut in shards for a in self.shard_axes[cut[-1]]}

    @remembered
    def changing(self, state: State, after: State) -> list[int]:
        """The axes that shard otherwise afterwards."""
        old = self.roles(state)
        new = self.roles(after)
        return [a for a in {**old, **new} if old.get(a) != new.get(a)]

    def spare(self, state: State, goal: State, changing: Iterable[int]) -> list[int]:
        """Axes with replicas in both; unless a sum ends, on faster links than the slowest that changes."""
        slowest = min((self.levels(a)[0] for a in changing), default=0)
        free = set(self.free(goal))
        ended = set(state.sums) - set(goal.sums)
        return [
            a for a in self.free(state) if a in free and (ended or self.levels(a)[-1] > slowest)
        ]

    def least_received(self, state: State, goal: State) -> int:
        """Fewest elements that the busiest device must receive on any path from a state to a goal."""
        if state.sums != goal.sums:
            return self._least_reduced(state, goal)
        even = self._even_exchange(state, goal)
        # Uneven blocks would have to be compared one by one, too slow for a bound.
        return max(0, self.block(goal) - self.block(state)) if even is None else even.received

    def _least_reduced(self, state: State, goal: State, level: int | None = None) -> int:
        """Elements that devices must receive on average if a sum ends, over links of any level or of one: see
        `bounds.total_elements`. Devices that are connected by other links count as one.
        """
        axes = self.ended(state, goal), self.free(goal)
        spans = ([s.size for s in self.group(a) if level in (None, s.level)] for a in axes)
        ended, copies = map(math.prod, spans)
        stay = self.parts(a for a in goal.sums if a in state.sums)
        n = self.mesh.n_devices
        return least_received(math.prod(self.shape), n, ended, copies, stay) if ended > 1 else 0

    def ended(self, state: State, goal: State) -> tuple[int, ...]:
        """The axes along which a sum ends."""
        return tuple([a for a in state.sums if a not in goal.sums])

    def least_crossing(self, state: State, goal: State) -> float:
        """Fewest elements that some device must receive over the slowest links, on any path to a goal."""
        several = len(self.fabric.links) > 1 and self.nodes is None
        if (
            not several
            or state.sums != goal.sums
            or not (self.is_regular(state) and self.is_regular(goal))
        ):
            return 0.0
        near = math.prod(span.size for span in self.fabric.spans if span.level)
        return node_lack(self.shape, self._link_cuts(state), self._link_cuts(goal)) / near

    @remembered
    def least_seconds(self, state: State, goal: State) -> float:
        """A lower bound for the seconds of any path from a state to a goal."""
        links = self.fabric.links
        fastest = self.fastest
        received = self.least_received(state, goal)
        crossing = self.least_crossing(state, goal)
        if not received:
            return 0.0
        # The slowest links may be busiest at another device than the others: steps wait for both.
        waits = links[0].latency_s if crossing else self.least_latency
        far = crossing / links[0].bytes_per_s
        near = max(0.0, received - crossing) / fastest
        if (
            links[0].topology == "port"
        ):  # it may carry less than the busiest device receives over it
            near = max(0.0, received / fastest - far)
        return self.least_launch + waits + (far + near) * self.itemsize

    @remembered
    def least_reducing(self, state: State, goal: State) -> float:
        """A closer bound if sums end: a scatter takes turns with all others, an all-reduce two trees."""
        links = self.fabric.links
        spans = self.group(self.ended(state, goal))
        launch = min(map(self.profile.launch, ("all_reduce", "reduce_scatter", "exchange")))
        turns = [
            min(s.size - 1, 2 * (s.size - 1).bit_length()) * links[s.level].latency_s for s in spans
        ]
        crossing = 0 if self.nodes else self._least_reduced(state, goal, level=0)
        received = self.least_received(state, goal)
        far = crossing / links[0].bytes_per_s
        near = (received - crossing) / self.fastest if links[0].topology != "port" else 0.0
        return launch + sum(turns) + (far + max(0.0, near)) * self.itemsize if received else 0.0

    @remembered
    def least_exchange(self, state: State, after: State) -> float:
        """A lower bound for the seconds of an exchange, without counting its traffic."""
        ended = self.ended(state, after)
        links = self.fabric.links
        is_regular = self.is_regular(after)
        # Of a new sum, only some devices receive.
        wanted = senders = 0 if set(after.sums) - set(state.sums) else self.parts(ended)
        near = self._parts_near(ended)
        kept = 1
        most = 1
        for d, cuts in enumerate(zip(state.cuts, after.cuts, strict=True)):
            rows, blocks, met, at_hand, nearby = self._dim_exchange(d, *cuts, is_regular)
            wanted = wanted * rows
            senders = senders * blocks
            most = most * met
            near = near * nearby
            kept = kept * at_hand
        far = 0 if self.nodes and not ended else max(0, wanted - near)  # over the slowest links
        first = -(-far // max(1, most))  # messages
        seconds = wanted * (2 - self.profile.rounds) / self.profile.copy_bytes_per_s
        if links[0].topology != "port":
            seconds += far / links[0].bytes_per_s + max(0, wanted - far - kept) / self.fastest
        waits = (
            first * links[0].latency_s
            + max(not first, senders - bool(kept) - first) * self.least_latency
        )
        return self.profile.launch("exchange") + waits + seconds * self.itemsize

    @remembered
    def _dim_exchange(
        self, d: int, a: Cut, b: Cut, is_regular: bool
    ) -> tuple[int, int, int, int, int]:
        """Rows of the longest block of a dim after an exchange; in at least how many blocks they are before;
        at most how many in one, in its own, and in all that the slowest links do not lead to.
        """
        have = self.length(d, a)[0]
        want = self.length(d, b)[0]
        met = min(have, want)
        nearby = min(want, have * self._parts_near(self.axes_in(a)))
        # If contiguous shards part, the last of the old ones does not meet the first of the new ones.
        parting = (
            [x for x, y in zip(a, b, strict=False) if x != y]
            if self.is_plain(a) and is_regular
            else []
        )
        is_far = parting and not self._spans[parting[0]][0].level
        return want, -(-want // max(1, have)), met, 0 if parting else met, 0 if is_far else nearby

    @remembered
    def _parts_near(self, axes: tuple[int, ...]) -> int:
        """The devices along some axes that all but the slowest links connect."""
        return math.prod(span.size for span in self.group(axes) if span.level)

    @cached_property
    def least_launch(self) -> float:
        """Fewest seconds to start a step that communicates."""
        return min((s for _, s in self.profile.launch_s), default=0.0)

    @cached_property
    def least_latency(self) -> float:
        """Fewest seconds of a message."""
        return min((link.latency_s for link in self.fabric.links), default=0.0)

    @cached_property
    def fastest(self) -> float:
        """Bytes per second of the fastest link."""
        return max((link.bytes_per_s for link in self.fabric.links), default=1.0)

    @remembered
    def seconds(
        self, kind: str, traffic: Any, block: int, axes: tuple[int, ...], *in_place: bool
    ) -> float:
        """Seconds of a collective of blocks along some axes."""
        return self.fabric.seconds(kind, traffic(block, self.group(axes), *in_place), self.itemsize)

    def exchange_traffic(self, state: State, after: State) -> Traffic:
        """Traffic of an exchange between two states."""
        if (even := self.even_received(state, after)) is not None:
            return even
        is_node_local = self.nodes and state.sums == after.sums
        begins = set(after.sums) - set(state.sums)
        most = math.prod(self.shape) * self.mesh.n_devices**2
        if not (is_node_local or begins) and most < 2**62:
            return self._counted(state, after)
        before = self.sharding(state)
        there = self.sharding(after)
        if is_node_local:
            return node_local_traffic(before, there, self.nodes or 1)
        return traffic.counted_traffic(before, there, self.fabric.spans)

    def even_received(self, state: State, after: State) -> Traffic | None:
        """Traffic of an exchange, if it is known without counting per device."""
        return (
            None if self.nodes and state.sums == after.sums else self._even_exchange(state, after)
        )

    @remembered
    def _even_exchange(self, state: State, after: State) -> Traffic | None:
        """The same with any senders; None if shards do not divide each other, or a sum begins."""
        if not (self.is_regular(state) and self.is_regular(after)) or set(after.sums) - set(
            state.sums
        ):
            return None
        addends = [span for a in state.sums if a not in after.sums for span in self._spans[a]]
        return digit_traffic(self.shape, self._link_cuts(state), self._link_cuts(after), addends)

    @cached_property
    def _spans(self) -> tuple[LinkSpans, ...]:
        """The spans of every axis, the outermost first."""
        spans = traffic.spans_by_axis(self.mesh, self.fabric.spans)
        return tuple(spans[axis] for axis in self.axes)

    def _link_cuts(self, state: State) -> LinkCuts:
        return tuple([tuple([span for a in cut for span in self._spans[a]]) for cut in state.cuts])

    def _counted(self, state: State, after: State) -> Traffic:
        """`counted_traffic` from tables by dim: a search asks for thousands."""
        mesh, factors, levels = self._span_axes
        ended = [axis for a in state.sums if a not in after.sums for axis in factors[self.axes[a]]]
        moved = [axis for a in self.changing(state, after) for axis in factors[self.axes[a]]]

        def received_from(agree: tuple[str, ...]) -> Received:
            addends = mesh.size(*(axis for axis in ended if axis not in agree))
            received = np.full((2, *[1] * len(mesh.axes)), addends)
            for d, (a, b) in enumerate(zip(state.cuts, after.cuts, strict=True)):
                fixed = tuple([axis for axis in self._dim_end(d, a).dim.axes if axis in agree])
                received = received * self._received_of_dim(d, a, b, fixed)
            return Received(*received)

        return traffic.traffic_by_level(received_from, mesh, [*ended, *moved], levels)

    @remembered
    def _received_of_dim(self, d: int, a: Cut, b: Cut, fixed: tuple[str, ...]) -> np.ndarray:
        """The factors of a dim in one array: see `received_of_dim`."""
        source = self._dim_end(d, a)
        target = self._dim_end(d, b)
        return np.stack(traffic.received_of_dim(source, target, fixed, self._span_axes.mesh, False))

    @remembered
    def _dim_end(self, d: int, cut: Cut) -> DimEnd:
        """A dim with this cut, on the mesh that has the spans of links as axes."""
        mesh, factors, _ = self._span_axes
        [dim] = factored(Layout((Dim("", self.cut_by(cut)),)), factors).dims
        return DimEnd(dim, self.shape[d], mesh.sizes_of(dim.axes))

    @cached_property
    def _span_axes(self) -> traffic.SpanAxes:
        return traffic.span_axes(self.mesh, self.fabric.spans)

    @remembered
    def sharding(self, state: State) -> Sharding:
        """A state as a sharding; its dims have numbers for names."""
        dims = tuple(Dim(str(d), self.cut_by(cut)) for d, cut in enumerate(state.cuts))
        return Sharding(Layout(dims, (("sum", self.names(state.sums)),)), self.mesh, self.shape)


MAX_SHARDS = (
    4096  # shards that a grid numbers: documents have other lengths at every step of a training
)


def grid(mesh: Mesh, shape: tuple[int, ...], itemsize: int, profile: Profile) -> Grid:
    """The one grid of a shape on a mesh; a new one once it has numbered too many shards."""
    cached = _grid(mesh, shape, itemsize, profile)
    if len(cached.shards) > MAX_SHARDS:
        _grid.cache_clear()
        cached = _grid(mesh, shape, itemsize, profile)
    return cached


_grid = layout_cache(maxsize=1024)(Grid)
