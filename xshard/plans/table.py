"""A plan as the rows of a table, and why it won: its alternatives, priced by the same model."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.errors import PlanError
from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.layout import Sharding
from xshard.layout.sub_axes import Split
from xshard.search import overlap_paths
from xshard.search.a_star import Search
from xshard.search.moves import Space
from xshard.search.request import FORWARD
from xshard.search.solve import with_copies, with_scale, without_copies
from xshard.steps import AllGather, AllReduce, Mask, ReduceScatter, Slice, Step
from xshard.steps.base import DimCut, axes_of
from xshard.steps.exchange.traffic import begun_axes, ended_axes
from xshard.steps.traffic import Phases

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
        meshes = iter(
            ["on", str(plan.steps_mesh), *(str(stage.after.mesh) for stage in plan.stages)]
        )
        table = [(step, next(meshes) if rest[0] else "", *rest) for step, *rest in table]
    return "\n".join([title(plan), "", align_columns(table), "", total(plan)])


def rows(plan: Plan) -> tuple[Row, ...]:
    """The source, then one row per step; below it a row per kind of link, if it runs in phases."""
    table = [Row("", str(plan.src), _shape_text(plan.source), "", "", "")]
    for i, (stage, cost) in enumerate(zip(plan.stages, plan.prices, strict=True)):
        # The last layout as the user wrote it: the stages are in normal form.
        layout = plan.dst if i == len(plan.stages) - 1 else stage.after.layout
        received = format_bytes(cost.received_bytes)
        seconds = format_seconds(cost.seconds)
        prices = received, seconds, format_bytes(cost.peak_bytes)
        table.append(Row(str(stage.step), str(layout), _shape_text(stage.after), *prices))
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
        if not parts or device != parts[-1][-1] + 1:
            parts.append([])
        parts[-1].append(device)
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def total(plan: Plan) -> str:
    """The price of the whole plan, with the lower bound."""
    received = plan.bytes_received
    bound = plan.bytes_lower_bound
    times = f"{received / bound:.2f}x the bound of" if bound else "the bound is"
    sent = (
        plan.transfer
        and f"sent between meshes {format_bytes(plan.transfer.sent * plan.itemsize)}, "
    )
    seconds = format_seconds(plan.cost)
    if plan.objective != FORWARD:
        seconds += f" with the backward's {format_seconds(plan.backward.cost)}"
    text = (
        f"received {format_bytes(received)} ({times} {format_bytes(bound)}), {sent or ''}{seconds}, "
        f"peak {format_bytes(plan.peak_bytes)}, priced for {plan.profile.name}"
    )
    return text if plan.stages else f"nothing to do: the layouts mean the same; {text}"


def _shape_text(sharding: Sharding) -> str:
    """The largest block, with `<=` where blocks differ."""
    text = "x".join(map(str, sharding.max_local_shape)) or "scalar"
    return text if sharding.is_even else f"<={text}"


@dataclass(frozen=True)
class Alternative:
    """One alternative to a plan; without a plan it is not possible, for the reason in `why_not`."""

    name: str
    plan: Plan | None
    why_not: str = ""


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """The plan, then its alternatives for the same machine. Raises PlanError between two meshes."""
    if plan.transfer:
        reason = f"no alternatives from {plan.mesh!r} to {plan.dst_mesh!r}"
        raise PlanError(reason, hint="they are ways on one mesh")
    target = plan.target.in_order(plan.source.layout.names)
    start, goal = (s.with_layout(s.normal) for s in (plan.source, target))
    last = plan.steps[-1:] if target is not plan.target else ()  # the transposition
    endpoints = without_copies(start), without_copies(goal)
    ways = _alternative_steps(*endpoints, plan.dtype, plan.request.machine, plan.split)
    options: list[Alternative] = [Alternative("the plan", plan)]
    for name, steps in ways.items():
        try:
            scaled = with_scale(with_copies(steps(), start, goal), plan.scale, start, goal)
            options.append(Alternative(name, replace(plan, steps=(*scaled, *last), split=())))
        except PlanError as error:
            options.append(Alternative(name, None, error.reason))
    return tuple(options)


def _alternative_steps(
    start: Sharding, goal: Sharding, dtype: str, profile: Profile, split: Split
) -> dict[str, Callable[[], Sequence[Step]]]:
    """Every alternative by name, as a function that makes its steps, or raises PlanError."""
    if start.layout.overlaps or goal.layout.overlaps:
        made = overlap_paths.ways(start, goal, dtype, profile)
        return {name: functools.partial(tuple[Step, ...], steps) for name, steps in made.items()}
    space = Space(start, goal, itemsize(dtype), profile)
    search = Search(space.route, None)
    return {
        **({"whole axes": lambda: space.steps(search.path().moves)} if split else {}),
        "direct exchange": lambda: (space.exchange(start.layout, goal.layout),),
        "collectives alone": lambda: space.steps(replace(search, exchanges=False).path().moves),
        "all-gather and slice": lambda: _gather_and_slice(start, goal),
    }


def _gather_and_slice(start: Sharding, goal: Sharding) -> tuple[Step, ...]:
    """Reduce sums that end, gather every dim to the common shards, slice to the goal. Normal forms."""
    src = start.layout
    dst = goal.layout
    steps: list[Step] = []
    for kind, axes in src.tags:
        over = tuple(a for a in axes if a in ended_axes(src, dst))
        if over:
            steps.append(AllReduce(over, kind))
    slices: list[DimCut] = []
    for here, there in zip(src.dims, dst.dims, strict=True):
        n = sum(itertools.takewhile(bool, map(operator.eq, here.shards, there.shards)))  # in common
        if here.shards[n:]:
            steps.append(AllGather(here.name, here.shards[n:]))
        if there.shards[n:]:
            slices.append((there.name, there.shards[n:]))
    begins = begun_axes(src, dst)
    sliced = (Slice(tuple(slices)),) if slices else ()
    return (*steps, *sliced, *((Mask(begins),) if begins else ()))


def explain(plan: Plan) -> str:
    """The alternatives as a table, and why the plan won."""
    ways = alternatives(plan)
    head = ("", "time", "received", "peak", "messages", "steps")
    return "\n".join([align_columns([head, *map(_row, ways)]), "", _verdict(plan, ways)])


def _row(way: Alternative) -> tuple[str, ...]:
    if way.plan is None:
        return way.name, "-", "-", "-", "-", way.why_not
    p = way.plan
    steps = ", ".join(map(str, p.steps)) or "nothing"
    costs = format_seconds(p.cost), format_bytes(p.bytes_received), format_bytes(p.peak_bytes)
    return way.name, *costs, str(p.messages), steps


def _verdict(plan: Plan, ways: Sequence[Alternative]) -> str:
    if not plan.steps:
        return "The layouts mean the same: there is nothing to do."
    others = {way.name: way.plan for way in ways[1:] if way.plan and way.plan.steps != plan.steps}
    swelling = {name: other for name, other in others.items() if other.exceeds_endpoints}
    allowed = {name: other for name, other in others.items() if name not in swelling}
    return "\n".join(
        [_against_best(plan, allowed), *(_too_large(plan, *way) for way in swelling.items())]
    )


def _against_best(plan: Plan, others: Mapping[str, Plan]) -> str:
    if not others:
        return "Every other way within the memory of both ends is the same plan or not possible."
    name, best = min(others.items(), key=lambda way: way[1].cost)
    if best.cost <= plan.cost:
        why = "holds less" if plan.peak_bytes < best.peak_bytes else "is the plainer of the two"
        return f"As fast as {name} under '{plan.profile.name}'; it {why}."
    here, there = ((p.bytes_received, p.messages, len(p.steps)) for p in (plan, best))
    costs = zip(("bytes received", "messages", "steps"), here, there, strict=True)
    fewer = ", ".join(f"{other - own} fewer {what}" for what, own, other in costs if other > own)
    why = fewer or "cheaper launches and copies"
    saved = format_seconds(best.cost - plan.cost)
    return (
        f"{saved} faster than {name}, the best of the others, under '{plan.profile.name}': {why}."
    )


def _too_large(plan: Plan, name: str, other: Plan) -> str:
    gain = plan.cost - other.cost
    would = f"would be {format_seconds(gain)} faster, but" if gain > 0 else "also"
    return f"{name.capitalize()} {would} holds a block larger than both ends, which no plan does."
