"""The state of an optimizer by the names of a model's parameters: moments are sharded as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_bridge.models.parallel import parallel_of
from torch_bridge.models.state import block_of_value, stored_block
from xshard import Layout, Sharding, XshardError
from xshard.errors import ShapeError, api_boundary, located
from xshard.signatures import short_repr

Names = Mapping[int, str]  # of parameters, by the id of the tensor
State = dict[str, Any]  # {"state": {name: {key: value}}, "param_groups": [{"params": [name]}]}


@api_boundary
@torch.no_grad()
def optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer by parameter names, with a DTensor for each sharded tensor.

        state = xt.optimizer_state_dict(model, optimizer)
        state["state"]["up.weight"]["exp_avg"]      # DTensor [10, 6], as xt.state_dict(model) has

    A tensor of the shape of its parameter's block is sharded as the parameter is; a single number is
    the same on all processes. `torch.distributed.checkpoint` saves it in the format of its own
    `get_optimizer_state_dict`. All processes call it.

    Args:
        model: A parallel model.
        optimizer: An optimizer of its parameters, of all or of some.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [...]}`. Tensors share memory with the
        optimizer, unless no DTensor has their layout: they are whole copies then.

    Raises:
        XshardError: The model is not parallel, or the optimizer trains other parameters.
        ShapeError: A tensor has another shape than its parameter's block.
    """
    parallel = parallel_of(model)
    names = {id(parameter.tensor): parameter.name for parameter in parallel.parameters}
    state = named_state(optimizer, names)
    for name, values in state["state"].items():
        sharding = parallel.by_name[name].sharding
        block_shape = parallel.by_name[name].tensor.shape
        for key, x in values.items():
            if isinstance(x, Tensor):
                with located(f"{name}: {key}"):
                    own = sharding_of_state(x.shape, block_shape, sharding)
                    values[key] = stored_block(x.detach(), own, parallel.context)
    return state


@api_boundary
@torch.no_grad()
def load_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Give an optimizer a state by parameter names: whole tensors, or DTensors under any placements.

        xt.load_optimizer_state_dict(model, optimizer, state)

    All processes call it.

    Args:
        model: A parallel model.
        optimizer: An optimizer of its parameters.
        state: What `optimizer_state_dict` returned, of this model or of one that is parallel in
            another way; or torch's `get_optimizer_state_dict`.

    Raises:
        XshardError: The state is of other parameters, or of other groups of them.
        ShapeError: A tensor has another shape than the whole parameter.
    """
    parallel = parallel_of(model)
    if not state.keys() >= {"state", "param_groups"}:
        what = f"the state has {', '.join(state)}" if state else "the state is empty"
        raise XshardError(
            what, hint="{'state': ..., 'param_groups': ...}, as of optimizer_state_dict"
        )
    names = {id(parameter.tensor): parameter.name for parameter in parallel.parameters}
    check_groups(optimizer, names, state["param_groups"])
    blocks: dict[str, dict[str, Any]] = {}
    for name, values in state["state"].items():
        if name not in parallel.by_name:
            raise XshardError(f"a state of {name}, which the model lacks")
        parameter = parallel.by_name[name]
        blocks[name] = dict(values)
        for key, x in values.items():
            if isinstance(x, Tensor):
                with located(f"{name}: {key}"):
                    own = sharding_of_state(x.shape, parameter.sharding.shape, parameter.sharding)
                    value = x.to(parameter.tensor.device) if own.layout.axes else x
                    block = block_of_value(value, own, parallel.context)
                # A copy: torch would let the optimizer write to the caller's tensors.
                blocks[name][key] = block.clone()
    load_named(optimizer, names, {"state": blocks, "param_groups": state["param_groups"]})


def named_state(optimizer: Optimizer, names: Names) -> State:
    """Return the state of an optimizer with names in place of parameters: tensors are as they are.

    Raises XshardError for a parameter without a name, and for a value that is no tensor, number or text.
    """
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = _name_of(parameter, names)
        for key, x in values.items():
            if not isinstance(x, Tensor | int | float | str | None):
                what = f"the state '{key}' of {name} is {short_repr(x)}"
                raise XshardError(what, hint="tensors, numbers and texts are saved")
        state[name] = dict(values)
    groups = []
    for group, group_names in zip(optimizer.param_groups, names_in(optimizer, names), strict=True):
        groups.append({**group, "params": group_names})
    return {"state": state, "param_groups": groups}


def names_in(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    return [[_name_of(x, names) for x in group["params"]] for group in optimizer.param_groups]


def _name_of(parameter: Any, names: Names) -> str:
    """Return the name of a parameter. Raises XshardError for one that has none."""
    if id(parameter) not in names:
        what = "the optimizer trains a tensor that is no parameter of the model"
        if isinstance(parameter, Tensor):
            what += f": one of shape {tuple(parameter.shape)}"
        hint = "make the optimizer after parallelize, of model.parameters(); "
        hint += 'in a tree, the model is beside it: {"model": model, "optimizer": optimizer}'
        raise XshardError(what, hint=hint)
    return names[id(parameter)]


def check_groups(optimizer: Optimizer, names: Names, stored: Sequence[Mapping[str, Any]]) -> None:
    """Raise XshardError unless stored groups have the parameters of the optimizer's, in this order."""
    own = names_in(optimizer, names)
    stored_names = [list(group["params"]) for group in stored]
    if own != stored_names:
        hint = "make the optimizer as it was made, with the same groups of parameters in the same order"
        what = f"the optimizer has groups {short_repr(own)}, and the stored one {short_repr(stored_names)}"
        raise XshardError(what, hint=hint)


def sharding_of_state(
    shape: Sequence[int], parameter_shape: Sequence[int], sharding: Sharding
) -> Sharding:
    """Return how a tensor of an optimizer's state is sharded: as its parameter, or not at all.

    shape, parameter_shape: of the blocks of both, or of the whole tensors of both. sharding: of the
    parameter. Raises ShapeError for another shape, as of factored or packed moments.
    """
    if tuple(shape) == tuple(parameter_shape):
        return sharding
    is_whole = sharding.mesh.size(*sharding.layout.sharding_axes) == 1
    if math.prod(shape) == 1 or is_whole:
        return Sharding(Layout.parse("..."), sharding.mesh, tuple(shape))
    what = f"a state of shape {tuple(shape)}, of a parameter {sharding.shape} under '{sharding.layout}'"
    hint = "no layout follows for another shape than the parameter's: store the parameter whole, "
    hint += "or use an optimizer with states of its shape"
    raise ShapeError(what, hint=hint)


def load_named(optimizer: Optimizer, names: Names, state: State) -> None:
    """Give an optimizer this process's blocks, by the names of parameters."""
    numbers: dict[str, int] = {}
    groups = []
    for group, group_names in zip(state["param_groups"], names_in(optimizer, names), strict=True):
        for name in group_names:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group_names]})
    numbered = {numbers[name]: values for name, values in state["state"].items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})
