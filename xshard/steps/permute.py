"""Permute: whole blocks change devices. Its adjoint is the inverse permutation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from xshard.caches import layout_cache
from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.notation.parser import Tags
from xshard.steps.base import REDUCERS, Block, Blocks, Step, axes_with_new_role, without_tags
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic, slowest_first

BlockKey = tuple[object, ...]  # of a device's block: equal keys, equal blocks
DevicesByBlock = dict[BlockKey, list[int]]


@dataclass(frozen=True)
class Permute(Step):
    """Every device gets the whole block of one device, so that layout `to` results.

    "n/x/y" -> "n/y/x" is one, since both layouts have the same blocks.
    """

    kind: ClassVar[str] = "permute"
    to: Layout

    def after(self, source: Sharding) -> Sharding:
        """Return the sharding under `to`.

        Raises PlanError if it needs blocks that no device has.
        """
        target = source.with_layout(self.to)
        if _sums(source) != _sums(target):
            raise PlanError(f"a permutation keeps sums: '{source.layout}' -> '{self.to}'")
        if not (source.has_even_cuts and target.has_even_cuts):
            sender_of_each_device(source, target)  # raises where blocks differ
        # Even contiguous blocks of one shape are the same blocks: no comparison of devices.
        elif source.max_local_shape != target.max_local_shape:
            raise _no_permutation(source, target)
        return target

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        moved = axes_with_new_role(source, self.to)
        return permute_traffic(source.max_local_size, slowest_first(source.mesh, moved, spans))

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        elements = source.max_local_size
        device_pairs = enumerate(self._senders(source))
        return tuple(PairTraffic(src, dst, elements) for dst, src in device_pairs if src != dst)

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        return [blocks[sender].copy() for sender in self._senders(source)]

    def _senders(self, source: Sharding) -> tuple[int, ...]:
        """Return the device that sends each device its block."""
        return sender_of_each_device(source, source.with_layout(self.to))

    def __str__(self) -> str:
        return "permute"


def _sums(sharding: Sharding) -> Tags:
    """Return the tags of axes that hold addends."""
    layout = sharding.layout
    return without_tags(layout, layout.tagged("copy")).tags


def _no_permutation(source: Sharding, target: Sharding) -> PlanError:
    """Make the error for shardings with different blocks."""
    return PlanError(f"no permutation of blocks leads from '{source.layout}' to '{target.layout}'")


def permute_traffic(block_elements: int, moved: LinkSpans) -> Traffic:
    """Count what one device receives if devices swap whole blocks.

    It is one message with one block, priced over the slowest link that any device may use. Blocks
    of 8 elements among 2 nodes of 4 devices: the hop has 8 elements, for the busiest device, and a
    mean shortfall of 4, since half of the devices of a node get their block from the same node.

    Args:
        block_elements: Elements of each block.
        moved: The spans (parts of mesh axes over links of one speed) of the axes whose use changes,
            the slowest first.
    """
    if not moved:
        return Traffic()
    slowest = moved[0]
    n_nodes = math.prod(span.size for span in moved if span.level == slowest.level)
    n_inside = math.prod(span.size for span in moved if span.level != slowest.level)
    # If the devices inside a node divide evenly among the nodes, one in `n_nodes` gets its block
    # from its own node. The devices of a node may share the slowest links, which so carry less on
    # average. Otherwise some node may get all its blocks from others: nothing is saved for sure.
    shortfall = 0 if n_inside % n_nodes else block_elements // n_nodes
    hop = Hop(
        axis=slowest.axis,
        received=block_elements,
        messages=1,
        level=slowest.level,
        mean_shortfall=shortfall,
    )
    return Traffic(received=block_elements, hops=(hop,))


@layout_cache(maxsize=1024)
def sender_of_each_device(source: Sharding, target: Sharding) -> tuple[int, ...]:
    """Find, for each device, the device that sends it its block if whole blocks change places.

    From "n/x/y" to "n/y/x" with x=2, y=2: (0, 2, 1, 3), so devices 1 and 2 swap. Sender and
    receiver differ only along mesh axes that are used in another way afterwards. A block that is
    already on its device stays there.

    Raises:
        PlanError: The shardings have different blocks.
    """
    mesh = source.mesh
    changed_axes = axes_with_new_role(source, target.layout)
    unchanged_axes = [axis for axis in mesh.axes if axis not in changed_axes]
    holders = _devices_by_block(source, unchanged_axes)
    receivers = _devices_by_block(target, unchanged_axes)
    sender_of: dict[int, int] = {}  # by receiver
    for block, block_receivers in receivers.items():
        block_holders = holders.get(block, [])
        if len(block_holders) != len(block_receivers):
            raise _no_permutation(source, target)
        sender_of |= _pair_off(block_holders, block_receivers)
    return tuple(sender_of[device] for device in range(mesh.n_devices))


def _pair_off(holders: Sequence[int], receivers: Sequence[int]) -> dict[int, int]:
    """Return which holder of a block sends it to which receiver: {receiver: sender}.

    A device that is both keeps its block; the others are paired in their order. Holders (0, 1, 2)
    and receivers (1, 3, 4) -> {1: 1, 3: 0, 4: 2}.
    """
    staying = set(holders) & set(receivers)
    leaving_from = [device for device in holders if device not in staying]
    arriving_at = [device for device in receivers if device not in staying]
    sender_of = {device: device for device in staying}
    return sender_of | dict(zip(arriving_at, leaving_from, strict=True))


def _devices_by_block(sharding: Sharding, unchanged_axes: list[str]) -> DevicesByBlock:
    """Group devices by their block, and their position along axes that a permutation leaves alone.

    The keys of the result are (that position, rows of each dim ...).
    """
    devices: DevicesByBlock = defaultdict(list)
    for device, block_key in enumerate(block_keys(sharding)):
        position = sharding.mesh.index(device, unchanged_axes)
        devices[position, *block_key].append(device)
    return devices


def block_keys(sharding: Sharding) -> Iterator[BlockKey]:
    """Yield, for each device, its number among the addends of a sum, and its rows of each dim."""
    mesh = sharding.mesh
    sum_axes = sorted(sharding.layout.tagged(*REDUCERS), key=mesh.position)
    holders = [sharding.held_by_position(dim_index) for dim_index in range(len(sharding.shape))]
    for device in range(mesh.n_devices):
        rows = [
            blocks[sharding.dim_device(dim_index, device)]
            for dim_index, blocks in enumerate(holders)
        ]
        yield mesh.index(device, sum_axes), *rows
