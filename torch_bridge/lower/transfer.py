"""A plan between two meshes as one process executes it: steps on its own mesh, and messages. An empty tensor
stands for the block of a process that has none, so that autograd reaches every process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.lower.collectives import CARRIERS, Works
from torch_bridge.lower.executable import Executable, computed_once, dense
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.rules import lower, no_arithmetic
from torch_bridge.lower.subarray import Subarray, box_rows, subarray
from torch_bridge.mesh.failures import call_backend, during
from torch_bridge.mesh.process_groups import rank_in
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of_ranks
from xshard import Mesh, Plan
from xshard.errors import MeshError, PlanError
from xshard.layout.sub_axes import SubAxisMesh
from xshard.plans.plan import Stage

_ALIGNED = 16  # bytes of the largest element, a complex number


@dataclass(frozen=True, eq=False)
class TransferExecutable:
    """A plan between two meshes as this process executes it."""

    plan: Plan
    tensor_device: torch.device
    group: dist.ProcessGroup
    before: Executable | None  # on the source's mesh
    sent: tuple[tuple[int, Subarray], ...]  # ranks, its own too, and the part of its block for each
    received: tuple[
        tuple[int, Subarray], ...
    ]  # and the part of its new block from each, as in `whole`
    whole: Packing | None
    after: Executable | None  # on the destination's mesh

    def __call__(self, block: Tensor) -> Tensor:
        return run_together([self], [block])[0]

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

    def batched(self, n: int) -> NoReturn:
        raise PlanError(
            "torch.func.vmap does not reach over two meshes", hint="name the batch as a dim"
        )


def run_together(crossings: Sequence[TransferExecutable], blocks: Sequence[Tensor]) -> list[Tensor]:
    """A block for each of several crossings of a group -> results, in one message per pair of processes."""
    dtypes = [block.dtype for block in blocks]
    starts = [_seen_as(CARRIERS.get(block.dtype, block.dtype), dense(block)) for block in blocks]
    outs = [
        _stepped(*each) for each in zip((c.before for c in crossings), starts, dtypes, strict=True)
    ]
    sending = [i for i, each in enumerate(crossings) if _sends(each.plan)]

    def stay() -> None:  # what moves nowhere is copied while the others travel
        for i, (each, start) in enumerate(zip(crossings, starts, strict=True)):
            if i not in sending and outs[i] is start and each.after is None:
                outs[i] = start.clone(memory_format=torch.contiguous_format)

    if sending:
        first = crossings[sending[0]].plan
        several = [crossings[i] for i in sending], [outs[i] for i in sending], stay
        for i, out in zip(
            sending, during(lambda: _place(first), _transferred, *several), strict=True
        ):
            outs[i] = out
    results = []
    for each, start, out, dtype in zip(crossings, starts, outs, dtypes, strict=True):
        done = _stepped(each.after, out, dtype)
        # The result is the caller's own even if nothing moves, to write to as they like.
        done = start.clone(memory_format=torch.contiguous_format) if done is start else done
        results.append(_seen_as(dtype, done))
    return results


def _stepped(steps: Executable | None, block: Tensor, dtype: torch.dtype) -> Tensor:
    return block if steps is None else _seen_as(block.dtype, steps(_seen_as(dtype, block)))


def _transferred(
    crossings: Sequence[TransferExecutable], blocks: Sequence[Tensor], meanwhile: Callable[[], None]
) -> list[Tensor]:
    group = crossings[0].group
    me = rank_in(group)
    kept = {}
    leaving: dict[int, list[Tensor]] = {}
    coming: dict[
        int, list[tuple[int, Tensor]]
    ] = {}  # of every giver the crossings, and what they get
    for i, (each, block) in enumerate(zip(crossings, blocks, strict=True)):
        for rank, part in each.sent:
            if rank == me:
                kept[i] = part.read(block)
            else:
                leaving.setdefault(rank, []).append(part.read(block))
        for rank, part in each.received:
            if rank != me:
                coming.setdefault(rank, []).append((i, block.new_empty(part.shape, device="meta")))
    work = []
    arrived = {(i, me): part for i, part in kept.items()}
    # Receives first: gloo's word that one is ready would come behind all that one sends.
    for rank, parts in coming.items():
        buffer = blocks[0].new_empty(_ends([part for _, part in parts])[-1], dtype=torch.uint8)
        views = unpacked(buffer, [part for _, part in parts])
        arrived |= {(i, rank): view for (i, _), view in zip(parts, views, strict=True)}
        work.append(dist.P2POp(dist.irecv, buffer, rank, group))
    if (leaving or coming) and not blocks[0].is_meta:  # else shapes alone are asked for
        work += [
            dist.P2POp(dist.isend, packed(parts), rank, group) for rank, parts in leaving.items()
        ]
        ranks = sorted(
            {rank for c in crossings for rank in (*c.plan.src_devices, *c.plan.dst_devices)}
        )
        begun = call_backend("an exchange", ranks, dist.batch_isend_irecv, work)
        meanwhile()
        call_backend("an exchange", ranks, Works(begun).wait)
    received = [[arrived[i, rank] for rank, _ in each.received] for i, each in enumerate(crossings)]
    new = zip((each.whole for each in crossings), blocks, received, strict=True)
    return [
        block.new_empty(0) if whole is None else whole.place(block, own)
        for whole, block, own in new
    ]


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Tensors -> their bytes in one, or a view: not every backend sends booleans and complex numbers."""
    if len(parts) == 1:
        [x] = parts  # its strides count for nothing if it has one element, except in views
        return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)
    out = parts[0].new_empty(_ends(parts)[-1], dtype=torch.uint8)
    for view, part in zip(unpacked(out, parts), parts, strict=True):
        view.copy_(part)
    return out


