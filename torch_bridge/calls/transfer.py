"""A redistribution from one mesh of processes to another as a value: a plan, and facts that ranks compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from torch_bridge.mesh.desync import CallFacts
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, callers, mesh_of
from xshard.cost.machine import AUTO
from xshard.cost.model import Profile
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, ShapeError
from xshard.layout import Mesh
from xshard.planner import plan as find_plan
from xshard.plans.expression import Expression
from xshard.plans.plan import Plan


class TransferCall(NamedTuple):
    """A redistribution between two meshes, without its block. With a plan the meshes may be None; `shape` and
    `dtype` are global, and None if this process does not know them."""

    expression: Expression
    src_mesh: MeshLike | None
    dst_mesh: MeshLike | None
    shape: tuple[int, ...] | None
    dtype: str | None
    relabel: bool = False
    profile: str | Path | Profile = AUTO

    def plan(self) -> Plan:
        """The plan; its device numbers are global ranks. Raises MeshError, ShapeError if one is missing."""
        if isinstance(self.expression, Plan):
            plan = self.expression
            ranks = plan.src_devices if self.src_mesh is None else ranks_of(self.src_mesh)
            plan = plan if plan.transfer or ranks == plan.src_devices else replace(plan, devices=ranks)
        else:
            plan = self._planned()
        last, n = max(*plan.src_devices, *plan.dst_devices), dist.get_world_size()
        if last >= n:
            raise MeshError(
                f"the meshes have a rank {last}, the world has {n} processes",
                hint="device numbers of a plan are global ranks",
            )
        return plan

    def _planned(self) -> Plan:
        if self.src_mesh is None or self.dst_mesh is None:
            raise MeshError(
                "two meshes are needed", hint="redistribute(x, layouts, src_mesh=..., dst_mesh=...)"
            )
        if self.shape is None or self.dtype is None:
            missing = "shape" if self.shape is None else "dtype"
            raise ShapeError(
                f"the global {missing} is missing",
                hint="shape= and dtype= of the global array: processes without a block know neither",
            )
        assert not isinstance(self.expression, Plan)
        return find_plan(
            self.expression,
            src_mesh=mesh_of(self.src_mesh),
            dst_mesh=mesh_of(self.dst_mesh),
            shape=self.shape,
            dtype=self.dtype,
            src_devices=ranks_of(self.src_mesh),
            dst_devices=ranks_of(self.dst_mesh),
            relabel=self.relabel,
            profile=machine(self.profile),
        )

    def facts(self, x: Tensor | None, requires_grad: bool) -> CallFacts:
        """What ranks compare before this call with a block. Raises as `check_block` does."""
        plan = self.plan()
        check_block(x, plan)
        meshes = f"{plan.src_mesh!r} on {plan.src_devices}, {plan.dst_mesh!r} on {plan.dst_devices}"
        everywhere = {
            "expression": f"{plan.src} -> {plan.dst}",
            "meshes": meshes,
            "shape": str(plan.shape),
            "dtype": plan.dtype,
            "requires_grad": str(requires_grad),
            "plan": "; ".join(map(str, plan.steps)),
            "profile": plan.profile.name,
        }
        own = {"block": "none" if x is None else str(tuple(x.shape))}
        return CallFacts(everywhere, {}, tuple(range(dist.get_world_size())), own)


def ranks_of(mesh: MeshLike) -> tuple[int, ...]:
    """The global rank of every device of a mesh, in its order."""
    return tuple(range(mesh.n_devices)) if isinstance(mesh, Mesh) else callers(mesh)


def check_block(x: Tensor | None, plan: Plan) -> None:
    """Raise ShapeError, DtypeError unless this process brings the block that the source gives it."""
    rank, source = dist.get_rank(), plan.source
    if rank not in plan.src_devices:
        if x is not None:
            raise ShapeError(f"rank {rank} is not in the source and has a block", hint="pass None there")
        return
    expected = source.local_shape(plan.src_devices.index(rank))
    hint = f"under '{source.layout}' on {source.mesh!r} that is its part of a {source.shape} array"
    if x is None:
        raise ShapeError(f"rank {rank} is in the source and brings no block", hint=hint)
    if tuple(x.shape) != expected:
        raise ShapeError(f"the block of rank {rank} has shape {tuple(x.shape)}, not {expected}", hint=hint)
    if name_of(x.dtype) != plan.dtype:
        raise DtypeError(f"the block of rank {rank} is {x.dtype}, the plan is for {plan.dtype}")
