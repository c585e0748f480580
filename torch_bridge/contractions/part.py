"""One local contraction with the moves around it, as this process executes it.

Decides what autograd records: redistributions and `torch.einsum`. Where a gradient has a place of its own, or
nothing that was moved is to be kept, that is `Contract`, whose gradients are made of the same two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_bridge.autodiff.function import apply, is_transformed
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.contractions.local import LocalContraction
from torch_bridge.lower.computed_once import computed_once
from torch_bridge.lower.executable import Executable
from xshard import Layout

Move = Executable | None  # None: nothing moves, and no gradient does
Blocks = Sequence[Tensor | None]


def moved(move: Move, block: Any) -> Tensor:
    """A block after a move, differentiable."""
    return block if move is None else apply(move, block)


def adjoint(move: Move) -> Move:
    """The move of cotangents, the other way."""
    return None if move is None else move.backward


class OwnGradient(NamedTuple):
    """The gradient of an operand, contracted in a place of its own.

    cotangent: the move that takes the cotangent there; the part finds it there.
    as_used: for each of the other operands, whether it is taken where it was used, else where it was given.
    """

    cotangent: Move
    part: PartExecutable
    as_used: tuple[bool, ...]


class Stages(NamedTuple):
    """Moves of operands, what contracts them, and the move of its result."""

    moves: tuple[Move, ...]
    contract: Callable[..., Tensor]
    result: Move


@dataclass(frozen=True, eq=False)
class PartExecutable:
    """The blocks of operands -> the block of the result. takes: which of those that are left.

    in_rounds: what it does where a move and the contraction run at the same time.
    """

    takes: tuple[int, ...]
    moves: tuple[Move, ...]
    local: LocalContraction
    result: Move
    own: tuple[OwnGradient | None, ...]
    in_rounds: Stages | None = None
    is_last: bool = True

    def __call__(self, blocks: Sequence[Tensor], keeps: bool = True, async_op: bool = False) -> Any:
        """keeps: whether operands are kept where they are used; else gradients move them there again."""
        if self._is_special(blocks, keeps):
            each = zip(self.moves, blocks, self.own, strict=True)
            kept = [moved(move, x.detach() if own else x) if keeps else None for move, x, own in each]
            y = Contract.apply(self, *blocks, *kept)
        else:
            moves, contract, result = self._stages
            y = contract(*map(moved, moves, blocks))
            if async_op and result is not None:
                return PendingTensor.begin(y, result)
            y = self.finish(y, result)
        return PendingTensor(y, y.shape, y) if async_op else y

    @computed_once
    def _stages(self) -> Stages:
        """What it does without gradients in places of their own."""
        return self.in_rounds or Stages(self.moves, self.local, self.result)

    def _is_special(self, blocks: Sequence[Tensor], keeps: bool) -> bool:
        again = not keeps and self._sends
        if forward_ad._current_level >= 0 or not (again or any(self.own)):
            return False  # tangents go the plain way, and so do gradients beside them
        if is_transformed():
            return True
        needed = (x.requires_grad and (again or own) for x, own in zip(blocks, self.own, strict=True))
        return torch.is_grad_enabled() and any(needed)

    @computed_once
    def _sends(self) -> bool:
        """Whether operands come from other processes."""
        return any(move is not None and move.plan.bytes_received for move in self.moves)

    def contracted(self, given: Blocks, kept: Blocks) -> Tensor:
        """The result of operands that are kept where they are used, or of none of them: of those given."""
        if any(x is not None for x in kept):
            used = (self.used(i, given, kept) for i in range(len(given)))
            return self.finish(self.local(*used), self.result)
        moves, contract, result = self._stages
        return self.finish(contract(*map(moved, moves, given)), result)

    def finish(self, y: Tensor, result: Move) -> Tensor:
        """What the local contraction gives -> the result: at last contiguous, and no view of an operand."""
        if result is not None:
            return apply(result, y)
        if len(self.moves) == 1:
            return y.clone(memory_format=torch.contiguous_format)
        return y.contiguous() if self.is_last else y

    def used(self, i: int, given: Blocks, kept: Blocks) -> Tensor:
        """An operand where it is used: as it is kept, or moved there again.

        What is kept of one with a gradient of its own has no history, which higher derivatives need.
        """
        again = kept[i] is None or (self.own[i] is not None and torch.is_grad_enabled())
        return moved(self.moves[i], given[i]) if again else kept[i]  # type: ignore[return-value]

    def gradients(
        self, cotangent: Tensor, given: Blocks, kept: Blocks, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Of what is given, and of what is kept."""
        n = len(self.moves)
        found: list[Tensor | None] = [None for _ in (*given, *kept)]
        places: dict[Layout | None, Tensor] = {}  # the cotangent: it travels once to each

        def at(move: Move) -> Tensor:
            layout = None if move is None else move.plan.dst
            if layout not in places:
                used = adjoint(self.result)
                is_onward = move is not None and used is not None and move.plan.src == used.plan.dst != layout
                places[layout] = moved(move, at(used) if is_onward else cotangent)
            return places[layout]

        for i, own in enumerate(self.own):
            others = [j for j in range(n) if j != i]
            if own is not None and needed[i]:
                pairs = zip(others, own.as_used, strict=True)
                blocks = (self.used(j, given, kept) if as_used else given[j] for j, as_used in pairs)
                found[i] = own.part([at(own.cotangent), *(x.conj() for x in blocks)])  # type: ignore[union-attr]
            elif own is None and needed[i if kept[i] is None else n + i]:
                others_used = (self.used(j, given, kept).conj() for j in others)
                local = self.local.gradient(i)(at(adjoint(self.result)), *others_used)
                if kept[i] is None:
                    found[i] = moved(adjoint(self.moves[i]), local)
                else:
                    found[n + i] = local
        return found


class Contract(torch.autograd.Function):
    """`Contract.apply(part, *given, *kept)`: the result of a part, differentiable.

    given: the operands. kept: the same where they are used; None where gradients move them there again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(part: PartExecutable, *blocks: Tensor | None) -> Tensor:
        n = len(blocks) // 2
        y = part.contracted(blocks[:n], blocks[n:])
        return y.detach()  # callers may write to it, which autograd refuses for views

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.part = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        blocks, n = ctx.saved_tensors, len(ctx.saved_tensors) // 2
        return None, *ctx.part.gradients(cotangent, blocks[:n], blocks[n:], ctx.needs_input_grad[1:])
