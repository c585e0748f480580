"""A plan as the rows of a table, in text: what every step leads to and costs.

Decides the columns and the words around them. Who prints them aligns or colours them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xshard.formatting import align_columns, format_bytes, format_seconds
from xshard.layout.sharding import Sharding
from xshard.plans.priced import FORWARD, Priced

if TYPE_CHECKING:
    from xshard.plans.plan import Plan  # which prints itself by this table


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
    """The whole table, aligned."""
    return "\n".join([title(plan), "", align_columns([HEAD, *rows(plan)]), "", total(plan)])


def rows(plan: Plan) -> tuple[Row, ...]:
    """Where the plan starts, then one row per step."""
    found = [Row("", str(plan.src), shape_text(plan.source), "", "", "")]
    for i, (stage, cost) in enumerate(zip(plan.stages, plan.prices, strict=True)):
        # The last layout as the user wrote it: the stages are in normal form.
        layout = plan.dst if i == len(plan.stages) - 1 else stage.after.layout
        found.append(
            Row(
                str(stage.step),
                str(layout),
                shape_text(stage.after),
                format_bytes(cost.received_bytes),
                format_seconds(cost.seconds),
                format_bytes(cost.peak_bytes),
            )
        )
    return tuple(found)


def title(plan: Plan) -> str:
    """What is moved, and where."""
    text = f"{plan.src} -> {plan.dst}   {plan.dtype}{list(plan.shape)} on {plan.mesh}"
    return f"{text}, divided as {plan.steps_mesh}" if plan.split else text


def total(plan: Plan) -> str:
    """What the whole plan costs, beside the lower bound."""
    bound = plan.bytes_lower_bound
    ratio = (
        f"{plan.bytes_received / bound:.2f}x the bound of {format_bytes(bound)}"
        if bound
        else "the bound is 0 B"
    )
    text = (
        f"received {format_bytes(plan.bytes_received)} ({ratio}), {seconds_text(plan)}, "
        f"peak {format_bytes(plan.peak_bytes)}, priced for {plan.profile.name}"
    )
    return text if plan.stages else f"nothing to do: the layouts mean the same; {text}"


def seconds_text(plan: Priced) -> str:
    """The predicted time; of both passes and of each, where both count."""
    total = format_seconds(plan.cost)
    if plan.objective == FORWARD:
        return total
    return f"{total} with the backward's {format_seconds(plan.backward.cost)}"


def shape_text(sharding: Sharding) -> str:
    """The largest block, with `<=` where blocks differ."""
    text = "x".join(map(str, sharding.max_local_shape)) or "scalar"
    return text if sharding.is_even else f"<={text}"
