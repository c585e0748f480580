"""A redistribution as a value, on one mesh or between two: its plan, and facts that ranks compare.

What all processes have in common is checked first, so that all raise or none; then the local block.

A repeated call hits one cache: `_executable`, of the call, the block and the world. Where that misses, the
planner's cache may still have the plan, and the cache of `lower` its moves, of another call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.comm_dtype import CommDtype, CommDtypeLike, comm_dtype_of, comm_dtypes
from torch_bridge.lower.executable import Executable, check_dense
from torch_bridge.lower.rules import lower
from torch_bridge.mesh import process_mesh as meshes
from torch_bridge.mesh.desync import CallFacts, sent_facts
from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, mesh_of, process_mesh, world_key
from torch_bridge.versions.functorch import has_functorch_transforms
from torch_bridge.versions.modes import FakeTensor
from xshard.arguments import lengths_of
from xshard.caches import layout_cache
from xshard.cost.machine import AUTO, load_profile, profile_of_devices, resolve_profile
from xshard.cost.model import Profile, ProfileLike
from xshard.dtypes import name_of
from xshard.errors import DtypeError, MeshError, PlanError, ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.layout.sub_axes import root_of
from xshard.notation.parser import with_map_digests
from xshard.planner import plan as plan_redistribution
from xshard.plans.expression import (
    Expression,
    LayoutPair,
    as_expression,
    check_block,
    check_given,
    sides,
)
from xshard.plans.plan import Plan

Block = tuple[tuple[int, ...], torch.dtype, torch.device]  # a block without its values
# The types of most blocks; any other may have rules of its own.
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
F = TypeVar("F", bound=Callable[..., Any])

# A verb -> a function of blocks, expression, mesh and options that makes the call while a compiler records.
TRACED: dict[str, Callable[..., Tensor]] = {}


class MoveCall(NamedTuple):
    """A redistribution on one mesh, without its block: a key of caches."""

    expression: Expression
    mesh: MeshLike
    shape: tuple[int, ...] | None = None  # the global shape; None: inferred from the block
    profile: ProfileLike = AUTO
    comm_dtype: CommDtypeLike | CommDtype = None

    @classmethod
    def of(
        cls,
        expression: Any,
        mesh: MeshLike | None,
        shape: Any,
        profile: Any,
        comm_dtype: Any,
    ) -> MoveCall:
        """Turn the arguments of `redistribute` into a hashable value, the key of caches.

        Each argument gets one form, so that equal calls are equal keys: a list of lengths becomes a
        tuple, a `comm_dtype` a pair of them, forward and backward. Every `redistribute` comes
        through here, so that arguments of the usual types are passed on without a function call.
        Raises as `redistribute` does.
        """
        if type(expression) is not str:
            expression = as_expression(expression)
        if type(mesh) is not DeviceMesh:
            mesh = meshes.checked_mesh(mesh)
        if shape is not None:
            shape = lengths_of(shape)
        if comm_dtype is not None:
            comm_dtype = comm_dtypes(comm_dtype)
        return cls(expression, mesh, shape, resolve_profile(profile), comm_dtype)

    @property
    def text(self) -> str:
        """The expression, for errors."""
        return sides(self.expression).text

    def executable(self, block: Block) -> Executable:
        """Return the executable of this process for a block, from the cache if it is there."""
        return _executable(self, block, world_key())

    def executable_for(self, x: Tensor) -> Executable:
        """Return the executable for the block `x`, with its gradient planned if autograd records it."""
        if x.is_nested or x.layout is not torch.strided:
            check_dense(x)
        block = x.shape, x.dtype, x.device
        if type(x) in PLAIN_TYPES:
            executable = _executable(self, block, world_key())
        else:
            executable = call_cached(_executable, [x], self, block)
        if x.requires_grad and torch.is_grad_enabled():
            # Now, where errors come early and all processes are here to make the gradient's groups.
            executable.plan_gradient()
        return executable

    def plan(self, block: Block) -> tuple[Plan, ProcessMesh]:
        """Find the plan for a block, and the processes that take part in it.

        What all processes have in common is checked first: there, all raise or none. The shape of
        the own block comes last. Raises ShapeError if it does not fit.

        Args:
            block: The shape, dtype and device of this process's block.
        """
        local_shape, block_dtype, device = block
        processes = process_mesh(self.mesh)
        meshes.check_device(device)
        # The plan is for the dtype that travels, as bfloat16; `casting` converts blocks and
        # results.
        dtype = name_of(comm_dtype_of(self.comm_dtype, block_dtype).forward)
        expression_sides = sides(self.expression)
        for layout in (expression_sides.src, expression_sides.dst):
            check_axes(layout, processes.mesh, expression_sides.text)

        if isinstance(self.expression, Plan):
            plan = self.expression
            check_given("the block is", plan, dtype, self.shape, processes.mesh)
        else:
            profile = machine_profile(self.profile, device)
            profile, processes = part_of_mesh(
                (expression_sides.src, expression_sides.dst), processes, profile
            )
            shape = self.shape
            if shape is None:
                shape = global_shape(
                    expression_sides.src, processes.mesh, local_shape, expression_sides.text
                )
            plan = plan_redistribution(
                expression_sides, processes.mesh, shape, dtype, profile=profile
            )

        # This check is last, because it may raise on this process alone.
        is_inferred = self.shape is None
        title = "the block of"
        check_local(
            title, local_shape, plan.source, processes, expression_sides.text, inferred=is_inferred
        )
        return plan, processes

    def facts(self, block: Block, **sent: object) -> CallFacts:
        """Return what ranks compare before this call with a block.

        Args:
            block: Shape, dtype and device of this process's block.
            **sent: Facts that do not follow from the call.
        """
        plan, processes = self.plan(block)
        local_shape, dtype, device = block
        comm_dtype = comm_dtype_of(self.comm_dtype, dtype)
        sent["dtype"] = name_of(dtype)
        sent["device"] = device.type
        sent["comm_dtype"] = ", ".join(map(str, comm_dtype))
        return CallFacts(
            equal_on_all={"expression": self.text, "mesh": mesh_with_ranks(self.mesh)},
            # Processes that this one does not talk to may have other blocks.
            equal_on_peers=sent_facts(plan, plan.steps, shape=plan.shape, **sent),
            peers=processes.ranks,
            not_compared={"block": str(tuple(local_shape)), "of": str(plan.shape)},
        )


def check_local(
    title: str,
    block: Sequence[int],
    array: Sharding,
    processes: ProcessMesh,
    text: str,
    **options: Any,
) -> None:
    """Raise ShapeError unless a block has the shape of this process's part of an array.

    An array [8, 5] under "n/dp i" on dp=4 -> each process needs a block [2, 5].

    Args:
        title: The block in the error, as "the block of"; the rank is added.
        block: The shape of the block.
        array: The global shape and the layout.
        processes: The mesh, and the number of this process in it.
        text: The user's expression, for the error.
        **options: As for `check_block`.
    """
    device = processes.device
    mesh = root_of(array.mesh)
    hint = f"under '{array.written}' that is the part of device {device} of {mesh!r}"
    hint += f" of a {array.shape} array"
    title = f"{title} rank {processes.ranks[device]}"
    expected = array.local_shape(device)
    check_block(title, tuple(block), expected, array.layout.names, text, hint, **options)


@layout_cache(maxsize=4096)
def _executable(call: MoveCall, block: Block, world: object) -> Executable:
    """Plan and lower a call for a block.

    Cached by the world too: an `xshard.Mesh` has other processes in another world.
    """
    # Errors are not cached: a wrong call raises each time.
    plan, processes = call.plan(block)
    _, dtype, device = block
    travels = comm_dtype_of(call.comm_dtype, dtype)
    return lower(plan, processes, device).casting(dtype, travels)


def call_cached(cached: Callable[..., Any], blocks: Sequence[Tensor], *key: Any) -> Any:
    """Call `cached(*key, world())`, without its cache for fake tensors: an executable keeps tensors."""
    for x in blocks:
        if isinstance(x, FakeTensor):
            with x.fake_mode:
                return cached.__wrapped__(*key, world_key())  # type: ignore[attr-defined]  # by lru_cache
    return cached(*key, world_key())


def between_graphs(function: F) -> F:
    """Make torch.compile call a function between two graphs, instead of recording it."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        # Asked at each call: the decorator of torch would import Dynamo with this module.
        if not torch.compiler.is_dynamo_compiling():
            return function(*arguments, **options)
        from torch_bridge.calls import compiled  # slow: it imports torch._dynamo, half a second

        return compiled.eagerly(function, *arguments, **options)

    return cast(F, call)


