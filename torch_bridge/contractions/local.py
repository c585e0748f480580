"""The contraction of one device's blocks by `torch.einsum`, and in rounds: one part while the next, a
redistribution in flight, travels; so autograd runs the rounds backwards.
"""

from __future__ import annotations

import math
import string
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.lower.executable import Executable
from xshard.contractions.placements import dim_lengths
from xshard.contractions.plan import Part
from xshard.contractions.ring import ContractionRing

Names = tuple[str, ...]

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True)
class LocalContraction:
    """`torch.einsum` of blocks with named dims. A dim that only the result has is repeated."""

    operands: tuple[Names, ...]
    result: Names
    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, part: Part, device: int) -> LocalContraction:
        """The local contraction of a part on a device."""
        names = tuple(x.layout.names for x in part.used)
        lengths = dim_lengths(
            (x.layout for x in part.used), (x.local_shape(device) for x in part.used)
        )
        return cls(names, part.result.src.names, tuple(lengths.items()))

    @lru_cache(maxsize=256)  # noqa: B019 (a value, as its results)
    def gradient(self, i: int) -> LocalContraction:
        """The gradient of operand `i`: the contraction of the cotangent and the other operands."""
        rest = (*self.operands[:i], *self.operands[i + 1 :])
        return LocalContraction((self.result, *rest), self.operands[i], self.lengths)

    def __call__(self, *blocks: Tensor) -> Tensor:
        kind = blocks[0].dtype
        if kind in _NARROW:  # torch sums them into int64, and has no product of both
            blocks = tuple(x.long() for x in blocks)
        y = torch.einsum(self._equation, *blocks).to(kind)
        for d, length in self._repeated:
            y = y.unsqueeze(d).expand(*y.shape[:d], length, *y.shape[d:])
        return y

    @cached_property
    def _equation(self) -> str:
        # torch sums dims in the order of their letters. In the order of the largest block it is not copied.
        # Torch itself decides which block comes first.
        lengths = dict(self.lengths)
        largest = sorted(self.operands, key=lambda dims: -math.prod(lengths[name] for name in dims))
        names = dict.fromkeys(name for dims in largest for name in dims)
        letters = dict(zip(names, string.ascii_letters, strict=False))
        left = ",".join("".join(letters[name] for name in dims) for dims in self.operands)
        return f"{left}->{''.join(letters[name] for name in self.result if name in letters)}"

    @cached_property
    def _repeated(self) -> tuple[tuple[int, int], ...]:
        known = {name for dims in self.operands for name in dims}
        return tuple(
            (d, dict(self.lengths)[n]) for d, n in enumerate(self.result) if n not in known
        )


@dataclass(frozen=True, eq=False)
class Rounds:
    """The blocks of operands -> the local result. order: the pieces in the order of the products."""

    local: LocalContraction
    ring: ContractionRing
    rotation: Executable
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, whole: LocalContraction, ring: ContractionRing, rotation: Executable | None
    ) -> Rounds:
        """`whole`, the contraction of the gathered operands, in the rounds of a ring."""
        assert rotation is not None, "a ring has two devices or more"
        lengths = tuple(
            (name, k // ring.products if name == ring.dim else k) for name, k in whole.lengths
        )
        order = ring.order(ring.rotation.mesh.index(rotation.processes.device, (ring.axis,)))
        return cls(replace(whole, lengths=lengths), ring, rotation, tuple(order))

    def __call__(self, *blocks: Tensor) -> Tensor:
        parts = [self._parts(i, block) for i, block in enumerate(blocks)]
        i = self.ring.operand
        return self._scattered(parts) if i is None else self._gathered(parts, i)

    def _parts(self, i: int, block: Tensor) -> Sequence[Tensor]:
        """The block for each product, of an operand that stays; the own pieces of the one that travels."""
        names = self.local.operands[i]
        if self.ring.dim not in names:
            return [block] * len(self.order)
        if i == self.ring.operand:
            return block.chunk(self.ring.pieces, names.index(self.ring.dim))
        parts = block.chunk(len(self.order), names.index(self.ring.dim))
        return [parts[j] for j in self.order]

    def _scattered(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        under_way = deque[PendingTensor]()
        sums = list[Tensor]()
        for k, blocks in enumerate(zip(*parts, strict=True)):
            y = self.local(*blocks)
            y = under_way.popleft().wait() + y if k >= self.ring.pieces else y
            if k + self.ring.pieces < len(self.order):
                under_way.append(PendingTensor.begin(y, self.rotation))
            else:
                sums.append(y)
        return self._concatenated(sums)

    def _gathered(self, parts: Sequence[Sequence[Tensor]], operand: int) -> Tensor:
        under_way = deque[Tensor | PendingTensor](parts[operand])
        results = list[Tensor]()
        for k in range(len(self.order)):
            block = under_way.popleft()
            block = block.wait() if isinstance(block, PendingTensor) else block
            if k + self.ring.pieces < len(self.order):
                under_way.append(PendingTensor.begin(block, self.rotation))
            results.append(
                self.local(*(block if i == operand else each[k] for i, each in enumerate(parts)))
            )
        if self.ring.dim not in self.local.result:
            return sum(results[1:], start=results[0])
        return self._concatenated([results[self.order.index(j)] for j in range(len(self.order))])

    def _concatenated(self, pieces: Sequence[Tensor]) -> Tensor:
        d = self.local.result.index(self.ring.dim)
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), d)
