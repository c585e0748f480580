"""Steps without communication: Embed and Mask make addends, Retag, Scale and Transpose other readings."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.notation.parser import Shard
from xshard.steps import base
from xshard.steps.base import (
    Block,
    Blocks,
    Step,
    axes_of,
    own_part,
    put_rows,
    shards_text,
    take_free,
)


@dataclass(frozen=True)
class Embed(Step):
    """Every device puts its part of `dim` into a block of zeros: a sharding becomes a sum.

    shards: the innermost shards of `dim`, which are removed; their axes become a sum.
    """

    kind: ClassVar[str] = "embed"
    dim: str
    shards: tuple[Shard, ...]

    def after(self, before: Sharding) -> Sharding:
        layout = base.without_inner(before.layout, self.dim, self.shards)
        return before.with_layout(base.with_tag(layout, "sum", axes_of(self.shards)))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after = self.after(before)
        at = before.dim_index(self.dim)
        results = []
        for device, block in enumerate(blocks):
            out = np.zeros(after.local_shape(device), block.dtype)
            put_rows(out, at, own_part(before, self.dim, self.shards, device), block)
            results.append(out)
        return results

    def __str__(self) -> str:
        return f"embed {self.dim}/{shards_text(self.shards)} -> sum"


@dataclass(frozen=True)
class Mask(Step):
    """The first device along `axes` keeps its block, the others hold zeros: replicas become a sum."""

    kind: ClassVar[str] = "mask"
    axes: tuple[str, ...]

    def after(self, before: Sharding) -> Sharding:
        return before.with_layout(
            base.with_tag(take_free(before.layout, self.axes), "sum", self.axes)
        )

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        firsts = (
            not before.mesh.index(device, self.axes) for device in range(before.mesh.n_devices)
        )
        return [
            b.copy() if first else np.zeros_like(b) for b, first in zip(blocks, firsts, strict=True)
        ]

    def __str__(self) -> str:
        return f"mask sum({','.join(self.axes)})"


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
        layout = take_free(base.without_tags(layout, self.replicas), self.copies)
        return before.with_layout(base.with_tag(layout, "copy", self.copies))

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
        numerator = self.factor.numerator
        denominator = self.factor.denominator
        # Division is exact where the result is representable; a rounded reciprocal is not.
        kinds = [(b, b.dtype.type) for b in blocks]
        return [
            np.divide(b * kind(numerator), kind(denominator)).astype(b.dtype) for b, kind in kinds
        ]

    def __str__(self) -> str:
        return f"scale {self.factor}"


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

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        return [block.transpose(self.order(before)) for block in blocks]

    def __str__(self) -> str:
        return f"transpose -> {' '.join(self.names)}"
