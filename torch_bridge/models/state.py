"""The state of a parallel model for checkpoints: each block as a part of its whole tensor.

Decides which names and which DTensors a state dict has, and how values of any placement come back.
"""

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
from torch_bridge.models.parallel import Parallel, parallel_of
from torch_bridge.models.parameters import Kept
from xshard import XshardError
from xshard.errors import PlanError, ShapeError, with_path
from xshard.state.files.loading import in_both


@torch.no_grad()
def state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of a parallel model under its own names: a DTensor for each tensor that is cut.

    They share memory with the model, so that `torch.distributed.checkpoint` saves blocks and loads into them;
    `load_state_dict` ends a loading. A block under a layout that no DTensor has, as zigzag, or some uneven
    ones, is gathered: that tensor is whole, and a copy. All processes call it.
    """
    parallel, found = parallel_of(model), model.state_dict()
    for each in parallel.kept:
        cut = _cut(parallel, each) if each.sharding.layout.axes else None
        found.update((name, cut) for name in each.names if name in found and cut is not None)
    return found


@torch.no_grad()
def load_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Copy values into the blocks of a parallel model: whole tensors, or DTensors under any placements.

    strict: whether every name has to be in both. Raises XshardError for one that is not, and ShapeError.
    """
    parallel = parallel_of(model)
    known = {name: each for each in parallel.kept for name in each.names}
    own = model.state_dict()
    for name in in_both(state, [[name] for name in own], strict, ("model", "state dict")):
        if name is not None:
            block = own[name] if name not in known else known[name].tensor
            try:
                given = _block(parallel, known[name], state[name]) if name in known else state[name]
                if given.shape != block.shape:
                    raise ShapeError(f"a value of shape {tuple(given.shape)} for {tuple(block.shape)}")
            except XshardError as error:
                raise with_path(error, name) from None
            block.copy_(given)


def _cut(parallel: Parallel, each: Kept) -> Tensor:
    sharding, setting, block = each.sharding, parallel.setting, each.tensor.detach()
    mesh = _device_mesh(setting.mesh, block.device.type)
    try:
        to_placements(sharding.layout, mesh, sharding.shape)
    except PlanError:
        return setting.moved(block, sharding.layout, each.whole, sharding.shape)
    return as_dtensor(block, sharding.layout, mesh, sharding.shape)


def _block(parallel: Parallel, each: Kept, given: Tensor) -> Tensor:
    sharding, setting = each.sharding, parallel.setting
    if tuple(given.shape) != sharding.shape:
        raise ShapeError(f"a value of shape {tuple(given.shape)}, not {sharding.shape}")
    given = given.to(each.tensor.device)
    if not isinstance(given, DTensor):
        return each.cut(given, setting)
    here = from_placements(given.placements, given.device_mesh, given.ndim, sharding.shape)
    layout = sharding.layout
    return setting.moved(given.to_local(), here.named(layout.names), layout, sharding.shape)


@lru_cache(maxsize=64)
def _device_mesh(mesh: Any, kind: str) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    return init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axes)
