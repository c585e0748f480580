"""One local contraction with the moves around it, as this process executes it.

Decides what autograd records. Mostly that is redistributions and `torch.einsum`, whose derivatives are known.
Where the plan has another place for a gradient, or nothing that was moved is to be kept, it is `Contract`,
whose derivatives are contractions again, made of the same two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.autodiff.function import apply, is_transformed
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.lower.computed_once import computed_once
from torch_bridge.lower.executable import Executable

Blocks = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Lent:
    """A plan that leaves the block as it is, without the copy that callers get: it is only read."""

    executable: Executable
    is_linear = True

    def __call__(self, block: Tensor) -> Tensor:
        return block.view_as(block)

    @property
    def backward(self) -> Executable:
        return self.executable.backward

    @property
    def tangent(self) -> Lent:
        return self

    def batched(self, n: int) -> Lent:
        return Lent(self.executable.batched(n))


Move = Executable | Lent | None  # None: nothing moves, and no gradient does


def moved(move: Move, block: Tensor) -> Tensor:
    """A block after a move, differentiable."""
    return block if move is None else apply(move, block)


class OwnGradient(NamedTuple):
    """The gradient of an operand, contracted in a place of its own.

    as_used: for each of the other operands, whether it is taken where it was used, else where it was given.
    """

    part: PartExecutable
    as_used: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class PartExecutable:
    """The blocks of operands -> the block of the result. takes: which of those that are left."""

    takes: tuple[int, ...]
    moves: tuple[Move, ...]
    local: LocalContraction
    result: Executable | None
    own: tuple[OwnGradient | None, ...]
    is_last: bool = True

    def __call__(self, blocks: Sequence[Tensor], keeps: bool = True, async_op: bool = False) -> Any:
        """keeps: whether operands are kept where they are used; else gradients move them there again."""
        if self._is_special(blocks, keeps):
            y = Contract.apply(self, *self._given(blocks, keeps), *self._kept(blocks, keeps))
        else:
            y = self.local(*map(moved, self.moves, blocks))
            if async_op and self.result is not None:
                return PendingTensor.begin(y, self.result)
            y = self.finish(y)
        return PendingTensor(y, y.shape, y) if async_op else y

    def finish(self, y: Tensor) -> Tensor:
        """What the local contraction gives -> the result: in the end contiguous, and no view of an operand."""
        if self.result is not None:
            return apply(self.result, y)
        if not self.is_last:
            return y
        return y.contiguous() if len(self.moves) > 1 else y.clone(memory_format=torch.contiguous_format)

    def _is_special(self, blocks: Sequence[Tensor], keeps: bool) -> bool:
        again = not keeps and any(isinstance(move, Executable) for move in self.moves)
        if is_transformed():  # tensors do not say whether they have a gradient
            return again or any(self.own)
        if not torch.is_grad_enabled():
            return False
        return any(x.requires_grad and (again or own) for x, own in zip(blocks, self.own, strict=True))

    def _given(self, blocks: Sequence[Tensor], keeps: bool) -> Blocks:
        """The operands that gradients take as they are given."""
        return [x if not keeps or i in self._taken_as_given else None for i, x in enumerate(blocks)]

    def _kept(self, blocks: Sequence[Tensor], keeps: bool) -> Blocks:
        """The operands where they are used, if they are kept; those with a gradient of their own detached."""
        if not keeps:
            return [None] * len(blocks)
        return [
            moved(move, x.detach() if own else x)
            for move, x, own in zip(self.moves, blocks, self.own, strict=True)
        ]

    @computed_once
    def _taken_as_given(self) -> set[int]:
        found = set()
        for i, own in enumerate(self.own):
            if own is not None:
                others = [j for j in range(len(self.own)) if j != i]
                found |= {i, *(j for j, as_used in zip(others, own.as_used, strict=True) if not as_used)}
        return found

    def used(self, i: int, given: Blocks, kept: Blocks) -> Tensor:
        """An operand where it is used: as it is kept, or moved there again.

        What is kept of one with a gradient of its own has no history, which higher derivatives need.
        """
        again = kept[i] is None or (self.own[i] is not None and torch.is_grad_enabled())
        return moved(self.moves[i], given[i]) if again else kept[i]

    def pulled(self, cotangent: Tensor, given: Blocks, kept: Blocks, needed: Sequence[bool]) -> list[Any]:
        """The gradients of what is given and of what is kept."""
        n = len(self.moves)
        found: list[Tensor | None] = [None] * 2 * n
        through: Tensor | None = None
        for i, own in enumerate(self.own):
            others = [j for j in range(n) if j != i]
            if own is not None and needed[i]:
                pairs = zip(others, own.as_used, strict=True)
                blocks = (self.used(j, given, kept) if as_used else given[j] for j, as_used in pairs)
                found[i] = own.part([cotangent, *(x.conj() for x in blocks)])
            elif own is None and (needed[i] or needed[n + i]):
                if through is None:
                    through = moved(self.result and self.result.backward, cotangent)
                local = self.gradients[i](through, *(self.used(j, given, kept).conj() for j in others))
                if kept[i] is None:
                    found[i] = moved((move := self.moves[i]) and move.backward, local)
                else:
                    found[n + i] = local
        return found

    def pushed(self, given: Blocks, kept: Blocks, tangents: Blocks) -> Tensor:
        """The tangent of the result: the sum of what the tangent of each operand gives beside the others."""
        terms, n = [], len(self.moves)
        for i, own in enumerate(self.own):
            by_given = kept[i] is None or own is not None
            tangent = tangents[i if by_given else n + i]
            if tangent is not None:
                tangent = moved(self.moves[i], tangent) if by_given else tangent
                blocks = (tangent if j == i else self.used(j, given, kept) for j in range(n))
                terms.append(self.local(*blocks))
        return self.finish(sum(terms[1:], terms[0]))

    @computed_once
    def gradients(self) -> tuple[LocalContraction, ...]:
        """The local contraction of the gradient of every operand."""
        return tuple(map(self.local.gradient, range(len(self.moves))))

    def plan_gradients(self) -> None:
        """Lower the plans of the backward pass."""
        for move in (*self.moves, self.result):
            _ = move and move.backward


class Contract(torch.autograd.Function):
    """`Contract.apply(part, *given, *kept)`: the result of a part, differentiable.

    given: the operands as they are given, None where no gradient takes them so. kept: where they are used;
    None where gradients move them there again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(part: PartExecutable, *blocks: Tensor | None) -> Tensor:
        given, kept = _halves(blocks)
        return part.finish(part.local(*(part.used(i, given, kept) for i in range(len(given)))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.part = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *ctx.part.pulled(cotangent, *_halves(ctx.saved_tensors), needed)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        return ctx.part.pushed(*_halves(ctx.saved_tensors), tangents)


def _halves(both: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    n = len(both) // 2
    return both[:n], both[n:]
