"""One local contraction with the moves around it, as this process executes it.

Autograd records redistributions and `torch.einsum`, so there is no gradient rule but one: `MoveAgain`, which
keeps operands as they were given.
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

Move = Executable | None  # None: neither the block moves nor its gradient


def moved(move: Move, block: Any) -> Tensor:
    """Run a move on a block, differentiable."""
    return block if move is None else apply(move, block)


class Stages(NamedTuple):
    """The moves of the operands, the function that contracts them, and the move of its result."""

    moves: tuple[Move, ...]
    contract: Callable[..., Tensor]
    result: Move


@dataclass(frozen=True, eq=False)
class PartExecutable:
    """The blocks of operands -> the block of the result.

    takes: indices of the operands among the blocks that are left.
    in_rounds: the stages of a part whose move and contraction run at the same time.
    """

    takes: tuple[int, ...]
    moves: tuple[Move, ...]
    local: LocalContraction
    result: Move
    in_rounds: Stages | None = None
    is_last: bool = True

    def __call__(self, blocks: Sequence[Tensor], keeps: bool = True, async_op: bool = False) -> Any:
        """keeps: keep operands as they were contracted; else gradients move them again."""
        if not keeps and self._records_moves(blocks):
            y = MoveAgain.apply(self, *blocks)
        else:
            moves, contract, result = self._stages
            y = contract(*map(moved, moves, blocks))
            if async_op and result is not None:
                return PendingTensor.begin(y, result)
            y = self._finish(y, result)
        return PendingTensor(y, y.shape, y) if async_op else y

    @computed_once
    def _stages(self) -> Stages:
        return self.in_rounds or Stages(self.moves, self.local, self.result)

    def _records_moves(self, blocks: Sequence[Tensor]) -> bool:
        """Whether reverse mode would keep operands that came from other processes."""
        if not self._receives or forward_ad._current_level >= 0:
            return False  # tangents need the operands now
        return is_transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in blocks))

    @computed_once
    def _receives(self) -> bool:
        """Whether operands come from other processes."""
        return any(move is not None and move.plan.bytes_received for move in self.moves)

    def _finish(self, y: Tensor, result: Move) -> Tensor:
        """Move the local result; the last part's is contiguous and no view of an operand."""
        if result is not None:
            return apply(result, y)
        if len(self.moves) == 1:
            return y.clone(memory_format=torch.contiguous_format)
        return y.contiguous() if self.is_last else y


class MoveAgain(torch.autograd.Function):
    """`MoveAgain.apply(part, *operands)`: the result of a part, whose gradients move the operands again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(part: PartExecutable, *operands: Tensor) -> Tensor:
        return part(operands).detach()  # callers may write to it, which autograd refuses for views

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.part = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        part, (_, *needed), n = ctx.part, ctx.needs_input_grad, len(ctx.saved_tensors)
        backward = [None if move is None else move.backward for move in (*part.moves, part.result)]
        local = moved(backward[-1], cotangent)
        others = [[j for j in range(n) if j != i] for i in range(n)]
        used = [
            moved(move, x).conj() if any(needed[i] for i in others[j]) else None
            for j, (move, x) in enumerate(zip(part.moves, ctx.saved_tensors, strict=True))
        ]
        return None, *(
            moved(backward[i], part.local.gradient(i)(local, *(used[j] for j in others[i])))
            if needed[i]
            else None
            for i in range(n)
        )
