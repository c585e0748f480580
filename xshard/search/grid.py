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
from xshard.cost.bounds import reduction_messages
from xshard.cost.model import Profile
from xshard.layout import Mesh
from xshard.layout.partition import ceil_div
from xshard.search.links import LinkedStates
from xshard.search.states import Cut, State, cached_method, common, common_prefix
from xshard.steps.exchange.even_traffic import elements_lacking_in_node

# Shards that a grid numbers, before a new one takes its place: documents have other lengths at
# every step of a training.
MAX_SHARDS = 4096


class ExchangeDemand(NamedTuple):
    """Bounds for what a device takes in an exchange: rows of one dim, or elements of all dims."""

    wanted: int  # in the longest block of the target
    min_senders: int  # in at least how many blocks of the source they are
    max_per_sender: int
    already_local: int  # at most so many are in the device's own block
    in_node: int  # at most so many are in blocks that the slowest links do not lead to


@dataclass(frozen=True, eq=False)
class Grid(LinkedStates):
    """A mesh, its links, and the shards that searches have met, with bounds for what moves cost."""

    costs: dict[Any, Any] = field(default_factory=dict, init=False)  # of moves: see `move_cost`

    @cached_property
    def _has_ports(self) -> bool:
        """Whether devices of a node share a port, whose load may be below the busiest device's."""
        return self.fabric.links[0].topology == "port"

    def received_lower_bound(self, state: State, goal: State) -> int:
        """Bound the elements that the busiest device must receive on any path, from below.

        One direct exchange sends no element twice: no path receives less. Where a sum ends, partial
        sums may be added on the way, so that less than an exchange receives may do.
        """
        if state.sums == goal.sums:
            even = self.even_exchange(state, goal)
            if even is not None:
                return even.received
        # Uneven blocks would have to be compared one by one, too slow for a bound.
        return self._quick_received(state, goal)

    def quick_bound_s(self, state: State, goal: State) -> float:
        """Return a lower bound on the seconds to redistribute: lower than `lower_bound_s`, but quick.

        It is one launch, one message, and the elements that a device lacks, over the fastest link.
        """
        received = self._quick_received(state, goal)
        if not received:
            return 0.0
        byte_s = self.itemsize / self.fabric.fastest_bytes_per_s
        return received * byte_s + self.fabric.least_step_s

    def _quick_received(self, state: State, goal: State) -> int:
        """Bound the elements that the busiest device receives, by the lengths of blocks alone.

        Of each dim a device keeps at most as many rows as both its blocks have. 8 x 6 rows,
        "n/x m" -> "n m/x" over 2 devices: it needs 8 x 3, and keeps at most 4 x 3.
        """
        if state.sums != goal.sums:
            return self._reduced_lower_bound(state, goal)
        lengths = zip(self.lengths(state), self.lengths(goal), strict=True)
        n_kept = math.prod(
            [min(length.longest, goal_length.longest) for length, goal_length in lengths]
        )
        return self.block_elements(goal) - n_kept

    def _reduced_lower_bound(self, state: State, goal: State, level: int | None = None) -> int:
        """Bound from below the elements that a device must receive, on average, to reduce sums.

        The bound is for partial sums along mesh axes that the goal no longer has: whatever the
        steps, all addends of an element have to meet. 0 if no sum ends. See `bounds` for the
        formula.

        level: count only what comes over links of this speed, 0 for the slowest, as if devices
            that other links connect were one device. None: count everything.
        """
        n_addends = self._span_product(self.ended(state, goal), level)
        if n_addends == 1:
            return 0
        # On how many devices each element of the result has to be.
        n_copies = self._span_product(self.replica_axes(goal), level)
        # Partial sums along other axes may stay: each addend of these is an array to be reduced.
        n_kept = self.count_parts(common(goal.sums, state.sums))
        n_messages = reduction_messages(math.prod(self.shape), n_addends, n_copies) * n_kept
        return ceil_div(n_messages, self.mesh.n_devices)

    def _span_product(self, axes: tuple[int, ...], level: int | None) -> int:
        """Count the devices along some axes, or those of their links of one level."""
        return math.prod(
            [span.size for span in self.group(axes) if level is None or span.level == level]
        )

    def crossing_lower_bound(self, state: State, goal: State) -> float:
        """Bound the elements that some device must receive over the slowest links, from below.

        0.0 where no bound is known: with node-local senders, with sums that change, or with uneven
        shards; and where all links are equally fast.
        """
        has_one_speed = len(self.fabric.links) <= 1
        if has_one_speed or self.nodes is not None or state.sums != goal.sums:
            return 0.0
        if not (self.is_regular(state) and self.is_regular(goal)):
            return 0.0
        src = self.link_cuts(state)
        dst = self.link_cuts(goal)
        # What a node lacks enters it through its devices: one of them receives the mean or more.
        node_devices = math.prod([span.size for span in self.fabric.spans if span.level])
        return elements_lacking_in_node(self.shape, src, dst) / node_devices

    @cached_method
    def lower_bound_s(self, state: State, goal: State) -> float:
        """Return a lower bound on the seconds to redistribute from one layout to another.

        Whatever the steps, at least one is launched and one message is waited for. Elements that a
        whole node lacks come over the slowest links, between nodes; all others may come over the
        fastest. 0.0 if no element has to move. A* needs a bound that is never too high.
        """
        received = self.received_lower_bound(state, goal)
        crossing = self.crossing_lower_bound(state, goal)
        if not received:
            return 0.0
        slowest = self.fabric.links[0]
        latency_s = self.fabric.least_latency_s
        if crossing:
            # A message between nodes cannot be avoided.
            latency_s = slowest.latency_s
        far_s = crossing / slowest.bytes_per_s  # if elements had one byte
        if self._has_ports:
            # The devices of a node share a port, and the one that receives most need not be at the
            # busiest port. So the two times are not added: together with `far_s` below, the longer
            # one counts.
            near_s = max(0.0, received / self.fabric.fastest_bytes_per_s - far_s)
        else:
            near_s = max(0.0, received - crossing) / self.fabric.fastest_bytes_per_s
        return self.fabric.least_launch_s + latency_s + (far_s + near_s) * self.itemsize

    @cached_method
    def reducing_lower_bound_s(self, state: State, goal: State) -> float:
        """Return a lower bound on the seconds to reduce partial sums, closer than `lower_bound_s`.

        A reduce-scatter over n devices takes n - 1 messages, one after the other. An all-reduce
        goes up and down a tree, with log2(n) messages each way. The fewer of the two count: for 8
        devices min(7, 6) = 6 latencies. 0.0 if no element has to move.
        """
        received = self.received_lower_bound(state, goal)
        if not received:
            return 0.0
        links = self.fabric.links
        launch = self.profile.launch
        launch_s = min(launch("all_reduce"), launch("reduce_scatter"), launch("exchange"))
        waits_s = 0.0
        for span in self.group(self.ended(state, goal)):
            n_turns = min(span.size - 1, 2 * (span.size - 1).bit_length())
            waits_s += n_turns * links[span.level].latency_s
        crossing = 0 if self.nodes else self._reduced_lower_bound(state, goal, level=0)
        far_s = crossing / links[0].bytes_per_s  # if elements had one byte
        near_s = 0.0
        if not self._has_ports:
            near_s = max(0.0, (received - crossing) / self.fabric.fastest_bytes_per_s)
        return launch_s + waits_s + (far_s + near_s) * self.itemsize

    @cached_method
    def exchange_lower_bound_s(self, state: State, next_state: State) -> float:
        """Return a lower bound on the seconds of an exchange between two layouts.

        In an exchange each device takes from any others what it lacks. To count that exactly is
        slow; this bound adds a launch, a latency per message, and the time to copy and send the
        elements that one device takes. Elements in the device's node are near, all others are far.
        """
        demand = self._exchange_demand(state, next_state)
        # If replicas in the receiver's node send first (`nodes` is not None), far elements would
        # have to be counted. 0 is a bound.
        far_elements = 0
        if self.nodes is None or self.ended(state, next_state):
            far_elements = max(0, demand.wanted - demand.in_node)
        # Each element is packed by its sender and unpacked by its receiver: two copies. A runtime
        # that sends in rounds copies what stays on its device only once, and that may be all.
        n_copies = 1 if self.profile.rounds else 2
        # Seconds, if elements had one byte: of copies, and below of links.
        byte_s = demand.wanted * n_copies / self.profile.copy_bytes_per_s
        # Where the devices of a node share a port, it may carry less than they receive: no bound.
        if not self._has_ports:
            near_elements = max(0, demand.wanted - far_elements - demand.already_local)
            far_s = far_elements / self.fabric.links[0].bytes_per_s
            byte_s += far_s + near_elements / self.fabric.fastest_bytes_per_s
        waits_s = self._waits_lower_bound_s(demand, far_elements)
        return self.profile.launch("exchange") + waits_s + byte_s * self.itemsize

    def _waits_lower_bound_s(self, demand: ExchangeDemand, far_elements: int) -> float:
        """Return a lower bound on the seconds for which a device waits for messages.

        Each message costs a latency. There is one from each sender, and at least `min_senders` of
        these. Of the elements from other nodes a sender gives at most `max_per_sender`: 10 far
        elements, 4 per sender -> 3 messages between nodes; all others may be inside the node.
        """
        far_messages = ceil_div(far_elements, max(1, demand.max_per_sender))
        near_messages = demand.min_senders - far_messages
        if demand.already_local:
            near_messages -= 1  # the device itself is one of the senders, without a message
        if not far_messages:
            near_messages = max(1, near_messages)  # an exchange has at least one message
        waits_s = far_messages * self.fabric.links[0].latency_s  # of the slowest links
        waits_s += max(0, near_messages) * self.fabric.least_latency_s
        return waits_s

    def _exchange_demand(self, state: State, next_state: State) -> ExchangeDemand:
        """Bound what the busiest device takes in an exchange: elements, senders, and what is near.

        Each number is a product of bounds for the dims. A partial sum over n devices that ends
        multiplies it, as a device needs each element from all n: a block of 4 x 3 elements with a
        sum over 2 devices -> 2 * 4 * 3 elements.
        """
        ended = self.ended(state, next_state)
        is_regular = self.is_regular(next_state)
        # If the goal holds partial sums that the start does not, one device has the values, and the
        # others have zeros. Some devices then receive nothing, so 0 is the only bound.
        n_addends = 0 if self.ended(next_state, state) else self.count_parts(ended)
        of_sums = ExchangeDemand(
            wanted=n_addends,
            min_senders=n_addends,
            max_per_sender=1,
            already_local=1,
            in_node=self._parts_near(ended),
        )
        demands = [of_sums]
        for dim_index, (cut, next_cut) in enumerate(zip(state.cuts, next_state.cuts, strict=True)):
            demands.append(self._dim_demand(dim_index, cut, next_cut, is_regular))
        return ExchangeDemand(*map(math.prod, zip(*demands, strict=True)))

    @cached_method
    def _dim_demand(
        self, dim_index: int, cut: Cut, next_cut: Cut, is_regular: bool
    ) -> ExchangeDemand:
        """Bound the rows of one dim that the busiest device takes in an exchange between layouts.

        8 rows, "n/x" -> "n" with x=4: 8 rows are wanted, from at least 4 senders with at most 2
        rows each. At most 2 are on the device already, and with 2 devices in a node, 4 in the node.

        Args:
            dim_index: The index of the dim.
            cut: Its shards in the source.
            next_cut: Its shards in the target.
            is_regular: Whether all shards of all dims in the target are even and contiguous.
        """
        source_rows = self.length(dim_index, cut).longest  # of one block
        rows = self.length(dim_index, next_cut).longest
        min_senders = ceil_div(rows, max(1, source_rows))
        max_per_sender = min(source_rows, rows)
        # A node holds at most as many different blocks as it has devices along the axes of the dim.
        in_node = min(rows, source_rows * self._parts_near(self.axes_in(cut)))
        already_local = max_per_sender
        n_shared = len(common_prefix(cut, next_cut))
        has_other_shard = n_shared < min(len(cut), len(next_cut))  # outermost, in place of one
        if is_regular and self.is_plain(cut) and has_other_shard:
            # The device that is last along the old shard and first along the new one keeps no rows:
            # in "n/x" -> "n/y" with 8 rows on x=2, y=2 device (1, 0) has rows 4 to 7 and wants 0
            # to 3.
            already_local = 0
            outermost_span = self._spans[cut[n_shared]][0]
            if outermost_span.level == 0:  # the old shard is over nodes
                in_node = 0
        return ExchangeDemand(
            wanted=rows,
            min_senders=min_senders,
            max_per_sender=max_per_sender,
            already_local=already_local,
            in_node=in_node,
        )

    @cached_method
    def _parts_near(self, axes: tuple[int, ...]) -> int:
        """Count the devices along some axes that all but the slowest links connect."""
        return math.prod([span.size for span in self.group(axes) if span.level])


def grid(mesh: Mesh, shape: tuple[int, ...], itemsize: int, profile: Profile) -> Grid:
    """Return the one grid of a shape on a mesh; a new one once it has numbered too many shards."""
    cached = _grid(mesh, shape, itemsize, profile)
    if len(cached.shards) > MAX_SHARDS:
        _grid.cache_clear()
        cached = _grid(mesh, shape, itemsize, profile)
    return cached


_grid = layout_cache(maxsize=1024)(Grid)
