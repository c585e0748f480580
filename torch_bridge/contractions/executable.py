"""The plan of a contraction as this process executes it; autograd records its moves and `torch.einsum`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autodiff.function import apply
from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.comm_dtype import CommDtype
from torch_bridge.contractions.local import LocalContraction, Rounds
from torch_bridge.lower.executable import Executable, in_dtype
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import ProcessMesh
from torch_bridge.versions.functorch import is_forward_mode, is_transformed
from xshard import Plan
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.ring import ContractionRing
from xshard.contractions.shapes import named_block
from xshard.layout import Sharding

Move = Executable | None  # None: neither the block moves nor its gradient
View = Callable[[Tensor], Tensor]


def _move(move: Move, block: Any) -> Tensor:
    """Run a move on a block, differentiable."""
    if move is None:
        return block
    return apply(move, block)


@dataclass(frozen=True, eq=False)
class Stages:
    """The moves of the operands, the function that contracts them, and the move of its result."""

    moves: tuple[Move, ...]
    contract: Callable[..., Tensor]
    result: Move
    is_last: bool  # its result is contiguous

    # Hot: called for every cached einsum.
    def __call__(self, blocks: Sequence[Tensor], async_op: bool = False) -> Any:
        """Move the operands, contract them, and move the result, or begin to."""
        y = self.contract(*map(_move, self.moves, blocks))
        if self.result is None:
            if len(self.moves) == 1:
                return y.clone(memory_format=torch.contiguous_format)  # no view of the operand
            return y.contiguous() if self.is_last else y
        if async_op:
            return PendingTensor.begin(y, self.result)
        return apply(self.result, y)


@dataclass(frozen=True, eq=False)
class PartExecutable:
    """The blocks of operands -> the block of one part of the contraction."""

    operand_indices: tuple[int, ...]  # which of the blocks that are left
    plain: Stages
    stages: Stages  # as `plain`, or in rounds
    receives: bool

    def __call__(self, blocks: Sequence[Tensor], keep_moved: bool, async_op: bool) -> Any:
        """Contract the blocks; gradients move operands again unless `keep_moved`."""
        if keep_moved or not self.receives or not _are_kept_for_gradients(blocks):
            return self.stages(blocks, async_op)
        # As in ZeRO-3: the blocks as they came are kept, which are smaller, and are moved once more.
        return MoveAgain.apply(self, *blocks)


def _are_kept_for_gradients(blocks: Sequence[Tensor]) -> bool:
    """Return whether operands are kept for gradients. Tangents need them now."""
    if is_forward_mode():
        return False
    if is_transformed():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in blocks)


class MoveAgain(torch.autograd.Function):
    """`MoveAgain.apply(part, *operands)`: the result of a part; its gradients move the operands again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(part: PartExecutable, *operands: Tensor) -> Tensor:
        # Detached: callers may write to it, which autograd refuses for views.
        return part.stages(operands).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.stages = inputs[0].plain
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the operands of a distributed einsum.

        For y = einsum(a, b), the gradient of a is an einsum of the cotangent of y with b. First the
        saved blocks are moved again, as in the forward pass, and the cotangent backwards through
        the moves of the result; then each gradient goes backwards through its operand's moves.
        None for an operand that needs no gradient.
        """
        stages: Stages = ctx.stages
        operands = ctx.saved_tensors
        needs_gradient = ctx.needs_input_grad[1:]
        local_cotangent = _move(_adjoint(stages.result), cotangent)
        # An operand is moved only if another one needs a gradient. All processes decide this alike,
        # so that each move has all its participants.
        moved: list[Tensor | None] = []
        for i, operand in enumerate(operands):
            is_used = sum(needs_gradient) > needs_gradient[i]
            moved.append(_move(stages.moves[i], operand).conj() if is_used else None)
        gradients: list[Tensor | None] = [None] * len(operands)
        for i in range(len(operands)):
            if needs_gradient[i]:
                other_operands = (*moved[:i], *moved[i + 1 :])
                local_gradient = stages.contract.gradient(i)(local_cotangent, *other_operands)  # type: ignore[attr-defined]  # of `plain`
                gradients[i] = _move(_adjoint(stages.moves[i]), local_gradient)
        return None, *gradients


def _adjoint(move: Move) -> Move:
    if move is None:
        return None
    return move.backward


@dataclass(frozen=True, eq=False)
class ContractionExecutable:
    """The blocks of the operands -> the block of the result, of `shape`."""

    plan: ContractionPlan
    lowering: Lowering  # which made it of the plan
    parts: tuple[PartExecutable, ...]
    # By operand, where it has diagonals or composed dims: its block with one dim for every name.
    views: dict[int, View]
    shape: torch.Size

    # Hot: called for every cached einsum.
    def __call__(self, blocks: Sequence[Tensor], keep_moved: bool, async_op: bool) -> Any:
        """Run a distributed einsum of several operands as a sequence of smaller products.

        For a, b, c the first part may multiply b and c; then a and bc remain, for the next part.

        Args:
            blocks: This process's block of each operand.
            keep_moved: Whether the backward pass keeps operands as they were moved; else it moves
                them again.
            async_op: Whether the last product may return a tensor still in flight.
        """
        remaining: list[Any] = list(blocks)
        for i, view in self.views.items():
            remaining[i] = view(remaining[i])
        for part in self.parts:
            # As in opt_einsum's paths: the operands are removed, and the result is appended.
            operands = [remaining[i] for i in part.operand_indices]
            remaining = [
                block for i, block in enumerate(remaining) if i not in part.operand_indices
            ]
            remaining.append(part(operands, keep_moved, async_op and part.stages.is_last))
        [y] = remaining
        is_pending = isinstance(y, PendingTensor)
        if y.shape != self.shape:
            if is_pending:
                return PendingTensor(lambda: y.wait().reshape(self.shape), self.shape, y)
            y = y.reshape(self.shape)
        if async_op and not is_pending:
            return PendingTensor(y, self.shape, y)
        return y


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
        """Return the executable of a plan."""
        # On all processes in this order: groups may be made.
        parts = tuple(self._part(part, plan.text, part is plan.parts[-1]) for part in plan.parts)
        views = {
            i: self._view(plan.arrays[i], move.source)
            for i, move in enumerate(plan.moves)
            if plan.arrays[i] != move.source
        }
        shape = torch.Size(plan.arrays[-1].local_shape(self.processes.device))
        return ContractionExecutable(
            plan=plan, lowering=self, parts=parts, views=views, shape=shape
        )

    def _view(self, array: Sharding, named: Sharding) -> View:
        """Return the view of an operand's block, as it is written, with a dim for every name."""
        device = self.processes.device
        block_shape = named.local_shape(device)

        def positions(name: str) -> Tensor:
            row_numbers = named.layout.positions(named.mesh, named.shape, name, device)
            return torch.from_numpy(row_numbers).to(self.tensor_device)

        def view(block: Tensor) -> Tensor:
            return named_block(block, array.layout, named, block_shape, positions)

        return view

    def _part(self, part: Part, text: str, is_last: bool) -> PartExecutable:
        """Bind one product of a plan to process groups, as a function of blocks.

        It moves the operands, multiplies, and moves the result. If the plan has a ring, one operand
        or the result travels in pieces while the products are computed.

        Args:
            part: The product.
            text: The expression, for errors.
            is_last: Whether it gives the final result.
        """
        moves = tuple(self._lower_move(move, text, may_return_input=True) for move in part.moves)
        receives = any(move.plan.bytes_received for move in moves if move is not None)
        local = LocalContraction.of(part, self.processes.device)
        plain = Stages(moves, local, self._lower_move(part.result, text), is_last)
        stages = plain
        # The ring adds while pieces travel. With a communication dtype other than the blocks',
        # sums would be added in that dtype: then operands are moved as a whole instead.
        if part.ring is not None and self.travels == (self.block, self.block, self.block):
            stages = self._in_rounds(plain, local, part.ring, text)
        return PartExecutable(part.operand_indices, plain, stages, receives)

    def _in_rounds(
        self, plain: Stages, local: LocalContraction, ring: ContractionRing, text: str
    ) -> Stages:
        """Return the stages of a product in rounds, in which a ring replaces one collective.

        Other steps of the same move remain, for the operand or the result that travels.
        """
        operand = ring.operand  # its number; None: the result travels
        remaining = self._lower_move(
            ring.remaining_move, text, may_return_input=operand is not None
        )
        rounds = Rounds.of(local, ring, self._lower_move(ring.rotation, text))
        if operand is None:
            return replace(plain, contract=rounds, result=remaining)
        moves = list(plain.moves)
        moves[operand] = remaining
        return replace(plain, contract=rounds, moves=tuple(moves))

    def _lower_move(self, plan: Plan, text: str, *, may_return_input: bool = False) -> Move:
        """Return the move of a plan for these blocks; None if it has no steps."""
        if not plan.steps:
            return None
        # No cast without a message.
        dtype = self.travels.forward if plan.bytes_received else self.block
        move = self.lower(in_dtype(plan, dtype), self.processes, self.tensor_device)
        move = move.casting(self.block, self.travels._replace(forward=dtype))
        move = replace(move, may_return_input=may_return_input, contraction=text)
        if self.differentiated:
            move.plan_gradient()
        return move
