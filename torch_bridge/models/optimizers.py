"""The state of an optimizer by the names of a model's parameters: moments are sharded as they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_bridge.models.parallel import parallel_of
from torch_bridge.models.state import block_of_value, stored_block
from xshard import Layout, Sharding, XshardError
from xshard.errors import ShapeError, api_boundary, located
from xshard.rules import listed_names
from xshard.signatures import short_repr

Names = Mapping[int, str]  # of parameters, by the id of the tensor
State = dict[str, Any]  # {"state": {name: {key: value}}, "param_groups": [{"params": [name]}]}
Groups = Sequence[Mapping[str, Any]]

_NAMES_IN_GROUP = ("params", "param_names")  # which are no options


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
    block_shapes = {name: x.tensor.shape for name, x in parallel.by_name.items()}
    numbers = keys_of_numbers(state["state"], block_shapes)
    for name, values in state["state"].items():
        sharding = parallel.by_name[name].sharding
        for key, x in values.items():
            if isinstance(x, Tensor):
                with located(f"{name}: {key}"):
                    own = sharding_of_state(x.shape, block_shapes[name], sharding, key in numbers)
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
    if not isinstance(state.get("state"), Mapping):
        what = f"the state's 'state' is {short_repr(state.get('state'))}"
        hint = "{'state': ..., 'param_groups': ...}, as of optimizer_state_dict"
        raise XshardError(what, hint=hint)
    names = {id(parameter.tensor): parameter.name for parameter in parallel.parameters}
    groups = matched_groups(_named_groups(optimizer, names), state.get("param_groups"))
    trained = {name for group in groups for name in group["params"]}
    blocks: dict[str, dict[str, Any]] = {}
    for name, values in state["state"].items():
        if name not in trained:
            raise XshardError(f"a state of {name}, which the optimizer does not train")
        if not isinstance(values, Mapping):
            what = f"the state of {name} is {short_repr(values)}"
            raise XshardError(what, hint="{key: a tensor or a number}")
    numbers = keys_of_numbers(
        state["state"], {name: parallel.by_name[name].sharding.shape for name in state["state"]}
    )
    for name, values in state["state"].items():
        parameter = parallel.by_name[name]
        sharding = parameter.sharding
        blocks[name] = dict(values)
        for key, x in values.items():
            _check_value(name, key, x)
            if isinstance(x, Tensor):
                with located(f"{name}: {key}"):
                    own = sharding_of_state(x.shape, sharding.shape, sharding, key in numbers)
                    device = parallel.context.device_of(parameter.tensor)
                    value = x.to(device) if own.layout.axes else x
                    block = block_of_value(value, own, parallel.context)
                # A copy: torch would let the optimizer write to the caller's tensors.
                blocks[name][key] = block.clone()
    load_named(optimizer, names, {"state": blocks, "param_groups": groups})


def named_state(optimizer: Optimizer, names: Names) -> State:
    """Return the state of an optimizer with names in place of parameters: tensors are as they are.

    Raises XshardError for a parameter without a name, for a value that is no tensor, number or text,
    and for an optimizer that has more of a state than these.
    """
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = _name_of(parameter, names)
        for key, x in values.items():
            _check_value(name, key, x)
        state[name] = dict(values)
    return {"state": state, "param_groups": _named_groups(optimizer, names)}


def _named_groups(optimizer: Optimizer, names: Names) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with names in place of parameters. Raises as `named_state`."""
    if getattr(optimizer.state_dict, "__func__", None) is not Optimizer.state_dict:
        what = f"{type(optimizer).__name__} has a state_dict() of its own"
        hint = (
            "what it has beside torch's optimizers would be lost: pass the optimizer inside of it; "
        )
        hint += 'moments are in shards as parameters are: AdamW, and a rule as "o/dp ... -> o ..."'
        raise XshardError(what, hint=hint)
    groups = []
    for group in optimizer.param_groups:
        group_names = [_name_of(x, names) for x in group["params"]]
        groups.append({**group, "params": group_names})
    return groups


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


def _check_value(name: str, key: str, x: Any) -> None:
    """Raise XshardError for a value in the state of a parameter that cannot be saved."""
    if not isinstance(x, Tensor | int | float | str | np.generic | None):
        what = f"the state '{key}' of {name} is {short_repr(x)}"
        raise XshardError(what, hint="tensors, numbers and texts are saved")


