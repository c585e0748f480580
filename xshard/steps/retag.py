"""Retag and Scale: the meaning of a block changes, or its factor; no data moves."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.steps.base import Block, Blocks, Step, take_free, with_tag, without_tags
from xshard.steps.traffic import LinkSpans, Traffic


@dataclass(frozen=True)
class Retag(Step):
    """Replicas become copies, or copies become replicas, which are equal by contract.

    copies: replicated axes that hold copies afterwards.
    replicas: copied axes that hold replicas afterwards.
    """

    kind: ClassVar[str] = "retag"
    copies: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()

    def after(self, before: Sharding) -> Sharding:
        layout: Layout = before.layout
        copied = layout.tagged("copy")
        if not set(self.replicas) <= set(copied) or set(self.copies) & set(copied):
            raise PlanError(f"'{self}' does not apply to '{layout}'")
        layout = take_free(without_tags(layout, self.replicas), self.copies)
        return before.with_layout(with_tag(layout, "copy", self.copies))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        return Traffic()

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        return list(blocks)

    def __str__(self) -> str:
        roles = ("copy", self.copies), ("replica", self.replicas)
        return "retag " + " ".join(f"-> {role}({','.join(axes)})" for role, axes in roles if axes)


@dataclass(frozen=True)
class Scale(Step):
    """Every block times a constant: the 1/n of a mean, as a step of the plan."""

    kind: ClassVar[str] = "scale"
    factor: Fraction

    def after(self, before: Sharding) -> Sharding:
        return before

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        numerator, denominator = self.factor.numerator, self.factor.denominator
        # Division is exact where the result is representable; a rounded reciprocal is not.
        return [
            np.divide(b * b.dtype.type(numerator), b.dtype.type(denominator)).astype(b.dtype) for b in blocks
        ]

    def __str__(self) -> str:
        return f"scale {self.factor}"