def unpacked(buffer: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer of `packed`, one per part; parts may be on `meta`."""
    starts = zip((0, *_ends(parts)[:-1]), parts, strict=True)
    return [buffer[start : start + x.nbytes].view(x.dtype).view(x.shape) for start, x in starts]


def _ends(parts: Sequence[Tensor]) -> list[int]:
    """The end of each part among their bytes: a view of a dtype begins at a multiple of its size."""
    *sizes, last = (part.nbytes for part in parts)
    return list(itertools.accumulate([*(-(-n // _ALIGNED) * _ALIGNED for n in sizes), last]))


@functools.lru_cache(maxsize=1024)
def cross(plan: Plan, tensor_device: torch.device, group: dist.ProcessGroup) -> TransferExecutable:
    """A plan between two meshes -> its executable; all of `group` call. Raises DtypeError, MeshError."""
    rank = rank_in(group)
    transfer = plan.transfer
    if transfer and transfer.op and getattr(torch, plan.dtype) in CARRIERS:
        raise no_arithmetic(transfer.op, plan.dtype)
    sending = plan.steps.index(transfer) if transfer else len(plan.steps)

    def steps(stages: tuple[Stage, ...], ranks: tuple[int, ...]) -> Executable | None:
        """The steps on one mesh as this process executes them; None where it has none."""
        if not stages or rank not in ranks:
            return None
        part = plan.part(stages)
        return lower(part, _processes(part.mesh, ranks, group), tensor_device)

    before = steps(plan.stages[:sending], plan.src_devices)
    after = steps(plan.stages[sending + 1 :], plan.dst_devices)
    if transfer is None or not _sends(plan):
        return TransferExecutable(plan, tensor_device, group, before, (), (), None, after)
    if "threaded" in dist.get_backend_config(group):
        what = "ranks that are threads cannot send messages to each other, which a move between meshes needs"
        raise MeshError(what, hint="run them as processes: torch_bridge.run_ranks, or torchrun")
    if tensor_device.type != "meta":
        ranks = sorted({*plan.src_devices, *plan.dst_devices})
        during(
            lambda: _place(plan), call_backend, "an exchange", ranks, _connect, tensor_device, group
        )
    sent: list[tuple[int, Subarray]] = []
    received: list[tuple[int, Subarray]] = []
    for m in transfer.messages:
        giver = plan.src_devices[m.src]
        taker = plan.dst_devices[m.dst]
        shapes = transfer.source.local_shape(m.src), transfer.target.local_shape(m.dst)
        if giver == rank:
            sent.append((taker, subarray(shapes[0], box_rows(m.box, 0), tensor_device)))
        if taker == rank:
            received.append((giver, subarray(shapes[1], box_rows(m.box, 1), tensor_device)))
    whole = None
    if rank in plan.dst_devices:
        shape = transfer.target.local_shape(plan.dst_devices.index(rank))
        whole = Packing(shape, tuple(part for _, part in received), op=transfer.op)
    return TransferExecutable(
        plan, tensor_device, group, before, tuple(sent), tuple(received), whole, after
    )


def _place(plan: Plan) -> str:
    return f"the messages between the meshes of '{plan.src} -> {plan.dst}'"


def _sends(plan: Plan) -> bool:
    return plan.transfer is not None and not plan.transfer.is_in_place


@functools.lru_cache(maxsize=256)
def _processes(mesh: Mesh, ranks: tuple[int, ...], world: dist.ProcessGroup) -> ProcessMesh:
    """Cached by the world too: its groups end with it."""
    if isinstance(mesh, SubAxisMesh):
        return _processes(mesh.base, ranks, world).factored(mesh.split)
    return mesh_of_ranks(mesh, ranks, world=world)


@functools.cache
def _connect(tensor_device: torch.device, group: dist.ProcessGroup) -> None:
    """NCCL wants the whole group in its first call; later some processes may have nothing to send."""
    dist.all_reduce(torch.zeros(1, device=tensor_device), group=group)


def _seen_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The same bits, as another dtype of the same size."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
