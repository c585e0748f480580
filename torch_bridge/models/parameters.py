"""Parameters and buffers of a parallel model: whole tensors become blocks, in place, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.comm_dtype import CommDtypeLike
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh
from torch_bridge.precision import Precision
from torch_bridge.redistribution import redistribute
from torch_bridge.replicas import ComparedBlock, Comparison, compare_all
from torch_bridge.versions.autograd import addresses_of, shape_in_graph
from torch_bridge.versions.modules import buffers_of, parameters_of
from xshard import Layout, Mesh, ProfileLike, Sharding, XshardError
from xshard.dtypes import name_of
from xshard.models import layout_text, uncut_axes
from xshard.replicas import ReplicaCheck
from xshard.tolerances import SAME_SEED

COMPARED = 2**24  # bytes of blocks that are compared together
Init = Callable[[nn.Module], Any] | Mapping[str, Tensor] | None


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """The mesh and the options that all parts of a parallel model, and its copies, share.

    Attributes:
        mesh: The processes.
        profile: The machine to plan for.
        comm_dtype: The dtypes in which parameters and gradients travel.
        device: Where modules compute and processes communicate, if parameters are stored on the CPU;
            None: where the parameters are.
    """

    mesh: MeshLike
    profile: ProfileLike = "auto"
    comm_dtype: CommDtypeLike = None
    device: torch.device | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self  # process groups cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self.mesh, Mesh):
            reason = "a model on process groups cannot be pickled"
            raise XshardError(
                reason, hint="parallelize it on an xshard.Mesh, or xt.save(model, folder)"
            )
        return vars(self)

    @property
    def axes(self) -> Mesh:
        return mesh_of(self.mesh)

    @property
    def processes(self) -> ProcessMesh:
        return process_mesh(self.mesh)

    def mesh_of(self, sharding: Sharding) -> MeshLike:
        """Return the processes of an array, perhaps on sub-axes of the mesh."""
        return self.mesh if sharding.mesh == self.axes else self.processes.on(sharding.mesh)

    def device_of(self, x: Tensor) -> torch.device:
        """Return the device on which modules use a stored tensor, and processes exchange it."""
        return x.device if self.device is None else self.device

    def in_use(self, x: Tensor) -> Tensor:
        """Return a stored tensor on the device where it is used and exchanged."""
        return x.to(self.device_of(x))

    def redistribute(
        self,
        x: Tensor,
        src: Layout,
        dst: Layout,
        shape: Sequence[int] | None,
        mesh: MeshLike | None = None,
    ) -> Tensor:
        """Move a block, without its history, to another layout.

        Args:
            x: The block.
            src: Its layout.
            dst: The new layout.
            shape: The global shape; None: inferred.
            mesh: The mesh of the layouts; None: that of this context.
        """
        if mesh is None:
            mesh = self.mesh
        x = self.in_use(x.detach())
        return redistribute(x, (src, dst), mesh, shape=shape, profile=self.profile)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Reduce a tensor over all processes, which all call it, by "sum", "max" or "min"."""
        axes = ",".join(self.axes.axes)
        move = f"... | {op}({axes}) -> ..."
        return redistribute(self.in_use(x), move, self.mesh, profile=self.profile)

    def compare(self, blocks: Iterable[tuple[str, Tensor, Sharding]]) -> None:
        """Raise ReplicaError on all processes if replicas of a block are not equal.

        Under "o/tp i" on dp=2, tp=2 the two processes along dp have replicas of one block. Arrays
        without replicas are not compared. All processes call it.

        Args:
            blocks: For each a name for errors, the block, and its layout with the global shape.
        """
        processes = self.processes
        compared = []
        for name, block, sharding in blocks:
            check = ReplicaCheck(
                sharding=sharding,
                mesh=sharding.mesh,
                dtype=name_of(block.dtype),
                text=layout_text(sharding.written),
                cotangents=False,
                name=name,
            )
            if check.axes:  # along which there are replicas
                # Every process has a block, and every one calls it: the mesh stands for both.
                own_processes = processes.on(sharding.mesh)
                comparison = Comparison(
                    check, processes.ranks, processes=own_processes, callers=processes
                )
                compared.append(ComparedBlock(comparison, self.in_use(block.detach())))
        if compared:
            compare_all(compared, COMPARED)


