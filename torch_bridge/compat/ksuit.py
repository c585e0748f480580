"""Drop-ins for `ksuit.distributed`: gathers and reductions, in both gradient conventions.

Numbers and lists become tensors, scalars are gathered to one dim, tensors travel by way of a device
that the backend serves, and without a process group every block is the whole. Better here: the
gradient of a gather is a reduce-scatter in place of an all-reduce of P blocks; no input is written
to; bfloat16 comes back as bfloat16; no warning of autograd, and derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.mesh.process_mesh import MeshLike, group_mesh
from torch_bridge.ops import all_gather, all_reduce
from torch_bridge.redistribution import redistribute
from xshard import compat, ops
from xshard.errors import api_boundary
from xshard.ops import Grad, Shape
from xshard.signatures import Length

AXIS = "dp"
Values = Tensor | float | bool | list | tuple
Sizes = Sequence[int] | None

# Dtypes that are added in another one: booleans are counted, and sums of bfloat16 are rounded once.
_ADDED_AS = {torch.bool: torch.int32, torch.bfloat16: torch.float32}


class AllGatherGradAutograd:
    """The blocks of all ranks; the gradient of a block is the sum over the cotangents of all ranks.

    Examples:
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
    @api_boundary
    def apply(x: Tensor) -> tuple[Tensor, ...]:
        """Gather blocks: [...] -> P tensors, by rank. Raises MeshError without a process group."""
        return all_gather(x.unsqueeze(0), 0, AXIS, _world(), grad="sum").unbind(0)


class AllGatherGradOverwrite:
    """The blocks of all ranks.

    The gradient of a block is the cotangent of its own rank: nothing is sent.

    Right if all ranks compute the same loss.
    """

    @staticmethod
    @api_boundary
    def apply(x: Tensor) -> list[Tensor]:
        """Gather blocks: [...] -> P tensors, by rank. Raises MeshError without a process group."""
        return list(all_gather(x.unsqueeze(0), 0, AXIS, _world(), grad="replicated").unbind(0))


@api_boundary
def all_gather_grad(
    x: Values, batch_dim: int = 0, *, shape: Shape = None, sizes: Sizes = None
) -> Tensor:
    """Gather the blocks of all ranks along a dim: [n_r, ...] -> [sum of n_r, ...].

    n_r is the number of rows on rank r. Each rank's gradient of the result counts: a block's
    gradient is the sum of all ranks' gradients for its rows.

    Without `shape` and `sizes`, ranks on gloo first tell each other their rows; on other backends
    blocks are equal, as in the original.

    Args:
        x: This rank's block.
        batch_dim: The dim along which blocks are joined.
        shape: The global shape, if the first ranks have a row more.
        sizes: The rows of each rank.

    Raises:
        DesyncError: Blocks differ in another dim or in dtype.
        XshardError: As for `redistribute`.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from torch_bridge.compat.ksuit import all_gather_grad
        >>> def turn():
        ...     rank = torch.distributed.get_rank()
        ...     return all_gather_grad(torch.full((rank + 1,), rank)).tolist()
        >>> xt.testing.run_ranks(2, turn)[0]
        [0, 1, 1]
    """
    return _gather(x, batch_dim, "sum", shape, sizes)


@api_boundary
def all_gather_grad_autograd(x: Values) -> Tensor:
    """Gather blocks along the first dim: [n, ...] -> [P n, ...]; gradients are summed."""
    return _gather(x, 0, "sum")


@api_boundary
def all_gather_grad_overwrite(x: Values) -> Tensor:
    """Gather blocks: [n, ...] -> [P n, ...].

    The gradient of a block is its own rank's cotangent.
    """
    return _gather(x, 0, "replicated")


@api_boundary
@torch.no_grad()
def all_gather_nograd(x: Values) -> Tensor:
    """Gather blocks along the first dim, without a gradient: [n, ...] -> [P n, ...]."""
    return _gather(x, 0, "replicated").detach()


