"""Transpose: the dims of every block in another order; no data moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.steps.base import Block, Blocks, Step
from xshard.steps.traffic import LinkSpans, Traffic


@dataclass(frozen=True)
class Transpose(Step):
    """The last dims in another order: a view of every block.

    names: names of the last dims, in their new order; dims before them stay.
    """

    kind: ClassVar[str] = "transpose"
    names: tuple[str, ...]

    def order(self, before: Sharding) -> tuple[int, ...]:
        """For every dim afterwards, which it was. Raises PlanError for names that are not the last dims."""
        have = before.layout.names
        stay = len(have) - len(self.names)
        if sorted(self.names) != sorted(have[max(stay, 0) :]):
            raise PlanError(f"'{self}' does not apply to '{before.layout}'")
        return tuple(have.index(name) for name in (*have[:stay], *self.names))

    def after(self, before: Sharding) -> Sharding:
        return before.in_order([before.layout.names[d] for d in self.order(before)])

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        return Traffic()

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        return [block.transpose(self.order(before)) for block in blocks]

    def __str__(self) -> str:
        return f"transpose -> {' '.join(self.names)}"
