"""The plan of a contraction as this process executes it; autograd records its moves and `torch.einsum`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_bridge.autodiff.function import apply, is_transformed
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import CommDtype
from torch_bridge.contractions.local import LocalContraction, Rounds
from torch_bridge.lower.executable import Executable, in_dtype
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard import Plan
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.shapes import named_block
from xshard.layout import Sharding

Move = Executable | None  # None: neither the block moves nor its gradient


def _moved(move: Move, block: Any) -> Tensor:
    """Run a move on a block, differentiable."""
    return block if move is None else apply(move, block)


@dataclass(frozen=True, eq=False)
class Stages:
    """The moves of the operands, the function that contracts them, and the move of its result."""

    moves: tuple[Move, ...]
    contract: Callable[..., Tensor]
    result: Move
    is_last: bool  # its result is contiguous

    def __call__(self, blocks: Sequence[Tensor], async_op: bool = False) -> Any:
        y = self.contract(*map(_moved, self.moves, blocks))
        if self.result is not None:
            return PendingTensor.begin(y, self.result) if async_op else apply(self.result, y)
        if len(self.moves) == 1:
            y = y.clone(memory_format=torch.contiguous_format)  # no view of the operand
        elif self.is_last:
            y = y.contiguous()
        return PendingTensor(y, y.shape, y) if async_op else y


@dataclass(frozen=True, eq=False)
class PartExecutable:
    """The blocks of operands -> the block of one part. stages: as `plain`, or in rounds."""

    takes: tuple[int, ...]
    plain: Stages
    stages: Stages
    receives: bool

    def __call__(self, blocks: Sequence[Tensor], keeps: bool, async_op: bool) -> Any:
        """keeps: keep operands as they were contracted; else gradients move them again."""
        if keeps or not self.receives or not _records(blocks):
            return self.stages(blocks, async_op)
        y = MoveAgain.apply(self, *blocks)
        return PendingTensor(y, y.shape, y) if async_op else y


def _records(blocks: Sequence[Tensor]) -> bool:
    """Whether operands are kept for gradients. Tangents need them now."""
    if forward_ad._current_level >= 0:
        return False
    return is_transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in blocks))


class MoveAgain(torch.autograd.Function):
    """`MoveAgain.apply(part, *operands)`: the result of a part; its gradients move the operands again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(part: PartExecutable, *operands: Tensor) -> Tensor:
        return part.stages(
            operands
        ).detach()  # callers may write to it, which autograd refuses for views

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plain = inputs[0].plain
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        plain, (_, *needed), operands = ctx.plain, ctx.needs_input_grad, ctx.saved_tensors
        backward = [
            None if move is None else move.backward for move in (*plain.moves, plain.result)
        ]
        local = _moved(backward[-1], cotangent)
        others = [[j for j in range(len(operands)) if j != i] for i in range(len(operands))]
        contracted = [
            _moved(move, x).conj() if any(needed[i] for i in others[j]) else None
            for j, (move, x) in enumerate(zip(plain.moves, operands, strict=True))
        ]

        def gradient(i: int) -> Tensor:
            rest = (contracted[j] for j in others[i])
            return _moved(backward[i], plain.contract.gradient(i)(local, *rest))

        return None, *(gradient(i) if needed[i] else None for i in range(len(operands)))


@dataclass(frozen=True, eq=False)
class ContractionExecutable:
    """The blocks of the operands -> the block of the result, of `shape`."""

    plan: ContractionPlan
    lowering: Lowering  # which made it of the plan
    parts: tuple[PartExecutable, ...]
    views: tuple[
        tuple[int, Callable[[Tensor], Tensor]], ...
    ]  # to one dim per name, of operands without
    shape: torch.Size

    def __call__(self, blocks: Sequence[Tensor], keeps: bool, async_op: bool) -> Any:
        left = list(blocks)
        for i, view in self.views:
            left[i] = view(left[i])
        for part in self.parts:
            operands = [left[i] for i in part.takes]
            left = [block for i, block in enumerate(left) if i not in part.takes]
            left.append(part(operands, keeps, async_op and part.stages.is_last))
        [y] = left
        if isinstance(y, PendingTensor) and y.shape != self.shape:
            return PendingTensor(lambda: y.wait().reshape(self.shape), self.shape, y)
        return y if y.shape == self.shape else y.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Lowering:
    """How plans become executables, on which processes and for which blocks."""

    processes: ProcessMesh
    block: torch.dtype
    tensor_device: torch.device
    travels: CommDtype
    differentiated: bool  # plan gradients now, when all processes are here to make their groups
    lower: Callable[[Plan, ProcessMesh, torch.device], Executable] = lower

    def contraction(self, plan: ContractionPlan) -> ContractionExecutable:
        """The executable of a plan."""
        parts = tuple(self._part(part, plan.text, part is plan.parts[-1]) for part in plan.parts)
        arrays = enumerate(zip(plan.arrays, (move.source for move in plan.moves), strict=False))
        views = tuple(
            (i, self._view(array, named)) for i, (array, named) in arrays if array != named
        )
        shape = torch.Size(plan.arrays[-1].local_shape(self.processes.device))
        return ContractionExecutable(plan, self, parts, views, shape)

    def _view(self, array: Sharding, named: Sharding) -> Callable[[Tensor], Tensor]:
        """An operand's block as it is written -> the one with a dim for every name."""

        def rows(name: str) -> Tensor:
            numbers = named.layout.positions(named.mesh, named.shape, name, self.processes.device)
            return torch.from_numpy(numbers).to(self.tensor_device)

        block = named.local_shape(self.processes.device)
        return lambda x: named_block(x, array.layout, named, block, rows)

    def _part(self, part: Part, text: str, is_last: bool) -> PartExecutable:
        """text: the contraction, for errors."""
        moves = tuple(self._move(move, text, lends=True) for move in part.moves)
        receives = any(move.plan.bytes_received for move in moves if move is not None)
        local = LocalContraction.of(part, self.processes.device)
        result = part.result
        ring = part.ring
        plain = stages = Stages(moves, local, self._move(result, text), is_last)
        # Sums that travel in another dtype would be added in it.
        if ring is not None and self.travels == (self.block, self.block):
            rest = self._move(ring.rest, text, lends=ring.operand is not None)
            rounds = Rounds.of(local, ring, self._move(ring.rotation, text))
            moves = tuple(rest if i == ring.operand else move for i, move in enumerate(moves))
            stages = Stages(moves, rounds, rest if ring.operand is None else plain.result, is_last)
        return PartExecutable(part.takes, plain, stages, receives)

    def _move(self, plan: Plan, text: str, *, lends: bool = False) -> Move:
        if not plan.steps:
            return None
        forward = (
            self.travels.forward if plan.bytes_received else self.block
        )  # no cast without a message
        move = self.lower(in_dtype(plan, forward), self.processes, self.tensor_device)
        move = replace(move.casting(self.block, self.travels.backward), may_return_input=lends, contraction=text)
        if self.differentiated:
            move.plan_gradient()
        return move