class TensorSlot(NamedTuple):
    """A parameter or buffer of a module by its attribute: what the slot holds may be replaced."""

    module: nn.Module
    attribute: str

    @property
    def tensors(self) -> dict[str, Any]:
        """The dict of torch that has the tensor."""
        parameters = parameters_of(self.module)
        return parameters if self.attribute in parameters else buffers_of(self.module)

    def get(self) -> Any:
        """Return the tensor that the module uses."""
        return self.tensors[self.attribute]

    def set_tensor(self, x: Any) -> None:
        """Let the module use another tensor."""
        self.tensors[self.attribute] = x


@dataclass(eq=False)
class ShardedParameter:
    """A parameter or a buffer under one name or several, if it is tied.

    Attributes:
        names: Its names in the model; the first one is used in errors.
        slots: The module and attribute that hold it, for each name.
        sharding: How it is stored, with its global shape.
        axes_summed_later: Axes over which its gradient is summed after the backward pass of all its uses.
        precision: That of its first use, which says the dtype of this sum.
    """

    names: list[str]
    slots: list[TensorSlot]
    sharding: Sharding
    axes_summed_later: frozenset[str] = frozenset()
    precision: Precision | None = None
    _block: Tensor | None = None  # set while slots hold gathered tensors
    _n_gathered: int = 0  # how many `GatheredParameter`s have put one into a slot

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> Any:
        """This process's block, also while slots hold gathered tensors."""
        return self.slots[0].get() if self._block is None else self._block

    @property
    def is_in_model(self) -> bool:
        """Whether the model still has it: `weight_norm`, for one, takes a weight out of its module."""
        slot = self.slots[0]
        return self._block is not None or slot.attribute in slot.tensors

    def set_aside(self) -> None:
        """Keep the block, while slots hold a gathered tensor."""
        self._block = self.tensor
        self._n_gathered += 1

    def bring_back(self) -> None:
        """Count one gathered tensor less; slots hold the block again when there is none."""
        self._n_gathered -= 1
        if not self._n_gathered:
            self._block = None

    def block_of(self, x: Tensor, context: ParallelContext) -> Tensor:
        """Return this process's block of a whole tensor, on the device where it is stored."""
        layout = self.sharding.layout
        if layout.axes:
            mesh = context.mesh_of(self.sharding)
            x = context.redistribute(x, unsharded(layout), layout, self.sharding.shape, mesh)
        # A whole tensor is its own block. One of inference mode could not be trained.
        block = x.clone() if x.is_inference() else x.detach()
        if context.device is None or block.is_meta:
            return block
        if not isinstance(self.tensor, nn.Parameter):
            return block.to(context.device)  # buffers are where modules use them
        stored = block.to("cpu")
        # From pinned memory copies to a GPU go on beside the host's work.
        return stored if context.device.type == "cpu" else stored.pin_memory()

    def gathered(self, context: ParallelContext) -> Tensor:
        """Return the whole tensor, where modules use it. All processes call it."""
        layout = self.sharding.layout
        if not layout.axes:
            return context.in_use(self.tensor.detach())
        mesh = context.mesh_of(self.sharding)
        shape = self.sharding.shape
        return context.redistribute(self.tensor, layout, unsharded(layout), shape, mesh)

    @property
    def axes_in_buckets(self) -> tuple[str, ...]:
        """The axes of its sharding's mesh over which buckets sum its gradient, in order."""
        return uncut_axes(self.sharding, self.axes_summed_later)

    def set_block(self, block: Tensor) -> None:
        """Let modules have this block. A parameter stays the same object, which optimisers may have."""
        old = self.tensor
        new = block
        if isinstance(old, nn.Parameter):
            # `.data` cannot lead to another device, nor be set on a tensor made in inference mode.
            if old.device != block.device or old.is_inference():
                self._replace(old, nn.Parameter(block, old.requires_grad))
            new = old
            new.data = block
        for slot in self.slots:
            slot.set_tensor(new)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """Replace a tensor by another one in the same Python object, to which optimisers may refer."""
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError as error:
            hint = "give the model values before others, as a compiler, watch its parameters"
            raise XshardError(f"{self.name}: {error}", hint=hint) from None


