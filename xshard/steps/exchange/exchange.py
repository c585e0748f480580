"""Exchange, the general step: each device takes from the others the boxes that it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.layout.layout import NONLINEAR
from xshard.notation.overlap import Fold
from xshard.steps.base import Block, Blocks, Step, reduction_dtype, write_or_reduce
from xshard.steps.exchange.messages import fill_boundaries, messages_to, node_local_traffic
from xshard.steps.exchange.sources import carried_dims, views
from xshard.steps.exchange.traffic import begun_axes, ended_axes, exchange_traffic
from xshard.steps.traffic import LinkSpans, PairTraffic, Traffic


def negates_addends(source: Sharding, target: Sharding) -> bool:
    """Check whether a max or min ends while a pole negates rows: max(-x) is not -max(x)."""
    ended = set(source.layout.tagged("max", "min")) - set(target.layout.tagged("max", "min"))
    if not ended:
        return False
    return any(view.sign < 0 for view in views(target, carried_dims(source, target)))


@dataclass(frozen=True)
class Exchange(Step):
    """Every device gets its block of layout `to` from the devices that hold parts of it.

    The receiver adds sums that end, and contributions to a fold, in the order of the senders. Only
    the first holder contributes an element to a new sum or fold.

    to: the layout afterwards.
    node_devices: number of consecutive devices that are a node; replicas in the receiver's node
        then send in place of others. For exchanges that neither end nor begin a sum, of blocks
        without overlaps.
    """

    kind: ClassVar[str] = "exchange"
    to: Layout
    node_devices: int | None = None

    def __post_init__(self) -> None:
        if self.node_devices is not None and self.node_devices < 1:
            raise PlanError(
                f"{self.node_devices} devices in a node", hint="a node has 1 device or more"
            )

    def after(self, source: Sharding) -> Sharding:
        """Return the sharding under `to`. Raises PlanError if no exchange leads there."""
        target = source.with_layout(self.to)
        if self.node_devices is not None:
            self._check_node_senders(source.layout)
        _check_reductions(source.layout, target.layout)
        if negates_addends(source, target):
            op = self.op(source)
            raise PlanError(f"a pole of '{self.to}' negates rows whose {op} is still to be taken")
        return target

    def _check_node_senders(self, src: Layout) -> None:
        """Raise PlanError where no replica can send in place of another device."""
        if ended_axes(src, self.to) or begun_axes(src, self.to):
            limit = "exchanges that end or begin a sum"
        elif src.has_overlap or self.to.has_overlap:
            limit = "blocks that overlap"
        else:
            return
        raise PlanError(f"node_devices is not for {limit}: '{src}' -> '{self.to}'")

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        target = source.with_layout(self.to)
        if self.node_devices is not None:
            return node_local_traffic(source, target, self.node_devices)
        return exchange_traffic(source, target, spans)

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        target = source.with_layout(self.to)
        pairs = []
        for device in range(source.mesh.n_devices):
            for message in messages_to(source, target, device, self.node_devices):
                if message.src != message.dst:
                    pairs.append(PairTraffic(message.src, message.dst, message.size))
        return tuple(pairs)

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        """Run the exchange in numpy: one block per device in, one per device out.

        Each device fills the padding of its new block with the values of the boundary, then writes
        the boxes (slices of other devices' blocks, or of its own) that it receives. Where boxes
        overlap, as partial sums that end do, they are reduced. Elements that no box brings stay
        zero: if a sum begins, only the first device along its axes has the values.
        """
        target = source.with_layout(self.to)
        op = self.op(source)
        results = []
        for device in range(source.mesh.n_devices):
            dtype = blocks[device].dtype
            out = np.zeros(target.local_shape(device), reduction_dtype(op, dtype))
            fill_boundaries(out, target, device)
            is_written = np.zeros(out.shape, bool)
            for message in messages_to(source, target, device, self.node_devices):
                box = blocks[message.src][message.src_index()]
                if message.sign < 0:
                    box = -box
                write_or_reduce(out, is_written, message.dst_index(), box, op)
            results.append(out.astype(dtype, copy=False))
        return results

    def op(self, source: Sharding) -> str | None:
        """Return the reduction of boxes for the same elements; None if none ends.

        Contributions to a fold are added up.
        """
        for tag, axes in source.layout.tags:
            if tag != "copy" and not set(axes) <= set(self.to.tagged(tag)):
                return tag
        is_folded = any(isinstance(dim.overlap, Fold) for dim in source.layout.dims)
        return "sum" if is_folded else None

    def __str__(self) -> str:
        return "exchange"


def _check_reductions(src: Layout, dst: Layout) -> None:
    """Raise PlanError if an exchange would have to begin a max or min."""
    for tag in NONLINEAR:
        if not set(dst.tagged(tag)) <= set(src.tagged(tag)):
            raise PlanError(f"'{src}' lacks the {tag} of '{dst}'")
