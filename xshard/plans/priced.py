"""What a plan comes to, on one mesh or between two: seconds and bytes, summed over its steps.

Decides how the prices of steps become those of a plan, and when a plan is refused for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Self

from xshard import dtypes
from xshard.cost.model import Price, Profile
from xshard.errors import PlanError
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.layout.sub_axes import Split
from xshard.steps import Step


class Priced(ABC):
    """A plan, as far as it is weighed: its ends, the prices of its steps, and its gradient's plan."""

    src: Layout
    dst: Layout
    mesh: Mesh
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[Step, ...]
    scale: Fraction
    profile: Profile
    memory_limit: int | None
    objective: str
    split: Split

    @property
    @abstractmethod
    def source(self) -> Sharding:
        """Where the plan starts."""

    @property
    @abstractmethod
    def target(self) -> Sharding:
        """Where the plan ends."""

    @property
    @abstractmethod
    def prices(self) -> tuple[Price, ...]:
        """What every step costs."""

    @property
    @abstractmethod
    def backward(self) -> Priced:
        """The plan of the adjoint. Raises LinearityError."""

    @property
    def messages(self) -> int:
        """Latencies paid one after the other, over all steps."""
        raise NotImplementedError

    @property
    def swells(self) -> bool:
        """Whether a block on the way is larger than the blocks of both ends."""
        raise NotImplementedError

    def with_steps(self, steps: tuple[Step, ...]) -> Self:
        """The same request carried out by other steps, on whole axes."""
        raise NotImplementedError

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @property
    def cost(self) -> float:
        """Predicted seconds, of all that the objective counts."""
        forward = sum(p.seconds for p in self.prices)
        return forward + self.backward.cost if self.objective == BOTH else forward

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives, summed over the steps."""
        return sum(p.received_bytes for p in self.prices)

    @property
    def peak_bytes(self) -> int:
        """Bytes that the busiest device holds at the worst moment: input, output, buffers."""
        ends = max(self.source.max_local_size, self.target.max_local_size) * self.itemsize
        return max((p.peak_bytes for p in self.prices), default=ends)

    def _check_weight(self) -> None:
        """Raise PlanError where it holds more than it may, or its gradient does, if that counts.

        Raises LinearityError where there is no gradient.
        """
        if self.memory_limit is not None and self.peak_bytes > self.memory_limit:
            raise PlanError(f"the steps hold {self.peak_bytes} bytes, the limit is {self.memory_limit}")
        if self.objective == BOTH:
            try:
                _ = self.backward
            except PlanError as error:
                raise PlanError(f"backward: {error.reason}", hint=error.hint) from None


FORWARD, BOTH = "forward", "forward+backward"


OBJECTIVES = (FORWARD, BOTH)


def check_objective(objective: str) -> None:
    """Raise PlanError for what is none."""
    if objective not in OBJECTIVES:
        raise PlanError(f"no objective {objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}")
