"""Parameters and buffers of a parallel model: whole tensors become blocks, in place, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh
from torch_bridge.redistribution import redistribute
from torch_bridge.replicas import Comparison, compare_all
from xshard import Layout, Mesh, ProfileLike, Sharding, XshardError
from xshard.dtypes import name_of
from xshard.models import written
from xshard.replicas import ReplicaCheck
from xshard.tolerances import SAME_SEED

COMPARED = 2**24  # bytes of blocks that are compared together
Init = Callable[[nn.Module], Any] | Mapping[str, Tensor] | None


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """The mesh and the options that all parts of a parallel model, and its copies, share."""

    mesh: MeshLike
    profile: ProfileLike = "auto"
    comm_dtype: CommDtypeLike = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self

    @property
    def axes(self) -> Mesh:
        return mesh_of(self.mesh)

    @property
    def processes(self) -> ProcessMesh:
        return process_mesh(self.mesh)

    def moved(self, x: Tensor, src: Layout, dst: Layout, shape: Sequence[int] | None) -> Tensor:
        """A block without its history under another layout."""
        return redistribute(x.detach(), (src, dst), self.mesh, shape=shape, profile=self.profile)

    def compare(self, blocks: Iterable[tuple[str, Tensor, Sharding]]) -> None:
        """Raise ReplicaError, on all processes, if blocks that should be equal are not; names for errors."""
        pairs = list[tuple[Comparison, Tensor]]()
        here = self.processes
        for name, block, sharding in blocks:
            text = written(sharding.layout)
            dtype = name_of(block.dtype)
            check = ReplicaCheck(sharding, self.axes, dtype, text, False, name)
            pairs += (
                [(Comparison(check, here.ranks, here, here), block.detach())] if check.axes else []
            )
        if pairs:
            compare_all(pairs, COMPARED)


@dataclass(eq=False)
class ShardedParameter:
    """A parameter or a buffer under one name or several. owners: modules that have it, and its name in each.
    later: axes over which its gradient is summed after the backward pass of all its uses.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    sharding: Sharding
    later: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> Any:
        """This process's block. In the forward pass modules have the tensor that they use in its place."""
        owner, attribute = self.owners[0]
        return _dict_with(owner, attribute)[attribute]

    def cut(self, x: Tensor, context: ParallelContext) -> Tensor:
        layout = self.sharding.layout
        shape = self.sharding.shape
        if layout.axes:
            return context.moved(x, unsharded(layout), layout, shape)
        return x.clone() if x.is_inference() else x.detach()

    def gathered(self, context: ParallelContext) -> Tensor:
        layout = self.sharding.layout
        shape = self.sharding.shape
        return context.moved(self.tensor, layout, unsharded(layout), shape)

    def put(self, block: Tensor) -> None:
        """Make a block the data of the parameter, which an optimiser, for one, still has."""
        old = self.tensor
        new = block
        if isinstance(old, nn.Parameter):
            stays = old.device == block.device and not old.is_inference()
            new = old if stays else nn.Parameter(block, old.requires_grad)
            new.data = block
            _check_no_graph(new, self.name)
        for owner, attribute in self.owners:
            _dict_with(owner, attribute)[attribute] = new


def unsharded(layout: Layout) -> Layout:
    return Layout(tuple(replace(dim, shards=(), overlap=None) for dim in layout.dims))


def shard_all(
    parameters: Sequence[ShardedParameter],
    context: ParallelContext,
    init: Init,
    device: torch.device | None,
) -> None:
    """Replace every tensor by its block, on the meta device with values by `init`; all must begin equal."""
    sums: dict[str, Tensor] = {}
    for each in parameters:
        x = each.tensor
        if x.is_meta and isinstance(init, Mapping):
            x = _initial(init, each, x, device)
        elif x.is_meta and callable(init):
            _initialise(each.owners[0][0], init, device)
            x = each.tensor
        if not x.is_meta:
            sums[each.name] = x.detach().double().sum()
        each.put(each.cut(x, context))
    if sums:
        _check_equal(sums, context)


def _check_no_graph(x: nn.Parameter, name: str) -> None:
    """Raise XshardError if a graph of the whole tensor is alive: it expects the shape of that."""
    if x.requires_grad:
        with torch.enable_grad():
            node = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        if tuple(node._input_metadata[0].shape) != tuple(x.shape):  # type: ignore[union-attr]
            hint = "parallelize first, or drop what was computed before, or compute that under no_grad()"
            raise XshardError(
                f"{name} is part of a graph that waits for its backward pass", hint=hint
            )


def _dict_with(owner: nn.Module, attribute: str) -> dict[str, Any]:
    return owner._parameters if attribute in owner._parameters else owner._buffers


def _initialise(owner: nn.Module, init: Callable[[nn.Module], Any], device: Any) -> None:
    """Let one module make whole tensors for itself; tensors that have values keep them."""
    tensors: tuple[dict[str, Any], dict[str, Any]] = owner._parameters, owner._buffers  # type: ignore[assignment]
    values = [(own, name, x) for own in tensors for name, x in own.items() if x is not None]
    for own, attribute, old in values:
        new = torch.empty_like(old, device=device if old.is_meta else old.device)
        own[attribute] = (
            nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        )
    init(owner)
    for own, attribute, old in values:
        if not old.is_meta:
            own[attribute] = old


def _initial(init: Mapping[str, Tensor], each: ShardedParameter, x: Tensor, device: Any) -> Tensor:
    name = next((name for name in each.names if name in init), None)
    if name is None:
        hint = "a buffer that a state dict lacks needs init= as a function, or a real device"
        raise XshardError(f"{each.name} is on the meta device, and init= lacks it", hint=hint)
    value = init[name]
    if tuple(value.shape) != tuple(x.shape):
        raise XshardError(f"{name} has shape {tuple(value.shape)} in init=, not {tuple(x.shape)}")
    return value.to(device=device, dtype=x.dtype)


def _check_equal(sums: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Raise XshardError, on all processes, unless the sum of each tensor is the same on all of them."""
    axes = ",".join(context.axes.axes)
    own = torch.stack([*sums.values()])
    most, least = redistribute(torch.stack([own, -own]), f"a b | max({axes}) -> a b", context.mesh)
    differ = (most + least).abs() > SAME_SEED * torch.maximum(most.abs(), least.abs())
    if bool(differ.any()):
        name = [*sums][int(differ.nonzero()[0])]
        hint = "torch.manual_seed(0) on all before the model is made, or load one state dict on all"
        raise XshardError(f"{name} differs between processes, before it is sharded", hint=hint)
