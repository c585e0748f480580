"""The arrays of a model, a state dict or any tree by name: layouts, and the blocks of this process."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from torch_bridge.dtensor.function import local_block
from torch_bridge.dtensor.placements import from_placements
from torch_bridge.mesh.process_mesh import MeshLike, callers, dtensor_axes, dtensor_mesh, mesh_of
from torch_bridge.models.parallel import ATTRIBUTE, parallel_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from torch_bridge.state.processes import axes_of, processes_of, rank
from xshard import Layout, Rules, Sharding, XshardError
from xshard.arguments import lengths_of, shown
from xshard.errors import located
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Sides, check_block, sides_or_one
from xshard.trees import leaf_name, named_once, place_of

WHOLE: Any = {"**": "..."}
Constant = int | float | str | None  # bools are ints
_LARGE_BYTES = 2**20  # smaller blocks share their pages


@dataclass(eq=False)
class LocalArray:
    """An array of a tree, under one name or several, as this process has it.

    block: the local block; None on a process outside of the mesh. mesh, ranks: the devices of the array.
    put: replaces the block in the tree, if that is possible.
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
        """The index of this process in the mesh."""
        return self.ranks.index(rank())

    @property
    def is_meta(self) -> bool:
        return self.block is not None and self.block.is_meta

    def target(self, device: torch.device | str) -> Tensor:
        """The tensor to fill: the block, or new memory on a device."""
        if self.block is not None and not self.block.is_meta:
            return self.block
        shape = self.sharding.local_shape(self.device)
        return _on_large_pages(torch.empty(shape, dtype=self.dtype, device=device))


def local_arrays(
    tree: Any, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict[str, LocalArray], dict[str, Constant]]:
    """The arrays of a model or any tree, and its other leaves, by name.

    Parallel models and DTensors bring their layouts; all other tensors are local blocks with layouts by
    `rules`. shapes: global shapes by name, if blocks differ in size. Raises XshardError with the name of a
    leaf that has no rule or is neither a tensor nor a constant.
    """
    if isinstance(tree, nn.Module) and hasattr(tree, ATTRIBUTE):
        parallel, saved = parallel_of(tree), set(tree.state_dict())
        saved_parameters = [each for each in parallel.parameters if saved.intersection(each.names)]
        return {each.name: _parameter(each, parallel.context) for each in saved_parameters}, {}
    tensors, constants = tensors_and_constants(tree.state_dict() if isinstance(tree, nn.Module) else tree)
    blocks = [name for name, x in tensors.items() if not isinstance(x, DTensor)]
    layouts = Rules(WHOLE if rules is None else rules).match(blocks, what="tensor")
    ranks, arrays = processes_of(mesh), {}
    for name, x in tensors.items():
        with located(place_of(name)):
            rule = sides_or_one(Layout.parse(layouts[name])) if name in layouts else None
            shape = (shapes or {}).get(name)
            arrays[name] = local_array(name, x, rule, mesh or axes_of(None), ranks, shape)
    return arrays, constants


def tensors_and_constants(tree: Any) -> tuple[dict[str, Tensor], dict[str, Constant]]:
    """The leaves of a tree by name. Raises XshardError for other leaves, and for two leaves of one name."""
    leaves = named_once((leaf_name(path), x) for path, x in tree_flatten_with_path(tree)[0])
    tensors = {name: x for name, x in leaves.items() if isinstance(x, Tensor)}
    constants = {name: x for name, x in leaves.items() if name not in tensors}
    for name, x in constants.items():
        if not isinstance(x, Constant):
            hint = "tensors, numbers and text are moved and saved: leave it out of the tree"
            hint = "model.state_dict() is a tree" if isinstance(x, nn.Module) else hint
            raise XshardError(f"{place_of(name) or 'the tree'} is {shown(x)}", hint=hint)
    return tensors, constants


def local_array(
    name: str, x: Tensor, rule: Sides | None, mesh: MeshLike, ranks: Sequence[int], shape: Any = None
) -> LocalArray:
    """A DTensor, or a local block under the left side of a rule.

    shape: the global shape; None if blocks are equal. Raises ShapeError for a block of another shape.
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
        raise XshardError("a tensor without a layout", hint="a rule for the source, or a DTensor")
    else:
        axes = mesh_of(mesh)
        shape = global_shape(rule.src, axes, x.shape, rule.text) if shape is None else lengths_of(shape)
    array = LocalArray([name], block, x.dtype, Sharding(rule.src, axes, tuple(shape)), mesh, ranks)
    if block is not None:
        expected, dims = array.sharding.local_shape(array.device), array.sharding.layout.names
        what, whole = f"the block of rank {rank()}", array.sharding.shape
        hint = f"under '{rule.src}' on {axes!r} that is its part of a {whole} array (shapes= has others)"
        check_block(what, tuple(block.shape), expected, dims, rule.text, hint, inferred=False)
    return array


def _on_large_pages(x: Tensor) -> Tensor:
    """Advise the system to use large pages for new CPU memory, as numpy does.

    Getting small pages takes four times as long as copying into them.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux
    if x.device.type == "cpu" and x.nbytes >= _LARGE_BYTES and advice is not None:
        ahead = -x.data_ptr() % mmap.PAGESIZE
        _libc().madvise(c_void_p(x.data_ptr() + ahead), c_size_t(x.nbytes - ahead), advice)
    return x


@functools.cache
def _libc() -> CDLL:
    return CDLL(None)


def _parameter(each: ShardedParameter, context: ParallelContext) -> LocalArray:
    x, ranks = each.tensor.detach(), context.processes.ranks
    return LocalArray(each.names, x, x.dtype, each.sharding, context.mesh, ranks, each.put)
