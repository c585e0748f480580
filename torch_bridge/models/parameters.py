"""Parameters and buffers of a parallel model: each is cut in place, one after the other.

Decides how a whole tensor becomes this process's block, from the meta device too, and that all processes
began with equal ones. Knows no activations and no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh
from torch_bridge.redistribution import redistribute
from torch_bridge.replicas import Comparison
from xshard import Layout, Mesh, Profile, Sharding, XshardError, dtypes
from xshard.replicas import ReplicaCheck

Init = Callable[[nn.Module], Any] | Mapping[str, Tensor] | None


@dataclass(frozen=True, eq=False)
class Setting:
    """What all parts of a parallel model share; copies of the model share it too."""

    mesh: MeshLike
    axes: Mesh
    processes: ProcessMesh
    profile: str | Path | Profile
    comm_dtype: CommDtypeLike

    def __deepcopy__(self, memo: dict[int, Any]) -> Setting:
        return self

    def moved(self, x: Tensor, src: Layout, dst: Layout, shape: Sequence[int]) -> Tensor:
        """A block without its history under another layout."""
        move = f"{src} -> {dst}"
        return redistribute(x.detach(), move, self.mesh, shape=tuple(shape), profile=self.profile)

    def compare(self, block: Tensor, sharding: Sharding, name: str) -> None:
        """Raise ReplicaError, on all processes, where blocks that should be equal are not."""
        text, dtype = str(sharding.layout), dtypes.name_of(block.dtype)
        check = ReplicaCheck(sharding, self.axes, dtype, text, False, name)
        if check.axes:
            Comparison(check, self.processes.ranks, self.processes, self.processes)(block.detach())


@dataclass(eq=False)
class Kept:
    """A parameter or a buffer, and the modules that have it, under one name or several.

    later: the axes over which its gradient is summed after the backward pass of all its uses.
    """

    names: list[str]
    places: list[tuple[nn.Module, str]]
    sharding: Sharding
    later: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> Any:
        """This process's block; outside of the forward pass, in which modules have what they use."""
        owner, attribute = self.places[0]
        return _own(owner, attribute)[attribute]

    @property
    def whole(self) -> Layout:
        """The layout of the whole tensor on all processes."""
        return uncut(self.sharding.layout)

    def cut(self, x: Tensor, setting: Setting) -> Tensor:
        """The whole tensor -> this process's block, with memory of its own."""
        layout = self.sharding.layout
        return x.detach() if not layout.axes else setting.moved(x, self.whole, layout, self.sharding.shape)

    def put(self, block: Tensor) -> None:
        """Make it the parameter's data; what has the parameter, as an optimiser, keeps it."""
        old = self.tensor
        new = block
        if isinstance(old, nn.Parameter):
            new = old if old.device == block.device else nn.Parameter(block, old.requires_grad)
            new.data = block
            _check_no_graph(new, self.name)
        for owner, attribute in self.places:
            _own(owner, attribute)[attribute] = new


def uncut(layout: Layout) -> Layout:
    """The same dims on every process."""
    return Layout(tuple(replace(dim, shards=(), overlap=None) for dim in layout.dims))


def cut_all(kept: Sequence[Kept], setting: Setting, init: Init, device: torch.device | None) -> None:
    """Cut every tensor in its place. init, device: how, and where, those on the meta device get values.

    Raises XshardError where a tensor differs from process to process, or a name is not in `init`.
    """
    sums: list[Tensor] = []
    for each in kept:
        x = each.tensor
        if x.is_meta and isinstance(init, Mapping):
            x = _given(init, each, x, device)
        elif x.is_meta and callable(init):
            _initialise(each.places[0][0], init, device)
            x = each.tensor
        if not x.is_meta:
            sums.append(x.detach().double().sum())
        each.put(each.cut(x, setting))
    _check_equal([each.name for each in kept if not each.tensor.is_meta], sums, setting)


def _check_no_graph(x: nn.Parameter, name: str) -> None:
    """Raise XshardError where a graph of the whole tensor is alive: its shape would be expected."""
    if x.requires_grad:
        with torch.enable_grad():
            node = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        if tuple(node._input_metadata[0].shape) != tuple(x.shape):  # type: ignore[union-attr]
            raise XshardError(
                f"{name} is part of a graph, which still waits for its backward pass",
                hint="parallelize first, or drop what was computed before, or compute that under no_grad()",
            )


def _own(owner: nn.Module, attribute: str) -> dict[str, Any]:
    return owner._parameters if attribute in owner._parameters else owner._buffers


def _initialise(owner: nn.Module, init: Callable[[nn.Module], Any], device: Any) -> None:
    """Whole tensors for one module alone, from its own initialisation; what it has already stays."""
    tensors: tuple[dict[str, Any], dict[str, Any]] = owner._parameters, owner._buffers  # type: ignore[assignment]
    values = [(own, name, x) for own in tensors for name, x in own.items() if x is not None]
    for own, attribute, old in values:
        new = torch.empty_like(old, device=device if old.is_meta else old.device)
        is_parameter = isinstance(old, nn.Parameter)
        own[attribute] = nn.Parameter(new, old.requires_grad) if is_parameter else new
    init(owner)
    for own, attribute, old in values:
        if not old.is_meta:
            own[attribute] = old


def _given(init: Mapping[str, Tensor], each: Kept, x: Tensor, device: Any) -> Tensor:
    name = next((name for name in each.names if name in init), None)
    if name is None:
        raise XshardError(
            f"{each.name} is on the meta device, and init= does not have it",
            hint="a buffer that no state dict has needs init= as a function, or a real device",
        )
    given = init[name]
    if tuple(given.shape) != tuple(x.shape):
        raise XshardError(f"{name} has shape {tuple(given.shape)} in init=, not {tuple(x.shape)}")
    return given.to(device=device, dtype=x.dtype)


def _check_equal(names: Sequence[str], sums: Sequence[Tensor], setting: Setting) -> None:
    """Raise XshardError, on all processes, unless the sum of each tensor is the same on all of them."""
    if not sums:
        return
    both = torch.stack([torch.stack(list(sums)), -torch.stack(list(sums))])
    axes = ",".join(setting.axes.axes)
    most, least = redistribute(both, f"a b | max({axes}) -> a b", setting.mesh)
    apart = (most + least).abs() > 1e-6 * torch.maximum(most.abs(), least.abs())
    if bool(apart.any()):
        name = names[int(apart.nonzero()[0])]
        raise XshardError(
            f"{name} is not the same on all processes, before it is cut",
            hint="seed all of them alike, torch.manual_seed(0), or load one state dict on all",
        )
