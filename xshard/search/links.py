"""The links between devices, and what steps from one state to another send over them.

Traffic is looked up by small keys, and counted for thousands of pairs of states: closed forms come
first, then tables by dim. Only a few kinds of shards are counted message by message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from xshard.cost.model import Fabric, Profile
from xshard.layout import Layout
from xshard.layout.layout import factored
from xshard.notation.parser import Dim
from xshard.search.states import Cut, State, States, cached_method, common, without
from xshard.steps import Traffic
from xshard.steps.all_gather import gather_traffic
from xshard.steps.all_reduce import all_reduce_traffic
from xshard.steps.all_to_all import all_to_all_traffic
from xshard.steps.exchange.even_traffic import LinkCuts, digit_traffic
from xshard.steps.exchange.messages import MAX_PAIRED, node_local_traffic
from xshard.steps.exchange.sources import DimEnd, Received
from xshard.steps.exchange.traffic import (
    MAX_COUNTED,
    SpanAxes,
    counted_traffic,
    received_of_dim,
    span_axes,
    spans_by_axis,
    traffic_by_level,
)
from xshard.steps.permute import permute_traffic
from xshard.steps.reduce_scatter import reduce_scatter_traffic
from xshard.steps.traffic import LinkSpans


@dataclass(frozen=True, eq=False)
class LinkedStates(States):
    """The states of one shape on a machine: which links join devices, and the traffic of steps."""

    itemsize: int
    profile: Profile

    @cached_property
    def fabric(self) -> Fabric:
        """The links of the mesh."""
        return self.profile.fabric(self.mesh)

    @cached_property
    def nodes(self) -> int | None:
        """The devices of a node, if exchanges choose node-local senders."""
        if self.mesh.n_devices > MAX_PAIRED or not self.profile.splits_groups(self.mesh):
            return None
        return self.profile.node_devices

    @cached_property
    def _spans(self) -> tuple[LinkSpans, ...]:
        """The spans of each axis, the outermost first."""
        spans = spans_by_axis(self.mesh, self.fabric.spans)
        return tuple(spans[axis] for axis in self.axes)

    @cached_method
    def group(self, axes: tuple[int, ...]) -> LinkSpans:
        """Return the spans of some axes, the slowest first."""
        names = set(self.names(axes))
        return tuple(span for span in self.fabric.spans if span.axis in names)

    def levels(self, axis: int) -> tuple[int, ...]:
        """Rank the links along an axis, the slowest first; 0 is the slowest link of the mesh."""
        return tuple(span.level for span in self.group((axis,)))

    def spare(self, state: State, goal: State, changing: Iterable[int]) -> Sequence[int]:
        """List the mesh axes whose replicas can divide the work of a redistribution among them.

        Along such an axis devices hold equal blocks before and after. Each may move a share of its
        block, and all gather the shares afterwards. Unless a sum ends, this pays only if the gather
        runs over faster links than the slowest ones along `changing`, the axes whose use changes.
        """
        # Levels number the links by speed, 0 for the slowest, which is also taken if no axis
        # changes.
        slowest = min([min(self.levels(axis)) for axis in changing], default=0)
        spare = common(self.replica_axes(state), self.replica_axes(goal))
        if self.ended(state, goal):
            return spare
        return [axis for axis in spare if max(self.levels(axis)) > slowest]

    def collective_traffic(
        self, step_kind: str, block_elements: int, axes: tuple[int, ...], in_place: bool
    ) -> Traffic:
        """Count what a collective sends: elements and messages by speed of link, and copies.

        All-gather of a block of 3 elements over 4 devices: the busiest receives 9, in 3 messages.

        Args:
            step_kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "permute".
            block_elements: The elements of a device's block before the collective.
            axes: The axes over which it runs.
            in_place: Whether the pieces of a gather or scatter lie one after the other in the
                larger block, so that nothing is packed; see `steps.base.lands_in_place`.
        """
        group = self.group(axes)
        if step_kind == "all_gather":
            return gather_traffic(block_elements, group, in_place)
        if step_kind == "reduce_scatter":
            return reduce_scatter_traffic(block_elements, group, in_place)
        if step_kind == "all_reduce":
            return all_reduce_traffic(block_elements, group)
        if step_kind == "all_to_all":
            return all_to_all_traffic(block_elements, group)
        return permute_traffic(block_elements, group)

    @cached_method
    def collective_seconds(
        self, step_kind: str, block_elements: int, axes: tuple[int, ...], in_place: bool = False
    ) -> float:
        """Price a collective; for the arguments see `collective_traffic`."""
        traffic = self.collective_traffic(step_kind, block_elements, axes, in_place)
        return self.fabric.seconds(step_kind, traffic, self.itemsize)

    def exchange_traffic(self, state: State, next_state: State) -> Traffic:
        """Count what devices receive in an exchange between two layouts, on the busiest device.

        In an exchange each device takes from any others what it lacks. There are four ways to
        count, all exact; the quickest that applies is taken: a formula for even contiguous shards;
        pairs of devices, if replicas in the receiver's node send first (`nodes` is not None);
        cached tables for each dim; and, for a new partial sum or numbers beyond 64 bits, a count
        device by device.
        """
        even_traffic = self.even_received(state, next_state)
        if even_traffic is not None:
            return even_traffic
        if self.nodes is not None and state.sums == next_state.sums:
            return node_local_traffic(self.sharding(state), self.sharding(next_state), self.nodes)
        # Tables by dim know of no new sums, and hold 64-bit integers. All devices together take at
        # most the whole array for each pair of a device and an addend, of which there are at most
        # as many as devices.
        max_elements = math.prod(self.shape) * self.mesh.n_devices**2
        if self.ended(next_state, state) or max_elements >= MAX_COUNTED:
            spans = self.fabric.spans
            return counted_traffic(self.sharding(state), self.sharding(next_state), spans)
        return self._count_by_tables(state, next_state)

    def even_received(self, state: State, next_state: State) -> Traffic | None:
        """Return the traffic of an exchange, if it is known without counting per device."""
        if self.nodes is not None and state.sums == next_state.sums:
            return None
        return self.even_exchange(state, next_state)

    @cached_method
    def even_exchange(self, state: State, next_state: State) -> Traffic | None:
        """Return the traffic of an exchange with any senders, in closed form.

        None if shards do not divide each other, or a sum begins.
        """
        if not (self.is_regular(state) and self.is_regular(next_state)):
            return None
        if self.ended(next_state, state):
            return None
        addends = self._outermost_first(self.ended(state, next_state))
        return digit_traffic(self.shape, self.link_cuts(state), self.link_cuts(next_state), addends)

    def link_cuts(self, state: State) -> LinkCuts:
        """List, for each dim of a regular state, the spans that shard it, outermost first."""
        return tuple([self._outermost_first(cut) for cut in state.cuts])

    @cached_method
    def _outermost_first(self, axes: tuple[int, ...]) -> LinkSpans:
        """Return the spans of some axes, axis by axis, each from the outermost to the innermost."""
        return tuple(chain.from_iterable(self._spans[axis] for axis in axes))

    def _count_by_tables(self, state: State, next_state: State) -> Traffic:
        """Count the traffic of an exchange as a product of cached tables, one table for each dim.

        A search counts thousands of pairs of layouts, but the shards of one dim before and after
        are of few kinds, so the tables are shared. `counted_traffic` counts the same without
        tables.
        """
        mesh = self._span_axes.mesh
        ended = self._sub_axes(self.ended(state, next_state))
        moved = self._sub_axes(self.changing(state, next_state))

        def received_from(shared_axes: tuple[str, ...]) -> Received:
            """Count what each device takes from senders at its own coordinates along some axes.

            `shared_axes` are these axes: () counts all senders, the axis of nodes only those in its node.
            """
            # From each addend of a sum, so many times what the tables count.
            n_addends = mesh.size(*without(ended, shared_axes))
            # [elements or senders, *mesh]
            received = np.full((2, *[1] * len(mesh.axes)), n_addends)
            for dim_index, (cut, next_cut) in enumerate(
                zip(state.cuts, next_state.cuts, strict=True)
            ):
                axes = self._dim_end(dim_index, cut).dim.axes
                shared_dim_axes = common(axes, shared_axes)
                received = received * self._received_of_dim(
                    dim_index, cut, next_cut, shared_dim_axes
                )
            return Received(received[0], received[1])

        return traffic_by_level(received_from, mesh, [*ended, *moved], self._span_axes.levels)

    def _sub_axes(self, axes: Iterable[int]) -> list[str]:
        """List the sub-axes of some axes, on the mesh that has the spans of links as axes."""
        factors = self._span_axes.factors
        return [*chain.from_iterable(factors[axis] for axis in self.names(axes))]

    @cached_method
    def _received_of_dim(
        self, dim_index: int, cut: Cut, next_cut: Cut, fixed: tuple[str, ...]
    ) -> np.ndarray:
        """Count the rows of one dim as `received_of_dim` does: [elements and senders, *mesh]."""
        src = self._dim_end(dim_index, cut)
        dst = self._dim_end(dim_index, next_cut)
        from_providers = False  # no sum begins
        # Positional: a call with keywords would be another entry of the cache.
        return np.stack(received_of_dim(src, dst, fixed, self._span_axes.mesh, from_providers))

    @cached_method
    def _dim_end(self, dim_index: int, cut: Cut) -> DimEnd:
        """Return a dim with these shards, on the mesh that has the spans of links as axes."""
        layout = Layout((Dim("", self.shards_of(cut)),))
        [dim] = factored(layout, self._span_axes.factors).dims
        return DimEnd(dim, self.shape[dim_index], self._span_axes.mesh.sizes_of(dim.axes))

    @cached_property
    def _span_axes(self) -> SpanAxes:
        """The mesh that has the spans of links as axes."""
        return span_axes(self.mesh, self.fabric.spans)
