"""What a tree has, by name: tensors, numbers and texts, and objects with a state of their own.

A model has parameters, and an optimizer moments that are sharded as these. Schedulers, scalers and
the like have a `state_dict()` of numbers and tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_bridge.dtensor.placements import dtensor_of
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.models.names import is_inside
from torch_bridge.models.optimizers import (
    State,
    check_groups,
    load_named,
    named_state,
    sharding_of_state,
)
from torch_bridge.models.parallel import ATTRIBUTE, parallel_of
from torch_bridge.state.leaves import (
    Constant,
    LocalArray,
    axes_of,
    local_array,
    named_leaves,
    processes_of,
    tensors_and_constants,
)
from torch_bridge.versions.modules import uncompiled
from torch_bridge.versions.pytree import tree_map_with_path
from xshard import Layout, Rules, Sharding, XshardError, errors, trees
from xshard.plans.expression import sides_or_one
from xshard.state.files import Checkpoint
from xshard.state.relations import TargetArray
from xshard.trees import joined, leaf_name


class Owner(NamedTuple):
    """Where a parameter is: the name of its model in the tree, and its own name in the model."""

    model: str
    parameter: str


@dataclass
class Members:
    """What a tree has, by name.

    arrays: those of parallel models at first, and at last all. tensors: all others, of models that
    are not parallel, too. stateful: objects with the state that they returned. owners: of each
    parameter, by the id of its tensor.
    """

    arrays: dict[str, LocalArray] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    stateful: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)

    def add_tree(self, name: str, tree: Any) -> None:
        """Add the leaves of a tree. Raises XshardError for one without a state."""
        others = {}
        for key, x in named_leaves(tree).items():
            leaf = joined(name, key)
            if isinstance(x, nn.Module):
                self._add_model(leaf, x)
            elif isinstance(x, Optimizer):
                self.optimizers[leaf] = x
            elif isinstance(x, Stateful):
                state = x.state_dict()
                self.stateful[leaf] = (x, state)
                self.add_tree(leaf, state)
            else:
                others[leaf] = x
        tensors, constants = tensors_and_constants(others)
        self.tensors.update(tensors)
        self.constants.update(constants)

    def _add_model(self, name: str, model: nn.Module) -> None:
        """Add the tensors of a model, of which some parts may be parallel, as in an `AveragedModel`."""
        model = uncompiled(model)
        parts = list(_parallel_parts(model))
        for path, part in parts:
            prefix = joined(name, path)
            for parameter in parallel_of(part).parameters:
                self.owners.setdefault(id(parameter.tensor), Owner(prefix, parameter.name))
            self.arrays.update(_arrays_of_parallel(prefix, part))
        if parts and not parts[0][0]:
            return  # the model itself is parallel
        others = {}
        for key, x in model.state_dict(keep_vars=True).items():
            if not any(is_inside(key, path) for path, _ in parts):
                others[joined(name, key)] = x
                self.owners.setdefault(id(x), Owner(name, key))
        tensors, constants = tensors_and_constants(others)
        self.tensors.update(tensors)
        self.constants.update(constants)

    def add_arrays(
        self, rules: Any, mesh: MeshLike | None, shapes: Mapping[str, Sequence[int]] | None
    ) -> None:
        """Describe the tensors as arrays, by rules. Raises as `local_array`, with the tensor's name."""
        without_placements = [n for n, x in self.tensors.items() if not isinstance(x, DTensor)]
        if rules is None:
            rules = {"**": "..."}
        layouts = Rules(rules).match(without_placements, what="tensor")
        ranks = processes_of(mesh)
        if mesh is None:
            mesh = axes_of(None)
        for name, x in self.tensors.items():
            with errors.located(trees.place_of(name)):
                rule = sides_or_one(Layout.parse(layouts[name])) if name in layouts else None
                shape = None if shapes is None else shapes.get(name)
                self.arrays[name] = local_array(name, x, rule, mesh, ranks, shape)

    def add_optimizers(self) -> None:
        """Add the arrays, numbers and texts of all optimizers. Raises as `optimizer_state` does."""
        for name in self.optimizers:
            arrays, constants = self.optimizer_state(name).arrays_and_constants()
            self.arrays.update(arrays)
            self.constants.update(constants)

    def optimizer_state(self, name: str) -> OptimizerState:
        """Return the state of an optimizer by names of parameters, and the arrays of these.

        Raises XshardError if the tree lacks their model.
        """
        optimizer = self.optimizers[name]
        owners = {}
        for x in _parameters_of(optimizer):
            if id(x) in self.owners:
                owners[id(x)] = self.owners[id(x)]
        models = {owner.model for owner in owners.values()}
        with errors.located(trees.place_of(name)):
            if len(models) > 1:
                hint = "an nn.ModuleDict of them is one model"
                raise XshardError(f"it trains {len(models)} models: {sorted(models)}", hint=hint)
            names = {key: owner.parameter for key, owner in owners.items()}
            state = named_state(optimizer, names)
        arrays = {}
        for owner in owners.values():
            arrays[owner.parameter] = self.arrays[joined(owner.model, owner.parameter)]
        return OptimizerState(name, optimizer, names, arrays, state)


