"""Arrays of a model or a tree by name, with layouts and local blocks, and the processes that hold them."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from torch_bridge.dtensor.function import local_block
from torch_bridge.dtensor.placements import from_placements
from torch_bridge.mesh import process_mesh as meshes
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of, process_mesh
from torch_bridge.models.parallel import ATTRIBUTE, parallel_of
from xshard import Layout, Mesh, Rules, Sharding, XshardError, errors, trees
from xshard.arguments import lengths_of, shown
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Sides, check_block, sides_or_one


def rank() -> int:
    """The rank of this process; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes_of(mesh: MeshLike | None) -> tuple[int, ...]:
    """The ranks of a mesh; for None, the ranks of the world, or this process alone."""
    if not dist.is_initialized():
        if mesh is not None and mesh_of(mesh).n_devices > 1:
            process_mesh(mesh)  # raises
        return (0,)
    return tuple(range(dist.get_world_size())) if mesh is None else process_mesh(mesh).ranks


def axes_of(mesh: MeshLike | None) -> Mesh:
    """The axes of a mesh; None is the world as one axis."""
    return mesh_of(mesh) if mesh is not None else Mesh(world=len(processes_of(None)))


def all_or_none(
    ranks: Sequence[int], call: str, work: Callable[[], Any], *, timeout: timedelta | None = None
) -> list[Any]:
    """Do the work on all of these ranks -> the result of each, as JSON has it. Raises as `agreed` does."""
    if len(ranks) == 1:
        return [work()]
    reports = compare_ranks(
        ranks, call, lambda: CallFacts({}, {}, (), {"": json.dumps(work())}), timeout
    )
    return [json.loads(reports[r]["own"][""]) for r in ranks]


def agreed(ranks: Sequence[int], call: str, work: Callable[[], dict[str, Any]]) -> None:
    """Compare facts by name, which all of these ranks find. Raises as `compare_ranks` does."""

    def facts() -> CallFacts:
        return CallFacts({name: str(fact) for name, fact in work().items()}, {}, (), {})

    facts() if len(ranks) == 1 else compare_ranks(ranks, call, facts)


Constant = int | float | str | None  # bools are ints
_LARGE_BYTES = 2**20  # smaller blocks share their pages


@dataclass(eq=False)
class LocalArray:
    """An array under one name or several. block: None outside of its mesh. put: replaces it in the tree."""

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
        out = torch.empty(self.sharding.local_shape(self.device), dtype=self.dtype, device=device)
        return _on_large_pages(out)


def local_arrays(
    tree: Any, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict[str, LocalArray], dict[str, Constant]]:
    """The arrays of a model or any tree, with their own layouts or with layouts by rules; other leaves."""
    if isinstance(tree, nn.Module) and hasattr(tree, ATTRIBUTE):
        parallel = parallel_of(tree)
        saved = set(tree.state_dict(keep_vars=True))
        here = parallel.context.mesh, parallel.context.processes.ranks
        kept = [each for each in parallel.parameters if saved.intersection(each.names)]
        pairs = ((x, x.tensor.detach()) for x in kept)
        return {
            x.name: LocalArray(x.names, b, b.dtype, x.sharding, *here, x.put) for x, b in pairs
        }, {}
    tensors, constants = tensors_and_constants(
        tree.state_dict() if isinstance(tree, nn.Module) else tree
    )
    blocks = [name for name, x in tensors.items() if not isinstance(x, DTensor)]
    layouts = Rules({"**": "..."} if rules is None else rules).match(blocks, what="tensor")
    ranks = processes_of(mesh)
    arrays = {}
    for name, x in tensors.items():
        with errors.located(trees.place_of(name)):
            rule = sides_or_one(Layout.parse(layouts[name])) if name in layouts else None
            here = mesh or axes_of(None), ranks
            arrays[name] = local_array(name, x, rule, *here, (shapes or {}).get(name))
    return arrays, constants


def tensors_and_constants(tree: Any) -> tuple[dict[str, Tensor], dict[str, Constant]]:
    """The leaves of a tree by name."""
    leaves = trees.named_once(
        (trees.leaf_name(path), x) for path, x in tree_flatten_with_path(tree)[0]
    )
    for name, x in leaves.items():
        if not isinstance(x, Tensor | Constant):
            hint = "tensors, numbers and text are moved and saved: leave it out of the tree"
            hint = "model.state_dict() is a tree" if isinstance(x, nn.Module) else hint
            raise XshardError(f"{trees.place_of(name) or 'the tree'} is {shown(x)}", hint=hint)
    tensors = {name: x for name, x in leaves.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in leaves.items() if name not in tensors}


def local_array(
    name: str,
    x: Tensor,
    rule: Sides | None,
    mesh: MeshLike,
    ranks: Sequence[int],
    shape: Any = None,
) -> LocalArray:
    """A DTensor, or a local block under the left side of a rule. shape: global; None if blocks are equal."""
    if x.layout != torch.strided or x.is_quantized:
        reason = f"a tensor of {x.layout if x.layout != torch.strided else x.dtype}"
        raise XshardError(reason, hint="x.to_dense() or x.dequantize()")
    block: Tensor | None = x.detach()
    if isinstance(x, DTensor):
        on = x.device_mesh
        shape = tuple(x.shape)
        ranks = meshes.callers(on)
        axes = meshes.dtensor_axes(on)
        rule = sides_or_one(from_placements(x.placements, axes, x.ndim, shape))
        block, mesh = (local_block(x), meshes.dtensor_mesh(on)) if rank() in ranks else (None, on)
    elif rule is None:
        raise XshardError("a tensor without a layout", hint="a rule for the source, or a DTensor")
    else:
        axes = mesh_of(mesh)
        shape = (
            global_shape(rule.src, axes, x.shape, rule.text) if shape is None else lengths_of(shape)
        )
    array = LocalArray([name], block, x.dtype, Sharding(rule.src, axes, tuple(shape)), mesh, ranks)
    if block is not None:
        expected = array.sharding.local_shape(array.device)
        dims = array.sharding.layout.names
        what = f"the block of rank {rank()}"
        whole = array.sharding.shape
        hint = f"under '{rule.src}' on {axes!r} that is its part of a {whole} array (shapes= has others)"
        check_block(what, tuple(block.shape), expected, dims, rule.text, hint, inferred=False)
    return array


def _on_large_pages(x: Tensor) -> Tensor:
    """Use large pages for new CPU memory: getting small ones takes four times as long as copying to them."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux
    if x.device.type == "cpu" and x.nbytes >= _LARGE_BYTES and advice is not None:
        ahead = -x.data_ptr() % mmap.PAGESIZE
        CDLL(None).madvise(c_void_p(x.data_ptr() + ahead), c_size_t(x.nbytes - ahead), advice)
    return x
