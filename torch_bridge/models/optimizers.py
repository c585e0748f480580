"""The state of an optimizer by the names of a model's parameters: moments are sharded as they are.

A state has values by key for each parameter: tensors of the parameter's shape, as moments (exp_avg), or
scalars, as the count of steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_bridge.models.parallel import ParallelModel, parallel_of
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

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def moments():
        ...     rules = {"**": "o/dp ... -> o ..."}, {"": "b i -> b/dp i"}
        ...     model = xt.parallelize(torch.nn.Linear(2, 4), *rules, Mesh(dp=2))
        ...     optimizer = torch.optim.Adam(model.parameters())
        ...     model(torch.ones(2, 2)).sum().backward()
        ...     optimizer.step()
        ...     moment = xt.optimizer_state_dict(model, optimizer)["state"]["weight"]["exp_avg"]
        ...     return [*moment.to_local().shape], [*moment.shape]
        >>> xt.testing.run_ranks(2, moments)[0]
        ([2, 2], [4, 2])
    """
    parallel = parallel_of(model)
    names = {id(parameter.tensor): parameter.name for parameter in parallel.parameters}
    state = named_state(optimizer, names)
    block_shapes = {name: x.tensor.shape for name, x in parallel.by_name.items()}
    scalar_keys = scalar_keys_of(state["state"], block_shapes)
    for name, values in state["state"].items():
        sharding = parallel.by_name[name].sharding
        for key, x in values.items():
            if isinstance(x, Tensor):
                with located(f"{name}: {key}"):
                    state_sharding = sharding_of_state(
                        x.shape, block_shapes[name], sharding, key in scalar_keys
                    )
                    values[key] = stored_block(x.detach(), state_sharding, parallel.context)
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

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def loaded():
        ...     rules = {"**": "o/dp ... -> o ..."}, {"": "b i -> b/dp i"}
        ...     model = xt.parallelize(torch.nn.Linear(2, 4), *rules, Mesh(dp=2))
        ...     optimizer, other = (torch.optim.Adam(model.parameters()) for _ in range(2))
        ...     model(torch.ones(2, 2)).sum().backward()
        ...     optimizer.step()
        ...     xt.load_optimizer_state_dict(
        ...         model, other, xt.optimizer_state_dict(model, optimizer)
        ...     )
        ...     return [*other.state[model.weight]["exp_avg"].shape]
        >>> xt.testing.run_ranks(2, loaded)[0]
        [2, 2]
    """
    parallel = parallel_of(model)
    if not isinstance(state.get("state"), Mapping):
        reason = f"the state's 'state' is {short_repr(state.get('state'))}"
        hint = "{'state': ..., 'param_groups': ...}, as of optimizer_state_dict"
        raise XshardError(reason, hint=hint)
    names = {id(parameter.tensor): parameter.name for parameter in parallel.parameters}
    groups = matched_groups(_named_groups(optimizer, names), state.get("param_groups"))
    _check_states(state["state"], groups)
    blocks = _blocks_of_states(state["state"], parallel)
    load_named(optimizer, names, {"state": blocks, "param_groups": groups})


def _check_states(states: Mapping[str, Any], groups: Groups) -> None:
    """Raise XshardError unless each state is of a parameter in the groups, and has values by key."""
    trained = {name for group in groups for name in group["params"]}
    for name, values in states.items():
        if name not in trained:
            raise XshardError(f"a state of {name}, which the optimizer does not train")
        if not isinstance(values, Mapping):
            reason = f"the state of {name} is {short_repr(values)}"
            raise XshardError(reason, hint="{key: a tensor or a number}")
        for key, x in values.items():
            _check_value(name, key, x)


def _blocks_of_states(
    states: Mapping[str, Mapping[str, Any]], parallel: ParallelModel
) -> dict[str, dict[str, Any]]:
    """Return states with this process's block for each whole tensor: on tp=2 [12, 6] -> [6, 6]."""
    shapes = {name: parallel.by_name[name].sharding.shape for name in states}
    scalar_keys = scalar_keys_of(states, shapes)
    blocks: dict[str, dict[str, Any]] = {}
    for name, values in states.items():
        parameter = parallel.by_name[name]
        device = parallel.context.device_of(parameter.tensor)
        blocks[name] = dict(values)
        for key, x in values.items():
            if not isinstance(x, Tensor):
                continue
            with located(f"{name}: {key}"):
                is_scalar = key in scalar_keys
                sharding = sharding_of_state(x.shape, shapes[name], parameter.sharding, is_scalar)
                # A whole scalar stays on its device: optimizers count their steps on the CPU.
                value = x.to(device) if sharding.layout.axes else x
                block = block_of_value(value, sharding, parallel.context)
            # A copy: torch would let the optimizer write to the caller's tensors.
            blocks[name][key] = block.clone()
    return blocks


