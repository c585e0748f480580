"""What every device contracts alone, and its gradients, by `torch.einsum`.

Decides the letters of the dims. Knows no mesh.
"""

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
    """`torch.einsum` of blocks whose dims have names; dims that the result lacks are summed.

    lengths: of all dims here. A dim of the result that no operand has is repeated: as in gradients of sums.
    """

    operands: tuple[Names, ...]
    result: Names
    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, part: Part, device: int) -> LocalContraction:
        """What a part contracts on a device."""
        names = tuple(used.layout.names for used in part.used)
        shapes = (used.local_shape(device) for used in part.used)
        lengths = {n: k for dims, s in zip(names, shapes, strict=True) for n, k in zip(dims, s, strict=True)}
        return cls(names, part.result.src.names, tuple(lengths.items()))

    @lru_cache(maxsize=256)  # noqa: B019 (a value, as its results)
    def gradient(self, i: int) -> LocalContraction:
        """That of operand `i`: of the cotangent and the other operands."""
        rest = (*self.operands[:i], *self.operands[i + 1 :])
        return LocalContraction((self.result, *rest), self.operands[i], self.lengths)

    def __call__(self, *blocks: Tensor) -> Tensor:
        kind = blocks[0].dtype
        if kind in _NARROW:  # torch sums them into int64, and has no product of both
            blocks = tuple(x.long() for x in blocks)
        y = torch.einsum(self._equation, *blocks).to(kind)
        for at, length in self._repeated:
            y = y.unsqueeze(at).expand(*y.shape[:at], length, *y.shape[at:])
        return y

    @cached_property
    def _equation(self) -> str:
        # torch sums dims in the order of their letters: let it be that of the largest block, which is then
        # not copied. Which block comes first torch decides itself.
        lengths = dict(self.lengths)
        largest = sorted(self.operands, key=lambda dims: -math.prod(lengths[name] for name in dims))
        names = dict.fromkeys(name for dims in largest for name in dims)
        letters = dict(zip(names, string.ascii_letters, strict=False))
        left = ",".join("".join(letters[name] for name in dims) for dims in self.operands)
        return f"{left}->{''.join(letters[name] for name in self.result if name in letters)}"

    @cached_property
    def _repeated(self) -> tuple[tuple[int, int], ...]:
        known = {name for dims in self.operands for name in dims}
        return tuple((at, dict(self.lengths)[n]) for at, n in enumerate(self.result) if n not in known)