with_maps_between_graphs = between_graphs(with_map_digests)


def check_no_transform() -> None:
    """Raise PlanError under torch.func: torch would drop its tangents in a recorded call."""
    if has_functorch_transforms():
        hint = "torch would drop tangents without a word: use torch.func on what is not compiled"
        raise PlanError(
            "torch.func inside torch.compile does not reach through a redistribution", hint=hint
        )


def links_along(profile: ProfileLike, axes: Sequence[str], processes: ProcessMesh) -> Profile:
    """Return the profile of the links along some axes of a mesh.

    Nodes are runs of ranks, wherever these are in the mesh.
    """
    on_mesh = profile_of_devices(load_profile(profile), processes.mesh, processes.ranks)
    return on_mesh.for_axes(axes, processes.mesh)


def part_of_mesh(
    layouts: Iterable[Layout], processes: ProcessMesh, profile: ProfileLike
) -> tuple[Profile, ProcessMesh]:
    """Return the links and the processes along the mesh axes that some layouts name.

    On a mesh (dp=2, tp=4), layouts that name tp alone concern the 4 devices of a tp group. Along
    other axes, processes may have blocks of other sizes, and other plans.
    """
    axes = tuple(dict.fromkeys(chain.from_iterable(layout.axes for layout in layouts)))
    # The links are found in the whole mesh: which axes cross nodes does not show in a part of it.
    return links_along(profile, axes, processes), processes.submesh(axes)


