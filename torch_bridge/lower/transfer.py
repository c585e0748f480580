"""A plan between two meshes as one process executes it: steps on its own mesh, and messages.

Decides which parts of its block a process sends to whom, which it puts together, and the groups for that. An
empty tensor stands for the block of a process that has none, so that autograd reaches every process.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.lower.collectives import CARRIERS
from torch_bridge.lower.computed_once import computed_once
from torch_bridge.lower.executable import Executable, dense
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.rules import lower
from torch_bridge.lower.subarray import Subarray, subarray
from torch_bridge.mesh.failures import call_backend, during
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of_ranks
from xshard import DtypeError, Mesh, MeshError, Plan, PlanError, Stage
from xshard.layout.runs import Run
from xshard.layout.sub_axes import SubAxisMesh
from xshard.steps import Scale
from xshard.steps.exchange.messages import Message as Box


@dataclass(frozen=True, eq=False)
class TransferExecutable:
    """A plan between two meshes as this process executes it; an empty tensor stands for no block.

    before, after: the steps on the source's and on the destination's mesh. sent: ranks and the parts of
    its block that they get. received: ranks and the parts of its new block that come from them, in the
    order in which they are put together in `whole`. Its own rank is in both where it keeps a part. None
    or nothing where it is not at that end, or has nothing to do there.
    """

    plan: Plan
    tensor_device: torch.device
    group: dist.ProcessGroup
    before: Executable | None
    sent: tuple[tuple[int, Subarray], ...]
    received: tuple[tuple[int, Subarray], ...]
    whole: Packing | None
    after: Executable | None

    def __call__(self, block: Tensor) -> Tensor:
        dtype, carrier = block.dtype, CARRIERS.get(block.dtype, block.dtype)
        out = start = _seen_as(carrier, dense(block))
        if self.before:
            out = _seen_as(carrier, self.before(_seen_as(dtype, out)))
        if _sends(self.plan):
            out = during(self._place, self._transferred, out)
        if self.after:
            out = _seen_as(carrier, self.after(_seen_as(dtype, out)))
        # Where nothing moves the result still is the caller's own, to write to as they like.
        return _seen_as(dtype, start.clone(memory_format=torch.contiguous_format) if out is start else out)

    def _transferred(self, block: Tensor) -> Tensor:
        me, parts, work = dist.get_rank(), {}, []
        for rank, part in self.sent:
            if rank == me:
                parts[me] = part.read(block)
            else:
                work.append(dist.P2POp(dist.isend, _as_bytes(part.read(block)), rank, self.group))
        for rank, part in self.received:
            if rank != me:
                parts[rank] = block.new_empty(part.shape)
                work.append(dist.P2POp(dist.irecv, _as_bytes(parts[rank]), rank, self.group))
        if work and not block.is_meta:  # else shapes alone are asked for
            ranks = sorted({*self.plan.src_devices, *self.plan.dst_devices})
            call_backend("an exchange", ranks, _exchange, work)
        if self.whole is None:
            return block.new_empty(0)
        return self.whole.place(block, [parts[rank] for rank, _ in self.received])

    def _place(self) -> str:
        return f"the messages between the meshes of '{self.plan.src} -> {self.plan.dst}'"

    @property
    def is_linear(self) -> bool:
        return self.plan.src.is_linear

    @computed_once
    def backward(self) -> TransferExecutable:
        """The plan of the adjoint. Raises LinearityError, DtypeError."""
        return cross(self.plan.backward, self.tensor_device, self.group)

    @property
    def tangent(self) -> TransferExecutable:
        """What tangents take: the same, as nothing overlaps between two meshes."""
        return self

    def plan_gradient(self) -> None:
        """Make what the backward pass runs. Raises LinearityError, DtypeError where there is none."""
        _ = self.backward

    def batched(self, n: int) -> NoReturn:
        raise PlanError("torch.func.vmap does not reach over two meshes", hint="name the batch as a dim")


@functools.lru_cache(maxsize=1024)
def cross(made: Plan, tensor_device: torch.device, group: dist.ProcessGroup) -> TransferExecutable:
    """A plan between two meshes -> what this process executes; all of `group`, which holds both, call it.

    Raises DtypeError where torch has no arithmetic for the dtype of a plan that reduces or scales, MeshError
    for ranks that are threads.
    """
    rank, transfer = dist.get_rank(), made.transfer
    if transfer and transfer.op and getattr(torch, made.dtype) in CARRIERS:
        raise DtypeError(
            f"torch has no {transfer.op} of {made.dtype}",
            hint="this dtype only moves: cast before the reduction",
        )
    at = made.steps.index(transfer) if transfer else len(made.steps)
    before = _at_end(made, made.stages[:at], made.src_devices, tensor_device)
    after = _at_end(made, made.stages[at + 1 :], made.dst_devices, tensor_device)
    if transfer is None or not _sends(made):
        return TransferExecutable(made, tensor_device, group, before, (), (), None, after)
    if "threaded" in dist.get_backend_config(group):
        raise MeshError(
            "ranks that are threads have no messages from one to another, which a move between meshes needs",
            hint="run them as processes: torch_bridge.run_ranks, or torchrun",
        )
    if tensor_device.type != "meta":
        _connect(tensor_device, group)
    sent: list[tuple[int, Subarray]] = []
    received: list[tuple[int, Subarray]] = []
    for box in transfer.messages:
        giver, taker = made.src_devices[box.src], made.dst_devices[box.dst]
        if giver == rank:
            sent.append((taker, _part(box, 0, transfer.source.local_shape(box.src), tensor_device)))
        if taker == rank:
            received.append((giver, _part(box, 1, transfer.target.local_shape(box.dst), tensor_device)))
    whole = None
    if rank in made.dst_devices:
        shape = transfer.target.local_shape(made.dst_devices.index(rank))
        whole = Packing(shape, tuple(part for _, part in received), op=transfer.op)
    return TransferExecutable(made, tensor_device, group, before, tuple(sent), tuple(received), whole, after)


def _sends(plan: Plan) -> bool:
    return plan.transfer is not None and not plan.transfer.is_in_place


def _at_end(
    made: Plan, stages: tuple[Stage, ...], ranks: tuple[int, ...], tensor_device: torch.device
) -> Executable | None:
    """The steps on one mesh as this process executes them; None where it has none."""
    if not stages or dist.get_rank() not in ranks:
        return None
    mesh, ends = stages[0].before.mesh, (stages[0].before.layout, stages[-1].after.layout)
    steps = tuple(stage.step for stage in stages)
    scale = math.prod((step.factor for step in steps if isinstance(step, Scale)), start=Fraction(1))
    part = Plan(*ends, mesh, stages[0].before.shape, made.dtype, steps, scale, made.profile)
    return lower(part, _processes(mesh, ranks, dist.group.WORLD), tensor_device)


@functools.lru_cache(maxsize=256)
def _processes(mesh: Mesh, ranks: tuple[int, ...], world: dist.ProcessGroup) -> ProcessMesh:
    """Cached by the world too: its groups end with it."""
    if isinstance(mesh, SubAxisMesh):
        return _processes(mesh.base, ranks, world).factored(mesh.split)
    return mesh_of_ranks(mesh, ranks)


@functools.cache
def _connect(tensor_device: torch.device, group: dist.ProcessGroup) -> None:
    """NCCL wants the whole group in its first call; later some processes may have nothing to send."""
    dist.all_reduce(torch.zeros(1, device=tensor_device), group=group)


def _part(box: Box, end: int, shape: tuple[int, ...], tensor_device: torch.device) -> Subarray:
    rows = {d: tuple(Run(s[end], s.length) for s in segments) for d, segments in enumerate(box.box)}
    return subarray(shape, rows, tensor_device)


def _seen_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The same bits, as another dtype of the same size."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _exchange(work: list[dist.P2POp]) -> None:
    for pending in dist.batch_isend_irecv(work):
        pending.wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes: whether booleans and complex numbers travel differs by backend.

    A view of it where it is contiguous.
    """
    return tensor.contiguous().view(-1).view(torch.uint8)