def unsharded(layout: Layout) -> Layout:
    """Return the layout of the whole array, with the same dims."""
    return Layout(tuple(replace(dim, shards=(), overlap=None) for dim in layout.dims))


def shard_all(
    parameters: Sequence[ShardedParameter],
    context: ParallelContext,
    init: Init,
    device: torch.device | None,
) -> None:
    """Replace every parameter and buffer of a model by this process's block, in place.

    Whole tensors are made and freed one by one: beside the blocks, memory is needed for the largest
    one. Raises XshardError, with the model as it is, if processes began with different values.

    Args:
        parameters: The parameters and buffers, whole before and blocks afterwards.
        context: The mesh and options.
        init: Where tensors on the meta device get their values: a state dict, or a function that
            initialises one module; without it, their blocks stay on the meta device.
        device: The device of tensors that were on the meta device.
    """
    initialised: dict[TensorSlot, Tensor] = {}
    blocks = {}  # of tensors that were on the meta device
    sums = {}
    for parameter in parameters:
        x = parameter.tensor
        if x.is_meta:
            slot = parameter.slots[0]
            if isinstance(init, Mapping):
                x = _value_in(init, parameter).to(device=device, dtype=x.dtype)
            elif init is not None:
                if slot not in initialised:
                    initialised |= _initialise(slot.module, init, device)
                x = initialised.pop(slot)
            blocks[parameter] = parameter.block_of(x, context)
        if not x.is_meta:
            # Processes compare sums, to find out whether they began with equal values.
            sums[parameter.name] = x.detach().double().sum()
    if sums:
        _check_equal(sums, context)
    # Nothing fails from here on.
    for parameter in parameters:
        if parameter not in blocks:
            blocks[parameter] = parameter.block_of(parameter.tensor, context)
        _set_block(parameter, blocks.pop(parameter), context)


def _set_block(parameter: ShardedParameter, block: Tensor, context: ParallelContext) -> None:
    """Let modules have a block in the place of the whole tensor, whose gradient is cut alike."""
    gradient = parameter.tensor.grad
    if gradient is None:
        parameter.set_block(block)
        return
    # `.data` of another shape would leave the whole gradient beside it.
    parameter.tensor.grad = None
    parameter.set_block(block)
    parameter.tensor.grad = parameter.block_of(gradient, context)


@torch.inference_mode(False)
def check_whole(parameters: Sequence[ShardedParameter], init: Init) -> None:
    """Raise XshardError for tensors that cannot be cut.

    They are in a graph, without values in a state dict, or have the memory of another one.
    """
    _check_own_memory(parameters)
    for parameter in parameters:
        x = parameter.tensor
        if x.is_meta and isinstance(init, Mapping):
            _value_in(init, parameter)
        if isinstance(x, nn.Parameter) and parameter.sharding.layout.axes:
            _check_no_graph(x, parameter.name)


def _check_own_memory(parameters: Sequence[ShardedParameter]) -> None:
    """Raise XshardError for two tensors of one memory, as after `b.data = a.data`, of which one is cut.

    Its block has memory of its own: a step of one of them would no longer change the other.
    """
    owners: dict[tuple[torch.device, int], ShardedParameter] = {}
    for parameter in parameters:
        x = parameter.tensor
        if x.is_meta or not x.numel():
            continue
        [address] = addresses_of([x])
        owner = owners.setdefault((x.device, address), parameter)
        is_cut = owner.sharding.layout.axes or parameter.sharding.layout.axes
        if owner is not parameter and is_cut:
            reason = (
                f"{parameter.name} has the memory of {owner.name}, which cut ones would not share"
            )
            hint = "make them one parameter, as b.weight = a.weight, or copy the memory: b.data.clone()"
            raise XshardError(reason, hint=hint)


