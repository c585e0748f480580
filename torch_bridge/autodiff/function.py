"""The one differentiable wrapper, of any order: a plan forward, the plan of its adjoint backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_bridge.lower.executable import Executable
from torch_bridge.versions.functorch import (
    has_functorch_transforms,
    is_transformed,
    unwrap_if_dead,
)


class Map(Protocol):
    """A function of blocks, with its derivatives; one that is not linear has `max_min_derivatives`."""

    def __call__(self, *blocks: Tensor) -> Tensor | tuple[Tensor, ...]: ...

    @property
    def is_linear(self) -> bool: ...

    @property
    def backward(self) -> Map: ...

    @property
    def tangent(self) -> Map: ...

    def batched(self, n: int) -> Map: ...


class Redistribute(torch.autograd.Function):
    """`Redistribute.apply(executable, block, ...)` runs a plan on blocks, differentiable in any way.

    The backward pass is the executable of the adjoint, under this same wrapper: so are its derivatives.
    """

    @classmethod
    def apply(cls, executable: Any, *blocks: Tensor) -> Any:
        """Call `Function.apply` without binding arguments, which takes longer than the rest of it."""
        if has_functorch_transforms():
            return super().apply(executable, *blocks)
        # The implementation in C, which `Function.apply` calls after it has bound the arguments.
        plain: Any = super(torch.autograd.Function, cls)
        return plain.apply(executable, *map(unwrap_if_dead, blocks))

    @staticmethod
    def forward(executable: Map, *blocks: Tensor) -> Tensor | tuple[Tensor, ...]:
        return executable(*blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.executable = inputs[0]
        if not ctx.executable.is_linear:
            ctx.save_for_backward(inputs[1], output)
            ctx.save_for_forward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return None for the executable, which has no gradient, then the gradients of the blocks."""
        executable = ctx.executable
        if not executable.is_linear:
            # A max or min of one block: the gradient goes to the elements that equal the result.
            (gradient,) = gradients
            block, output = ctx.saved_tensors
            cotangent = Redistribute.apply(executable.max_min_derivatives.cotangent, gradient)
            return None, cotangent * share_among_winners(executable, block, output)
        adjoint = executable.backward
        # Most backward passes record nothing for a second one. Then the adjoint runs without
        # autograd, whose overhead is as long as a small move.
        if torch.is_grad_enabled() or is_transformed():
            cotangents = Redistribute.apply(adjoint, *gradients)
        else:
            cotangents = adjoint(*gradients)
        if isinstance(cotangents, Tensor):
            return None, cotangents
        return None, *cotangents

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor | tuple[Tensor, ...]:
        executable = ctx.executable
        if executable.is_linear:
            return Redistribute.apply(executable.tangent, *tangents)
        block, output = ctx.saved_tensors
        shares = share_among_winners(executable, block, output)
        return Redistribute.apply(executable.max_min_derivatives.tangent, tangents[0] * shares)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], executable: Map, *blocks: Tensor
    ) -> tuple[Any, Any]:
        n = info.batch_size
        batched = []  # all with the mapped dim first
        for x, dim in zip(blocks, in_dims[1:], strict=True):
            batched.append(x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0))
        results = Redistribute.apply(executable.batched(n), *batched)
        if isinstance(results, tuple):
            return results, (0,) * len(results)
        return results, 0


def share_among_winners(executable: Any, block: Tensor, output: Tensor) -> Tensor:
    """Return how much of the gradient of a max or min over processes each element gets: a factor.

    It is 1 / (number of elements that equal the result) for those that do, and 0 for all others. A
    max of [1, 3] on one process and [3, 3] on another is [3, 3]: factors [0, 1/2] and [1, 1/2].

    Args:
        executable: The executable of the max or min.
        block: This process's block, the candidates.
        output: The result, as the layout after the plan has it.
    """
    derivatives = executable.max_min_derivatives
    # The result under the layout of the block, to compare the two: the output moved back, or, if it
    # lacks rows of the block, the block reduced once more.
    can_move_back = derivatives.result.is_linear
    result = Redistribute.apply(derivatives.result, output if can_move_back else block.detach())
    has_won = (block == result).to(block.dtype)
    n_winners = Redistribute.apply(derivatives.winner_count, has_won)
    # Where a boundary value fills a row, no element has won: 1 in place of 0 avoids 0 / 0.
    return has_won / n_winners.clamp(min=1)


def apply(executable: Executable, block: Tensor) -> Tensor:
    """Run a plan on one block, differentiably. Hot: every call on one mesh comes through here."""
    is_recorded = block.requires_grad and torch.is_grad_enabled()
    if not is_recorded and not is_transformed():
        return executable(block)  # autograd would take as long as a small move
    if executable.is_linear or executable.casts is None:
        return Redistribute.apply(executable, block)
    # The winners of a max or min are those in the communication dtype, where more values are equal.
    uncast = replace(executable, casts=None)
    return Redistribute.apply(uncast, block.to(executable.dtype)).to(block.dtype)