def mesh_with_ranks(mesh: MeshLike) -> str:
    """Write a mesh with its ranks, for comparisons."""
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
        """Return the plan that the user passed, or find one between the two meshes for the layouts.

        Its device numbers are global ranks. Raises MeshError or ShapeError if a mesh, the shape or
        the dtype is missing, MeshError for a rank that the world lacks.
        """
        if isinstance(self.expression, Plan):
            plan = self._given_plan(self.expression)
        else:
            plan = self._found_plan(self.expression)
        last_rank = max(*plan.src_devices, *plan.dst_devices)
        n_processes = dist.get_world_size()
        if last_rank >= n_processes:
            reason = f"the meshes have a rank {last_rank}, the world has {n_processes} processes"
            raise MeshError(reason, hint="device numbers of a plan are global ranks")
        return plan

    def _given_plan(self, plan: Plan) -> Plan:
        """Return the plan that you passed, on the ranks of the source's mesh if there is one."""
        if self.src_mesh is None or plan.transfer:
            return plan
        # A plan on one mesh counts devices from 0: here they are the ranks of your mesh.
        ranks = ranks_of(self.src_mesh)
        return plan if ranks == plan.src_devices else replace(plan, devices=ranks)

    def _found_plan(self, layouts: LayoutPair) -> Plan:
        """Plan a move from the source's mesh to the destination's, for two layouts.

        Processes outside the source have no block, so that nothing can be inferred: both meshes,
        the global shape and the dtype have to be given. Raises MeshError or ShapeError if one is
        missing.
        """
        if self.src_mesh is None or self.dst_mesh is None:
            hint = "redistribute(x, layouts, src_mesh=..., dst_mesh=...)"
            raise MeshError("two meshes are needed", hint=hint)
        if self.shape is None or self.dtype is None:
            missing = "shape" if self.shape is None else "dtype"
            hint = "shape= and dtype= of the global array: processes without a block know neither"
            raise ShapeError(f"the global {missing} is missing", hint=hint)
        return plan_redistribution(
            layouts,
            shape=self.shape,
            dtype=self.dtype,
            src_mesh=mesh_of(self.src_mesh),
            src_devices=ranks_of(self.src_mesh),
            dst_mesh=mesh_of(self.dst_mesh),
            dst_devices=ranks_of(self.dst_mesh),
            relabel=self.relabel,
            profile=machine_profile(self.profile),
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, ascending: those that call it. All of the world, if a mesh is missing."""
        if isinstance(self.expression, Plan):
            return tuple(sorted({*self.expression.src_devices, *self.expression.dst_devices}))
        if self.src_mesh is None or self.dst_mesh is None:
            return tuple(range(dist.get_world_size()))
        return tuple(sorted({*ranks_of(self.src_mesh), *ranks_of(self.dst_mesh)}))

    def facts(self, x: Tensor | None, **sent: object) -> CallFacts:
        """Return what ranks compare before this call with a block. Raises as `check_source_block` does."""
        plan = self.plan()
        check_source_block(x, plan)
        src = f"{plan.src_mesh!r} on {plan.src_devices}"
        dst = f"{plan.dst_mesh!r} on {plan.dst_devices}"
        facts = {"expression": f"{plan.src} -> {plan.dst}", "meshes": f"{src}, {dst}"}
        facts |= sent_facts(plan, plan.steps, shape=plan.shape, dtype=plan.dtype, **sent)
        block_text = "none" if x is None else str(tuple(x.shape))
        return CallFacts(
            equal_on_all=facts,
            peers=self.ranks,
            not_compared={"block": block_text},
        )


def ranks_of(mesh: MeshLike) -> tuple[int, ...]:
    """Return the global rank of every device of a mesh, in its order."""
    if isinstance(mesh, Mesh):
        return tuple(range(mesh.n_devices))
    return meshes.calling_ranks(mesh)


def check_source_block(x: Tensor | None, plan: Plan) -> None:
    """Check the block that this process passes to a move between two meshes.

    A process of the source's mesh has to pass a block of the shape and dtype that the layout gives
    it; any other process passes None. Raises ShapeError or DtypeError.
    """
    # The plan's device numbers are ranks; a process outside the source has nothing to bring.
    rank = dist.get_rank()
    source = plan.source
    if rank not in plan.src_devices:
        if x is not None:
            raise ShapeError(
                f"rank {rank} is not in the source and has a block", hint="pass None there"
            )
        return
    expected = source.local_shape(plan.src_devices.index(rank))
    hint = f"under '{source.written}' on {root_of(source.mesh)!r} that is its part of a {source.shape} array"
    if x is None:
        raise ShapeError(f"rank {rank} is in the source and brings no block", hint=hint)
    if tuple(x.shape) != expected:
        raise ShapeError(
            f"the block of rank {rank} has shape {tuple(x.shape)}, not {expected}", hint=hint
        )
    if name_of(x.dtype) != plan.dtype:
        raise DtypeError(f"the block of rank {rank} is {x.dtype}, the plan is for {plan.dtype}")
