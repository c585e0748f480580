"""A plan as a table: a row per step, a title above and the total below.

step                             layout after      local shape  received   time      peak
                                 b s/zigzag(cp) c  2x2048x4096
all_to_all s/zigzag(cp) -> c/cp  b s c/cp          2x8192x1024  24.00 MiB  142.0 us  128.00 MiB
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from xshard.formatting import align_columns, format_bytes, format_seconds, range_text
from xshard.layout import Sharding
from xshard.search.request import FORWARD
from xshard.steps import AllGather, AllReduce, ReduceScatter
from xshard.steps.base import axes_of
from xshard.steps.traffic import Phases

if TYPE_CHECKING:
    from xshard.plans.plan import Plan, Stage  # which prints itself by this table


class Row(NamedTuple):
    """One step as texts. A column without a value is empty.

    Attributes:
        step: The step.
        layout: The layout after it.
        local_shape: The shape of the largest block after it.
        received: The bytes that the busiest device receives.
        time: The predicted time.
        peak: The most bytes that a device holds meanwhile.
    """

    step: str = ""
    layout: str = ""
    local_shape: str = ""
    received: str = ""
    time: str = ""
    peak: str = ""


HEAD = Row("step", "layout after", "local shape", "received", "time", "peak")


def text(plan: Plan) -> str:
    """Print a plan: title, table and total; between two meshes with the mesh that every step leads to."""
    table: list[tuple[str, ...]] = [HEAD, *rows(plan)]
    if plan.transfer:
        table = _with_meshes(plan, table)
    return "\n".join([title(plan), "", align_columns(table), "", total(plan)])


def _with_meshes(plan: Plan, table: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Add a column for the mesh after each step, second from the left."""
    meshes = ["on", str(plan.steps_mesh)]  # the column's head, then the mesh of the source
    meshes += [str(stage.after.mesh) for stage in plan.stages]
    remaining = iter(meshes)
    wider = []
    for step, layout, *columns in table:
        # A row without a layout says more about the row above it: on which links it runs.
        mesh = next(remaining) if layout else ""
        wider.append((step, mesh, layout, *columns))
    return wider


def rows(plan: Plan) -> tuple[Row, ...]:
    """Return the rows of a plan's printed table: the source's layout, then one row per step.

    A row has texts: the step, the layout after it, the block's shape, bytes received, time and
    peak. A collective that runs in phases, inside nodes and between them, has a row for each phase
    below.
    """
    # The layout at the start, which has no step and no price.
    table = [Row(layout=str(plan.src), local_shape=_shape_text(plan.source))]
    last = len(plan.stages) - 1
    for i, (stage, price) in enumerate(zip(plan.stages, plan.prices, strict=True)):
        # The last layout as the user wrote it: the stages are in normal form.
        layout = plan.dst if i == last else stage.after.layout
        table.append(
            Row(
                step=str(stage.step),
                layout=str(layout),
                local_shape=_shape_text(stage.after),
                received=format_bytes(price.received_bytes),
                time=format_seconds(price.seconds),
                peak=format_bytes(price.peak_bytes),
            )
        )
        table += _phase_rows(plan, stage)
    return tuple(table)


def _phase_rows(plan: Plan, stage: Stage) -> list[Row]:
    """Return a table row for each phase of a collective that runs over links of several speeds.

    A phase is the part over links of one speed: an all-reduce over tp=8, inside nodes, and dp=2,
    between nodes, has a row "  over tp=8" and a row "  over dp=2", each with its bytes and time. A
    step over links of one speed has no such rows: [].
    """
    step = stage.step
    if not isinstance(step, AllGather | AllReduce | ReduceScatter):
        return []
    axes = step.axes if isinstance(step, AllReduce) else axes_of(step.shards)
    fabric = plan.profile.fabric(stage.before.mesh)
    if not fabric.has_phases(axes):
        return []
    hops = step.traffic(stage.before, fabric.spans).hops
    phases = Phases.of_axes(stage.before.mesh, axes, fabric.spans, block_indices=())
    table = []
    for spans in phases.levels:  # the fastest links first
        hops_of_phase = [hop for hop in hops if hop.level == spans[0].level]
        received_elements = sum(hop.received for hop in hops_of_phase)
        seconds = sum(fabric.link(hop).seconds(hop, plan.itemsize) for hop in hops_of_phase)
        links = ",".join(f"{span.axis}={span.size}" for span in spans)
        table.append(
            Row(
                step=f"  over {links}",
                received=format_bytes(received_elements * plan.itemsize),
                time=format_seconds(seconds),
            )
        )
    if isinstance(step, AllGather):
        table.reverse()  # it runs over the slowest links first, where blocks are still small
    return table


def title(plan: Plan) -> str:
    """Return the layouts, the array and the mesh, on a line."""
    array = f"{plan.src} -> {plan.dst}   {plan.dtype}{list(plan.shape)}"
    if plan.transfer:
        devices = f"devices {device_ranges(plan.src_devices)} -> {device_ranges(plan.dst_devices)}"
        return f"{array} from {plan.mesh} to {plan.dst_mesh}, {devices}"
    if plan.steps_mesh != plan.mesh:
        return f"{array} on {plan.mesh}, divided as {plan.steps_mesh}"
    return f"{array} on {plan.mesh}"


def device_ranges(devices: Sequence[int]) -> str:
    """Write device numbers as ranges: `(0, 1, 2, 3, 6)` -> `0-3,6`."""
    device_runs: list[list[int]] = []  # consecutive devices
    for device in devices:
        if not device_runs or device != device_runs[-1][-1] + 1:
            device_runs.append([])
        device_runs[-1].append(device)
    return ",".join(range_text(consecutive[0], consecutive[-1]) for consecutive in device_runs)


def total(plan: Plan) -> str:
    """Return one line of text with the price of a whole plan: bytes, time and peak memory.

    The bytes received stand beside the fewest that any plan between these layouts can receive, such
    as "received 3.0 MiB (1.50x the bound of 2.0 MiB), 12 us, peak 8.0 MiB, priced for h100".
    """
    received = format_bytes(plan.bytes_received)
    bound_bytes = plan.bytes_lower_bound
    bound = format_bytes(bound_bytes)
    if bound_bytes:
        comparison = f"{plan.bytes_received / bound_bytes:.2f}x the bound of {bound}"
    else:
        comparison = f"the bound is {bound}"
    prices = [f"received {received} ({comparison})"]
    if plan.transfer:
        prices.append(f"sent between meshes {format_bytes(plan.transfer.sent * plan.itemsize)}")
    seconds = format_seconds(plan.cost)
    if plan.objective != FORWARD:
        seconds += f" with the backward's {format_seconds(plan.backward.cost)}"
    prices += [
        seconds,
        f"peak {format_bytes(plan.peak_bytes)}",
        f"priced for {plan.profile.name}",
    ]
    line = ", ".join(prices)
    return line if plan.stages else f"nothing to do: the layouts mean the same; {line}"


def _shape_text(sharding: Sharding) -> str:
    """Return the shape of the largest block, with `<=` where blocks differ: "2x2048", "<=3x5"."""
    shape = "x".join(map(str, sharding.max_local_shape)) or "scalar"
    return shape if sharding.is_even else f"<={shape}"
