"""Common redistributions by their usual names: expressions for `redistribute`, and its errors."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.redistribution import redistribute
from xshard.ops import Axes, HaloWidth, Shape, Side, gradient_tag, halo, move, sharded, tag

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "copy_to", "halo_exchange", "reduce_scatter", "shard",
    "trim_halo",
]  # fmt: skip

Grad = Literal["sum", "replicated"]


def _moved(x: Tensor, src: Side, dst: Side, mesh: MeshLike, shape: Shape = None) -> Tensor:
    return redistribute(x, move(as_tensor(x).shape, src, dst), mesh, shape=shape)


def all_gather(x: Tensor, dim: int, axis: Axes, mesh: MeshLike, *, grad: Grad, shape: Shape = None) -> Tensor:
    """Concatenate the blocks along `axis`, along `dim`: `n/axis -> n`.

    grad: the meaning of the results' gradients. "sum": each is an addend of its own, and the backward pass
    reduce-scatters. "replicated": they are equal, and it slices.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([1, 2]), xs.Mesh(dp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.all_gather(x, 0, "dp", mesh, grad="sum").tolist())[1]
    [1, 2, 1, 2]
    """
    return _moved(x, {dim: sharded(axis)}, gradient_tag(axis, grad), mesh, shape)


def reduce_scatter(
    x: Tensor, dim: int, axis: Axes, mesh: MeshLike, *, op: str = "sum", shape: Shape = None
) -> Tensor:
    """Reduce the blocks along `axis`, and cut the result along `dim`: `n | sum(axis) -> n/axis`.

    op: sum, mean, max or min. The backward pass all-gathers.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([1, 2]), xs.Mesh(tp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.reduce_scatter(x, 0, "tp", mesh).tolist())[1]
    [4]
    """
    return _moved(x, tag(op, axis), {dim: sharded(axis)}, mesh, shape)


def all_reduce(x: Tensor, axis: Axes, mesh: MeshLike, *, op: str = "sum", grad: Grad) -> Tensor:
    """Reduce the blocks along `axis`; every device has the result: `n | sum(axis) -> n`.

    op: sum, mean, max or min. grad: "sum": the results' gradients are addends, and the backward pass
    all-reduces. "replicated": they are equal, and it sends nothing.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([1, 2]), xs.Mesh(tp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.all_reduce(x, "tp", mesh, grad="replicated").tolist())[1]
    [2, 4]
    """
    return _moved(x, tag(op, axis), gradient_tag(axis, grad), mesh)


def all_to_all(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    axis: Axes,
    mesh: MeshLike,
    *,
    split_order: str = "block",
    concat_order: str = "block",
    shape: Shape = None,
) -> Tensor:
    """Move a cut from `concat_dim`, which becomes whole, to `split_dim`: `s/axis c -> s c/axis`.

    split_order, concat_order: the order of the new and of the old cut: block, zigzag, cyclic, balanced.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([[1, 2]]), xs.Mesh(cp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.all_to_all(x, 1, 0, "cp", mesh).tolist())[1]
    [[2], [2]]
    """
    before, after = {concat_dim: sharded(axis, concat_order)}, {split_dim: sharded(axis, split_order)}
    return _moved(x, before, after, mesh, shape)


def shard(x: Tensor, dim: int, axis: Axes, mesh: MeshLike, *, grad: Grad) -> Tensor:
    """This device's part, along `dim`, of a block replicated along `axis`: `n -> n/axis`.

    grad: the gradient of the block. "sum": an addend on each device (its part, and zeros elsewhere).
    "replicated": the same on all devices; the backward pass all-gathers.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([1, 2]), xs.Mesh(tp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.shard(x, 0, "tp", mesh, grad="sum").tolist())[1]
    [2]
    """
    return _moved(x, gradient_tag(axis, grad), {dim: sharded(axis)}, mesh)


def copy_to(x: Tensor, axis: Axes, mesh: MeshLike) -> Tensor:
    """The same block, as a separate copy on every device along `axis`: `n -> n | copy(axis)`.

    Sends nothing; the backward pass all-reduces.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([1, 2]), xs.Mesh(tp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.copy_to(x, "tp", mesh).tolist())[1]
    [1, 2]
    """
    return _moved(x, "", gradient_tag(axis, "sum"), mesh)


def halo_exchange(
    x: Tensor,
    width: HaloWidth,
    dim: int,
    axis: Axes,
    mesh: MeshLike,
    *,
    boundary: str = "zero",
    shape: Shape = None,
) -> Tensor:
    """Widen a block by rows of its neighbours along `axis`: `n/axis -> n/axis:halo(lo,hi)`.

    width: rows at both sides, or (before, after); a list has one number per block. Rows may come from
    several blocks; negative widths drop rows. boundary: the values beyond the ends of the array, as in
    a layout: zero, constant(1.5), periodic, reflect, edge, none, pole, or two of them ("edge,zero").
    The backward pass adds the gradients of copied rows at their owner.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([1, 2]), xs.Mesh(sp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.halo_exchange(x, 1, 0, "sp", mesh, boundary="edge").tolist())
    [[1, 1, 2, 1], [2, 1, 2, 2]]
    """
    return _moved(x, {dim: sharded(axis)}, {dim: halo(axis, width, boundary)}, mesh, shape)


def trim_halo(
    x: Tensor,
    width: HaloWidth,
    dim: int,
    axis: Axes,
    mesh: MeshLike,
    *,
    boundary: str = "zero",
    shape: Shape = None,
) -> Tensor:
    """Drop the rows that `halo_exchange` added: `n/axis:halo(lo,hi) -> n/axis`.

    >>> import torch, torch_bridge as xt, xshard as xs
    >>> x, mesh = torch.tensor([0, 1, 2, 0]), xs.Mesh(sp=2)
    >>> xt.testing.run_ranks(2, lambda: xt.ops.trim_halo(x, 1, 0, "sp", mesh).tolist())[1]
    [1, 2]
    """
    return _moved(x, {dim: halo(axis, width, boundary)}, {dim: sharded(axis)}, mesh, shape)
