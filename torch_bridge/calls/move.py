"""A redistribution on one mesh, or from one to another, as a value: its plan, and facts that ranks compare.
What all processes have in common is checked first, so that all raise or none; then the local block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.comm_dtype import CommDtypeLike, comm_dtype_of, comm_dtypes
from torch_bridge.lower.executable import Executable, check_dense
from torch_bridge.lower.rules import lower
from torch_bridge.mesh import process_mesh as meshes
from torch_bridge.mesh.desync import CallFacts, sent_facts
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh, world
from xshard.arguments import lengths_of
from xshard.caches import layout_cache
from xshard.cost.machine import AUTO, asked_for, load_profile, located
from xshard.cost.model import Profile, ProfileLike
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, PlanError, ShapeError
from xshard.layout import Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.parser import with_maps
from xshard.planner import plan as find_plan
from xshard.plans.expression import Expression, as_expression, check_block, check_given, sides
from xshard.plans.plan import Plan

Block = tuple[tuple[int, ...], torch.dtype, torch.device]  # a block without its values
PLAIN = (Tensor, torch.nn.Parameter)  # the types of most blocks
F = TypeVar("F", bound=Callable[..., Any])

# A verb -> a function of blocks, expression, mesh and options that makes the call while a compiler records.
TRACED: dict[str, Callable[..., Tensor]] = {}


class MoveCall(NamedTuple):
    """A redistribution on one mesh, without its block."""

    expression: Expression
    mesh: MeshLike
    shape: tuple[int, ...] | None = None  # the global shape; None: inferred
    profile: ProfileLike = AUTO
    comm_dtype: CommDtypeLike = None

    @classmethod
    def of(
        cls,
        expression: Expression,
        mesh: MeshLike | None,
        shape: Any,
        profile: Any,
        comm_dtype: Any,
    ) -> MoveCall:
        """The call with the arguments of `redistribute`. Raises as `redistribute` does."""
        expression = expression if type(expression) is str else as_expression(expression)
        mesh = mesh if type(mesh) is DeviceMesh else meshes.as_mesh(mesh)
        shape = None if shape is None else lengths_of(shape)
        comm_dtype = None if comm_dtype is None else comm_dtypes(comm_dtype)
        return cls(expression, mesh, shape, asked_for(profile), comm_dtype)

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
        meshes.check_device(tensor_device)
        dtype = name_of(comm_dtype_of(self.comm_dtype, block_dtype).forward)
        src, dst, text = both = sides(self.expression)
        for layout in (src, dst):
            check_axes(layout, processes.mesh, text)
        if isinstance(self.expression, Plan):
            plan = self.expression
            check_given("the block is", plan, dtype, self.shape, processes.mesh)
        else:
            axes = tuple(dict.fromkeys((*src.axes, *dst.axes)))
            profile = links_along(machine(self.profile, tensor_device), axes, processes)
            processes = processes.along(axes)
            shape = self.shape
            if shape is None:
                shape = global_shape(src, processes.mesh, local_shape, text)
            plan = find_plan(both, processes.mesh, shape, dtype, profile=profile)
        check_local(
            "the block of", local_shape, plan.source, processes, text, inferred=self.shape is None
        )
        return plan, processes

    def facts(self, block: Block, **sent: object) -> CallFacts:
        """What ranks compare before this call with a block. sent: facts that the call itself lacks."""
        plan, processes = self.plan(block)
        local_shape, dtype, device = block
        travels = ", ".join(map(str, comm_dtype_of(self.comm_dtype, dtype)))
        sent |= {"dtype": name_of(dtype), "device": device.type, "comm_dtype": travels}
        own = {"block": str(tuple(local_shape)), "of": str(plan.shape)}
        within = sent_facts(plan, plan.steps, shape=plan.shape, **sent)
        return CallFacts(
            {"expression": self.text, "mesh": ranked(self.mesh)}, within, processes.ranks, own
        )


def check_local(
    what: str,
    block: Sequence[int],
    array: Sharding,
    processes: ProcessMesh,
    text: str,
    **options: Any,
) -> None:
    """Raise ShapeError unless a block is this process's part of an array. options: as for `check_block`."""
    device = processes.device
    layout = array.layout
    part = f"under '{layout}' that is the part of device {device} of {array.mesh!r} of a {array.shape} array"
    what = f"{what} rank {processes.ranks[device]}"
    expected = array.local_shape(device)
    check_block(what, tuple(block), expected, layout.names, text, part, **options)


@layout_cache(maxsize=4096)
def _executable(call: MoveCall, block: Block, world: object) -> Executable:
    """Cached by the world too: an `xshard.Mesh` has other processes in another world."""
    plan, processes = call.plan(block)
    _, dtype, device = block
    return lower(plan, processes, device).casting(
        dtype, comm_dtype_of(call.comm_dtype, dtype).backward
    )


def unless_fake(cached: Callable[..., Any], blocks: Sequence[Tensor], *key: Any) -> Any:
    """`cached(*key, world())`, but not from the cache for fake tensors: an executable keeps tensors."""
    mode = next((x.fake_mode for x in blocks if isinstance(x, FakeTensor)), None)
    if mode is None:
        return cached(*key, world())
    with mode:
        return cached.__wrapped__(*key, world())  # type: ignore[attr-defined]


