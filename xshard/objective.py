"""What a plan is to be best at: the move alone, or the move and that of its gradient.

Decides the words and what is counted; how the sum is formed is alike for plans on one mesh and
between two. The gradient's plan is made of layouts, not of the steps of the move, so both are
cheapest when each is: they share a choice only where devices are relabelled.
"""

from __future__ import annotations

from typing import Protocol

from xshard.cost import Price
from xshard.errors import PlanError

FORWARD, BOTH = "forward", "forward+backward"
OBJECTIVES = (FORWARD, BOTH)


class Weighed(Protocol):
    """A plan: what its steps cost, and its gradient's plan."""

    @property
    def prices(self) -> tuple[Price, ...]: ...

    @property
    def objective(self) -> str: ...

    @property
    def backward(self) -> Weighed: ...


def check_objective(objective: str) -> None:
    """Raise PlanError for what is none."""
    if objective not in OBJECTIVES:
        raise PlanError(f"no objective {objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}")


def seconds(plan: Weighed) -> float:
    """Predicted seconds of the steps that the objective counts."""
    forward = sum(p.seconds for p in plan.prices)
    return forward if plan.objective == FORWARD else forward + seconds(plan.backward)


def plan_backward(plan: Weighed) -> None:
    """Plan the gradient now if it counts. Raises LinearityError; PlanError where it exceeds the limit."""
    if plan.objective == BOTH:
        try:
            _ = plan.backward
        except PlanError as error:
            raise PlanError(f"backward: {error.reason}", hint=error.hint) from None
