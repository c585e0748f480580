"""The arrays of a tree by name: what each process has of them, and where that is.

Decides which names and layouts the leaves of a model, of a state dict, or of any tree have. Knows no files.
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
from torch_bridge.models.parameters import Kept, Setting
from xshard import Layout, Mesh, Rules, ShapeError, Sharding, XshardError
from xshard.arguments import shown
from xshard.errors import located
from xshard.plans.expression import whole_shape
from xshard.rules import leaf_name

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
        return _on_large_pages(
            torch.empty(self.sharding.local_shape(self.device), dtype=self.dtype, device=device)
        )


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
        kept = [each for each in parallel.kept if saved.intersection(each.names)]
        return {each.name: _kept(each, parallel.setting) for each in kept}, {}
    tree = tree.state_dict() if isinstance(tree, nn.Module) else tree
    found = {leaf_name(path): x for path, x in tree_flatten_with_path(tree)[0]}
    blocks = {name: x for name, x in found.items() if isinstance(x, Tensor) and not isinstance(x, DTensor)}
    axes, ranks = axes_of(mesh), processes_of(mesh)
    texts = Rules(WHOLE if rules is None else rules).match(blocks, what="tensor")
    leaves: dict[str, Leaf] = {}
    constants: dict[str, Constant] = {}
    for name, x in found.items():
        with located(name):
            if isinstance(x, DTensor):
                layout = from_placements(x.placements, x.device_mesh, x.ndim, tuple(x.shape))
                at = callers(x.device_mesh)
                block = local_block(x) if rank() in at else None
                sharding = Sharding(layout, dtensor_axes(x.device_mesh), tuple(x.shape))
                on = dtensor_mesh(x.device_mesh) if rank() in at else x.device_mesh
                leaves[name] = Leaf([name], block, x.dtype, sharding, on, at)
            elif isinstance(x, Tensor):
                layout = Layout.parse(texts[name]).resolved(x.ndim)
                shape = (shapes or {}).get(name) or whole_shape(layout, axes, x.shape, str(layout))
                sharding = Sharding(layout, axes, tuple(shape))
                leaves[name] = Leaf([name], x.detach(), x.dtype, sharding, mesh or axes, ranks)
            elif isinstance(x, Constant):
                constants[name] = x
            else:
                raise XshardError(f"{shown(x)} is no tensor, number or text", hint="leave it out of the tree")
    for name, leaf in leaves.items():
        if leaf.block is not None and tuple(leaf.block.shape) != leaf.sharding.local_shape(leaf.device):
            want, here = leaf.sharding.local_shape(leaf.device), tuple(leaf.block.shape)
            whole = f"of {leaf.sharding.shape} under '{leaf.sharding.layout}'"
            raise ShapeError(f"{name}: a block of shape {here}, not {want}", hint=f"that is its part {whole}")
    return leaves, constants


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


def _kept(each: Kept, setting: Setting) -> Leaf:
    x = each.tensor.detach()
    return Leaf(each.names, x, x.dtype, each.sharding, setting.mesh, setting.processes.ranks, each.put)
