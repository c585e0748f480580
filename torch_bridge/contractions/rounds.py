"""A local contraction in rounds: while one part is contracted, the next one travels.

Decides which part every round takes. Each part that travels is a redistribution in flight, so autograd runs
the rounds backwards: the gradient of a gather ring is the ring in front of a reduce-scatter, and the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.lower.executable import Executable
from xshard.contractions.ring import Ring


@dataclass(frozen=True, eq=False)
class Rounds:
    """The blocks of operands -> the local result.

    local: the contraction of a round. operand, dim: as a `Ring` has them. rotation: gets the part of the next
    device. first: the position of this device. n: how many rounds there are.
    """

    local: LocalContraction
    operand: int | None
    dim: str
    rotation: Executable
    first: int
    n: int

    @classmethod
    def of(cls, whole: LocalContraction, ring: Ring, rotation: Executable | None) -> Rounds:
        """`whole`, of operands where they are used, in the rounds of a ring."""
        assert rotation is not None, "a ring has two devices or more"
        lengths = tuple((name, k // ring.rounds if name == ring.dim else k) for name, k in whole.lengths)
        first = ring.rotation.mesh.index(rotation.processes.device, (ring.axis,))
        local = replace(whole, lengths=lengths)
        return cls(local, ring.operand, ring.dim, rotation, first, ring.rounds)

    def __call__(self, *blocks: Tensor) -> Tensor:
        parts = [self._parts(i, block) for i, block in enumerate(blocks)]
        return self._scattered(parts) if self.operand is None else self._gathered(parts, self.operand)

    def _parts(self, i: int, block: Tensor) -> Sequence[Tensor]:
        """What each round takes of an operand that stays where it is."""
        names = self.local.operands[i]
        if self.dim not in names or i == self.operand:
            return [block] * self.n
        parts = block.chunk(self.n, names.index(self.dim))
        first = self.first + (self.operand is None)  # sums end where they belong
        return [parts[(first + k) % self.n] for k in range(self.n)]

    def _scattered(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        first, *others = zip(*parts, strict=True)
        y = self.local(*first)
        for each in others:
            coming = PendingTensor.begin(y, self.rotation)
            own = self.local(*each)
            y = coming.wait() + own
        return y

    def _gathered(self, parts: Sequence[Sequence[Tensor]], operand: int) -> Tensor:
        found, block = [], parts[operand][0]
        for k, each in enumerate(zip(*parts, strict=True)):
            coming = PendingTensor.begin(block, self.rotation) if k + 1 < self.n else None
            found.append(self.local(*each[:operand], block, *each[operand + 1 :]))
            block = block if coming is None else coming.wait()
        if self.dim not in self.local.result:
            return sum(found[1:], start=found[0])
        rows = [found[(i - self.first) % self.n] for i in range(self.n)]
        return torch.cat(rows, self.local.result.index(self.dim))
