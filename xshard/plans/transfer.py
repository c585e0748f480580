"""Transfer: devices of one mesh send the devices of another the boxes that these lack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.cost.bounds import have_same_blocks
from xshard.cost.machine import are_across
from xshard.cost.model import Link, Price, Profile
from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import Runs, Segment, common_segments
from xshard.search.request import device_numbers
from xshard.steps.base import REDUCERS, Block, Blocks, Step
from xshard.steps.exchange.messages import Message, Messages
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic


class SentPieces(NamedTuple):
    """All boxes that devices of the destination take, as columns: receivers, elements, groups of holders."""

    dst: NDArray[np.int64]
    size: NDArray[np.int64]
    group: NDArray[np.int64]
    holders: tuple[NDArray[np.int64], ...]  # of each group, positions on the source's mesh
    group_of: NDArray[np.int64]  # of every device of the source, the group that it is in
    parts: tuple[
        tuple[NDArray[np.int64], tuple[Any, ...]], ...
    ]  # by dim: numbers of boxes, and the boxes


@dataclass(frozen=True)
class Transfer(Step):
    """Blocks of one sharding become blocks of another, on other devices, some of them, or the same. Every
    reduction ends: addends are added where they arrive, in the order of their devices; an element of a new
    sum goes to the first device along it. If every device has its block of `target` already, addends
    included, nothing is sent and nothing ends: only the mesh is another. Raises MeshError, PlanError.
    """

    kind: ClassVar[str] = "transfer"
    source: Sharding  # in normal form, as the target
    target: Sharding
    src_devices: tuple[int, ...]  # the number of every device, in the order of its mesh
    dst_devices: tuple[int, ...]
    profile: Profile = field(repr=False)
    senders: tuple[int, ...] = ()  # of each piece; by default, `balanced` for this transfer alone

    def __post_init__(self) -> None:
        device_numbers("source", self.source.mesh, self.src_devices)
        device_numbers("destination", self.target.mesh, self.dst_devices)
        target = self.target.layout
        if not self.is_in_place and (kept := target.tagged("max", "min")):
            reason = f"'{target}' holds a max or min over {', '.join(kept)}, which no transfer brings there"
            raise PlanError(reason, hint=f"reduce it: write copy({','.join(kept)})")
        if self.senders and (
            len(self.senders) != len(self._pieces.dst)
            or not set(self.senders) <= {*range(self.source.mesh.n_devices)}
            or (self._pieces.group_of[[*self.senders]] != self._pieces.group).any()
        ):
            n = len(self._pieces.dst)
            raise PlanError(f"senders {self.senders} do not hold the {n} pieces they send")

    @cached_property
    def is_in_place(self) -> bool:
        """Whether every device has its block already, so that nothing is sent."""
        return sorted(self.src_devices) == sorted(self.dst_devices) and have_same_blocks(
            self.source,
            self.target,
            [self.src_devices.index(device) for device in self.dst_devices],
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
        boxes = [map(boxes.__getitem__, which.tolist()) for which, boxes in self._pieces.parts]
        each = zip(*boxes, strict=True) if boxes else [()] * len(self._senders)
        return tuple(map(Message, self._senders, self._pieces.dst.tolist(), each))

    @cached_property
    def _pieces(self) -> SentPieces:
        return _find_pieces(self.source, self.target, not self.is_in_place)

    @cached_property
    def _numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.array(self.src_devices), np.array(self.dst_devices)

    @cached_property
    def _senders(self) -> tuple[int, ...]:
        return self.senders or balanced([self])[0]

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """Of all messages: the numbers of sender and receiver, and elements."""
        src, dst = self._numbers
        columns = self._pieces
        return np.stack([src[np.array(self._senders, np.int64)], dst[columns.dst], columns.size])

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
            box = blocks[message.src][message.src_index()]
            index = message.dst_index()
            out = outs[message.dst]
            known = written[message.dst]
            out[index] = (
                np.where(known[index], REDUCERS[self.op](out[index], box), box) if self.op else box
            )
            known[index] = True
        return outs

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        """As positions on the two meshes."""
        return tuple(
            PairTraffic(m.src, m.dst, m.size) for m in self.messages if not self.is_kept(m)
        )

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
            total[np.searchsorted(self._devices, devices)] += sharding.block_sizes
        return int(total.max())

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        """A hop for each of `flows`, of the device that sends or receives longest over its link."""
        hops = []
        for level, flow in enumerate(self.flows.values()):
            busiest, messages = flow.max(axis=(0, 1)).tolist()
            mean = max(map(self._node_most, flow[..., 0])) / (self.profile.node_devices or 1)
            hops.append(Hop("", busiest, messages, level, int(busiest - mean)))
        return Traffic(
            self.received, int((self._elements.sum(axis=0) + self._rearranged).max()), tuple(hops)
        )

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
        sender, receiver, size = self.pairs[:, self.pairs[0] != self.pairs[1]]
        across = are_across(self.profile, sender, receiver)
        flows: dict[Link, NDArray[np.int64]] = {}
        for link, some in ((self.profile.default, ~across), (self.profile.across, across)):
            if link and some.any():
                flow = flows.setdefault(link, np.zeros((2, len(self._devices), 2), np.int64))
                for end, devices in enumerate((sender, receiver)):
                    places = np.searchsorted(self._devices, devices[some])
                    np.add.at(flow[end, :, 0], places, size[some])
                    np.add.at(flow[end, :, 1], places, 1)
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

    def __str__(self) -> str:
        n = int((self.pairs[0] != self.pairs[1]).sum())
        return f"transfer, {n} {'message' if n == 1 else 'messages'}"

    @cached_property
    def _devices(self) -> NDArray[np.int64]:
        """Every device of either mesh, in the order of the arrays of a flow."""
        return np.array(sorted({*self.src_devices, *self.dst_devices}))

    def _node_most(self, elements: NDArray[np.int64]) -> int:
        """The most that all devices of a node send or receive together."""
        nodes = self._devices // (self.profile.node_devices or 1)
        return int(np.bincount(np.unique(nodes, return_inverse=True)[1], elements).max())

    @property
    def _rearranged(self) -> NDArray[np.int64]:
        """Elements that every device copies from its old block to its new one, unless that is the same."""
        total = np.zeros(len(self._devices), np.int64)
        if not (self.pairs[0] == self.pairs[1]).any():
            return total
        for m in filter(self.is_kept, self.messages):
            shape = self.source.local_shape(m.src)
            whole = tuple((Segment(0, 0, n),) for n in shape)
            if m.box != whole or self.target.local_shape(m.dst) != shape:
                total[np.searchsorted(self._devices, self.src_devices[m.src])] += m.size
        return total


def balanced(transfers: Sequence[Transfer], itemsizes: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """For every transfer the senders of its pieces, largest first: the receiver, else who is done first."""
    sizes = itemsizes or (1,) * len(transfers)
    last = max((max(*t.src_devices, *t.dst_devices) for t in transfers), default=0)
    busy_s = np.zeros(last + 1)
    chosen = []
    batches = []
    for t, (transfer, n) in enumerate(zip(transfers, sizes, strict=True)):
        dst, size, group, _, group_of, _ = transfer._pieces
        positions = np.full(last + 1, -1)
        positions[[*transfer.src_devices]] = range(len(transfer.src_devices))
        own = positions[transfer._numbers[1][dst]]
        chosen.append(np.where((own >= 0) & (group_of[own] == group), own, -1))
        left = np.flatnonzero(chosen[t] < 0)
        left = left[np.lexsort((group[left], -size[left]))]
        starts = np.flatnonzero(np.diff(size[left]) | np.diff(group[left])) + 1
        batches += [
            (-int(size[some[0]]) * n, t, some) for some in np.split(left, starts) if len(some)
        ]
    for minus_bytes, t, some in sorted(batches, key=lambda batch: batch[:2]):
        pieces = transfers[t]._pieces
        profile = transfers[t].profile
        devices, receivers = transfers[t]._numbers
        holders = pieces.holders[pieces.group[some[0]]]
        across = are_across(profile, devices[holders], receivers[pieces.dst[some], None])
        links = profile.default, profile.across or profile.default
        by_link_s = [link.latency_s - minus_bytes / link.bytes_per_s for link in links]
        each_s = np.array(by_link_s)[across.astype(int)]
        if (each_s == each_s[0, 0]).all():
            one_s = max(float(each_s[0, 0]), 1e-12)
            picked, busy_s[devices[holders]] = _filled(busy_s[devices[holders]], one_s, len(some))
            chosen[t][some] = holders[picked]
            continue
        for i, takes_s in zip(some, each_s, strict=True):
            done_s = busy_s[devices[holders]] + takes_s
            chosen[t][i] = sender = holders[done_s.argmin()]
            busy_s[devices[sender]] = done_s.min()
    return [tuple(senders.tolist()) for senders in chosen]


def _filled(
    busy_s: NDArray[np.float64], each_s: float, n: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For n equal pieces in turn who is done with one first; and until when all are busy then."""
    done = np.sort(busy_s)
    levels = (n * each_s + done.cumsum()) / np.arange(
        1, len(done) + 1
    )  # the first 1, 2, ... until one time
    counts = np.clip((levels.min() + each_s - busy_s) / each_s, -1, n).astype(np.int64) + 1
    who = np.repeat(np.arange(len(busy_s)), counts)
    turns = np.arange(1, len(who) + 1) - np.repeat(counts.cumsum() - counts, counts)
    ends_s = busy_s[who] + turns * each_s
    first = np.lexsort((who, ends_s))[:n]
    busy_s = busy_s.copy()
    np.maximum.at(busy_s, who[first], ends_s[first])
    return who[first], busy_s


