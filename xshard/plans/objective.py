"""What a plan is to be cheapest at: the forward pass, or both passes together."""

from __future__ import annotations

from xshard.errors import PlanError

FORWARD, BOTH = "forward", "forward+backward"
OBJECTIVES = (FORWARD, BOTH)


def check_objective(objective: str) -> None:
    """Raise PlanError for an unknown objective."""
    if objective not in OBJECTIVES:
        raise PlanError(f"no objective {objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}")
