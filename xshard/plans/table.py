"""A plan as the rows of a table: every step, its result and its price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.layout import Sharding
from xshard.search.request import FORWARD
from xshard.steps import AllGather, AllReduce, ReduceScatter
from xshard.steps.base import axes_of
from xshard.steps.phases import Phases

if TYPE_CHECKING:
    from xshard.plans.plan import Plan, Stage  # which prints itself by this table


class Row(NamedTuple):
    """One step: its text, the layout and largest block after it, bytes received, seconds, peak bytes."""

    step: str
    layout: str
    local_shape: str
    received: str
    time: str
    peak: str


HEAD = Row("step", "layout after", "local shape", "received", "time", "peak")


def text(plan: Plan) -> str:
    """The whole table, aligned; between two meshes with the mesh that every step leads to."""
    table: list[tuple[str, ...]] = [HEAD, *rows(plan)]
    if plan.transfer:
        meshes = iter(["on", str(plan.steps_mesh), *(str(stage.after.mesh) for stage in plan.stages)])
        table = [(step, next(meshes) if rest[0] else "", *rest) for step, *rest in table]
    return "\n".join([title(plan), "", align_columns(table), "", total(plan)])


def rows(plan: Plan) -> tuple[Row, ...]:
    """The source, then one row per step; below it a row per kind of link, if it runs in phases."""
    table = [Row("", str(plan.src), _shape_text(plan.source), "", "", "")]
    for i, (stage, cost) in enumerate(zip(plan.stages, plan.prices, strict=True)):
        # The last layout as the user wrote it: the stages are in normal form.
        layout = plan.dst if i == len(plan.stages) - 1 else stage.after.layout
        table.append(
            Row(
                str(stage.step),
                str(layout),
                _shape_text(stage.after),
                format_bytes(cost.received_bytes),
                format_seconds(cost.seconds),
                format_bytes(cost.peak_bytes),
            )
        )
        table += _phase_rows(plan, stage)
    return tuple(table)


def _phase_rows(plan: Plan, stage: Stage) -> list[Row]:
    """A row per kind of link, in the order of phases, if there are some; gathers begin with the slowest."""
    step, before, _ = stage
    if not isinstance(step, AllGather | AllReduce | ReduceScatter):
        return []
    axes = step.axes if isinstance(step, AllReduce) else axes_of(step.shards)
    fabric = plan.profile.fabric(before.mesh)
    if not fabric.has_phases(axes):
        return []
    hops = step.traffic(before, fabric.spans).hops
    table = []
    for spans in Phases.along(before.mesh, axes, fabric.spans, ()).levels:
        level = [hop for hop in hops if hop.level == spans[0].level]
        seconds = sum(fabric.link(hop).seconds(hop, plan.itemsize) for hop in level)
        links = ",".join(f"{span.axis}={span.size}" for span in spans)
        received = format_bytes(sum(hop.received for hop in level) * plan.itemsize)
        table.append(Row(f"  over {links}", "", "", received, format_seconds(seconds), ""))
    return table[::-1] if isinstance(step, AllGather) else table


def title(plan: Plan) -> str:
    """The layouts, the array and the mesh."""
    text = f"{plan.src} -> {plan.dst}   {plan.dtype}{list(plan.shape)} "
    if plan.transfer:
        devices = f"devices {device_ranges(plan.src_devices)} -> {device_ranges(plan.dst_devices)}"
        return f"{text}from {plan.mesh} to {plan.dst_mesh}, {devices}"
    return f"{text}on {plan.mesh}" + (f", divided as {plan.steps_mesh}" if plan.split else "")


def device_ranges(devices: Sequence[int]) -> str:
    """`(0, 1, 2, 3, 6)` -> `0-3,6`."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def total(plan: Plan) -> str:
    """The price of the whole plan, with the lower bound."""
    bound = plan.bytes_lower_bound
    ratio = (
        f"{plan.bytes_received / bound:.2f}x the bound of {format_bytes(bound)}"
        if bound
        else "the bound is 0 B"
    )
    sent = plan.transfer and f"sent between meshes {format_bytes(plan.transfer.sent * plan.itemsize)}, "
    seconds = format_seconds(plan.cost)
    if plan.objective != FORWARD:
        seconds += f" with the backward's {format_seconds(plan.backward.cost)}"
    text = (
        f"received {format_bytes(plan.bytes_received)} ({ratio}), {sent or ''}{seconds}, "
        f"peak {format_bytes(plan.peak_bytes)}, priced for {plan.profile.name}"
    )
    return text if plan.stages else f"nothing to do: the layouts mean the same; {text}"


def _shape_text(sharding: Sharding) -> str:
    """The largest block, with `<=` where blocks differ."""
    text = "x".join(map(str, sharding.max_local_shape)) or "scalar"
    return text if sharding.is_even else f"<={text}"
