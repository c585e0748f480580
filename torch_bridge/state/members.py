"""What a tree has, by name: tensors, numbers and texts, and objects with a state of their own.

A tree is what users save and load, as {"model": model, "optimizer": optimizer, "step": 7}. A model has
parameters, and an optimizer moments that are sharded as these. Schedulers, scalers and the like have a
`state_dict()` of numbers and tensors. All become arrays and constants under dotted names, as
"optimizer.state.up.weight.exp_avg".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_bridge.dtensor.placements import dtensor_of
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.models.block_guards import parameters_of
from torch_bridge.models.names import is_inside, is_part, module_of
from torch_bridge.models.optimizers import (
    State,
    load_named,
    matched_groups,
    named_state,
    scalar_keys_of,
    sharding_of_state,
)
from torch_bridge.models.parallel import ATTRIBUTE, parallel_of
from torch_bridge.models.structure import check_structure
from torch_bridge.state.leaves import (
    Constant,
    LocalArray,
    axes_of,
    local_array,
    named_leaves,
    processes_of,
    tensors_and_constants,
)
from torch_bridge.versions.modules import COMPILED, uncompiled
from xshard import Layout, Rules, Sharding, errors, trees
from xshard.plans.expression import sides_or_one
from xshard.state.files import Checkpoint
from xshard.state.files.values import number_of, to_json
from xshard.state.parts import TargetArray
from xshard.trees import joined

MADE_BY = "made by"  # of a stored group: the class of its optimizer
ArraysAndConstants = tuple[dict[str, LocalArray], dict[str, Constant]]


class Owner(NamedTuple):
    """Where a parameter is: the name of its model in the tree, and its own name in the model.

    The model is "" for a tensor of the tree itself.
    """

    model: str
    parameter: str

    @property
    def name_in_tree(self) -> str:
        """The name of the parameter in the tree: "model.up.weight"."""
        return joined(self.model, self.parameter)


class ObjectState(NamedTuple):
    """The state of an object, such as a scheduler, as it is and as JSON, and what gives it another one."""

    value: Any
    json: Any
    load: Callable[[Any], object]


@dataclass
class Members:
    """What a tree has, by name in the tree.

    Attributes:
        arrays: Arrays with their sharding: of parallel models, and after `add_arrays` all.
        tensors: Those whose sharding `add_arrays` will tell by rules, as of models without layouts.
        constants: Numbers and texts.
        optimizers: Optimizers.
        states: Of other objects that have one, as schedulers.
        owners: Of each parameter, by the id of its tensor.
    """

    arrays: dict[str, LocalArray] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    states: dict[str, ObjectState] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)

    def add_tree(self, tree: Any) -> None:
        """Add the leaves of a tree. Raises XshardError for one without a state, and for a name twice."""
        plain_leaves = {}
        for leaf, value in named_leaves(tree).items():
            if isinstance(value, nn.Module):
                self._add_model(leaf, value)
            elif isinstance(value, Optimizer):
                self.optimizers[leaf] = value
            elif isinstance(value, Stateful) and not isinstance(value, type):
                self._add_state(leaf, value.state_dict(), value.load_state_dict)
            else:
                plain_leaves[leaf] = value
                self.owners.setdefault(id(value), Owner("", leaf))
        self._add_leaves(plain_leaves)

    def _add_leaves(self, leaves: Mapping[str, Any]) -> None:
        """Add tensors, numbers and texts."""
        tensors, constants = tensors_and_constants(leaves)
        named_so_far = (self.arrays, self.tensors, self.constants)
        trees.named_once(
            itertools.chain(tensors.items(), *(names.items() for names in named_so_far))
        )
        self.tensors.update(tensors)
        self.constants.update(constants)

    def _add_state(self, name: str, value: Any, load: Callable[[Any], object]) -> None:
        """Add the state of an object: its numbers and texts as one value, each of its tensors as a leaf."""
        tensors: dict[str, Tensor] = {}
        self.states[name] = ObjectState(value, to_json(value, name, Tensor, tensors), load)
        self._add_leaves(tensors)

    def _add_model(self, name: str, model: nn.Module) -> None:
        """Add the tensors of a model, of which some modules may be parallel, as in an `AveragedModel`."""
        model = uncompiled(model)
        parallel_tensors = set()
        for path, parallel_module in _outermost_parallel(model):
            self.arrays.update(_arrays_of_parallel(joined(name, path), parallel_module))
            for parameter in parallel_of(parallel_module).parameters:
                parallel_tensors.add(id(parameter.tensor))
                owner = Owner(name, joined(path, parameter.name))
                self.owners.setdefault(id(parameter.tensor), owner)
        plain_tensors = {}
        for key, x in model.state_dict(keep_vars=True).items():
            name_in_model = key.replace(COMPILED, "")
            if key.endswith("_extra_state"):
                module = model.get_submodule(module_of(key))
                self._add_state(joined(name, name_in_model), x, module.set_extra_state)
            elif id(x) not in parallel_tensors:
                plain_tensors[joined(name, name_in_model)] = x
                self.owners.setdefault(id(x), Owner(name, name_in_model))
        self._add_leaves(plain_tensors)

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
        names_of: dict[int, list[str]] = {}  # tied weights have several
        for name, x in self.tensors.items():
            names_of.setdefault(id(x), []).append(name)
        for name, x in self.tensors.items():
            with errors.located(trees.place_of(name)):
                rule = sides_or_one(Layout.parse(layouts[name])) if name in layouts else None
                shape = None if shapes is None else shapes.get(name)
                self.arrays[name] = local_array(name, x, rule, mesh, ranks, shape)
                self.arrays[name].names = names_of[id(x)]

    def take_stored(self, checkpoint: Checkpoint, arrays: Mapping[str, TargetArray]) -> list[str]:
        """Prepare the states of objects for a load, before `add_arrays`; return those stored as values.

        A checkpoint of this package stores an object's numbers and texts as one value, under the
        object's name: the object gets it, with the tensors that are stored in it. Another program,
        as DCP, stores each leaf by itself: these fill what the object has.

        Args:
            checkpoint: The checkpoint.
            arrays: The stored ones, by name in the tree.
        """
        stored_as_values = []
        for name, state in self.states.items():
            stored_leaves = [
                leaf for leaf in (*checkpoint.constants, *arrays) if is_part(leaf, name)
            ]
            if name in stored_leaves:
                stored_as_values.append(name)
                stored_arrays = {leaf: arrays[leaf] for leaf in stored_leaves if leaf in arrays}
                self._replace_tensors_of(name, stored_arrays)
            elif stored_leaves:
                for key, x in named_leaves(state.value).items():
                    if not isinstance(x, Tensor):
                        self.constants[joined(name, key)] = x
            else:
                self.constants[name] = state.value  # the checkpoint lacks it
        return stored_as_values

    def _replace_tensors_of(self, name: str, stored: Mapping[str, TargetArray]) -> None:
        """Give an object just the tensors that are stored of it: new ones where it has none yet."""
        for leaf in [leaf for leaf in self.tensors if is_part(leaf, name)]:
            if leaf not in stored:
                del self.tensors[leaf]
        for leaf, x in stored.items():
            if leaf not in self.tensors:
                self.tensors[leaf] = torch.empty(x.shape, dtype=getattr(torch, x.dtype))

    def add_states(self) -> None:
        """Add what objects and optimizers have, for a save. Raises as `optimizer_state` does."""
        for name, state in self.states.items():
            self.constants[name] = state.json
        for name in self.optimizers:
            state_of_optimizer = self.optimizer_state(name)
            for arrays, constants in (state_of_optimizer.moments(), state_of_optimizer.groups()):
                self.arrays.update(arrays)
                self.constants.update(constants)

    def optimizer_state(self, name: str) -> OptimizerState:
        """Return the state of an optimizer by names of parameters, and the arrays of these.

        Raises XshardError if the tree lacks their model.
        """
        optimizer = self.optimizers[name]
        owners: dict[int, Owner] = {}  # by the id of the tensor
        for x in parameters_of(optimizer):
            if id(x) in self.owners:
                owners[id(x)] = self.owners[id(x)]
        has_one_model = len({owner.model for owner in owners.values()}) <= 1
        names: dict[int, str] = {}
        arrays: dict[str, LocalArray] = {}
        for tensor_id, owner in owners.items():
            # Two models may have parameters of one name.
            names[tensor_id] = owner.parameter if has_one_model else owner.name_in_tree
            arrays[names[tensor_id]] = self.arrays[owner.name_in_tree]
        with errors.located(trees.place_of(name)):
            state = named_state(optimizer, names)
        return OptimizerState(
            name=name, optimizer=optimizer, names=names, parameters=arrays, state=state
        )


@dataclass
class OptimizerState:
    """An optimizer in a tree: its name there, and its state by the names of parameters.

    Attributes:
        name: In the tree.
        optimizer: The optimizer.
        names: Of parameters, by the id of the tensor.
        parameters: The arrays of parameters, by name.
        state: As of `named_state`.
    """

    name: str
    optimizer: Optimizer
    names: dict[int, str]
    parameters: dict[str, LocalArray]
    state: State

    def moments(self) -> ArraysAndConstants:
        """Return the state of all parameters: tensors as arrays, and numbers, by name in the tree."""
        arrays = {}
        constants = {}
        blocks = {name: parameter.block for name, parameter in self.parameters.items()}
        block_shapes = {name: block.shape for name, block in blocks.items() if block is not None}
        scalar_keys = scalar_keys_of(self.state["state"], block_shapes)
        for parameter_name, values in self.state["state"].items():
            parameter = self.parameters[parameter_name]
            for key, x in values.items():
                leaf = joined(self.name, f"state.{parameter_name}.{key}")
                if isinstance(x, Tensor):
                    with errors.located(trees.place_of(leaf)):
                        arrays[leaf] = _state_array(leaf, x, parameter, key in scalar_keys)
                else:
                    constants[leaf] = number_of(x)
        return arrays, constants

    def groups(self) -> ArraysAndConstants:
        """Return the options of all groups as one value, and the tensors in it, by name in the tree."""
        tensors: dict[str, Tensor] = {}
        groups_with_class = [
            {**group, MADE_BY: self._made_by} for group in self.state["param_groups"]
        ]
        groups = to_json(groups_with_class, self._groups_name, Tensor, tensors)
        arrays = {}
        for leaf, tensor in tensors.items():
            arrays[leaf] = _state_array(
                leaf, tensor, next(iter(self.parameters.values())), is_scalar=True
            )
        return arrays, {self._groups_name: groups}

    def targets(self, stored: Mapping[str, TargetArray]) -> dict[str, LocalArray]:
        """Return arrays to fill with what is stored of this state; an optimizer may not have one yet.

        They have the memory of the state where it has the stored shape, and new memory elsewhere.

        Args:
            stored: By name in the tree.
        """
        arrays, _ = self.moments()
        by_parameter: dict[str, dict[str, TargetArray]] = {}
        for leaf, stored_array in stored.items():
            parameter_name, key = self._key_of(leaf)
            by_parameter.setdefault(parameter_name, {})[key] = stored_array
        shapes = {name: parameter.sharding.shape for name, parameter in self.parameters.items()}
        scalar_keys = scalar_keys_of(by_parameter, shapes)
        for leaf, stored_array in stored.items():
            if is_part(leaf, self._groups_name):
                any_parameter = next(iter(self.parameters.values()))
                arrays[leaf] = _whole_array(leaf, stored_array, any_parameter)
                continue
            parameter_name, key = self._key_of(leaf)
            parameter = self.parameters.get(parameter_name)
            if parameter is None:
                continue  # of something else in the tree, or of a parameter that only the file has
            with errors.located(trees.place_of(leaf)):
                sharding = sharding_of_state(
                    stored_array.shape,
                    parameter.sharding.shape,
                    parameter.sharding,
                    key in scalar_keys,
                )
            dtype = getattr(torch, stored_array.dtype)
            if not _can_hold(arrays.get(leaf), sharding, dtype):
                arrays[leaf] = LocalArray(
                    names=[leaf],
                    block=_new_block(sharding, parameter, dtype),
                    dtype=dtype,
                    sharding=sharding,
                    mesh=parameter.mesh,
                    ranks=parameter.ranks,
                )
        return arrays

    def takes(self, leaf: str) -> bool:
        """Return whether a leaf of the tree is of this optimizer: of its groups, or of a parameter."""
        is_of_parameter = self._key_of(leaf).parameter in self.parameters
        return is_of_parameter or is_part(leaf, self._groups_name)

    def needed_constants(self, checkpoint: Checkpoint) -> dict[str, Constant]:
        """Return the numbers that a checkpoint has to have: of states, and groups if it lacks them."""
        _, needed = self.moments()
        if not checkpoint.value(self._groups_name, {}):
            needed[self._groups_name] = ""  # never read: only its name is reported as missing
        return needed

    def stored_groups(
        self, checkpoint: Checkpoint, arrays: Mapping[str, Any], strict: bool
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups of parameters with the options that a checkpoint has for them.

        Stored lr=1, of an optimizer with lr=9 -> lr=1. A checkpoint without options: lr=9.

        Args:
            checkpoint: The checkpoint.
            arrays: Options that are tensors, such as a learning rate, by name in the tree.
            strict: Whether every parameter has to be stored, by an optimizer of the same class.

        Raises:
            XshardError: As `matched_groups`, or another class of optimizer was saved, if `strict`.
        """
        groups_of_optimizer = self.state["param_groups"]
        stored = checkpoint.value(self._groups_name, arrays)
        if not stored:
            return groups_of_optimizer
        with errors.located(trees.place_of(self.name)):
            groups = matched_groups(groups_of_optimizer, stored, strict)
            for group in groups:
                # The class was saved among the options, and is taken out: torch knows no such option.
                # Files of earlier releases do not name a class.
                saved_class = group.pop(MADE_BY, self._made_by)
                if strict:
                    self._check_class(saved_class)
        return groups

    def _check_class(self, saved_class: str) -> None:
        """Raise XshardError if the state is that of an optimizer of another class."""
        if saved_class != self._made_by:
            reason = f"the state of an optimizer {saved_class}, for one that is {self._made_by}"
            raise errors.XshardError(reason, hint="make it by the class that was saved")

    def load(self, arrays: Mapping[str, Tensor], checkpoint: Checkpoint, strict: bool) -> None:
        """Give the optimizer the state that was read from a checkpoint.

        Values that the checkpoint lacks stay as they are: an earlier check has refused to load such
        a checkpoint if `strict`.

        Args:
            arrays: The tensors that were read, by name in the tree.
            checkpoint: Has the numbers of the state, and the options of groups.
            strict: As in `stored_groups`.
        """
        parameters = {self.names[id(x)]: x for x in parameters_of(self.optimizer)}
        state = {name: dict(values) for name, values in self.state["state"].items()}
        for leaf in (*arrays, *checkpoint.constants):
            parameter_name, key = self._key_of(leaf)
            if parameter_name not in parameters:
                continue  # of something else in the tree, or of a parameter that only the file has
            if leaf in arrays:
                value = _as_dtensor_like(arrays[leaf], parameters[parameter_name])
            else:
                value = checkpoint.constant(leaf, None)
            state.setdefault(parameter_name, {})[key] = value
        groups = self.stored_groups(checkpoint, arrays, strict)
        load_named(self.optimizer, self.names, {"state": state, "param_groups": groups})

    @property
    def _made_by(self) -> str:
        """The name of its class."""
        return type(self.optimizer).__name__

    @property
    def _groups_name(self) -> str:
        """The name of its groups in the tree."""
        return joined(self.name, "param_groups")

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


