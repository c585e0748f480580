"""The state of a parallel model for checkpoints: DTensors, which parallel models do not need otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torch_bridge.dtensor.function import dtensor_of_block
from torch_bridge.dtensor.placements import from_placements, to_placements
from torch_bridge.mesh.process_mesh import calling_ranks, dtensor_axes
from torch_bridge.models.names import module_of
from torch_bridge.models.parallel import parallel_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter, unsharded
from torch_bridge.redistribution import redistribute
from torch_bridge.versions.modules import COMPILED
from xshard import Mesh, Sharding
from xshard.errors import PlanError, ShapeError, XshardError, api_boundary, located
from xshard.signatures import short_repr
from xshard.state.files.loading import in_both


@api_boundary
@torch.no_grad()
def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a parallel model, with a DTensor for each sharded tensor.

        state = xt.state_dict(model)        # {"up.weight": DTensor [10, 6], ...}
        dcp.save(state, checkpoint_id=folder)

    They share memory with the model, so that `torch.distributed.checkpoint` saves blocks and loads
    into them; call `load_state_dict` with them after loading. DTensors cannot have all layouts: a
    tensor that is sharded in zigzag order, or in some uneven ways, is gathered to a whole copy. All
    processes call it.

    Args:
        model: A parallel model.

    Returns:
        Tensors by name; those without a sharded dim are the model's own.

    Raises:
        XshardError: The model is not parallel.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def shapes():
        ...     rules = {"**": "o/dp ... -> o ..."}, {"": "b i -> b/dp i"}
        ...     model = xt.parallelize(torch.nn.Linear(2, 4), *rules, Mesh(dp=2))
        ...     return [*model.weight.shape], [*xt.state_dict(model)["weight"].shape]
        >>> xt.testing.run_ranks(2, shapes)[0]
        ([2, 2], [4, 2])
    """
    parallel = parallel_of(model)
    state = {}
    for name, x in _tensors_by_name(model).items():
        state[name] = x.detach() if isinstance(x, Tensor) else x
    # `state_dict()` of the model has blocks for these: they are replaced by DTensors of global
    # shape.
    for parameter in parallel.sharded_parameters:
        x = stored_block(parameter.tensor.detach(), parameter.sharding, parallel.context)
        for name in parameter.names:
            if name in state:  # some buffers are not saved
                state[name] = x
    return state


@api_boundary
@torch.no_grad()
def load_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Copy values into the blocks of a parallel model: whole tensors, or DTensors under any placements.

        xt.load_state_dict(model, {"up.weight": torch.ones(10, 6), ...})

    All processes call it.

    Args:
        model: A parallel model.
        state: Values by name.
        strict: Require every name in both.

    Raises:
        XshardError: A name is in one of them only, with `strict`.
        ShapeError: A value has another shape than the whole tensor.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def filled():
        ...     rules = {"**": "o/dp ... -> o ..."}, {"": "b i -> b/dp i"}
        ...     model = xt.parallelize(torch.nn.Linear(2, 4, bias=False), *rules, Mesh(dp=2))
        ...     xt.load_state_dict(model, {"weight": torch.arange(8).view(4, 2)})
        ...     return model.weight.tolist()
        >>> xt.testing.run_ranks(2, filled)
        [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]
    """
    parallel = parallel_of(model)
    own_state = _tensors_by_name(model)
    by_name = parallel.by_name
    names = in_both(state, [[name] for name in own_state], strict, ("model", "state dict"))
    # None stands for a name in the model or the state dict alone, which `strict=False` allows.
    shared_names = [name for name in names if name is not None]
    # All are checked before any is copied: an error leaves the model as it was.
    for name in shared_names:
        with located(name):
            _check_value(state[name], own_state[name], by_name.get(name))
    for name in shared_names:
        parameter = by_name.get(name)
        if not isinstance(own_state[name], Tensor):  # what `get_extra_state` of a module returned
            model.get_submodule(module_of(name)).set_extra_state(state[name])
        elif parameter is None:
            own_state[name].copy_(state[name])
        else:
            value = state[name].to(parallel.context.device_of(parameter.tensor))
            block = block_of_value(value, parameter.sharding, parallel.context)
            parameter.tensor.copy_(block)


def _tensors_by_name(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and saved buffers of a model, by their names before anything was compiled."""
    state = model.state_dict(keep_vars=True)
    return {name.replace(COMPILED, ""): x for name, x in state.items()}