def between_graphs(function: F) -> F:
    """A function that torch.compile calls between two graphs, and does not record."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return function(*arguments, **options)
        from torch_bridge.calls import compiled  # slow: it imports torch._dynamo, half a second

        return compiled.eagerly(function, *arguments, **options)

    return cast(F, call)


named = between_graphs(with_maps)


def check_no_transform() -> None:
    """Raise PlanError under torch.func: torch would drop its tangents in a recorded call."""
    if torch._C._are_functorch_transforms_active():
        hint = "torch would drop tangents without a word: use torch.func on what is not compiled"
        raise PlanError(
            "torch.func inside torch.compile does not reach through a redistribution", hint=hint
        )


def links_along(profile: ProfileLike, axes: Sequence[str], processes: ProcessMesh) -> Profile:
    """The profile for some axes of a mesh. Nodes are runs of ranks, wherever these are in the mesh."""
    return located(load_profile(profile), processes.mesh, processes.ranks).along(
        axes, processes.mesh
    )


def ranked(mesh: MeshLike) -> str:
    """A mesh with its ranks, for comparisons."""
    processes = process_mesh(mesh)
    return f"{processes.mesh!r} of {processes.ranks}"


class TransferCall(NamedTuple):
    """A redistribution between two meshes, without its block."""

    expression: Expression
    src_mesh: MeshLike | None  # None: a plan's
    dst_mesh: MeshLike | None
    shape: tuple[int, ...] | None  # None, as the dtype, if unknown
    dtype: str | None
    relabel: bool = False
    profile: ProfileLike = AUTO

    def plan(self) -> Plan:
        """The plan; its device numbers are global ranks. Raises MeshError, ShapeError if one is missing."""
        if isinstance(self.expression, Plan):
            plan = self.expression
            ranks = plan.src_devices if self.src_mesh is None else ranks_of(self.src_mesh)
            plan = (
                plan if plan.transfer or ranks == plan.src_devices else replace(plan, devices=ranks)
            )
        else:
            if self.src_mesh is None or self.dst_mesh is None:
                hint = "redistribute(x, layouts, src_mesh=..., dst_mesh=...)"
                raise MeshError("two meshes are needed", hint=hint)
            if self.shape is None or self.dtype is None:
                missing = "shape" if self.shape is None else "dtype"
                hint = (
                    "shape= and dtype= of the global array: processes without a block know neither"
                )
                raise ShapeError(f"the global {missing} is missing", hint=hint)
            src = self.src_mesh
            dst = self.dst_mesh
            options: dict[str, Any] = {"relabel": self.relabel, "profile": machine(self.profile)}
            options |= {"src_mesh": mesh_of(src), "src_devices": ranks_of(src)}
            options |= {"dst_mesh": mesh_of(dst), "dst_devices": ranks_of(dst)}
            plan = find_plan(self.expression, shape=self.shape, dtype=self.dtype, **options)
        last = max(*plan.src_devices, *plan.dst_devices)
        n = dist.get_world_size()
        if last >= n:
            what = f"the meshes have a rank {last}, the world has {n} processes"
            raise MeshError(what, hint="device numbers of a plan are global ranks")
        return plan

    def facts(self, x: Tensor | None, **sent: object) -> CallFacts:
        """What ranks compare before this call with a block. Raises as `check_part` does."""
        plan = self.plan()
        check_part(x, plan)
        meshes = f"{plan.src_mesh!r} on {plan.src_devices}, {plan.dst_mesh!r} on {plan.dst_devices}"
        everywhere = {"expression": f"{plan.src} -> {plan.dst}", "meshes": meshes}
        everywhere |= sent_facts(plan, plan.steps, shape=plan.shape, dtype=plan.dtype, **sent)
        own = {"block": "none" if x is None else str(tuple(x.shape))}
        return CallFacts(everywhere, {}, tuple(range(dist.get_world_size())), own)


def ranks_of(mesh: MeshLike) -> tuple[int, ...]:
    """The global rank of every device of a mesh, in its order."""
    return tuple(range(mesh.n_devices)) if isinstance(mesh, Mesh) else meshes.callers(mesh)


def check_part(x: Tensor | None, plan: Plan) -> None:
    """Raise ShapeError, DtypeError unless this process brings the block that the source gives it."""
    rank = dist.get_rank()
    source = plan.source
    if rank not in plan.src_devices:
        if x is not None:
            raise ShapeError(
                f"rank {rank} is not in the source and has a block", hint="pass None there"
            )
        return
    expected = source.local_shape(plan.src_devices.index(rank))
    hint = f"under '{source.layout}' on {source.mesh!r} that is its part of a {source.shape} array"
    if x is None:
        raise ShapeError(f"rank {rank} is in the source and brings no block", hint=hint)
    if tuple(x.shape) != expected:
        raise ShapeError(
            f"the block of rank {rank} has shape {tuple(x.shape)}, not {expected}", hint=hint
        )
    if name_of(x.dtype) != plan.dtype:
        raise DtypeError(f"the block of rank {rank} is {x.dtype}, the plan is for {plan.dtype}")
