"""The one differentiable wrapper, of any order: a plan forward, the plan of its adjoint backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_bridge.lower.executable import Executable

_unwrap = torch._C._functorch.unwrap_if_dead  # a tensor that outlives its transform


class Map(Protocol):
    """A linear function of blocks with its derivatives; if not linear, an `Executable` with `winners`."""

    def __call__(self, *blocks: Tensor) -> Tensor | tuple[Tensor, ...]: ...

    @property
    def is_linear(self) -> bool: ...

    @property
    def backward(self) -> Map: ...

    @property
    def tangent(self) -> Map: ...

    def batched(self, n: int) -> Map: ...


class Redistribute(torch.autograd.Function):
    """`Redistribute.apply(executable, block, ...)`: the blocks after the plan, differentiable in any way."""

    @classmethod
    def apply(cls, executable: Any, *blocks: Tensor) -> Any:
        """As `Function.apply`, without binding arguments, which takes longer than the rest of it."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(executable, *blocks)
        plain: Any = super(torch.autograd.Function, cls)
        return plain.apply(executable, *map(_unwrap, blocks))

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
        executable = ctx.executable
        if executable.is_linear:
            back = executable.backward
            is_recorded = torch.is_grad_enabled() or is_transformed()
            blocks = Redistribute.apply(back, *gradients) if is_recorded else back(*gradients)
            return None, *((blocks,) if isinstance(blocks, Tensor) else blocks)
        cotangent = executable.winners[2]
        return None, Redistribute.apply(cotangent, *gradients) * winner_shares(
            executable, *ctx.saved_tensors
        )

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor | tuple[Tensor, ...]:
        executable = ctx.executable
        if executable.is_linear:
            return Redistribute.apply(executable.tangent, *tangents)
        shares = winner_shares(executable, *ctx.saved_tensors)
        return Redistribute.apply(executable.winners[3], tangents[0] * shares)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], executable: Map, *blocks: Tensor
    ) -> tuple[Any, Any]:
        n = info.batch_size
        pairs = zip(blocks, in_dims[1:], strict=True)
        leading = [x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs]
        results = Redistribute.apply(executable.batched(n), *leading)
        return results, tuple(0 for _ in results) if isinstance(results, tuple) else 0


def winner_shares(executable: Any, block: Tensor, output: Tensor) -> Tensor:
    """1 / (number of processes that hold the max or min) where the block holds it, else 0."""
    result, count, *_ = executable.winners
    best = Redistribute.apply(result, output if result.is_linear else block.detach())
    won = (block == best).to(block.dtype)
    return won / Redistribute.apply(count, won).clamp(
        min=1
    )  # rows that a boundary fills have no winner


def apply(executable: Executable, block: Tensor) -> Tensor:
    """A plan on one block, differentiable. For max and min, winners are found in the communication dtype."""
    if not (block.requires_grad and torch.is_grad_enabled()) and not is_transformed():
        return executable(block)  # nothing to record; autograd takes as long as a small move
    if executable.is_linear or executable.casts is None:
        return Redistribute.apply(executable, block)
    uncast = replace(executable, casts=None)
    return Redistribute.apply(uncast, block.to(executable.casts.forward)).to(block.dtype)


def is_transformed() -> bool:
    """Whether torch.func or forward mode is active; their tensors require no gradient."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
