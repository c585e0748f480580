"""A layer on ranks beside its module on the whole array: outputs, gradients of inputs and of parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from xshard import reference

TOLERANCE = 1e-10


def scattered(x: Tensor, layout: str | xs.Layout, mesh: xs.Mesh) -> Tensor:
    """This rank's block of a tensor, on its device."""
    blocks = reference.scatter(x.detach().cpu().numpy(), str(layout), mesh)
    return torch.from_numpy(blocks[dist.get_rank()].copy()).to(x.device)


def whole_gradients(
    module: nn.Module, x: Tensor, *more: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """On one device: the outputs, and the gradients of a loss that weighs every one of them differently."""
    x = x.clone().requires_grad_()
    y = module(x, *more)
    (y * weights_of(y)).sum().backward()
    return y.detach(), x.grad, [p.grad for p in module.parameters()]


def weights_of(y: Tensor) -> Tensor:
    return torch.cos(torch.arange(y.numel(), dtype=torch.float64, device=y.device)).reshape(y.shape)


def check_layer(
    module: nn.Module,
    shape: tuple[int, ...],
    layout: str,
    mesh: xs.Mesh,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> xs.Sharding:
    """Outputs, gradients and buffers of a layer are those of its module; returns where the outputs stand."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64).to(device)
    module = module.double().to(device)
    for p in module.parameters():
        nn.init.uniform_(p, -1, 1)
    alone = copy.deepcopy(module)
    found = [whole_gradients(alone, x) if dist.get_rank() == 0 else None, list(alone.buffers())]
    dist.broadcast_object_list(found)  # computed once: the ranks share two cores
    layer = xt.nn.domain_parallel(module, layout, mesh, shape=shape, **options)
    block = scattered(x, layout, mesh).requires_grad_()
    sharding = compare(layer(block), block, layout, module, found[0])
    for (name, buffer), wanted in zip(module.named_buffers(), found[1], strict=True):
        same(buffer, wanted, name)
    return sharding


def compare(
    mine: Tensor,
    block: Tensor,
    layout: str,
    module: nn.Module,
    wanted: tuple[Tensor, Tensor, list[Tensor]],
) -> xs.Sharding:
    """A block's outputs, and then gradients, are what `whole_gradients` found; returns their sharding."""
    y, of_x, of_parameters = wanted
    sharding = xt.nn.sharding_of(mine)
    assert sharding.shape == tuple(y.shape)
    same(mine, scattered(y, sharding.layout, sharding.mesh), "outputs")
    (mine * scattered(weights_of(y), sharding.layout, sharding.mesh)).sum().backward()
    same(block.grad, scattered(of_x, layout, sharding.mesh), "gradient of the input")
    for (name, p), gradient in zip(module.named_parameters(), of_parameters, strict=True):
        same(p.grad, gradient, f"gradient of {name}")
    return sharding


def same(mine: Tensor | None, wanted: Tensor, what: str) -> None:
    """Equal but for rounding."""
    assert mine is not None, what
    assert mine.shape == wanted.shape, f"{what}: {tuple(mine.shape)}, not {tuple(wanted.shape)}"
    error = (mine.detach() - wanted).abs().max().item() if wanted.numel() else 0.0
    assert error <= TOLERANCE, f"{what}: error {error}"


def sizes(sharding: xs.Sharding, dim: int) -> list[int]:
    """The lengths of a dim's blocks."""
    return list(sharding.local_sizes[dim])
