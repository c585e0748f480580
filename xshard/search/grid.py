"""Grid: the states of one shape on one machine, with lower bounds for the seconds between them.

A* needs a bound for what is left to do, and skips moves that their own bound rules out. A bound is
never more than the price, and must cost less than the price to compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.cost.bounds import least_received
from xshard.cost.model import Profile
from xshard.layout import Mesh
from xshard.search.links import LinkedStates
from xshard.search.states import Cut, State, cached_method
from xshard.steps.exchange.even_traffic import node_lack

# Shards that a grid numbers, before a new one takes its place: documents have other lengths at
# every step of a training.
MAX_SHARDS = 4096


class ExchangeDemand(NamedTuple):
    """Bounds for what a device takes in an exchange: rows of one dim, or elements of all dims."""

    wanted: int  # in the longest block afterwards
    min_senders: int  # in at least how many blocks they are before
    max_per_sender: int
    already_local: int  # at most so many are in the device's own block
    in_node: int  # at most so many are in blocks that the slowest links do not lead to


@dataclass(frozen=True, eq=False)
class Grid(LinkedStates):
    """A mesh, its links, and the shards that searches have met, with bounds for what moves cost."""

    costs: dict[Any, Any] = field(default_factory=dict, init=False)  # of moves: see `move_cost`

    @cached_property
    def least_launch_s(self) -> float:
        """The fewest seconds to start a step that communicates."""
        return min((seconds for _, seconds in self.profile.launch_s), default=0.0)

    @cached_property
    def least_latency_s(self) -> float:
        """The fewest seconds of a message."""
        return min((link.latency_s for link in self.fabric.links), default=0.0)

    @cached_property
    def fastest_bytes_per_s(self) -> float:
        """The bytes per second of the fastest link."""
        return max((link.bytes_per_s for link in self.fabric.links), default=1.0)

    @cached_property
    def _has_ports(self) -> bool:
        """Whether devices of a node share a port, whose load may be below the busiest device's."""
        return self.fabric.links[0].topology == "port"

    def least_received(self, state: State, goal: State) -> int:
        """Bound the elements that the busiest device must receive on any path, from below.

        One direct exchange sends no element twice: no path receives less. Where a sum ends, partial
        sums may be added on the way, so that less than an exchange receives may do.
        """
        if state.sums != goal.sums:
            return self._least_reduced(state, goal)
        even = self.even_exchange(state, goal)
        if even is not None:
            return even.received
        # Uneven blocks would have to be compared one by one, too slow for a bound.
        return max(0, self.block(goal) - self.block(state))

    def _least_reduced(self, state: State, goal: State, level: int | None = None) -> int:
        """Bound the elements that devices must receive on average if a sum ends: see `bounds`.

        level: count only what comes over links of this level, as if devices that other links
            connect were one. None: count all.
        """
        n_addends = self._span_product(self.ended(state, goal), level)
        if n_addends == 1:
            return 0
        n_copies = self._span_product(
            self.replica_axes(goal), level
        )  # of each element of the result
        # A sum that stays has several addends: each is an array of its own, to be reduced.
        n_kept = self.count_parts([a for a in goal.sums if a in state.sums])
        n_elements = math.prod(self.shape)
        return least_received(n_elements, self.mesh.n_devices, n_addends, n_copies, n_kept)

    def _span_product(self, axes: tuple[int, ...], level: int | None) -> int:
        """Count the devices along some axes, or those of their links of one level."""
        return math.prod([s.size for s in self.group(axes) if level is None or s.level == level])

    def least_crossing(self, state: State, goal: State) -> float:
        """Bound the elements that some device must receive over the slowest links, from below.

        0.0 where no bound is known: with node-local senders, with sums that change, or with uneven
        shards; and where all links are equally fast.
        """
        has_one_speed = len(self.fabric.links) <= 1
        if has_one_speed or self.nodes is not None or state.sums != goal.sums:
            return 0.0
        if not (self.is_regular(state) and self.is_regular(goal)):
            return 0.0
        # What a node lacks enters it through its devices: one of them receives the mean or more.
        node_devices = math.prod([span.size for span in self.fabric.spans if span.level])
        return node_lack(self.shape, self.link_cuts(state), self.link_cuts(goal)) / node_devices

    @cached_method
    def least_seconds(self, state: State, goal: State) -> float:
        """Bound the seconds of any path from a state to a goal from below.

        At least one step is launched, one message is waited for, and the elements that must arrive
        come over the slowest links, where nodes lack them, or over the fastest.
        """
        received = self.least_received(state, goal)
        crossing = self.least_crossing(state, goal)
        if not received:
            return 0.0
        slowest = self.fabric.links[0]
        latency_s = self.least_latency_s
        if crossing:
            # The slowest links may be busiest at another device than the others: steps wait for
            # both.
            latency_s = slowest.latency_s
        far_s = crossing / slowest.bytes_per_s  # if elements had one byte
        if self._has_ports:
            # The device that receives most need not be at the busiest port: the longer time counts.
            near_s = max(0.0, received / self.fastest_bytes_per_s - far_s)
        else:
            near_s = max(0.0, received - crossing) / self.fastest_bytes_per_s
        return self.least_launch_s + latency_s + (far_s + near_s) * self.itemsize

    @cached_method
    def least_reducing(self, state: State, goal: State) -> float:
        """Bound the seconds of any path more closely than `least_seconds`, if sums end.

        A reduce-scatter over n devices takes n - 1 messages in turn, one from each other addend. An
        all-reduce goes up and down a tree, log2(n) messages each way. The fewer count: of 8 devices
        min(7, 6) = 6.
        """
        received = self.least_received(state, goal)
        if not received:
            return 0.0
        links = self.fabric.links
        launch = self.profile.launch
        launch_s = min(launch("all_reduce"), launch("reduce_scatter"), launch("exchange"))
        waits_s = 0.0
        for span in self.group(self.ended(state, goal)):
            turns = min(span.size - 1, 2 * (span.size - 1).bit_length())
            waits_s += turns * links[span.level].latency_s
        crossing = 0
        if self.nodes is None:
            crossing = self._least_reduced(state, goal, level=0)
        far_s = crossing / links[0].bytes_per_s  # if elements had one byte
        near_s = 0.0
        if not self._has_ports:
            near_s = max(0.0, (received - crossing) / self.fastest_bytes_per_s)
        return launch_s + waits_s + (far_s + near_s) * self.itemsize

    @cached_method
    def least_exchange(self, state: State, after: State) -> float:
        """Bound the seconds of an exchange from below, without counting its traffic.

        They are a launch, a latency per message, and the time to copy and send the elements that
        one device takes. Elements are far if only the slowest links lead to them, else near.
        """
        demand = self._exchange_demand(state, after)
        slowest = self.fabric.links[0]
        # With node-local senders, which elements cross nodes is not known without counting: none.
        far_elements = 0
        if self.nodes is None or self.ended(state, after):
            far_elements = max(0, demand.wanted - demand.in_node)
        # Each element is packed by its sender and unpacked by its receiver. In rounds, what stays
        # on its device is copied once, and that may be all.
        n_copies = 1 if self.profile.rounds else 2
        seconds = demand.wanted * n_copies / self.profile.copy_bytes_per_s  # of one-byte elements
        if not self._has_ports:  # a port may carry less than its devices receive
            near_elements = max(0, demand.wanted - far_elements - demand.already_local)
            seconds += far_elements / slowest.bytes_per_s + near_elements / self.fastest_bytes_per_s
        waits_s = self._least_waits(demand, far_elements)
        return self.profile.launch("exchange") + waits_s + seconds * self.itemsize

    def _least_waits(self, demand: ExchangeDemand, far_elements: int) -> float:
        """Bound the seconds in which a device waits for messages of an exchange, from below.

        There are at least as many messages as blocks to take from. Far elements fill the fewest
        messages, rounded up, if each sender gives the most that it can.
        """
        far_messages = -(-far_elements // max(1, demand.max_per_sender))
        near_messages = demand.min_senders - far_messages
        if demand.already_local:
            near_messages -= 1  # the device itself is one of the senders, without a message
        if not far_messages:
            near_messages = max(1, near_messages)  # no exchange is without any message
        waits_s = far_messages * self.fabric.links[0].latency_s  # of the slowest links
        waits_s += max(0, near_messages) * self.least_latency_s
        return waits_s

    def _exchange_demand(self, state: State, after: State) -> ExchangeDemand:
        """Bound the elements that a device takes in an exchange: products over the dims.

        A device takes each element of its block as often as a sum that ends has addends. Under
        bounds for rows of (4, 3) in two dims and a sum over 2 devices: 2 * 4 * 3 elements.
        """
        ended = self.ended(state, after)
        begins = set(after.sums) - set(state.sums)
        is_regular = self.is_regular(after)
        # If a sum begins, only some devices receive: the others fill with zeros.
        wanted = 0 if begins else self.count_parts(ended)
        min_senders = wanted
        max_per_sender = 1
        already_local = 1
        in_node = self._parts_near(ended)
        for d, (cut, cut_after) in enumerate(zip(state.cuts, after.cuts, strict=True)):
            dim = self._dim_demand(d, cut, cut_after, is_regular)
            wanted *= dim.wanted
            min_senders *= dim.min_senders
            max_per_sender *= dim.max_per_sender
            already_local *= dim.already_local
            in_node *= dim.in_node
        return ExchangeDemand(wanted, min_senders, max_per_sender, already_local, in_node)

    @cached_method
    def _dim_demand(self, d: int, cut: Cut, cut_after: Cut, is_regular: bool) -> ExchangeDemand:
        """Bound the rows of one dim that the busiest device takes in an exchange.

        8 rows, "n/x" on x=4 -> "n" on all devices: 8 wanted, from 4 senders or more, of which each
        has 2; 2 are already local, and with 2 of the devices in a node, 4 are in the node.

        Args:
            d: The index of the dim.
            cut: Its shards before.
            cut_after: Its shards after.
            is_regular: Whether all shards of all dims after are even and contiguous.
        """
        rows_before = self.length(d, cut).longest  # of one block
        rows = self.length(d, cut_after).longest
        max_per_sender = min(rows_before, rows)
        already_local = max_per_sender
        # The devices of a node hold at most as many blocks as faster links connect along the dim.
        in_node = min(rows, rows_before * self._parts_near(self.axes_in(cut)))
        first_changed = None
        if is_regular and self.is_plain(cut):
            first_changed = _first_difference(cut, cut_after)
        if first_changed is not None:
            # The device that is last along the old shard and first along the new one has no common
            # rows before and after: in "n/x" -> "n/y" with 8 rows on x=2, y=2 device (1, 0) has rows
            # 4 to 7 and wants 0 to 3. If the old shard is over nodes, its whole node lacks them.
            already_local = 0
            if self._spans[first_changed][0].level == 0:
                in_node = 0
        min_senders = -(-rows // max(1, rows_before))  # rounded up
        return ExchangeDemand(rows, min_senders, max_per_sender, already_local, in_node)

    @cached_method
    def _parts_near(self, axes: tuple[int, ...]) -> int:
        """Count the devices along some axes that all but the slowest links connect."""
        return math.prod([span.size for span in self.group(axes) if span.level])


def _first_difference(cut: Cut, other: Cut) -> int | None:
    """Return the outermost shard of `cut` in place of which `other` has another one.

    (0, 2, 1) and (0, 1) -> 2; None if one cut only goes on where the other ends.
    """
    for shard, other_shard in zip(cut, other, strict=False):
        if shard != other_shard:
            return shard
    return None


def grid(mesh: Mesh, shape: tuple[int, ...], itemsize: int, profile: Profile) -> Grid:
    """Return the one grid of a shape on a mesh; a new one once it has numbered too many shards."""
    cached = _grid(mesh, shape, itemsize, profile)
    if len(cached.shards) > MAX_SHARDS:
        _grid.cache_clear()
        cached = _grid(mesh, shape, itemsize, profile)
    return cached


_grid = layout_cache(maxsize=1024)(Grid)