def named_state(optimizer: Optimizer, names: Names) -> State:
    """Return the state of an optimizer by the names of its parameters; tensors are this process's blocks.

    Raises XshardError for a parameter without a name, for a value that is no tensor, number or text,
    and for an optimizer with a `state_dict()` of its own.
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
        reason = f"{type(optimizer).__name__} has a state_dict() of its own"
        hint = (
            "what it has beside torch's optimizers would be lost: pass the optimizer inside of it; "
        )
        hint += 'moments are in shards as parameters are: AdamW, and a rule as "o/dp ... -> o ..."'
        raise XshardError(reason, hint=hint)
    groups = []
    for group in optimizer.param_groups:
        group_names = [_name_of(x, names) for x in group["params"]]
        groups.append({**group, "params": group_names})
    return groups


def _name_of(parameter: Any, names: Names) -> str:
    """Return the name of a parameter. Raises XshardError for one that has none."""
    if id(parameter) not in names:
        reason = "the optimizer trains a tensor that is no parameter of the model"
        if isinstance(parameter, Tensor):
            reason += f": one of shape {tuple(parameter.shape)}"
        hint = "make the optimizer after parallelize, of model.parameters(); "
        hint += 'in a tree, the model is beside it: {"model": model, "optimizer": optimizer}'
        raise XshardError(reason, hint=hint)
    return names[id(parameter)]


def _check_value(name: str, key: str, x: Any) -> None:
    """Raise XshardError for a value in the state of a parameter that cannot be saved."""
    if not isinstance(x, Tensor | int | float | str | np.generic | None):
        reason = f"the state '{key}' of {name} is {short_repr(x)}"
        raise XshardError(reason, hint="tensors, numbers and texts are saved")


def matched_groups(groups: Groups, stored: Any, strict: bool = True) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with the options that their parameters had when stored.

    Groups may be in another order, or split: stored [(a, b) lr=1], of an optimizer [(b) lr=9, (a) lr=9]
    -> [(b) lr=1, (a) lr=1]. They may be merged if their options were equal.

    Args:
        groups: Those of the optimizer, by names of parameters.
        stored: Those that were stored; checked here.
        strict: Whether every parameter has to be in both.

    Raises:
        XshardError: Other parameters were stored, or parameters of one group had unequal options.
    """
    options_of = _options_by_parameter(stored)
    unmatched = dict.fromkeys(options_of)  # names in one of both; a dict, as a set has no order
    matched = []
    for group in groups:
        stored_options = []
        for name in group["params"]:
            if name in options_of:
                stored_options.append(options_of[name])
                del unmatched[name]
            else:
                unmatched[name] = None
        options = stored_options[0] if stored_options else {}
        for options_of_another in stored_options[1:]:
            differing = [key for key, x in options_of_another.items() if options.get(key) != x]
            if differing:
                detail = f"parameters of one group had other values of {listed_names(differing)}"
                raise _groups_differ(groups, stored, detail)
        # Copies: a rate that is a tensor may change in one group alone.
        matched.append({**group, **copy.deepcopy(options)})
    if strict and unmatched:
        detail = f"one of them lacks {listed_names(list(unmatched))}"
        raise _groups_differ(groups, stored, detail)
    return matched


def _options_by_parameter(stored: Any) -> dict[str, dict[str, Any]]:
    """Return the options of stored groups by the names of parameters. Raises XshardError if it has none."""
    if not isinstance(stored, list | tuple):
        reason = f"param_groups is {short_repr(stored)}"
        raise XshardError(reason, hint="[{'params': [name, ...], 'lr': ...}, ...]")
    options_of: dict[str, dict[str, Any]] = {}
    for group in stored:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            reason = f"one of param_groups is {short_repr(group)}"
            raise XshardError(reason, hint="{'params': [name, ...], 'lr': ...}")
        options = {key: x for key, x in group.items() if key not in _NAMES_IN_GROUP}
        options_of.update(dict.fromkeys(map(str, group["params"]), options))
    return options_of


