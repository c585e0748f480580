"""Transfer: devices of one mesh send the devices of another the boxes that these lack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from xshard.cost.bounds import have_same_blocks
from xshard.cost.machine import are_on_two_nodes
from xshard.cost.model import Link, Price, Profile
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import Segment
from xshard.plans.transfer_pieces import Ints, SentPieces, find_pieces
from xshard.plans.transfer_senders import balanced
from xshard.search.request import device_numbers
from xshard.steps.base import REDUCERS, Block, Blocks, Step, reduction_dtype
from xshard.steps.exchange.messages import Message, Messages
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic

# What crosses one kind of link: [sent and received, devices, elements and messages].
Flow = Ints
SENT = 0
RECEIVED = 1
ELEMENTS = 0
MESSAGES = 1


@dataclass(frozen=True)
class Transfer(Step):
    """Move the blocks of one sharding to another, on other devices, some of them, or the same.

    Every reduction ends: addends are added where they arrive, in the order of their devices; an
    element of a new sum goes to the first device along it. If every device has its block of `target`
    already, addends included, nothing is sent and nothing ends: only the mesh is another.

    Attributes:
        source: The sharding at the start, in normal form.
        target: The sharding at the end, in normal form.
        src_devices: The number of every device of the source's mesh, in its order.
        dst_devices: The number of every device of the target's mesh, in its order.
        profile: The machine, whose links decide which replica sends.
        senders: Of each piece, the position of its sender on the source's mesh. Default: `balanced`
            for this transfer alone.

    Raises:
        MeshError: The devices do not fit a mesh.
        PlanError: The target holds a max or min, or a sender does not hold what it sends.
    """

    kind: ClassVar[str] = "transfer"
    source: Sharding
    target: Sharding
    src_devices: tuple[int, ...]
    dst_devices: tuple[int, ...]
    profile: Profile = field(repr=False)
    senders: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        device_numbers("source", self.source.mesh, self.src_devices)
        device_numbers("destination", self.target.mesh, self.dst_devices)
        self._check_target()
        if self.senders:
            self._check_senders()

    def _check_target(self) -> None:
        target = self.target.layout
        nonlinear_axes = target.tagged("max", "min")
        if nonlinear_axes and not self.is_in_place:
            axes = ", ".join(nonlinear_axes)
            raise PlanError(
                f"'{target}' holds a max or min over {axes}, which no transfer brings there",
                hint=f"reduce it: write copy({','.join(nonlinear_axes)})",
            )

    def _check_senders(self) -> None:
        """Raise PlanError unless there is one sender for each piece, which holds the piece."""
        n_pieces = len(self._pieces.dst)
        positions = range(self.source.mesh.n_devices)
        is_complete = len(self.senders) == n_pieces and set(self.senders) <= set(positions)
        if not is_complete or (
            (self._pieces.group_of[[*self.senders]] != self._pieces.group).any()
        ):
            raise PlanError(f"senders {self.senders} do not hold the {n_pieces} pieces they send")

    @cached_property
    def is_in_place(self) -> bool:
        """Whether every device has its block already, so that nothing is sent."""
        if sorted(self.src_devices) != sorted(self.dst_devices):
            return False
        src_positions = [self.src_devices.index(device) for device in self.dst_devices]
        return have_same_blocks(self.source, self.target, src_positions)

    @property
    def op(self) -> str | None:
        """How boxes for the same elements combine, if the source holds addends: "sum", "max", "min"."""
        if self.is_in_place:
            return None
        for tag, _ in self.source.layout.tags:
            if tag in REDUCERS:
                return tag
        return None

    def after(self, source: Sharding) -> Sharding:
        is_same_array = source.mesh == self.source.mesh and source.shape == self.source.shape
        if not (is_same_array and source.means_the_same_as(self.source)):
            expected = f"'{self.source.layout}' on {self.source.mesh!r}"
            actual = f"'{source.layout}' on {source.mesh!r}"
            raise PlanError(f"the transfer starts from {expected}, not from {actual}")
        return self.target

    @cached_property
    def messages(self) -> Messages:
        """Every box with its sender and receiver, in order of receivers and, for each, of addends."""
        receivers = self._pieces.dst.tolist()
        return tuple(map(Message, self._senders, receivers, self._boxes()))

    def _boxes(self) -> Iterator[tuple[Any, ...]]:
        """Yield the box of every piece: for each dim, the segments of its rows."""
        if not self._pieces.boxes_by_dim:  # a scalar has no dims
            return iter([()] * len(self._senders))
        segments_by_dim = []
        for box_indices, boxes in self._pieces.boxes_by_dim:
            segments_by_dim.append(map(boxes.__getitem__, box_indices.tolist()))
        return zip(*segments_by_dim, strict=True)

    @cached_property
    def _pieces(self) -> SentPieces:
        return find_pieces(self.source, self.target, not self.is_in_place)

    @cached_property
    def _senders(self) -> tuple[int, ...]:
        return self.senders or balanced([self])[0]

    @cached_property
    def pairs(self) -> Ints:
        """Of all messages: the numbers of sender and receiver, and elements. [3, messages]."""
        senders = np.array(self.src_devices)[np.array(self._senders, np.int64)]
        receivers = np.array(self.dst_devices)[self._pieces.dst]
        return np.stack([senders, receivers, self._pieces.size])

    def is_kept(self, message: Message) -> bool:
        """Return whether sender and receiver are one device."""
        return self.src_devices[message.src] == self.dst_devices[message.dst]

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        """Compute in numpy what each device of the destination's mesh holds after the transfer.

        One block per device of the source -> one block per device of the destination. Each message
        copies a box (a range of rows in every dim) of one block into another. Where several messages
        bring the same elements, they hold addends, and `op` ("sum", "max" or "min"; None without
        addends) combines them.
        """
        # Nothing moves: every device has the block that it needs.
        if self.is_in_place:
            return [blocks[self.src_devices.index(device)] for device in self.dst_devices]
        dtype = blocks[0].dtype
        results = [
            np.zeros(self.target.local_shape(device), reduction_dtype(self.op, dtype))
            for device in range(self.target.mesh.n_devices)
        ]
        is_written = [np.zeros(result.shape, bool) for result in results]  # by an earlier message
        for message in self.messages:
            box = blocks[message.src][message.src_index()]
            index = message.dst_index()
            result = results[message.dst]
            written = is_written[message.dst]
            if self.op:
                # The first addend is copied: zeros would be wrong for a max, and turn -0.0 into 0.0.
                box = np.where(written[index], REDUCERS[self.op](result[index], box), box)
            result[index] = box
            written[index] = True
        return [result.astype(dtype, copy=False) for result in results]

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        """Return what every sender gives to every receiver, as positions on the two meshes."""
        return tuple(
            PairTraffic(message.src, message.dst, message.size)
            for message in self.messages
            if not self.is_kept(message)
        )

    @property
    def received(self) -> int:
        """Elements that the busiest receiver gets from other devices."""
        return int(self._elements[RECEIVED].max())

    @property
    def sent(self) -> int:
        """Elements that the busiest sender gives to other devices."""
        return int(self._elements[SENT].max())

    @property
    def peak_elements(self) -> int:
        """Elements that the busiest device holds at once: its blocks, and what it sends and receives."""
        if self.is_in_place:
            return self.source.max_local_size
        elements = self._elements.sum(axis=0)
        elements[self._device_positions(self.src_devices)] += self.source.block_sizes
        elements[self._device_positions(self.dst_devices)] += self.target.block_sizes
        return int(elements.max())

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        """Return a hop for each of `flows`, of the device that sends or receives longest over its link."""
        hops = []
        for level, flow in enumerate(self.flows.values()):
            elements, messages = flow.max(axis=(0, 1)).tolist()
            busiest_node = max(map(self._busiest_node, flow[..., ELEMENTS]))
            mean_in_node = busiest_node / (self.profile.node_devices or 1)
            hops.append(
                Hop(
                    axis="",  # two meshes, with axes of their own
                    received=elements,
                    messages=messages,
                    level=level,
                    mean_shortfall=int(elements - mean_in_node),
                )
            )
        # Sent and received boxes are packed and unpacked, own rows are moved in memory.
        copied = self._elements.sum(axis=0) + self._rearranged
        return Traffic(received=self.received, copied=int(copied.max()), hops=tuple(hops))

    def price(self, itemsize: int) -> Price:
        """Price the transfer in bytes and seconds.

        The time is the sum over the links of the time of the busiest device.
        """
        traffic = self.traffic(self.source)
        seconds = traffic.copied * itemsize / self.profile.copy_bytes_per_s
        if self.flows:
            seconds += self.profile.launch("exchange")
        for link, hop in zip(self.flows, traffic.hops, strict=True):
            seconds += link.seconds(hop, itemsize)
        return Price(seconds, traffic.received * itemsize, self.peak_elements * itemsize)

    @cached_property
    def flows(self) -> dict[Link, Flow]:
        """What each device sends and receives, by link: inside nodes, and between nodes.

        A link's array is [2, devices, 2]: sent or received; the device, by its position in `_devices`;
        elements or messages. If device 0 sends 8 elements to device 1, [SENT, 0] and [RECEIVED, 1]
        are both (8, 1).
        """
        # `pairs` has three rows: sender, receiver and elements of each message. Messages of a device
        # to itself are copies in its memory, and take no link.
        senders, receivers, elements = self.pairs[:, self.pairs[0] != self.pairs[1]]
        is_between_nodes = are_on_two_nodes(self.profile, senders, receivers)
        flows: dict[Link, Flow] = {}
        messages_of_links = (
            (self.profile.default, ~is_between_nodes),
            (self.profile.across, is_between_nodes),
        )
        for link, is_chosen in messages_of_links:
            if link is None or not is_chosen.any():
                continue
            # A machine may have equal links inside nodes and between them: then their flows add up.
            flow = flows.setdefault(link, np.zeros((2, len(self._devices), 2), np.int64))
            for direction, devices in ((SENT, senders), (RECEIVED, receivers)):
                positions = self._device_positions(devices[is_chosen])
                # `+=` would count a device that occurs several times only once.
                np.add.at(flow[direction, :, ELEMENTS], positions, elements[is_chosen])
                np.add.at(flow[direction, :, MESSAGES], positions, 1)
        return flows

    @property
    def _elements(self) -> Ints:
        """Elements that every device sends, and that it receives: [2, devices]."""
        elements_by_device = np.zeros((2, len(self._devices)), np.int64)
        for flow in self.flows.values():
            elements_by_device += flow[..., ELEMENTS]
        return elements_by_device

    @property
    def between_nodes(self) -> int:
        """Elements that the busiest node receives from others."""
        if self.profile.across not in self.flows:
            return 0
        flow = self.flows[self.profile.across]
        return self._busiest_node(flow[RECEIVED, :, ELEMENTS])

    def __str__(self) -> str:
        n_messages = int((self.pairs[0] != self.pairs[1]).sum())
        return f"transfer, {n_messages} {'message' if n_messages == 1 else 'messages'}"

    @cached_property
    def _devices(self) -> Ints:
        """The number of every device of either mesh, sorted: the order of a flow's devices."""
        return np.array(sorted({*self.src_devices, *self.dst_devices}))

    def _device_positions(self, devices: Any) -> Ints:
        """Return the positions of devices in `_devices`."""
        return np.asarray(np.searchsorted(self._devices, devices))

    def _busiest_node(self, elements: Ints) -> int:
        """Return the most that all devices of a node send or receive together."""
        nodes = self._devices // (self.profile.node_devices or 1)
        _, node_of_device = np.unique(nodes, return_inverse=True)
        return int(np.bincount(node_of_device, elements).max())

    @property
    def _rearranged(self) -> Ints:
        """Count the elements that each device copies from its old block to its new one: [devices].

        These are the messages of a device to itself. 0 where the old block is the whole new block,
        since it is then used without a copy.
        """
        copied = np.zeros(len(self._devices), np.int64)
        # Rows 0 and 1 of `pairs` are senders and receivers. They are looked at first, since making
        # messages takes much longer.
        if not (self.pairs[0] == self.pairs[1]).any():
            return copied
        for message in filter(self.is_kept, self.messages):
            src_shape = self.source.local_shape(message.src)
            whole_block = tuple((Segment(0, 0, length),) for length in src_shape)
            is_same_block = (
                message.box == whole_block and self.target.local_shape(message.dst) == src_shape
            )
            if not is_same_block:
                copied[self._device_positions(self.src_devices[message.src])] += message.size
        return copied
