"""The contraction of one device's blocks, and its gradients, by `torch.einsum`."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from xshard.contractions.plan import Part

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
        names = tuple(operand.layout.names for operand in part.used)
        shapes = (operand.local_shape(device) for operand in part.used)
        lengths = {n: k for dims, s in zip(names, shapes, strict=True) for n, k in zip(dims, s, strict=True)}
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
        return tuple((d, dict(self.lengths)[n]) for d, n in enumerate(self.result) if n not in known)
