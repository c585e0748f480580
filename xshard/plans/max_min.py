"""The derivatives of a `max` or `min`: they go to the winners, in equal shares, by linear redistributions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xshard.caches import layout_cache
from xshard.errors import LinearityError, PlanError
from xshard.layout import Layout
from xshard.layout.layout import NONLINEAR
from xshard.plans.plan import Plan, find_plan


@dataclass(frozen=True)
class MaxMinPlans:
    """Plans for the derivatives of `y = max(x)`, where `won = (x == result(y))` marks the winners.

    Attributes:
        result: Brings the output to every addend, as a copy beside it. If the output lacks rows of
            the input, it reduces the input once more: `result(x)`.
        count: Counts the winners, beside every addend; 0 for rows that a boundary fills.
        cotangent: The gradient is `cotangent(g) * won / max(count(won), 1)`.
        tangent: The tangent is `tangent(t * won / max(count(won), 1))`.
    """

    result: Plan
    count: Plan
    cotangent: Plan
    tangent: Plan


@layout_cache(maxsize=1024)
def max_min_plans(plan: Plan) -> MaxMinPlans:
    """Plan the moves that the gradient of a max or min over devices needs.

    With y = max(x) over devices, the gradient of y goes to the devices where x equals y, the
    winners, in equal shares: x = 1, 3, 3 and a gradient of 6 give 0, 3, 3. So y is brought back to
    every device that has an x, an all-reduce counts the winners, and the gradient moves as that of
    a sum does.

    Raises:
        LinearityError: The destination holds a max or min too, so the gradient is not defined.
    """
    if not plan.dst.is_linear:
        raise LinearityError(
            f"'{plan.src} -> {plan.dst}' keeps a max or min: its gradient is not defined",
            hint="reduce it first, then redistribute",
        )

    def find(src: Layout, dst: Layout) -> Plan:
        # The layouts of x and of y may have other dims: each goes with the shape of its own array.
        shape = plan.shape if src.names == plan.src.names else plan.target.shape
        # scale=None: it follows from the layouts. The memory limit is left out, since it is the
        # user's for the forward move alone.
        request = replace(
            plan.request, src=src, dst=dst, shape=shape, scale=None, memory_limit=None
        )
        return find_plan(request)

    # Layouts in comments are those of the move "n | max(tp) -> n/tp".
    # In a tangent, rows that a boundary fills are zeros.
    layout_of_x = plan.src.tangent  # "n | max(tp)": a candidate for the max on each device
    layout_of_addends = with_kind(layout_of_x, "sum")  # "n | sum(tp)": won, shares of a tangent
    layout_of_copies = with_kind(layout_of_x, "copy")  # "n | copy(tp)": y beside each candidate
    layout_of_y_tangent = plan.dst.tangent  # "n/tp"
    # The gradient moves as that of the sum "n | sum(tp) -> n/tp": from the dual of the sum's
    # destination to the dual of its source.
    layout_of_y_cotangent = plan.dst.dual  # "n/tp"
    layout_of_x_cotangent = layout_of_addends.dual  # "n | copy(tp)"

    def find_result() -> Plan:
        try:
            return find(plan.dst, layout_of_copies)  # "n/tp -> n | copy(tp)"
        except PlanError:
            # The output lacks rows of x, which only the planner can tell. So y cannot be made from
            # the output: it is reduced again from x.
            return find(layout_of_x, layout_of_copies)  # "n | max(tp) -> n | copy(tp)"

    return MaxMinPlans(
        result=find_result(),
        count=find(layout_of_addends, layout_of_copies),
        cotangent=find(layout_of_y_cotangent, layout_of_x_cotangent),
        tangent=find(layout_of_addends, layout_of_y_tangent),
    )


def with_kind(layout: Layout, new_tag: str) -> Layout:
    """Replace the max or min tag of a layout: "n | max(x)" with "sum" -> "n | sum(x)"."""
    tags = tuple((new_tag if tag in NONLINEAR else tag, axes) for tag, axes in layout.tags)
    return replace(layout, tags=tags)