def _check_no_graph(x: nn.Parameter, name: str) -> None:
    """Raise XshardError if a graph of the whole tensor is alive: it expects the shape of that."""
    if not x.requires_grad or x.is_inference():
        return
    whole = x.data
    x.data = whole.new_empty(0)  # a graph that is alive has the shape from before
    is_alive = shape_in_graph(x) != (0,)
    x.data = whole
    if is_alive:
        hint = (
            "parallelize first, or drop what was computed before, or compute that under no_grad()"
        )
        raise XshardError(f"{name} is part of a graph that waits for its backward pass", hint=hint)


def _initialise(
    module: nn.Module, init: Callable[[nn.Module], Any], device: Any
) -> dict[TensorSlot, Tensor]:
    """Let the user's `init` give values to those tensors of a module that are on the meta device.

    `init` writes to all tensors of the module: while it runs, new ones stand in for them. Returns
    those with values in place of tensors on the meta device.

    Args:
        module: The module, which stays as it is.
        init: A function of a module that writes to its tensors.
        device: The device of tensors that were on the meta device.
    """
    earlier = {}  # the module's tensors by slot
    for name, x in {**parameters_of(module), **buffers_of(module)}.items():
        if x is None:
            continue
        slot = TensorSlot(module, name)
        earlier[slot] = x
        new = torch.empty_like(x, device=device if x.is_meta else x.device)
        if isinstance(x, nn.Parameter):
            new = nn.Parameter(new, x.requires_grad)
        slot.set_tensor(new)
    try:
        init(module)
        return {slot: slot.get() for slot, x in earlier.items() if x.is_meta}
    finally:
        for slot, x in earlier.items():
            slot.set_tensor(x)


def _value_in(init: Mapping[str, Tensor], parameter: ShardedParameter) -> Tensor:
    """Return the whole value of a parameter or buffer, which may be tied, in a state dict."""
    # A state dict may have a tied parameter under one of its names alone.
    names = [name for name in parameter.names if name in init]
    if not names:
        hint = "a buffer that a state dict lacks needs init= as a function, or a real device"
        raise XshardError(f"{parameter.name} is on the meta device, and init= lacks it", hint=hint)
    value = init[names[0]]
    if tuple(value.shape) != parameter.sharding.shape:
        reason = (
            f"{names[0]} has shape {tuple(value.shape)} in init=, not {parameter.sharding.shape}"
        )
        raise XshardError(reason)
    return value


def _check_equal(sums: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Raise XshardError on all processes if one of them began with another model.

    Processes that draw initial values from different seeds would shard different models: this shows
    in the sums of the tensors' elements.

    Args:
        sums: The sum of the elements of each whole tensor on this process, by name.
        context: The mesh and options.
    """
    own_sums = torch.stack(list(sums.values()))
    # One collective finds the largest and the smallest sum, as min(x) = -max(-x).
    signed_sums = torch.stack([own_sums, -own_sums])
    largest, minus_smallest = context.all_reduce(signed_sums, "max")
    # A relative tolerance: processes may add equal values in another order, and round differently.
    magnitude = torch.maximum(largest.abs(), minus_smallest.abs())
    is_different = (largest + minus_smallest).abs() > SAME_SEED * magnitude
    if bool(is_different.any()):
        name = list(sums)[int(is_different.nonzero()[0])]
        hint = "torch.manual_seed(0) on all before the model is made, or load one state dict on all"
        raise XshardError(f"{name} differs between processes, before it is sharded", hint=hint)
