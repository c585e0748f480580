"""Embed and Mask: values become addends of a sum, without communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps.base import (
    Block,
    Blocks,
    Step,
    axes_of,
    own_part,
    put_rows,
    shards_text,
    take_free,
    with_tag,
    without_inner,
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
        layout = without_inner(before.layout, self.dim, self.shards)
        return before.with_layout(with_tag(layout, "sum", axes_of(self.shards)))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after, at = self.after(before), before.dim_index(self.dim)
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
        return before.with_layout(with_tag(take_free(before.layout, self.axes), "sum", self.axes))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        return [
            np.zeros_like(block) if before.mesh.index(device, self.axes) else block.copy()
            for device, block in enumerate(blocks)
        ]

    def __str__(self) -> str:
        return f"mask sum({','.join(self.axes)})"