def _groups_differ(groups: Groups, stored: Groups, detail: str) -> XshardError:
    """Return the error for stored groups that do not fit those of the optimizer."""
    reason = f"the optimizer has groups {_listed_groups(groups)}, "
    reason += f"and the stored one {_listed_groups(stored)}: {detail}"
    hint = "make the optimizer with groups of parameters whose options were equal, as it was made"
    return XshardError(reason, hint=hint)


def _listed_groups(groups: Groups) -> str:
    """Write the parameters of groups: (a, b), (c)."""
    return listed_names([f"({listed_names(list(map(str, group['params'])))})" for group in groups])


def scalar_keys_of(
    state: Mapping[str, Mapping[str, Any]], parameter_shapes: Mapping[str, Sequence[int]]
) -> set[str]:
    """Return the keys of a state whose values are scalars, as the count of steps.

    A tensor of shape [1] beside a parameter of one element may be a moment, or a scalar: what longer
    parameters have under its key tells. With shapes for values,
    {"w": {"step": [1], "exp_avg": [6]}, "b": {"step": [1], "exp_avg": [1]}} -> {"step"}.

    Args:
        state: By names of parameters and keys.
        parameter_shapes: By names, of blocks as the state has blocks, or of whole tensors.
    """
    scalar_keys = set()
    for name, shape in parameter_shapes.items():
        if math.prod(shape) == 1:
            continue
        for key, x in state.get(name, {}).items():
            if math.prod(getattr(x, "shape", ())) == 1:
                scalar_keys.add(key)
    return scalar_keys


def sharding_of_state(
    shape: Sequence[int], parameter_shape: Sequence[int], sharding: Sharding, is_scalar: bool
) -> Sharding:
    """Return how a tensor of an optimizer's state is sharded: as its parameter, or not at all.

    Args:
        shape: Of the tensor: of its block, or whole.
        parameter_shape: Of its parameter, likewise.
        sharding: Of the parameter.
        is_scalar: Whether the tensor is a scalar by `scalar_keys_of`.

    Raises:
        ShapeError: The tensor has another shape than its parameter, as factored or packed moments.
    """
    if tuple(shape) == tuple(parameter_shape) and not is_scalar:
        return sharding
    is_unsharded = sharding.mesh.size(*sharding.layout.sharding_axes) == 1
    if math.prod(shape) == 1 or is_unsharded:
        return Sharding(Layout.parse("..."), sharding.mesh, tuple(shape))
    reason = f"a state of shape {tuple(shape)}, of a parameter {sharding.shape} under '{sharding.written}'"
    hint = "no layout follows for another shape than the parameter's: store the parameter whole, "
    hint += "or use an optimizer with states of its shape"
    raise ShapeError(reason, hint=hint)


def load_named(optimizer: Optimizer, names: Names, state: State) -> None:
    """Give an optimizer a state by the names of parameters, of this process's blocks, bit by bit.

    Its own `load_state_dict` takes the state by the indices of parameters, and casts floats. Raises
    XshardError, with the optimizer as it was, for a state that it does not take.
    """
    index_of_name: dict[str, int] = {}
    parameters = {}
    groups = []
    for group, optimizer_group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for name, parameter in zip(group["params"], optimizer_group["params"], strict=True):
            index_of_name[name] = len(index_of_name)
            parameters[name] = parameter
        groups.append({**group, "params": [index_of_name[name] for name in group["params"]]})
    state_by_index = {index_of_name[name]: values for name, values in state["state"].items()}
    attributes_before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        optimizer.load_state_dict({"state": state_by_index, "param_groups": groups})
    except Exception as error:  # of any kind: it is the optimizer's own code
        optimizer.__dict__.update(attributes_before)
        reason = f"{type(optimizer).__name__} does not take this state: {error!r}"
        raise XshardError(reason, hint="a state of an optimizer of the same class") from error
    for name, values in state["state"].items():
        loaded = optimizer.state[parameters[name]]
        for key, x in values.items():
            # torch casts floats to the dtype of the parameter: float32 moments of bfloat16 ones.
            if isinstance(x, Tensor) and key in loaded and loaded[key].dtype != x.dtype:
                loaded[key] = x.to(loaded[key].device)