def _outermost_parallel(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost parallel modules in a model, with their names; ("", model) if it is one."""
    if hasattr(model, ATTRIBUTE):
        yield "", model
        return
    paths: list[str] = []
    for name, module in model.named_modules():
        if hasattr(module, ATTRIBUTE) and not any(is_inside(name, path) for path in paths):
            paths.append(name)
            yield name, module


def _arrays_of_parallel(prefix: str, model: nn.Module) -> dict[str, LocalArray]:
    """List the parameters and saved buffers of a model of `parallelize`, with how each is sharded.

    A parameter with several names (tied weights) is listed once. Buffers that `state_dict` leaves
    out are left out here, too.

    Args:
        prefix: The name of the model in its tree.
        model: The model.
    """
    parallel = parallel_of(model)
    check_structure(model, parallel)  # a layer that came later would be left out
    # By identity: a part that was compiled meanwhile has other names here.
    saved = {id(x) for x in model.state_dict(keep_vars=True).values()}
    arrays = {}
    for parameter in parallel.parameters:
        if id(parameter.tensor) not in saved:  # a buffer that is not persistent
            continue
        block = parameter.tensor.detach()
        arrays[joined(prefix, parameter.name)] = LocalArray(
            names=[joined(prefix, name) for name in parameter.names],
            block=block,
            dtype=block.dtype,
            sharding=parameter.sharding,
            mesh=parallel.context.mesh,
            ranks=parallel.context.processes.ranks,
            put=parameter.set_block,
        )
    return arrays


def _state_array(leaf: str, x: Tensor, parameter: LocalArray, is_scalar: bool) -> LocalArray:
    """Describe a tensor of an optimizer's state: it is sharded as its parameter, or whole."""
    if isinstance(x, DTensor) or parameter.block is None:
        return local_array(
            leaf, x, rule=None, mesh=parameter.mesh, ranks=parameter.ranks, shape=None
        )
    return LocalArray(
        names=[leaf],
        block=x.detach(),
        dtype=x.dtype,
        sharding=sharding_of_state(x.shape, parameter.block.shape, parameter.sharding, is_scalar),
        mesh=parameter.mesh,
        ranks=parameter.ranks,
    )


def _whole_array(leaf: str, x: TargetArray, parameter: LocalArray) -> LocalArray:
    """Return a stored tensor as an array that every process of a parameter's mesh has whole."""
    return LocalArray(
        names=[leaf],
        block=None,
        dtype=getattr(torch, x.dtype),
        sharding=Sharding(Layout.parse("..."), parameter.sharding.mesh, x.shape),
        mesh=parameter.mesh,
        ranks=parameter.ranks,
    )


def _can_hold(present: LocalArray | None, sharding: Sharding, dtype: torch.dtype) -> bool:
    """Return whether the array that a state has now, if any, has the shape and dtype of a stored one."""
    if present is None:
        return False
    return present.sharding.shape == sharding.shape and present.dtype == dtype


def _new_block(sharding: Sharding, parameter: LocalArray, dtype: torch.dtype) -> Tensor | None:
    """Return memory for this process's block of a state; None if the parameter has none yet."""
    if not sharding.shape:
        # Optimizers count their steps on the CPU, and torch moves the count where they do not.
        return torch.empty((), dtype=dtype)
    if parameter.block is None or parameter.is_meta:
        return None
    shape = sharding.local_shape(parameter.device)
    return torch.empty(shape, dtype=dtype, device=parameter.block.device)


def _as_dtensor_like(block: Tensor, parameter: Tensor) -> Tensor:
    """Return a block as its parameter is: a DTensor if that is one."""
    if not isinstance(parameter, DTensor) or isinstance(block, DTensor) or not block.shape:
        return block
    return dtensor_of(block, parameter.device_mesh, parameter.placements, parameter.shape)
