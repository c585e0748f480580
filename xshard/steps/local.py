"""Steps without communication: Embed, Mask, Retag, Scale and Transpose.

Embed and Mask make addends of a sum. The others read blocks in another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps import base
from xshard.steps.base import (
    Block,
    Blocks,
    Step,
    axes_of,
    put_rows,
    rows_of_own_part,
    shards_text,
    take_free,
)


@dataclass(frozen=True)
class Embed(Step):
    """Every device puts its part of `dim` into a block of zeros: "n/x d" -> "n d | sum(x)".

    shards: the innermost shards of `dim`, which are removed; their axes become a sum.
    """

    kind: ClassVar[str] = "embed"
    dim: str
    shards: tuple[Shard, ...]

    def after(self, source: Sharding) -> Sharding:
        layout = base.without_inner(source.layout, self.dim, self.shards)
        return source.with_layout(base.with_tag(layout, "sum", axes_of(self.shards)))

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        target = self.after(source)
        dim = source.dim_index(self.dim)
        results = []
        for device, block in enumerate(blocks):
            out = np.zeros(target.local_shape(device), block.dtype)
            put_rows(out, dim, rows_of_own_part(source, self.dim, self.shards, device), block)
            results.append(out)
        return results

    def __str__(self) -> str:
        return f"embed {self.dim}/{shards_text(self.shards)} -> sum"


@dataclass(frozen=True)
class Mask(Step):
    """The first device along `axes` keeps its block, the others hold zeros.

    Replicas become addends: "n d" -> "n d | sum(x)".
    """

    kind: ClassVar[str] = "mask"
    axes: tuple[str, ...]

    def after(self, source: Sharding) -> Sharding:
        layout = take_free(source.layout, self.axes)
        return source.with_layout(base.with_tag(layout, "sum", self.axes))

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        results = []
        for device, block in enumerate(blocks):
            is_first = source.mesh.index(device, self.axes) == 0
            results.append(block.copy() if is_first else np.zeros_like(block))
        return results

    def __str__(self) -> str:
        return f"mask sum({','.join(self.axes)})"


@dataclass(frozen=True)
class Retag(Step):
    """Replicas become copies, or copies become replicas, which are equal by contract.

    Blocks stay as they are. What changes is the gradient: cotangents of copies add up.

    copies: replicated axes that hold copies afterwards.
    replicas: copied axes that hold replicas afterwards.
    """

    kind: ClassVar[str] = "retag"
    copies: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()

    def after(self, source: Sharding) -> Sharding:
        layout = source.layout
        copied = set(layout.tagged("copy"))
        if not set(self.replicas) <= copied or set(self.copies) & copied:
            raise PlanError(f"'{self}' does not apply to '{layout}'")
        layout = base.without_tags(layout, self.replicas)
        layout = take_free(layout, self.copies)
        return source.with_layout(base.with_tag(layout, "copy", self.copies))

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        return list(blocks)

    def __str__(self) -> str:
        words = ["retag"]
        if self.copies:
            words.append(f"-> copy({','.join(self.copies)})")
        if self.replicas:
            words.append(f"-> replica({','.join(self.replicas)})")
        return " ".join(words)


@dataclass(frozen=True)
class Scale(Step):
    """Every block times a constant: the 1/n of a mean, as a step of the plan."""

    kind: ClassVar[str] = "scale"
    factor: Fraction

    def after(self, source: Sharding) -> Sharding:
        return source

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        results = []
        for block in blocks:
            as_dtype = block.dtype.type
            # Division is exact where the result is representable; a rounded reciprocal is not.
            product = block * as_dtype(self.factor.numerator)
            quotient = np.divide(product, as_dtype(self.factor.denominator))
            results.append(quotient.astype(block.dtype))
        return results

    def __str__(self) -> str:
        return f"scale {self.factor}"


@dataclass(frozen=True)
class Transpose(Step):
    """The last dims in another order: a view of every block.

    names: names of the last dims, in their new order; dims before them stay.
    """

    kind: ClassVar[str] = "transpose"
    names: tuple[str, ...]

    def order(self, source: Sharding) -> tuple[int, ...]:
        """Return, for each dim afterwards, its index before: "b s c" to (c, s) -> (0, 2, 1).

        Raises:
            PlanError: The names are not those of the last dims.
        """
        old_names = source.layout.names
        n_leading = len(old_names) - len(self.names)
        if sorted(self.names) != sorted(old_names[max(n_leading, 0) :]):
            raise PlanError(f"'{self}' does not apply to '{source.layout}'")
        new_names = old_names[:n_leading] + self.names
        return tuple(old_names.index(name) for name in new_names)

    def after(self, source: Sharding) -> Sharding:
        return source.in_order([source.layout.names[dim_index] for dim_index in self.order(source)])

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        return [block.transpose(self.order(source)) for block in blocks]

    def __str__(self) -> str:
        return f"transpose -> {' '.join(self.names)}"
