"""The one differentiable wrapper: a plan forward, the plan of its adjoint backward.

Decides how executables and autograd meet. It holds no gradient rule: `plan.backward` is the
plan between the dual layouts, and runs through the same Function, so that derivatives of any
order work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge.lower import Executable
from xshard import LinearityError


class Redistribute(torch.autograd.Function):
    """`Redistribute.apply(block, executable)`: the block after the plan, differentiable.

    Works under torch.func (grad, jvp, vmap). A max or min sends its gradient to the winners in
    equal shares, which has no forward-mode form here.
    """

    @staticmethod
    def forward(block: Tensor, executable: Executable) -> Tensor:
        return executable(block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Executable], output: Tensor) -> None:
        block, ctx.executable = inputs
        if not ctx.executable.plan.src.is_linear:
            ctx.save_for_backward(block, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        executable: Executable = ctx.executable
        if executable.plan.src.is_linear:
            return Redistribute.apply(gradient, executable.backward), None
        block, output = ctx.saved_tensors
        result, count, cotangent = executable.winners
        won = (block == Redistribute.apply(output, result)).to(block.dtype)
        winners = Redistribute.apply(won, count)
        return Redistribute.apply(gradient, cotangent) * won / winners, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        executable: Executable = ctx.executable
        if not executable.plan.src.is_linear:
            raise LinearityError(f"'{executable.plan.src}' has no forward-mode derivative: use reverse mode")
        return Redistribute.apply(tangent, executable.tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], block: Tensor, executable: Executable
    ) -> tuple[Tensor, int]:
        return Redistribute.apply(block.movedim(in_dims[0], 0), executable.batched(info.batch_size)), 0
