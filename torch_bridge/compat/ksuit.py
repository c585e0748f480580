"""Drop-ins for `ksuit.distributed`: gathers and reductions over all processes, in both gradient conventions.

Numbers and lists become tensors, scalars are gathered to one dim, tensors travel by way of a device that the
backend serves, and without a process group every block is the whole.
Better here: the gradient of a gather is a reduce-scatter in place of an all-reduce of P blocks; no input is
written to; bfloat16 comes back as bfloat16; no warning of autograd, and derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike, group_mesh
from torch_bridge.ops import all_gather, all_reduce
from torch_bridge.redistribution import redistribute
from xshard import compat, ops
from xshard.ops import Grad, Shape

AXIS = "dp"
Values = Tensor | float | list | tuple
Sizes = Sequence[int] | None

# Dtypes that are added in another one: booleans are counted, and sums of bfloat16 are rounded once.
_ADDED_AS = {torch.bool: torch.int32, torch.bfloat16: torch.float32}


class AllGatherGradAutograd:
    """The blocks of all ranks; the gradient of a block is the sum over the cotangents of all ranks.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat.ksuit import AllGatherGradAutograd
    >>> def turn():
    ...     rank = torch.distributed.get_rank()
    ...     x = torch.tensor([1.0 + rank, 2.0 + rank], requires_grad=True)
    ...     y = torch.cat(AllGatherGradAutograd.apply(x))
    ...     (y * (torch.arange(4) + 10 * (rank + 1))).sum().backward()
    ...     return y.tolist(), x.grad.tolist()
    >>> xt.testing.run_ranks(2, turn)
    [([1.0, 2.0, 2.0, 3.0], [30.0, 32.0]), ([1.0, 2.0, 2.0, 3.0], [34.0, 36.0])]
    """

    @staticmethod
    def apply(x: Tensor) -> tuple[Tensor, ...]:
        """[...] -> P tensors, by rank. Raises MeshError without a process group."""
        return all_gather(x.unsqueeze(0), 0, AXIS, _world(), grad="sum").unbind(0)


class AllGatherGradOverwrite:
    """The blocks of all ranks; the gradient of a block is the cotangent of its own rank: nothing is sent.
    Right if all ranks compute the same loss.
    """

    @staticmethod
    def apply(x: Tensor) -> list[Tensor]:
        """[...] -> P tensors, by rank. Raises MeshError without a process group."""
        return list(all_gather(x.unsqueeze(0), 0, AXIS, _world(), grad="replicated").unbind(0))


def all_gather_grad(
    x: Values, batch_dim: int = 0, *, shape: Shape = None, sizes: Sizes = None
) -> Tensor:
    """The blocks of all ranks along `batch_dim`: [n_r, ...] -> [sum of n_r, ...]; gradients are summed.

    sizes: the rows of each rank. shape: the global shape, if the first ranks have a row more. Without either,
    ranks on gloo first tell each other their rows; on other backends blocks are equal, as in the original.
    Raises as `redistribute` does: DesyncError for blocks that differ in another dim or in dtype.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat.ksuit import all_gather_grad
    >>> def turn():
    ...     rank = torch.distributed.get_rank()
    ...     return all_gather_grad(torch.full((rank + 1,), rank)).tolist()
    >>> xt.testing.run_ranks(2, turn)[0]
    [0, 1, 1]
    """
    return _gathered(x, batch_dim, "sum", shape, sizes)


def all_gather_grad_autograd(x: Values) -> Tensor:
    """`all_gather_grad` along the first dim: [n, ...] -> [P n, ...]; gradients are summed."""
    return _gathered(x, 0, "sum")


def all_gather_grad_overwrite(x: Values) -> Tensor:
    """[n, ...] -> [P n, ...]; the gradient of a block is the cotangent of its own rank."""
    return _gathered(x, 0, "replicated")


@torch.no_grad()
def all_gather_nograd(x: Values) -> Tensor:
    """[n, ...] -> [P n, ...], without a gradient."""
    return _gathered(x, 0, "replicated").detach()


@torch.no_grad()
def all_gather_nograd_clipped(x: Values, max_length: int) -> Tensor:
    """Samples that a `DistributedSampler` dealt out -> the first `max_length`, in their own order.

    [n, ...] -> [min(P n, max_length), ...]: rank r holds samples r, r + P, ..., the last of them to fill up.
    Without a process group nothing was dealt out, and nothing is clipped.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat.ksuit import all_gather_nograd_clipped
    >>> def turn():
    ...     mine = torch.tensor([[0, 2, 4], [1, 3, 0]][torch.distributed.get_rank()])
    ...     return all_gather_nograd_clipped(mine, 5).tolist()
    >>> xt.testing.run_ranks(2, turn)[1]
    [0, 1, 2, 3, 4]
    """
    block = torch.atleast_1d(torch.as_tensor(x))
    if not dist.is_initialized():
        return block
    sent = block.to(_served(block.device))
    return redistribute(sent, compat.sampler_gather(sent.shape, AXIS), _world())[:max_length].to(
        block.device
    )


def all_reduce_sum_grad(x: Values) -> Tensor:
    """The sum over ranks, on every rank: [...] -> [...]; the gradient passes, as for a loss equal on all. A
    bool becomes whether any is true.
    """
    return _reduced(x, mean=False)


def all_reduce_mean_grad(x: Values) -> Tensor:
    """The mean over ranks, a float, on every rank: [...] -> [...]; the gradient is divided by P."""
    return _reduced(x, mean=True)


@torch.no_grad()
def all_reduce_sum_nograd(x: Values) -> Tensor:
    """The sum over ranks, on every rank: [...] -> [...], without a gradient."""
    return _reduced(x, mean=False).detach()


@torch.no_grad()
def all_reduce_mean_nograd(x: Values) -> Tensor:
    """The mean over ranks, on every rank: [...] -> [...], without a gradient."""
    return _reduced(x, mean=True).detach()


def _world() -> MeshLike:
    return group_mesh(None, AXIS)


def _gathered(x: Values, dim: int, grad: Grad, shape: Shape = None, sizes: Sizes = None) -> Tensor:
    block = torch.atleast_1d(torch.as_tensor(x))
    if not dist.is_initialized():
        return block
    sent = block.to(_served(block.device))
    mesh = _world()
    on_gloo = sent.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config()
    if shape is None and sizes is None and on_gloo and not torch.compiler.is_compiling():
        rows = sent.shape[dim] if -sent.ndim <= dim < sent.ndim else 0  # which all_gather refuses
        sizes = redistribute(torch.tensor([rows]), f"r/{AXIS} -> r", mesh).tolist()
    if sizes is None or len(set(sizes)) == 1:
        return all_gather(sent, dim, AXIS, mesh, grad=grad, shape=shape).to(block.device)
    cut = ops.dims(sent.shape, {dim: f"sizes({AXIS},{','.join(map(str, sizes))})"})
    text = f"{cut} -> {ops.dims(sent.shape)}{ops.gradient_tag(AXIS, grad)}"
    return redistribute(sent, text, mesh, shape=shape).to(block.device)


def _reduced(x: Values, *, mean: bool) -> Tensor:
    block = torch.as_tensor(x)
    if not dist.is_initialized():
        return block
    dtype = _ADDED_AS.get(block.dtype, block.dtype)
    total = all_reduce(block.to(_served(block.device), dtype), AXIS, _world(), grad="replicated")
    total = total / dist.get_world_size() if mean else total
    return total.to(block.device, block.dtype if block.dtype in _ADDED_AS else total.dtype)


def _served(device: torch.device) -> torch.device:
    """The device on which a tensor travels: its own, unless no backend serves it."""
    return _served_in(device, dist.get_backend_config())


@lru_cache(maxsize=64)
def _served_in(device: torch.device, config: str) -> torch.device:
    backends = dict(served.split(":") for served in config.split(","))  # of "cpu:gloo,cuda:nccl"
    if backends.get(device.type) == "gloo":
        return torch.device("cpu")  # gloo has few operations elsewhere
    return device if device.type in backends else torch.device(next(iter(backends)))
