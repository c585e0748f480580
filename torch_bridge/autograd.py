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


class Redistribute(torch.autograd.Function):
    """`Redistribute.apply(block, executable)`: the block after the plan, differentiable.

    Works under torch.func (grad, jvp, vmap). A max or min has the derivatives of its winners, in equal
    shares.
    """

    @staticmethod
    def forward(block: Tensor, executable: Executable) -> Tensor:
        return executable(block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Executable], output: Tensor) -> None:
        block, ctx.executable = inputs
        if not ctx.executable.plan.src.is_linear:
            ctx.save_for_backward(block, output)
            ctx.save_for_forward(block, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        executable: Executable = ctx.executable
        if executable.plan.src.is_linear:
            return Redistribute.apply(gradient, executable.backward), None
        cotangent = executable.winners[2]
        return Redistribute.apply(gradient, cotangent) * _shares(executable, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        executable: Executable = ctx.executable
        if not executable.plan.src.is_linear:
            shared = tangent * _shares(executable, *ctx.saved_tensors)
            return Redistribute.apply(shared, executable.winners[3])
        return Redistribute.apply(tangent, executable.tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], block: Tensor, executable: Executable
    ) -> tuple[Tensor, int]:
        return Redistribute.apply(block.movedim(in_dims[0], 0), executable.batched(info.batch_size)), 0


def _shares(executable: Executable, block: Tensor, output: Tensor) -> Tensor:
    """1 where the block holds the max or min that came out, divided by how many processes do; else 0."""
    result, count, *_ = executable.winners
    won = (block == Redistribute.apply(output, result)).to(block.dtype)
    return won / Redistribute.apply(won, count)
