"""A local contraction in rounds: while one part is contracted, the next one travels.
Each part that travels is a redistribution in flight, so autograd runs the rounds backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.lower.executable import Executable
from xshard.contractions.ring import ContractionRing


@dataclass(frozen=True, eq=False)
class Rounds:
    """The blocks of operands -> the local result. order: the pieces in the order of the products."""

    local: LocalContraction
    operand: int | None
    dim: str
    pieces: int
    rotation: Executable
    order: tuple[int, ...]

    @classmethod
    def of(cls, whole: LocalContraction, ring: ContractionRing, rotation: Executable | None) -> Rounds:
        """`whole`, the contraction of the gathered operands, in the rounds of a ring."""
        assert rotation is not None, "a ring has two devices or more"
        lengths = tuple((name, k // ring.products if name == ring.dim else k) for name, k in whole.lengths)
        order = ring.order(ring.rotation.mesh.index(rotation.processes.device, (ring.axis,)))
        local = replace(whole, lengths=lengths)
        return cls(local, ring.operand, ring.dim, ring.pieces, rotation, tuple(order))

    def __call__(self, *blocks: Tensor) -> Tensor:
        parts = [self._parts(i, block) for i, block in enumerate(blocks)]
        return self._scattered(parts) if self.operand is None else self._gathered(parts, self.operand)

    def _parts(self, i: int, block: Tensor) -> Sequence[Tensor]:
        """The block for each product, of an operand that stays; the own pieces of the one that travels."""
        names = self.local.operands[i]
        if self.dim not in names:
            return [block] * len(self.order)
        if i == self.operand:
            return block.chunk(self.pieces, names.index(self.dim))
        parts = block.chunk(len(self.order), names.index(self.dim))
        return [parts[j] for j in self.order]

    def _scattered(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        under_way, sums = deque[PendingTensor](), list[Tensor]()
        for k, blocks in enumerate(zip(*parts, strict=True)):
            y = self.local(*blocks)
            y = under_way.popleft().wait() + y if k >= self.pieces else y
            if k + self.pieces < len(self.order):
                under_way.append(PendingTensor.begin(y, self.rotation))
            else:
                sums.append(y)
        return self._concatenated(sums)

    def _gathered(self, parts: Sequence[Sequence[Tensor]], operand: int) -> Tensor:
        under_way, results = deque[Tensor | PendingTensor](parts[operand]), list[Tensor]()
        for k in range(len(self.order)):
            block = under_way.popleft()
            block = block.wait() if isinstance(block, PendingTensor) else block
            if k + self.pieces < len(self.order):
                under_way.append(PendingTensor.begin(block, self.rotation))
            results.append(self.local(*(block if i == operand else each[k] for i, each in enumerate(parts))))
        if self.dim not in self.local.result:
            return sum(results[1:], start=results[0])
        return self._concatenated([results[self.order.index(j)] for j in range(len(self.order))])

    def _concatenated(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), self.local.result.index(self.dim))
