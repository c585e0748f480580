"""Exchange: every device sends every other device exactly the boxes that it lacks. The general step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.notation.overlap import Fold
from xshard.steps.base import REDUCERS, Block, Blocks, Step
from xshard.steps.exchange.messages import fill_boxes, messages_to, node_local_traffic
from xshard.steps.exchange.sources import carried_dims, views
from xshard.steps.exchange.traffic import begun_axes, ended_axes, exchange_traffic
from xshard.steps.traffic import LinkSpans, PairTraffic, Traffic


def negates_addends(before: Sharding, after: Sharding) -> bool:
    """Whether a max or min ends while a pole negates rows: max(-x) is not -max(x)."""
    ended = set(before.layout.tagged("max", "min")) - set(after.layout.tagged("max", "min"))
    return bool(ended) and any(view.sign < 0 for view in views(after, carried_dims(before, after)))


@dataclass(frozen=True)
class Exchange(Step):
    """Every device gets its block of layout `to` from the devices that hold parts of it.

    The receiver adds sums that end, and contributions to a fold, in the order of the senders. Only
    the first holder contributes an element to a new sum or fold.

    node_devices: number of consecutive devices that are a node; replicas in the receiver's node then
    send in place of others. For exchanges that neither end nor begin a sum, of blocks without overlaps.
    """

    kind: ClassVar[str] = "exchange"
    to: Layout
    node_devices: int | None = None

    def __post_init__(self) -> None:
        if self.node_devices is not None and self.node_devices < 1:
            raise PlanError(
                f"{self.node_devices} devices in a node", hint="a node has 1 device or more"
            )

    def after(self, before: Sharding) -> Sharding:
        after = before.with_layout(self.to)
        sides = before.layout, self.to
        for wrong, what in (
            (ended_axes(*sides) or begun_axes(*sides), "exchanges that end or begin a sum"),
            (any(layout.overlaps for layout in sides), "blocks that overlap"),
        ):
            if wrong and self.node_devices is not None:
                raise PlanError(f"node_devices is not for {what}: '{before.layout}' -> '{self.to}'")
        kinds = {kind for kind, _ in before.layout.tags if kind != "copy"}
        new = set(after.layout.tagged("max", "min")) - set(before.layout.tagged("max", "min"))
        if (
            new
            or not {kind for kind, _ in after.layout.tags if kind not in ("copy", "sum")} <= kinds
        ):
            raise PlanError(f"'{before.layout}' lacks the max or min of '{self.to}'")
        if negates_addends(before, after):
            op = self.op(before)
            raise PlanError(f"a pole of '{self.to}' negates rows whose {op} is still to be taken")
        return after

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        after = before.with_layout(self.to)
        if self.node_devices is not None:
            return node_local_traffic(before, after, self.node_devices)
        return exchange_traffic(before, after, spans)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        after = before.with_layout(self.to)
        every = (
            messages_to(before, after, i, self.node_devices) for i in range(before.mesh.n_devices)
        )
        return tuple(
            PairTraffic(m.src, m.dst, m.size) for each in every for m in each if m.src != m.dst
        )

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after = before.with_layout(self.to)
        op = self.op(before)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.zeros(after.local_shape(device), blocks[device].dtype)
            for d, start, stop, value in fill_boxes(after, device):
                out[(slice(None),) * d + (slice(start, stop),)] = value
            written = np.zeros(out.shape, bool)
            for message in messages_to(before, after, device, self.node_devices):
                box = blocks[message.src][message.src_index()]
                index = message.dst_index()
                box = box if message.sign > 0 else -box
                out[index] = (
                    np.where(written[index], REDUCERS[op](out[index], box), box) if op else box
                )
                written[index] = True
            results.append(out)
        return results

    def op(self, before: Sharding) -> str | None:
        """The reduction that combines boxes for the same elements; None if no sum, max, min or fold ends."""
        for kind, axes in before.layout.tags:
            if kind != "copy" and not set(axes) <= set(self.to.tagged(kind)):
                return kind
        return "sum" if any(isinstance(dim.overlap, Fold) for dim in before.layout.dims) else None

    def __str__(self) -> str:
        return "exchange"