@api_boundary
@torch.no_grad()
def all_gather_nograd_clipped(x: Values, max_length: Length) -> Tensor:
    """Gather results for samples that a `DistributedSampler` dealt out, in the samples' order.

    [n, ...] -> [min(P n, max_length), ...] on P ranks: rank r holds samples r, r + P, ... 5 samples
    on 2 ranks are 0 2 4 and 1 3 0, and the repeated last one is clipped. Without a process
    group nothing was dealt out, and nothing is clipped.

    Args:
        x: This rank's samples.
        max_length: The number of samples: the sampler repeats some, so that all ranks have as many.

    Examples:
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
    sent = block.to(_communication_device(block.device))
    # Rank r has samples r, r + P, ...: the layout deals rows out in turn.
    samples = redistribute(sent, compat.sampler_gather(sent.shape, AXIS), _world())
    return samples[:max_length].to(block.device)


@api_boundary
def all_reduce_sum_grad(x: Values) -> Tensor:
    """Sum over ranks, on every rank: [...] -> [...].

    The gradient passes, as for a loss equal on all.

    A bool becomes whether any is true.
    """
    return _reduce(x, mean=False)


@api_boundary
def all_reduce_mean_grad(x: Values) -> Tensor:
    """Average over ranks, as a float, on every rank: [...] -> [...].

    The gradient is divided by P.
    """
    return _reduce(x, mean=True)


@api_boundary
@torch.no_grad()
def all_reduce_sum_nograd(x: Values) -> Tensor:
    """Sum over ranks, on every rank, without a gradient: [...] -> [...]."""
    return _reduce(x, mean=False).detach()


@api_boundary
@torch.no_grad()
def all_reduce_mean_nograd(x: Values) -> Tensor:
    """Average over ranks, on every rank, without a gradient: [...] -> [...]."""
    return _reduce(x, mean=True).detach()


def _world() -> MeshLike:
    return group_mesh(None, AXIS)


def _gather(x: Values, dim: int, grad: Grad, shape: Shape = None, sizes: Sizes = None) -> Tensor:
    """Gather the blocks of all ranks along a dim; blocks may differ in size: [1, 3], [2, 3] -> [3, 3].

    Without a process group x is returned, as a tensor.

    Args:
        x: This rank's block: a tensor, or numbers.
        dim: The dim along which blocks are joined.
        grad: What gradients of the result are on each rank: "sum", addends; "replicated", equal.
        shape: The global shape, if rows do not divide evenly: the first ranks then have one more.
        sizes: The number of rows of each rank. If shape and sizes are None, ranks on gloo exchange
            their numbers of rows; on other backends blocks have to be equal.
    """
    block = torch.atleast_1d(torch.as_tensor(x))
    if not dist.is_initialized():
        return block
    sent = block.to(_communication_device(block.device))
    mesh = _world()
    if shape is None and sizes is None:
        sizes = _exchange_sizes(sent, dim, mesh)
    if sizes is None or len(set(sizes)) == 1:
        return all_gather(sent, dim, AXIS, mesh, grad=grad, shape=shape).to(block.device)
    # Blocks of different sizes: the layout lists the rows of each rank, as in "sizes(axis,1,2)".
    cut = ops.dims(sent.shape, {dim: f"sizes({AXIS},{','.join(map(str, sizes))})"})
    text = f"{cut} -> {ops.dims(sent.shape)}{ops.gradient_tag(AXIS, grad)}"
    return redistribute(sent, text, mesh, shape=shape).to(block.device)


def _exchange_sizes(sent: Tensor, dim: int, mesh: MeshLike) -> Sizes:
    """Exchange the number of rows of each rank, on gloo: 1 and 2 rows -> [1, 2]; None elsewhere."""
    # NCCL would wait for the numbers on the host; a compiler cannot record a size that depends on
    # data.
    is_on_gloo = sent.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config()
    if not is_on_gloo or torch.compiler.is_compiling():
        return None
    rows = 0  # of a dim that does not exist, which `all_gather` refuses on all ranks
    if -sent.ndim <= dim < sent.ndim:
        rows = sent.shape[dim]
    sizes: list[int] = redistribute(torch.tensor([rows]), f"r/{AXIS} -> r", mesh).tolist()
    return sizes


def _reduce(x: Values, *, mean: bool) -> Tensor:
    """Return the sum or the mean over ranks, in the dtype of the values if it can hold it."""
    block = torch.as_tensor(x)
    if not dist.is_initialized():
        return block
    # In a wider dtype: a sum of booleans counts, and bfloat16 would round at every rank.
    sum_dtype = _ADDED_AS.get(block.dtype, block.dtype)
    sent = block.to(_communication_device(block.device), sum_dtype)
    total = all_reduce(sent, AXIS, _world(), grad="replicated")
    if mean:
        total = total / dist.get_world_size()
    if block.dtype in _ADDED_AS:
        total = total.to(dtype=block.dtype)
    return total.to(block.device)


def _communication_device(device: torch.device) -> torch.device:
    """Return the device on which a tensor travels: its own, unless no backend serves it."""
    config = dist.get_backend_config()  # as in "cpu:gloo,cuda:nccl"
    backends = dict(entry.split(":") for entry in config.split(","))
    if backends.get(device.type) == "gloo":
        return torch.device("cpu")  # gloo has few operations elsewhere
    if device.type in backends:
        return device
    first_device_type = next(iter(backends))
    return torch.device(first_device_type)
