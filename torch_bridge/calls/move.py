"""A redistribution on one mesh as a value: its plan, its executable, and the facts that ranks compare. It
checks first the values that all processes have in common, so that all raise or none; then the local block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of, comm_dtypes
from torch_bridge.lower.executable import Executable, check_dense
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.desync import CallFacts
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import (
    MeshLike,
    ProcessMesh,
    check_device,
    process_mesh,
    require_mesh,
    world,
)
from xshard.arguments import lengths_of
from xshard.cost.machine import AUTO, asked_for, load_profile, located
from xshard.cost.model import Profile
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, PlanError, ShapeError
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.planner import plan as find_plan
from xshard.plans.expression import Expression, as_expression, check_block, sides
from xshard.plans.plan import Plan

Block = tuple[tuple[int, ...], torch.dtype, torch.device]  # a block without its values
PLAIN = (Tensor, torch.nn.Parameter)  # the types of most blocks

# A verb -> a function of blocks, expression, mesh and options that makes the call while a compiler records.
TRACED: dict[str, Callable[..., Tensor]] = {}


class MoveCall(NamedTuple):
    """A redistribution on one mesh, without its block. shape: the global shape; None: inferred."""

    expression: Expression
    mesh: MeshLike
    shape: tuple[int, ...] | None = None
    profile: str | Path | Profile = AUTO
    comm_dtype: CommDtypeLike = None

    @classmethod
    def of(
        cls,
        expression: Expression,
        mesh: MeshLike | None,
        shape: Sequence[int] | None,
        profile: str | Path | Profile,
        comm_dtype: CommDtypeLike,
    ) -> MoveCall:
        """The call with the arguments of `redistribute`. Raises as `redistribute` does."""
        return cls(
            expression if type(expression) is str else as_expression(expression),
            mesh if type(mesh) is DeviceMesh else require_mesh(mesh),
            None if shape is None else lengths_of(shape),
            asked_for(profile),
            None if comm_dtype is None else comm_dtypes(comm_dtype),
        )

    @property
    def text(self) -> str:
        """The expression, for errors."""
        return sides(self.expression).text

    def executable(self, block: Block) -> Executable:
        """The executable of this process for a block, from the cache if it is there."""
        return _executable(self, block, world())

    def executable_for(self, x: Tensor) -> Executable:
        """The same for the block `x`, with its gradient planned if autograd records it."""
        if x.is_nested or x.layout is not torch.strided:
            check_dense(x)
        block = x.shape, x.dtype, x.device
        if type(x) in PLAIN:
            executable = _executable(self, block, world())
        else:
            executable = unless_fake(_executable, [x], self, block)
        if x.requires_grad and torch.is_grad_enabled():
            executable.plan_gradient()  # errors come early, and all processes are here to make its groups
        return executable

    def plan(self, block: Block) -> tuple[Plan, ProcessMesh]:
        """The plan, and the processes that run it. Raises ShapeError unless the block fits."""
        local_shape, block_dtype, tensor_device = block
        processes = process_mesh(self.mesh)
        check_device(tensor_device)
        dtype = name_of(comm_dtype_of(self.comm_dtype, block_dtype).forward)
        src, dst, text = both = sides(self.expression)
        for layout in (src, dst):
            check_axes(layout, processes.mesh, text)
        if isinstance(self.expression, Plan):
            plan = self.expression
            if plan.mesh != processes.mesh:
                raise MeshError(f"the plan is for {plan.mesh!r}, this is {processes.mesh!r}")
            if plan.dtype != dtype:
                raise DtypeError(f"the plan is for {plan.dtype}, the block has {dtype}")
            if self.shape not in (None, plan.shape):
                raise ShapeError(f"the plan is for a {plan.shape} array, not {self.shape}")
        else:
            axes = tuple(dict.fromkeys((*src.axes, *dst.axes)))
            profile = links_along(machine(self.profile, tensor_device), axes, processes)
            processes = processes.along(axes)
            shape = self.shape
            if shape is None:
                shape = global_shape(src, processes.mesh, local_shape, text)
            plan = find_plan(both, processes.mesh, shape, dtype, profile=profile)
        device, source = processes.device, plan.source
        check_block(
            f"the block of rank {processes.ranks[device]}",
            tuple(local_shape),
            source.local_shape(device),
            source.layout.names,
            text,
            f"under '{source.layout}' that is the part of device {device} of {source.mesh!r} "
            f"of a {source.shape} array",
            inferred=self.shape is None,
        )
        return plan, processes

    def facts(self, block: Block, requires_grad: bool) -> CallFacts:
        """What ranks compare before this call with a block."""
        plan, processes = self.plan(block)
        local_shape, dtype, device = block
        travels = comm_dtype_of(self.comm_dtype, dtype)
        return CallFacts(
            everywhere={"expression": self.text, "mesh": repr(process_mesh(self.mesh).mesh)},
            within={
                "shape": str(plan.shape),
                "dtype": name_of(dtype),
                "comm_dtype": f"{travels.forward}, {travels.backward}",
                "device": device.type,
                "requires_grad": str(requires_grad),
                "plan": "; ".join(map(str, plan.steps)),
            },
            part=processes.ranks,
            own={"block": str(tuple(local_shape)), "of": str(plan.shape)},
        )


@lru_cache(maxsize=4096)
def _executable(call: MoveCall, block: Block, world: object) -> Executable:
    """Cached by the world too: an `xshard.Mesh` has other processes in another world."""
    plan, processes = call.plan(block)
    _, dtype, device = block
    return lower(plan, processes, device).casting(dtype, comm_dtype_of(call.comm_dtype, dtype).backward)


def unless_fake(cached: Callable[..., Any], blocks: Sequence[Tensor], *key: Any) -> Any:
    """`cached(*key, world())`, but not from the cache for fake tensors: an executable keeps tensors."""
    mode = next((x.fake_mode for x in blocks if isinstance(x, FakeTensor)), None)
    if mode is None:
        return cached(*key, world())
    with mode:
        return cached.__wrapped__(*key, world())  # type: ignore[attr-defined]


def check_no_transform() -> None:
    """Raise PlanError under torch.func: torch would drop its tangents in a recorded call."""
    if torch._C._are_functorch_transforms_active():
        raise PlanError(
            "torch.func inside torch.compile does not reach through a redistribution",
            hint="torch would drop tangents without a word: use torch.func on what is not compiled",
        )


def links_along(profile: str | Path | Profile, axes: Sequence[str], processes: ProcessMesh) -> Profile:
    """The profile for some axes of a mesh. Nodes are runs of ranks, wherever these are in the mesh."""
    machine = located(load_profile(profile), processes.mesh, processes.ranks)
    return machine.along(axes, processes.mesh)