def _check_value(value: Any, own_value: Any, parameter: ShardedParameter | None) -> None:
    """Raise XshardError unless a value may be copied into this tensor, or the block of this parameter."""
    if not isinstance(own_value, Tensor):
        return
    if not isinstance(value, Tensor):
        reason = f"a value is {short_repr(value)}, not a tensor"
        raise XshardError(reason, hint="a whole one, or a DTensor")
    whole_shape = tuple(own_value.shape if parameter is None else parameter.sharding.shape)
    if value.shape != whole_shape:
        raise ShapeError(f"a value of shape {tuple(value.shape)}, not {whole_shape}")


def stored_block(block: Tensor, sharding: Sharding, context: ParallelContext) -> Tensor:
    """Return a block as a DTensor of the same memory; the whole tensor if there is no such DTensor."""
    layout = sharding.layout
    if not layout.axes:
        return block
    mesh = context.mesh
    if not isinstance(mesh, DeviceMesh):
        mesh = _device_mesh(mesh, block.device.type)
    if not _has_placements(sharding, mesh):
        own_mesh = context.mesh_of(sharding)
        return context.redistribute(block, layout, unsharded(layout), sharding.shape, own_mesh)
    return dtensor_of_block(block, layout, mesh, sharding.shape)


def _has_placements(sharding: Sharding, mesh: DeviceMesh) -> bool:
    """Return whether a DTensor on the model's mesh can have these blocks: not if devices share units."""
    if sharding.mesh != dtensor_axes(mesh):
        return False
    try:
        to_placements(sharding.layout, mesh, sharding.shape)
    except PlanError:
        return False
    return True


def block_of_value(value: Tensor, sharding: Sharding, context: ParallelContext) -> Tensor:
    """Return this process's block of a value for a parameter, as one that a checkpoint has.

    Args:
        value: The whole tensor, or a DTensor on any mesh.
        sharding: That of the parameter, perhaps on a mesh whose axes are split into sub-axes.
        context: The model's mesh and options.
    """
    layout = sharding.layout
    mesh_of_parameter = context.mesh_of(sharding)
    if isinstance(value, DTensor) and mesh_of_parameter is not context.mesh:
        value = value.full_tensor()  # no placements lead to sub-axes
    if not isinstance(value, DTensor):
        if not layout.axes:
            return value
        whole = unsharded(layout)
        return context.redistribute(value, whole, layout, sharding.shape, mesh_of_parameter)
    # Placements have no names of dims: those of the parameter tell which dims are the same.
    dst = layout.resolved(value.ndim)
    axes = dtensor_axes(value.device_mesh)
    src = from_placements(value.placements, axes, value.ndim, sharding.shape).with_names(dst.names)
    block = value.to_local()
    is_on_model_ranks = calling_ranks(value.device_mesh) == context.processes.ranks
    if axes == context.axes and is_on_model_ranks:
        return context.redistribute(block, src, dst, sharding.shape)
    # A run on another mesh has saved it, or its mesh has the model's ranks in another order.
    moved: Tensor = redistribute(
        block,
        (src, dst),
        src_mesh=value.device_mesh,
        dst_mesh=context.mesh,
        shape=sharding.shape,
        profile=context.profile,
    )
    return moved


@lru_cache(maxsize=64)
def _device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Make the torch mesh of an `xshard.Mesh` once: each one makes process groups."""
    return init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.axes)
