"""The state of a parallel model for checkpoints: DTensors, which parallel models do not need otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torch_bridge.dtensor.function import as_dtensor
from torch_bridge.dtensor.placements import from_placements, to_placements
from torch_bridge.models.parallel import parallel_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter
from xshard import Mesh
from xshard.errors import PlanError, ShapeError, located
from xshard.state.files.loading import in_both


@torch.no_grad()
def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of a parallel model under its own names: a DTensor for each sharded tensor.

    They share memory with the model, so that `torch.distributed.checkpoint` saves blocks and loads into them;
    `load_state_dict` ends a loading. A block under a layout that DTensors cannot have, as zigzag, or some
    uneven ones, is gathered, and its tensor is a whole copy. All processes call it.
    """
    parallel = parallel_of(model)
    own = model.state_dict(keep_vars=True).items()
    state = {name: x.detach() if isinstance(x, Tensor) else x for name, x in own}
    for each in parallel.sharded:
        x = _stored(each, parallel.context)
        state.update((name, x) for name in each.names if name in state)
    return state


@torch.no_grad()
def load_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Copy values into the blocks of a parallel model: whole tensors, or DTensors under any placements.

    strict: require every name in both. Raises XshardError for a name in one of them only, and ShapeError.
    """
    parallel = parallel_of(model)
    own = model.state_dict(keep_vars=True)
    by_name = parallel.by_name
    for name in in_both(state, [[name] for name in own], strict, ("model", "state dict")):
        if name is not None:
            each = by_name.get(name)
            block, shape = (
                (each.tensor, each.sharding.shape) if each else (own[name], own[name].shape)
            )
            with located(name):
                if (value := state[name]).shape != shape:
                    raise ShapeError(f"a value of shape {tuple(value.shape)}, not {tuple(shape)}")
                block.copy_(_block(each, parallel.context, value) if each else value)


def _stored(each: ShardedParameter, context: ParallelContext) -> Tensor:
    sharding = each.sharding
    block = each.tensor.detach()
    mesh = context.mesh
    mesh = mesh if isinstance(mesh, DeviceMesh) else _device_mesh(mesh, block.device.type)
    try:
        to_placements(sharding.layout, mesh, sharding.shape)
    except PlanError:
        return each.gathered(context)
    return as_dtensor(block, sharding.layout, mesh, sharding.shape)


def _block(each: ShardedParameter, context: ParallelContext, value: Tensor) -> Tensor:
    layout = each.sharding.layout
    shape = each.sharding.shape
    value = value.to(each.tensor.device)
    if not isinstance(value, DTensor):
        return each.cut(value, context)
    src = from_placements(value.placements, value.device_mesh, value.ndim, shape).named(
        layout.names
    )
    return context.moved(value.to_local(), src, layout, shape)


@lru_cache(maxsize=64)
def _device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    return init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axes)