@layout_cache(maxsize=4096)
def _find_pieces(source: Sharding, target: Sharding, sends: bool) -> SentPieces:
    """The pieces in order of receivers, of addends, and of boxes; none unless it `sends`."""
    mesh = source.mesh
    dims = source.layout.dims
    sums = source.layout.tagged(*REDUCERS)
    key_of = mesh.indices(sums)
    n_addends = mesh.size(*sums)
    for dim in dims:
        key_of = key_of * mesh.size(*dim.axes) + mesh.indices(dim.axes)
    keys, group_of = np.unique(key_of, return_inverse=True)
    holders = tuple(np.flatnonzero(group_of == i) for i in range(len(keys)))
    # The first device along a new sum contributes, the others add nothing.
    first = np.flatnonzero(sends & (target.mesh.indices(target.layout.tagged("sum")) == 0))
    dst = np.repeat(first, n_addends)
    key = np.tile(np.arange(n_addends), len(first))
    size = np.ones_like(dst)
    entries = list[NDArray[np.int64]]()
    parts = [_overlaps(source.owners(d), target.holders(d)) for d in range(len(dims))]
    for dim, here, (starts, src, elements, _) in zip(target.layout.dims, dims, parts, strict=True):
        block = target.mesh.indices(dim.axes)[dst]
        counts = (starts[1:] - starts[:-1])[block]
        row = np.repeat(np.arange(len(dst)), counts)
        entry = np.arange(len(row)) + np.repeat(starts[block] - (counts.cumsum() - counts), counts)
        dst = dst[row]
        size = size[row] * elements[entry]
        key = key[row] * mesh.size(*here.axes) + src[entry]
        entries = [*(before[row] for before in entries), entry]
    which = tuple(zip(entries, (part[3] for part in parts), strict=True))
    return SentPieces(dst, size, np.searchsorted(keys, key), holders, group_of, which)


@layout_cache(maxsize=4096)
def _overlaps(owned: tuple[Runs, ...], wanted: tuple[Runs, ...]) -> tuple[Any, ...]:
    """The parts that the target's blocks of a dim take: their begins by block; each part's source block,
    elements, and box.
    """
    parts = [
        [(i, box) for i, rows in enumerate(owned) if (box := common_segments(rows, some))]
        for some in wanted
    ]
    starts = np.cumsum([0, *map(len, parts)])
    src, boxes = zip(*itertools.chain(*parts), strict=True) if starts[-1] else ((), ())
    elements = [sum(segment.length for segment in box) for box in boxes]
    return starts, np.array(src, np.int64), np.array(elements, np.int64), boxes
