"""The search space: layouts as small tuples of numbers, priced without building them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xshard.cost.bounds import least_received
from xshard.cost.model import Fabric, Profile
from xshard.dtypes import itemsize
from xshard.layout import Layout, Sharding
from xshard.layout.layout import factored
from xshard.layout.partition import block_length, misfit
from xshard.notation.parser import Dim, Shard
from xshard.search.grid import Grid, Tables, grid
from xshard.steps import Exchange, Traffic
from xshard.steps.exchange.messages import node_local_traffic
from xshard.steps.exchange.sources import DimEnd
from xshard.steps.exchange.traffic import Received, counted_traffic, received_of_dim, traffic_by_level
from xshard.steps.traffic import LinkSpans

Cut = tuple[int, ...]  # the shards of one dim, outermost first, as indices into `Space.shards`


class State(NamedTuple):
    """A layout without copy tags: the shards of every dim, and the axes that hold addends."""

    cuts: tuple[Cut, ...]
    sums: tuple[int, ...]


class Move(NamedTuple):
    """A step not yet built: its kind, the data of the kind (`move_costs`), and its result."""

    kind: str
    data: tuple[int | Cut, ...]
    after: State


@dataclass(frozen=True)
class Space:
    """The states between two shardings in normal form without copies. The first shards are the axes."""

    start: Sharding
    goal: Sharding
    dtype: str
    profile: Profile

    @cached_property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @cached_property
    def grid(self) -> Grid:
        return grid(self.start.mesh, self.start.shape, self.itemsize, self.profile)

    @cached_property
    def tables(self) -> Tables:
        """Tables shared by all spaces of the grid."""
        return self.grid.tables

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return self.grid.axes

    @cached_property
    def shards(self) -> Sequence[Shard]:
        return self.grid.shards.known

    @cached_property
    def shard_axes(self) -> Sequence[tuple[int, ...]]:
        return self.grid.shards.axes_of

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Number of parts of every shard; the first are the sizes of the axes."""
        return self.grid.shards.sizes

    @cached_property
    def op(self) -> str:
        """The kind of reduction in these layouts."""
        kinds = [kind for end in (self.start, self.goal) for kind, _ in end.layout.tags]
        return kinds[0] if kinds else "sum"

    @cached_property
    def fabric(self) -> Fabric:
        return self.grid.fabric

    def state(self, layout: Layout) -> State:
        """A layout of this space -> its state."""
        cuts = tuple(tuple(map(self.grid.shards.number, dim.shards)) for dim in layout.dims)
        return State(cuts, tuple(sorted(self.axes.index(a) for a in layout.tagged(self.op))))

    def layout(self, state: State) -> Layout:
        """A state -> its layout."""
        dims = zip(self.start.layout.names, state.cuts, strict=True)
        sums = ((self.op, self.names(state.sums)),)
        return Layout(tuple(Dim(name, self.cut_by(cut)) for name, cut in dims), sums)

    def axes_in(self, cut: Iterable[int]) -> tuple[int, ...]:
        return tuple(a for s in cut for a in self.shard_axes[s])

    def free(self, state: State) -> tuple[int, ...]:
        """The axes that hold replicas."""
        used = {a for cut in state.cuts for a in self.axes_in(cut)} | set(state.sums)
        return tuple(a for a in range(len(self.axes)) if a not in used)

    def is_plain(self, cut: Iterable[int]) -> bool:
        """Whether every shard is contiguous, over one axis."""
        return all(s < len(self.axes) for s in cut)

    def length(self, dim: int, cut: Cut) -> tuple[int, bool]:
        """The longest block of a dim under its shards, and whether all are as long."""
        if (known := self.tables.lengths.get((dim, cut))) is None:
            whole, parts = self.start.shape[dim], math.prod(self.sizes[s] for s in cut)
            if self.is_plain(cut) and whole % parts == 0:
                known = whole // parts, True
            else:
                d = Dim("", tuple(self.shards[s] for s in cut))
                sizes = self.start.mesh.sizes_of(d.axes)
                longest, even = block_length(d, whole, sizes)
                # Documents and segments inside another shard would have other lengths: no step leads there.
                known = longest, even and misfit(d, whole, sizes) is None
            self.tables.lengths[dim, cut] = known
        return known

    def is_even(self, dim: int, cut: Cut) -> bool:
        return self.length(dim, cut)[1]

    def block(self, state: State) -> int:
        """Elements of the largest block."""
        if (known := self.tables.blocks.get(state.cuts)) is None:
            known = math.prod(self.length(d, cut)[0] for d, cut in enumerate(state.cuts))
            self.tables.blocks[state.cuts] = known
        return known

    def least_received(self, state: State) -> int:
        """Fewest elements that the busiest device must receive on any path from a state to the goal."""
        goal = self.goal_state
        if state.sums != goal.sums:
            return self._least_reduced(state)
        even = self._even_exchange(state, goal)
        # Uneven blocks would have to be compared one by one, too slow for a bound.
        return max(0, self.block(goal) - self.block(state)) if even is None else even.received

    def _least_reduced(self, state: State) -> int:
        """Elements that devices must receive on average if a sum ends: see `bounds.total_elements`."""
        goal, n = self.goal_state, self.start.mesh.n_devices
        ended = math.prod(self.sizes[a] for a in state.sums if a not in goal.sums)
        if ended == 1:
            return 0
        kept = math.prod(self.sizes[a] for a in goal.sums)
        copies = n // (kept * math.prod(self.sizes[a] for cut in goal.cuts for a in self.axes_in(cut)))
        stay = math.prod(self.sizes[a] for a in goal.sums if a in state.sums)
        return least_received(math.prod(self.start.shape), n, ended, copies, stay)

    def least_crossing(self, state: State) -> float:
        """Fewest elements that some device must receive over the slowest links, on any path to the goal."""
        goal, several = self.goal_state, len(self.fabric.links) > 1 and self.grid.nodes is None
        if not several or state.sums != goal.sums or not (self.is_regular(state) and self.is_regular(goal)):
            return 0.0
        return self.grid.crossing(state.cuts, goal.cuts)

    def even_received(self, state: State, after: State) -> Traffic | None:
        """Traffic of an exchange, if it is known without counting per device."""
        is_node_local = self.grid.nodes and state.sums == after.sums
        return None if is_node_local else self._even_exchange(state, after)

    @cached_property
    def start_state(self) -> State:
        return self.state(self.start.layout)

    @cached_property
    def goal_state(self) -> State:
        return self.state(self.goal.layout)

    def names(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.axes[a] for a in axes)

    def cut_by(self, cut: Iterable[int]) -> tuple[Shard, ...]:
        return tuple(self.shards[s] for s in cut)

    def group(self, axes: Iterable[int]) -> LinkSpans:
        """The spans of some axes, the slowest first."""
        return self.grid.group(axes)

    def levels(self, axis: int) -> tuple[int, ...]:
        """How fast the links along an axis are, the slowest first, 0 for the slowest of the mesh."""
        return tuple(span.level for span in self.group((axis,)))

    def exchange_traffic(self, state: State, after: State) -> Traffic:
        """Traffic of an exchange between two states."""
        even = self.even_received(state, after)
        if even is not None:
            return even
        is_node_local = self.grid.nodes and state.sums == after.sums
        begins = set(after.sums) - set(state.sums)
        most = math.prod(self.start.shape) * self.start.mesh.n_devices**2
        if not (is_node_local or begins) and most < 2**62:
            return self._counted(state, after)
        before, there = self._sharding(state), self._sharding(after)
        if is_node_local:
            return node_local_traffic(before, there, self.grid.nodes or 1)
        return counted_traffic(before, there, self.fabric.spans)

    def _counted(self, state: State, after: State) -> Traffic:
        """`counted_traffic` from tables by dim: a search asks for thousands."""
        mesh, factors, levels = self.grid.span_axes
        ended = [axis for a in state.sums if a not in after.sums for axis in factors[self.axes[a]]]
        old, new = self.roles(state), self.roles(after)
        moved = [axis for a in {**old, **new} if old.get(a) != new.get(a) for axis in factors[self.axes[a]]]
        cuts = list(enumerate(zip(state.cuts, after.cuts, strict=True)))

        def received_from(agree: tuple[str, ...]) -> Received:
            addends = mesh.size(*(axis for axis in ended if axis not in agree))
            elements = senders = np.full((1,) * len(mesh.axes), addends)
            for d, (a, b) in cuts:
                if a or b:
                    rows, parts = self._received_of_dim(d, a, b, agree)
                    elements, senders = elements * rows, senders * parts
                else:
                    elements = elements * self.start.shape[d]
            return Received(elements, senders)

        return traffic_by_level(received_from, mesh, [*ended, *moved], levels)

    def _received_of_dim(self, d: int, a: Cut, b: Cut, agree: tuple[str, ...]) -> Received:
        """The factors of a dim: see `received_of_dim`."""
        source, target = self._dim_end(a), self._dim_end(b)
        key = d, a, b, tuple([axis for axis in source.dim.axes if axis in agree])
        if (known := self.tables.received.get(key)) is None:
            rows = received_of_dim(
                source, target, self.start.shape[d], key[-1], self.grid.span_axes.mesh, False
            )
            known = self.tables.received[key] = Received(*rows)
        return known

    def _dim_end(self, cut: Cut) -> DimEnd:
        """A dim with this cut, on the mesh that has the spans of links as axes."""
        if (known := self.tables.dim_ends.get(cut)) is None:
            layout = Layout((Dim("", self.cut_by(cut)),))
            known = self.tables.dim_ends[cut] = DimEnd(factored(layout, self.grid.span_axes.factors).dims[0])
        return known

    def _sharding(self, state: State) -> Sharding:
        """A state as a sharding, shared by all spaces of the grid: its dims have numbers for names."""
        if (known := self.tables.shardings.get(state)) is None:
            dims = tuple(Dim(str(d), self.cut_by(cut)) for d, cut in enumerate(state.cuts))
            layout = Layout(dims, (("sum", self.names(state.sums)),))
            known = self.tables.shardings[state] = Sharding(layout, self.start.mesh, self.start.shape)
        return known

    def exchange(self, to: Layout, frm: Layout | None = None) -> Exchange:
        """The exchange to a layout from another, by default the start; with node-local senders if needed."""
        here = self.start.layout if frm is None else frm
        return Exchange(to, self.grid.nodes if here.tagged(self.op) == to.tagged(self.op) else None)

    def _even_exchange(self, state: State, after: State) -> Traffic | None:
        if not (self.is_regular(state) and self.is_regular(after)):
            return None
        if state.sums == after.sums:
            return self.grid.exchange(state.cuts, after.cuts, ())
        if set(after.sums) - set(state.sums):
            return None
        return self.grid.exchange(state.cuts, after.cuts, tuple(a for a in state.sums if a not in after.sums))

    def is_regular(self, state: State) -> bool:
        """Whether all shards are even, contiguous and over one axis."""
        cuts = state.cuts
        if (known := self.tables.regular.get(cuts)) is None:
            known = all(self.is_plain(cut) and self.is_even(d, cut) for d, cut in enumerate(cuts))
            self.tables.regular[cuts] = known
        return known

    def roles(self, state: State) -> dict[int, tuple[int, Cut]]:
        """Sharding axis -> its dim and the shards down to it."""
        if (known := self.tables.roles.get(state.cuts)) is None:
            shards = ((d, cut[: i + 1]) for d, cut in enumerate(state.cuts) for i in range(len(cut)))
            known = {a: (d, cut) for d, cut in shards for a in self.shard_axes[cut[-1]]}
            self.tables.roles[state.cuts] = known
        return known
