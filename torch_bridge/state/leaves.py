"""Arrays of a model or a tree by name, with layouts, local blocks and processes."""

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

from torch_bridge.dtensor.function import local_block
from torch_bridge.dtensor.placements import from_placements
from torch_bridge.mesh import process_mesh as meshes
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import DeviceLike, MeshLike, mesh_of, process_mesh
from torch_bridge.models.parallel import ATTRIBUTE
from torch_bridge.versions.pytree import tree_flatten_with_path
from xshard import Mesh, Sharding, XshardError, trees
from xshard.arguments import lengths_of
from xshard.layout.lengths import global_shape
from xshard.plans.expression import Sides, check_block, sides_or_one
from xshard.signatures import short_repr
from xshard.state.files.values import number_of

Constant = int | float | str | None  # bools are ints
_LARGE_BYTES = 2**20  # smaller blocks share their pages with others


def rank() -> int:
    """Return the rank of this process; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes_of(mesh: MeshLike | None) -> tuple[int, ...]:
    """Return the ranks of a mesh; for None, the ranks of the world, or this process alone."""
    if not dist.is_initialized():
        if mesh is not None and mesh_of(mesh).n_devices > 1:
            # A mesh of one device works without a world: one process is all of it.
            process_mesh(mesh)  # raises
        return (0,)
    if mesh is None:
        return tuple(range(dist.get_world_size()))
    return process_mesh(mesh).ranks


def axes_of(mesh: MeshLike | None) -> Mesh:
    """Return the axes of a mesh; None is the world as one axis."""
    return Mesh(world=len(processes_of(None))) if mesh is None else mesh_of(mesh)


def all_or_none(
    ranks: Sequence[int],
    call: str,
    function: Callable[[], Any],
    *,
    timeout: timedelta | None = None,
) -> list[Any]:
    """Run `function` on each of several ranks, and return all results on all of them.

    All of these ranks call it; results are in the order of `ranks`. If `function` fails on one rank, all
    raise DesyncError, so that none goes on alone.

    Args:
        ranks: The ranks.
        call: The name of the call in errors.
        function: A function whose result JSON can hold.
        timeout: How long to wait for the others; None: as long as a collective.
    """
    if len(ranks) == 1:
        return [function()]

    def result() -> CallFacts:
        # Ranks describe a call to each other. Facts that are not compared may differ: they carry
        # results.
        return CallFacts(not_compared={"": json.dumps(function())})

    reports = compare_ranks(ranks, call, result, timeout)
    return [json.loads(reports[rank]["not_compared"][""]) for rank in ranks]


def compare_facts(
    ranks: Sequence[int], call: str, find_facts: Callable[[], dict[str, Any]]
) -> None:
    """Compare facts by name, which all of these ranks find. Raises as `compare_ranks` does."""

    def facts() -> CallFacts:
        return CallFacts({name: str(fact) for name, fact in find_facts().items()})

    if len(ranks) == 1:
        facts()
    else:
        compare_ranks(ranks, call, facts)


@dataclass(eq=False)
class LocalArray:
    """An array of a tree, with the block of this process.

    Attributes:
        names: Its names, several if it is tied.
        block: This process's block; None outside of its mesh.
        dtype: The dtype.
        sharding: How it is sharded, with its global shape.
        mesh: The mesh.
        ranks: The rank of each device of the mesh.
        put: Replaces the array in its model, for parameters on the meta device.
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
        """Whether the array has a shape and no values yet."""
        return self.block is not None and self.block.is_meta

    def target(self, device: DeviceLike) -> Tensor:
        """Return the tensor to fill: the block, or new memory on a device."""
        if self.block is not None and not self.block.is_meta:
            return self.block
        out = torch.empty(self.sharding.local_shape(self.device), dtype=self.dtype, device=device)
        return _on_large_pages(out)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name: {"opt": {"step": 3}} -> {"opt.step": 3}.

    Raises XshardError for two leaves of one name.
    """
    # Containers of torch's pytrees: dicts, lists, tuples and named tuples.
    paths_and_leaves, _ = tree_flatten_with_path(tree)
    return trees.named_once((trees.leaf_name(path), x) for path, x in paths_and_leaves)


def tensors_and_constants(
    leaves: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Constant]]:
    """Separate the tensors among leaves from numbers and strings, both by name.

    {"w": tensor, "step": 3} -> {"w": tensor}, {"step": 3}. Raises XshardError for leaves of other
    types.
    """
    tensors = {}
    constants = {}
    for name, leaf in leaves.items():
        x = number_of(leaf)
        if isinstance(x, Tensor):
            tensors[name] = x
        elif isinstance(x, Constant):
            constants[name] = x
        else:
            hint = "tensors, numbers and text are moved and saved: leave it out of the tree"
            if isinstance(x, nn.Module):
                hint = "model.state_dict() is a tree"
                if hasattr(x, ATTRIBUTE):
                    hint = "xt.state_dict(model) is a tree"
            place = trees.place_of(name) if name else "the tree"
            raise XshardError(f"{place} is {short_repr(x)}", hint=hint)
    return tensors, constants


def local_array(
    name: str,
    x: Tensor,
    rule: Sides | None,
    mesh: MeshLike,
    ranks: Sequence[int],
    shape: Any,
) -> LocalArray:
    """Describe one tensor as this process's block of a sharded array.

    A plain tensor is a block under the left side of `rule`: a block [4, 3] under "n/dp d" on dp=2 is
    of an array [8, 3]. A DTensor says itself how it is sharded. Raises XshardError for sparse and
    quantized tensors and for a plain one without a rule, ShapeError for a block that does not fit.

    Args:
        name: The name of the array.
        x: The tensor.
        rule: Layouts of the tensor in the source and the target; None for a DTensor.
        mesh: The mesh of a plain tensor.
        ranks: The rank of each of its devices.
        shape: The global shape; None: inferred, as if all blocks had one size.
    """
    if x.layout != torch.strided:
        raise XshardError(f"a tensor of {x.layout}", hint="x.to_dense() or x.dequantize()")
    if x.is_quantized:
        raise XshardError(f"a tensor of {x.dtype}", hint="x.to_dense() or x.dequantize()")
    if isinstance(x, DTensor):
        return _array_of_dtensor(name, x)
    if rule is None:
        raise XshardError("a tensor without a layout", hint="a rule for the source, or a DTensor")
    axes = mesh_of(mesh)
    if shape is None:
        shape = global_shape(rule.src, axes, x.shape, rule.text)
    else:
        shape = lengths_of(shape)
    sharding = Sharding(rule.src, axes, tuple(shape))
    # Detached, so that autograd does not see when loaded values are copied into the block.
    array = LocalArray(
        names=[name],
        block=x.detach(),
        dtype=x.dtype,
        sharding=sharding,
        mesh=mesh,
        ranks=ranks,
    )
    _check_block_shape(array, rule)
    return array


def _array_of_dtensor(name: str, x: DTensor) -> LocalArray:
    """Describe a DTensor as this process's block of a sharded array: block, layout, mesh and ranks.

    The block is None on a process outside of the DTensor's mesh.
    """
    shape = tuple(x.shape)
    axes = meshes.dtensor_axes(x.device_mesh)
    layout = from_placements(x.placements, axes, x.ndim, shape)
    ranks = meshes.calling_ranks(x.device_mesh)
    is_in_mesh = rank() in ranks
    array = LocalArray(
        names=[name],
        # Outside of the mesh torch has an empty tensor in place of a block.
        block=local_block(x) if is_in_mesh else None,
        dtype=x.dtype,
        sharding=Sharding(layout, axes, shape),
        mesh=meshes.dtensor_mesh(x.device_mesh) if is_in_mesh else x.device_mesh,
        ranks=ranks,
    )
    if is_in_mesh:
        _check_block_shape(array, sides_or_one(layout))
    return array


def _check_block_shape(array: LocalArray, rule: Sides) -> None:
    """Raise ShapeError unless the block is this process's part of the array."""
    assert array.block is not None  # only arrays with a block come here
    sharding = array.sharding
    title = f"the block of rank {rank()}"
    expected_block = (
        f"under '{rule.src}' on {sharding.mesh!r} that is its part of a {sharding.shape} array"
    )
    hint = f"{expected_block} (shapes= has others)"
    shape = tuple(array.block.shape)
    expected = sharding.local_shape(array.device)
    names = sharding.layout.names
    check_block(title, shape, expected, names, rule.text, hint, inferred=False)


def _on_large_pages(x: Tensor) -> Tensor:
    """Use large pages for new CPU memory.

    Getting small ones from the system takes four times as long as copying to them.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it
    if x.device.type == "cpu" and x.nbytes >= _LARGE_BYTES and advice is not None:
        # madvise takes whole pages: start at the next one.
        skipped_bytes = -x.data_ptr() % mmap.PAGESIZE
        start = c_void_p(x.data_ptr() + skipped_bytes)
        CDLL(None).madvise(start, c_size_t(x.nbytes - skipped_bytes), advice)
    return x