@dataclass
class OptimizerState:
    """An optimizer in a tree: its name there, and its state by the names of parameters.

    names: of parameters, by the id of the tensor. parameters: their arrays, by name.
    """

    name: str
    optimizer: Optimizer
    names: dict[int, str]
    parameters: dict[str, LocalArray]
    state: State

    def arrays_and_constants(self) -> tuple[dict[str, LocalArray], dict[str, Constant]]:
        """Return the tensors of the state as arrays, and its numbers and texts, by name in the tree."""
        arrays = {}
        constants = {}
        for parameter_name, values in self.state["state"].items():
            parameter = self.parameters[parameter_name]
            for key, x in values.items():
                leaf = joined(self.name, f"state.{parameter_name}.{key}")
                if isinstance(x, Tensor):
                    with errors.located(trees.place_of(leaf)):
                        arrays[leaf] = _state_array(leaf, x, parameter)
                else:
                    constants[leaf] = x
        tensors, numbers = tensors_and_constants(named_leaves(self.state["param_groups"]))
        for key, x in tensors.items():
            leaf = joined(self.name, f"param_groups.{key}")
            arrays[leaf] = _state_array(leaf, x, next(iter(self.parameters.values())))
        for key, number in numbers.items():
            constants[joined(self.name, f"param_groups.{key}")] = number
        return arrays, constants

    def targets(self, stored: Mapping[str, TargetArray]) -> dict[str, LocalArray]:
        """Return arrays to fill with what is stored of this state; an optimizer may not have one yet.

        They have the memory of the state where it has the stored shape, and new memory elsewhere.

        stored: by name in the tree.
        """
        arrays, _ = self.arrays_and_constants()
        for leaf, x in stored.items():
            parameter = self.parameters.get(self._key_of(leaf).parameter)
            if parameter is None:
                continue
            with errors.located(trees.place_of(leaf)):
                sharding = sharding_of_state(x.shape, parameter.sharding.shape, parameter.sharding)
            if leaf not in arrays or arrays[leaf].sharding.shape != sharding.shape:
                dtype = getattr(torch, x.dtype)
                block = _new_block(sharding, parameter, dtype)
                arrays[leaf] = LocalArray(
                    [leaf], block, dtype, sharding, parameter.mesh, parameter.ranks
                )
        return arrays

    def stored_groups(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """Return the stored options of all groups. Raises XshardError for groups of other parameters."""
        prefix = joined(self.name, "param_groups")
        groups: list[dict[str, Any]] = tree_map_with_path(
            lambda path, own: checkpoint.constant(f"{prefix}.{leaf_name(path)}", own),
            self.state["param_groups"],
        )
        for i, group in enumerate(groups):
            for leaf in checkpoint.constants:  # options that the optimizer does not have yet
                option = leaf.removeprefix(f"{prefix}.{i}.")
                if option != leaf and "." not in option:
                    group.setdefault(option, checkpoint.constant(leaf, None))
        with errors.located(trees.place_of(self.name)):
            check_groups(self.optimizer, self.names, groups)
        return groups

    def load(
        self,
        tensors: Mapping[str, Tensor],
        groups: list[dict[str, Any]],
        checkpoint: Checkpoint,
    ) -> None:
        """Give the optimizer the state that was read: tensors by name in the tree, and numbers."""
        parameters = {self.names[id(x)]: x for x in _parameters_of(self.optimizer)}
        state: dict[str, dict[str, Any]] = {}
        for leaf in (*tensors, *checkpoint.constants):
            name, key = self._key_of(leaf)
            if name not in parameters:
                continue
            if leaf in tensors:
                value = _placed_as(tensors[leaf], parameters[name])
            else:
                value = checkpoint.constant(leaf, None)
            state.setdefault(name, {})[key] = value
        load_named(self.optimizer, self.names, {"state": state, "param_groups": groups})

    def _key_of(self, leaf: str) -> _Key:
        """Return which state a leaf of the tree is: "optimizer.state.up.weight.step" -> up.weight, step.

        The parameter is "" if the leaf is none of this optimizer.
        """
        prefix = joined(self.name, "state.")
        if not leaf.startswith(prefix):
            return _Key("", "")
        parameter, _, key = leaf.removeprefix(prefix).rpartition(".")
        return _Key(parameter, key)


class _Key(NamedTuple):
    """A value in the state of an optimizer: the parameter's name, and the key."""

    parameter: str
    key: str


def _parallel_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost parallel modules in a model, with their names; ("", model) if it is one."""
    if hasattr(model, ATTRIBUTE):
        yield "", model
        return
    found: list[str] = []
    for name, module in model.named_modules():
        if hasattr(module, ATTRIBUTE) and not any(is_inside(name, path) for path in found):
            found.append(name)
            yield name, module


def _arrays_of_parallel(prefix: str, model: nn.Module) -> dict[str, LocalArray]:
    """List the parameters and saved buffers of a model of `parallelize`, with how each is sharded.

    A parameter with several names (tied weights) is listed once. Buffers that `state_dict` leaves
    out are left out here, too.

    prefix: the name of the model in its tree.
    """
    parallel = parallel_of(model)
    # By identity: a part that was compiled meanwhile has other names here.
    saved = {id(x) for x in model.state_dict(keep_vars=True).values()}
    arrays = {}
    for parameter in parallel.parameters:
        if id(parameter.tensor) not in saved:  # a buffer that is not persistent
            continue
        block = parameter.tensor.detach()
        arrays[joined(prefix, parameter.name)] = LocalArray(
            [joined(prefix, name) for name in parameter.names],
            block,
            block.dtype,
            parameter.sharding,
            parallel.context.mesh,
            parallel.context.processes.ranks,
            put=parameter.set_block,
        )
    return arrays


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer trains."""
    return [x for group in optimizer.param_groups for x in group["params"]]


def _state_array(leaf: str, x: Tensor, parameter: LocalArray) -> LocalArray:
    """Describe a tensor of an optimizer's state: it is sharded as its parameter, or whole."""
    if isinstance(x, DTensor) or parameter.block is None:
        return local_array(leaf, x, None, parameter.mesh, parameter.ranks, None)
    sharding = sharding_of_state(x.shape, parameter.block.shape, parameter.sharding)
    return LocalArray([leaf], x.detach(), x.dtype, sharding, parameter.mesh, parameter.ranks)


def _new_block(sharding: Sharding, parameter: LocalArray, dtype: torch.dtype) -> Tensor | None:
    """Return memory for this process's block of a state; None on a process without a block."""
    if parameter.block is None:
        return None
    # Optimizers count their steps on the CPU, and torch moves the count where they do not.
    device = parameter.block.device if sharding.shape else torch.device("cpu")
    return torch.empty(sharding.local_shape(parameter.device), dtype=dtype, device=device)


def _placed_as(block: Tensor, parameter: Tensor) -> Tensor:
    """Return a block as its parameter is: a DTensor if that is one."""
    if not isinstance(parameter, DTensor) or isinstance(block, DTensor) or not block.shape:
        return block
    return dtensor_of(block, parameter.device_mesh, parameter.placements, parameter.shape)
