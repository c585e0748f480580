"""The arrays of a tree by name: what each process has of them, and where that is.

Decides which names and layouts the leaves of a model, of a state dict, or of any tree have. Knows no files,
and no other process.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from torch_bridge.dtensor.function import local_block
from torch_bridge.dtensor.placements import from_placements
from torch_bridge.mesh.process_mesh import (
    MeshLike,
    callers,
    dtensor_axes,
    dtensor_mesh,
    mesh_of,
    process_mesh,
)
from torch_bridge.models.parallel import ATTRIBUTE, parallel_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from xshard import Layout, Mesh, Rules, Sharding, XshardError
from xshard.arguments import lengths_of, shown
from xshard.errors import located
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Sides, check_block, sides_or_one
from xshard.trees import leaf_name, named_once, place_of

WHOLE: Any = {"**": "..."}
Constant = int | float | str | None  # bools are ints
_LARGE_BYTES = 2**20  # smaller blocks have no large page for themselves


@dataclass(eq=False)
class Leaf:
    """An array of the tree, under one name or several. block: this process's, or None where it has none.

    mesh, ranks: of its devices. put: makes a tensor the block, where the tree takes another.
    """

    names: Sequence[str]
    block: Tensor | None
    dtype: torch.dtype
    sharding: Sharding
    mesh: MeshLike
    ranks: Sequence[int]
    put: Callable[[Tensor], None] | None = None

    @property
    def device(self) -> int:
        """This process's device of the mesh."""
        return self.ranks.index(rank())

    @property
    def is_meta(self) -> bool:
        return self.block is not None and self.block.is_meta

    def target(self, device: torch.device | str) -> Tensor:
        """The block to fill: its own memory, or new memory on a device."""
        if self.block is not None and not self.block.is_meta:
            return self.block
        shape = self.sharding.local_shape(self.device)
        return _on_large_pages(torch.empty(shape, dtype=self.dtype, device=device))


def leaves_of(
    tree: Any, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict[str, Leaf], dict[str, Constant]]:
    """A model or any tree -> its arrays, and its other leaves, by name.

    Parallel models and DTensors bring their layouts; rules say those of all other tensors, which are blocks.
    shapes: global ones, by name, where blocks differ in size.
    Raises XshardError with the name of a leaf that has no rule or is neither a tensor nor a constant.
    """
    if isinstance(tree, nn.Module) and hasattr(tree, ATTRIBUTE):
        parallel, saved = parallel_of(tree), set(tree.state_dict())
        kept = [each for each in parallel.parameters if saved.intersection(each.names)]
        return {each.name: _parameter(each, parallel.context) for each in kept}, {}
    tensors, constants = by_name(tree.state_dict() if isinstance(tree, nn.Module) else tree)
    cut = [name for name, x in tensors.items() if not isinstance(x, DTensor)]
    layouts = Rules(WHOLE if rules is None else rules).match(cut, what="tensor")
    on, ranks, leaves = mesh or axes_of(None), processes_of(mesh), {}
    for name, x in tensors.items():
        with located(place_of(name)):
            rule = sides_or_one(Layout.parse(layouts[name])) if name in layouts else None
            leaves[name] = leaf_of(name, x, rule, on, ranks, (shapes or {}).get(name))
    return leaves, constants


def by_name(tree: Any) -> tuple[dict[str, Tensor], dict[str, Constant]]:
    """The tensors of a tree, and its constants. Raises XshardError for any other, and a name of two."""
    found = named_once((leaf_name(path), x) for path, x in tree_flatten_with_path(tree)[0])
    tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in found.items() if name not in tensors}
    for name, x in others.items():
        if not isinstance(x, Constant):
            hint = "tensors, numbers and text are moved and saved: leave it out of the tree"
            hint = "model.state_dict() is a tree" if isinstance(x, nn.Module) else hint
            raise XshardError(f"{place_of(name) or 'the tree'} is {shown(x)}", hint=hint)
    return tensors, others


def leaf_of(
    name: str, x: Tensor, rule: Sides | None, mesh: MeshLike, ranks: Sequence[int], shape: Any = None
) -> Leaf:
    """A block of this process under the left side of a rule, or a DTensor, which says itself where it is.

    shape: global; None: that of equal blocks. Raises ShapeError for a block of another shape.
    """
    if x.layout != torch.strided or x.is_quantized:
        raise XshardError(
            f"a tensor of {x.layout if x.layout != torch.strided else x.dtype}",
            hint="x.to_dense() or x.dequantize()",
        )
    block: Tensor | None = x.detach()
    if isinstance(x, DTensor):
        on, shape = x.device_mesh, tuple(x.shape)
        ranks, axes = callers(on), dtensor_axes(on)
        rule = sides_or_one(from_placements(x.placements, axes, x.ndim, shape))
        block, mesh = (local_block(x), dtensor_mesh(on)) if rank() in ranks else (None, on)
    elif rule is None:
        raise XshardError("a tensor has no layout of its own", hint="a rule for here, or a DTensor")
    else:
        axes = mesh_of(mesh)
        shape = global_shape(rule.src, axes, x.shape, rule.text) if shape is None else lengths_of(shape)
    leaf = Leaf([name], block, x.dtype, Sharding(rule.src, axes, tuple(shape)), mesh, ranks)
    if block is not None:
        expected, names = leaf.sharding.local_shape(leaf.device), leaf.sharding.layout.names
        what, whole = f"the block of rank {rank()}", leaf.sharding.shape
        hint = f"under '{rule.src}' on {axes!r} that is its part of a {whole} array (shapes= says others)"
        check_block(what, tuple(block.shape), expected, names, rule.text, hint, inferred=False)
    return leaf


def rank() -> int:
    """Of this process; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes_of(mesh: MeshLike | None) -> tuple[int, ...]:
    """The ranks of a mesh; of None those of the world, or this process alone."""
    if not dist.is_initialized():
        if mesh is not None and mesh_of(mesh).n_devices > 1:
            process_mesh(mesh)  # raises
        return (0,)
    if mesh is None:
        return tuple(range(dist.get_world_size()))
    return process_mesh(mesh).ranks


def axes_of(mesh: MeshLike | None) -> Mesh:
    """The axes of a mesh; None is the world as one axis, along which tensors are equal."""
    return mesh_of(mesh) if mesh is not None else Mesh(world=len(processes_of(None)))


def _on_large_pages(x: Tensor) -> Tensor:
    """New memory of a CPU, for which the system is advised to take large pages, as numpy does for its own.

    To be given small ones takes four times as long as to copy into them.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux
    if x.device.type == "cpu" and x.nbytes >= _LARGE_BYTES and advice is not None:
        ahead = -x.data_ptr() % mmap.PAGESIZE
        _libc().madvise(c_void_p(x.data_ptr() + ahead), c_size_t(x.nbytes - ahead), advice)
    return x


@functools.cache
def _libc() -> CDLL:
    return CDLL(None)


def _parameter(each: ShardedParameter, context: ParallelContext) -> Leaf:
    x = each.tensor.detach()
    return Leaf(each.names, x, x.dtype, each.sharding, context.mesh, context.processes.ranks, each.put)
