"""Transfer: devices of one mesh send the devices of another the boxes that these lack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.cost.bounds import have_same_blocks
from xshard.cost.machine import link_between
from xshard.cost.model import Link, Price, Profile
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import Segment, common_segments
from xshard.search.request import device_numbers
from xshard.steps.base import REDUCERS, Block, Blocks, Step
from xshard.steps.exchange.messages import Message, Messages
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic


class Piece(NamedTuple):
    """A box that a device of the destination takes from one of `holders`, positions on the source's mesh."""

    dst: int
    box: tuple[tuple[Segment, ...], ...]
    holders: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(sum(s.length for s in segments) for segments in self.box)


@dataclass(frozen=True)
class Transfer(Step):
    """Blocks of one sharding become blocks of another, on other devices, some of them, or the same. Every
    reduction ends: addends are added where they arrive, in the order of their devices; an element of a new
    sum goes to the first device along it. If every device has its block of `target` already, addends
    included, nothing is sent and nothing ends: only the mesh is another. Raises MeshError, PlanError."""

    kind: ClassVar[str] = "transfer"
    source: Sharding  # in normal form, as the target
    target: Sharding
    src_devices: tuple[int, ...]  # the number of every device, in the order of its mesh
    dst_devices: tuple[int, ...]
    profile: Profile = field(repr=False)
    senders: tuple[int, ...] = ()  # of each of `pieces`; by default, `balanced` for this transfer alone

    def __post_init__(self) -> None:
        device_numbers("source", self.source.mesh, self.src_devices)
        device_numbers("destination", self.target.mesh, self.dst_devices)
        target = self.target.layout
        if not self.is_in_place and (kept := target.tagged("max", "min")):
            reason = f"'{target}' holds a max or min over {', '.join(kept)}, which no transfer brings there"
            raise PlanError(reason, hint=f"reduce it: write copy({','.join(kept)})")
        if self.senders and (
            len(self.senders) != len(self.pieces)
            or any(s not in piece.holders for s, piece in zip(self.senders, self.pieces, strict=True))
        ):
            raise PlanError(f"senders {self.senders} do not hold the {len(self.pieces)} pieces they send")

    @cached_property
    def is_in_place(self) -> bool:
        """Whether every device has its block already, so that nothing is sent."""
        return sorted(self.src_devices) == sorted(self.dst_devices) and have_same_blocks(
            self.source, self.target, [self.src_devices.index(device) for device in self.dst_devices]
        )

    @property
    def op(self) -> str | None:
        """How boxes that meet at one place combine, if the source holds addends."""
        kinds = () if self.is_in_place else self.source.layout.tags
        return next((kind for kind, _ in kinds if kind in REDUCERS), None)

    def after(self, before: Sharding) -> Sharding:
        same = before.mesh == self.source.mesh and before.shape == self.source.shape
        if not (same and before.means_the_same_as(self.source)):
            start, other = (f"'{s.layout}' on {s.mesh!r}" for s in (self.source, before))
            raise PlanError(f"the transfer starts from {start}, not from {other}")
        return self.target

    @cached_property
    def messages(self) -> Messages:
        """Every box with its sender and receiver, in order of receivers and, for each, of addends."""
        senders = self.senders or balanced([self])[0]
        return tuple(Message(s, piece.dst, piece.box) for s, piece in zip(senders, self.pieces, strict=True))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every box that a device of the destination gets, and who could send it."""
        return () if self.is_in_place else _pieces(self.source, self.target)

    def is_kept(self, message: Message) -> bool:
        """Sender and receiver are one device."""
        return self.src_devices[message.src] == self.dst_devices[message.dst]

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        """The numpy rule: one block per device of the source -> one per device of the destination."""
        if self.is_in_place:
            return [blocks[self.src_devices.index(device)] for device in self.dst_devices]
        devices = range(self.target.mesh.n_devices)
        outs = [np.zeros(self.target.local_shape(d), blocks[0].dtype) for d in devices]
        written = [np.zeros(out.shape, bool) for out in outs]
        for message in self.messages:
            box, index = blocks[message.src][message.src_index()], message.dst_index()
            out, known = outs[message.dst], written[message.dst]
            out[index] = np.where(known[index], REDUCERS[self.op](out[index], box), box) if self.op else box
            known[index] = True
        return outs

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        """As positions on the two meshes."""
        return tuple(PairTraffic(m.src, m.dst, m.size) for m in self.messages if not self.is_kept(m))

    @property
    def received(self) -> int:
        """Elements that the busiest receiver gets from other devices."""
        return int(self._elements[1].max())

    @property
    def sent(self) -> int:
        """Elements that the busiest sender gives to other devices."""
        return int(self._elements[0].max())

    @property
    def held(self) -> int:
        """Elements that the busiest device holds at once: its blocks, and what it sends and receives."""
        if self.is_in_place:
            return self.source.max_local_size
        total = self._elements.sum(axis=0)
        for sharding, devices in ((self.source, self.src_devices), (self.target, self.dst_devices)):
            for index, device in enumerate(devices):
                total[self._devices[device]] += math.prod(sharding.local_shape(index))
        return int(total.max())

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        """A hop for each of `flows`, of the device that sends or receives longest over its link."""
        hops = []
        for level, flow in enumerate(self.flows.values()):
            busiest, messages = flow.max(axis=(0, 1)).tolist()
            mean = max(map(self._node_most, flow[..., 0])) / (self.profile.node_devices or 1)
            hops.append(Hop("", busiest, messages, level, int(busiest - mean)))
        copied = self._elements.sum(axis=0) + self._rearranged
        return Traffic(self.received, int(copied.max()), tuple(hops))

    def price(self, itemsize: int) -> Price:
        """Bytes, and the predicted time: the sum over the links of the time of the busiest device."""
        traffic = self.traffic(self.source)
        seconds = traffic.copied * itemsize / self.profile.copy_bytes_per_s
        if self.flows:
            seconds += self.profile.launch("exchange")
        hops = zip(self.flows, traffic.hops, strict=True)
        seconds += sum(link.seconds(hop, itemsize) for link, hop in hops)
        return Price(seconds, traffic.received * itemsize, self.held * itemsize)

    @cached_property
    def flows(self) -> dict[Link, NDArray[np.int64]]:
        """By the link that it takes, what crosses devices: (out and in, devices, elements and messages)."""
        flows: dict[Link, NDArray[np.int64]] = {}
        for m in itertools.filterfalse(self.is_kept, self.messages):
            flow = flows.setdefault(self.link(m.src, m.dst), np.zeros((2, len(self._devices), 2), np.int64))
            places = self._devices[self.src_devices[m.src]], self._devices[self.dst_devices[m.dst]]
            flow[(0, 1), places] += m.size, 1
        return flows

    @property
    def _elements(self) -> NDArray[np.int64]:
        """Elements that every device sends, and that it receives."""
        total = np.zeros((2, len(self._devices)), np.int64)
        return sum((flow[..., 0] for flow in self.flows.values()), total)

    @property
    def between_nodes(self) -> int:
        """Elements that the busiest node receives from others."""
        flow = self.flows.get(self.profile.across) if self.profile.across else None
        return 0 if flow is None else self._node_most(flow[1, :, 0])

    def link(self, src: int, dst: int) -> Link:
        """What connects two devices, given by their places in the two meshes."""
        return link_between(self.profile, self.src_devices[src], self.dst_devices[dst])

    def __str__(self) -> str:
        n = sum(not self.is_kept(m) for m in self.messages)
        return f"transfer, {n} {'message' if n == 1 else 'messages'}"

    @cached_property
    def _devices(self) -> dict[int, int]:
        """Every device of either mesh, and its place in the arrays of a flow."""
        return {device: i for i, device in enumerate(sorted({*self.src_devices, *self.dst_devices}))}

    def _node_most(self, elements: NDArray[np.int64]) -> int:
        """The most that all devices of a node send or receive together."""
        nodes = np.fromiter(self._devices, np.int64) // (self.profile.node_devices or 1)
        return int(np.bincount(np.unique(nodes, return_inverse=True)[1], elements).max())

    @property
    def _rearranged(self) -> NDArray[np.int64]:
        """Elements that every device copies from its old block to its new one, unless that is the same."""
        total = np.zeros(len(self._devices), np.int64)
        for m in filter(self.is_kept, self.messages):
            shape = self.source.local_shape(m.src)
            whole = tuple((Segment(0, 0, n),) for n in shape)
            if m.box != whole or self.target.local_shape(m.dst) != shape:
                total[self._devices[self.src_devices[m.src]]] += m.size
        return total


def balanced(transfers: Sequence[Transfer], itemsizes: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """For every transfer the senders of its pieces, largest first: the receiver, else who is done first."""
    sizes = itemsizes or (1,) * len(transfers)
    senders_of = [[-1] * len(transfer.pieces) for transfer in transfers]
    positions = [{device: index for index, device in enumerate(t.src_devices)} for t in transfers]
    pairs = enumerate(zip(transfers, sizes, strict=True))
    every = [(-p.size * n, t, i) for t, (transfer, n) in pairs for i, p in enumerate(transfer.pieces)]
    busy_s: dict[int, float] = {}
    for minus_bytes, t, i in sorted(every):
        transfer = transfers[t]
        dst, _, holders = transfer.pieces[i]
        own = positions[t].get(transfer.dst_devices[dst])
        if own in holders:
            senders_of[t][i] = own
            continue
        done_s = {}
        for holder in holders:
            link = transfer.link(holder, dst)
            begins_s = busy_s.get(transfer.src_devices[holder], 0.0)
            done_s[holder] = begins_s + link.latency_s - minus_bytes / link.bytes_per_s
        senders_of[t][i] = sender = min(holders, key=done_s.__getitem__)
        busy_s[transfer.src_devices[sender]] = done_s[sender]
    return [tuple(senders) for senders in senders_of]


@lru_cache(maxsize=4096)
def _pieces(source: Sharding, target: Sharding) -> tuple[Piece, ...]:
    dims = range(len(source.shape))
    sums = source.layout.tagged(*REDUCERS)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device in range(source.mesh.n_devices):
        key = source.mesh.index(device, sums), *(source.dim_device(d, device) for d in dims)
        holders.setdefault(key, []).append(device)
    # For every dim and every block of it in the target: which blocks of the source hold a part of it.
    overlaps = [
        [
            [(i, box) for i, rows in enumerate(source.owners(d)) if (box := common_segments(rows, wanted))]
            for wanted in target.holders(d)
        ]
        for d in dims
    ]
    pieces = []
    for dst in range(target.mesh.n_devices):
        if target.mesh.index(dst, target.layout.tagged("sum")):
            continue  # the first device along a new sum contributes, this one adds nothing
        parts = [overlaps[d][target.dim_device(d, dst)] for d in dims]
        for addend in range(source.mesh.size(*sums)):
            for combo in itertools.product(*parts):
                key = addend, *(i for i, _ in combo)
                pieces.append(Piece(dst, tuple(box for _, box in combo), tuple(holders[key])))
    return tuple(pieces)