def matched_groups(own: Groups, stored: Any, strict: bool = True) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with the options that their parameters had when stored.

    Groups may be in another order, or split. They may be merged if their options were equal.

    own: of the optimizer, by names of parameters. stored: likewise, if it is right. strict: every
    parameter has to be in both. Raises XshardError for other parameters, and for one group of
    different options.
    """
    options_of = _options_by_parameter(stored)
    alone = dict.fromkeys(options_of)  # a set with an order
    matched = []
    for group in own:
        found = []
        for name in group["params"]:
            if name in options_of:
                found.append(options_of[name])
                del alone[name]
            else:
                alone[name] = None
        for other in found[1:]:
            differing = [key for key, x in other.items() if found[0].get(key) != x]
            if differing:
                why = f"parameters of one group had other values of {listed_names(differing)}"
                raise _unmatched(own, stored, why)
        options = found[0] if found else {}
        # Copies: a rate that is a tensor may change in one group alone.
        matched.append({**group, **copy.deepcopy(options)})
    if strict and alone:
        raise _unmatched(own, stored, f"one of them lacks {listed_names(list(alone))}")
    return matched


def _options_by_parameter(stored: Any) -> dict[str, dict[str, Any]]:
    """Return the options of stored groups by the names of parameters. Raises XshardError if it has none."""
    if not isinstance(stored, list | tuple):
        what = f"param_groups is {short_repr(stored)}"
        raise XshardError(what, hint="[{'params': [name, ...], 'lr': ...}, ...]")
    options_of: dict[str, dict[str, Any]] = {}
    for group in stored:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            what = f"one of param_groups is {short_repr(group)}"
            raise XshardError(what, hint="{'params': [name, ...], 'lr': ...}")
        options = {key: x for key, x in group.items() if key not in _NAMES_IN_GROUP}
        options_of.update(dict.fromkeys(map(str, group["params"]), options))
    return options_of


def _unmatched(own: Groups, stored: Groups, why: str) -> XshardError:
    """Return the error for groups that do not belong together."""
    texts = []
    for groups in (own, stored):
        names = [f"({listed_names(list(map(str, group['params'])))})" for group in groups]
        texts.append(listed_names(names))
    what = f"the optimizer has groups {texts[0]}, and the stored one {texts[1]}: {why}"
    hint = "make the optimizer with groups of parameters whose options were equal, as it was made"
    return XshardError(what, hint=hint)


def keys_of_numbers(
    state: Mapping[str, Mapping[str, Any]], parameter_shapes: Mapping[str, Sequence[int]]
) -> set[str]:
    """Return the keys of a state that are single numbers for each parameter, as a count of steps.

    A tensor of shape [1] beside a parameter of one element may be a moment, or a number. What its key has
    beside longer parameters tells.

    Args:
        state: By names of parameters and keys.
        parameter_shapes: By names, of blocks as the state has blocks, or of whole tensors.
    """
    found = set()
    for name, shape in parameter_shapes.items():
        if math.prod(shape) == 1:
            continue
        for key, x in state.get(name, {}).items():
            if math.prod(getattr(x, "shape", ())) == 1:
                found.add(key)
    return found


def sharding_of_state(
    shape: Sequence[int], parameter_shape: Sequence[int], sharding: Sharding, is_number: bool
) -> Sharding:
    """Return how a tensor of an optimizer's state is sharded: as its parameter, or not at all.

    shape, parameter_shape: of the blocks of both, or of the whole tensors of both. sharding: of the
    parameter. is_number: the tensor is a number by `keys_of_numbers`. Raises ShapeError for another
    shape, as of factored or packed moments.
    """
    if tuple(shape) == tuple(parameter_shape) and not is_number:
        return sharding
    is_whole = sharding.mesh.size(*sharding.layout.sharding_axes) == 1
    if math.prod(shape) == 1 or is_whole:
        return Sharding(Layout.parse("..."), sharding.mesh, tuple(shape))
    what = f"a state of shape {tuple(shape)}, of a parameter {sharding.shape} under '{sharding.written}'"
    hint = "no layout follows for another shape than the parameter's: store the parameter whole, "
    hint += "or use an optimizer with states of its shape"
    raise ShapeError(what, hint=hint)


def load_named(optimizer: Optimizer, names: Names, state: State) -> None:
    """Give an optimizer this process's blocks, by the names of parameters, with their own bits.

    Raises XshardError, with the optimizer as it was, for a state that it does not take.
    """
    numbers: dict[str, int] = {}
    parameters = {}
    groups = []
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for name, x in zip(group["params"], own["params"], strict=True):
            numbers[name] = len(numbers)
            parameters[name] = x
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    numbered = {numbers[name]: values for name, values in state["state"].items()}
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    except Exception as error:  # of any kind: it is the optimizer's own code
        optimizer.__dict__.update(before)
        what = f"{type(optimizer).__name__} does not take this state: {error!r}"
        raise XshardError(what, hint="a state of an optimizer of the same class") from error
    for name, values in state["state"].items():
        loaded = optimizer.state[parameters[name]]
        for key, x in values.items():
            # torch casts floats to the dtype of the parameter: float32 moments of bfloat16 ones.
            if isinstance(x, Tensor) and key in loaded and loaded[key].dtype != x.dtype:
                loaded[key] = x.to(loaded[key].device)
