"""A plan between two meshes as one process executes it: steps on its own mesh, and messages.

An empty tensor stands for the block of a process that has none, so that autograd reaches every process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.lower.collectives import CARRIERS
from torch_bridge.lower.exchange import Assembly, Part
from torch_bridge.lower.executable import Executable, computed_once, dense
from torch_bridge.lower.rules import lower, no_arithmetic
from torch_bridge.lower.subarray import box_rows, subarray
from torch_bridge.mesh.failures import call_backend, timeout_of, with_place_in_errors
from torch_bridge.mesh.process_groups import naming_who_has_not_come, rank_in
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of_ranks
from torch_bridge.versions.process_groups import backend_and_store
from xshard import Mesh, Plan
from xshard.errors import MeshError, PlanError
from xshard.layout.sub_axes import SubAxisMesh
from xshard.plans.plan import Stage

_ALIGNMENT = 16  # bytes of the largest element, a complex number


@dataclass(frozen=True, eq=False)
class TransferExecutable:
    """A plan between two meshes as this process executes it: steps, messages, steps."""

    plan: Plan
    tensor_device: torch.device
    group: dist.ProcessGroup
    on_source: Executable | None  # the steps on the source's mesh
    sent: tuple[Part, ...]  # to other ranks: rows of its block on the source's mesh
    received: tuple[Part, ...]  # from other ranks: rows of its block on the destination's mesh
    assembly: Assembly | None  # makes that block of rows of both; None if this process has none
    on_target: Executable | None  # the steps on the destination's mesh
    sends: bool  # whether any process sends; else rows stay on their ranks
    sends_gradient = True  # as far as ranks know of each other: all of them compare

    def __call__(self, block: Tensor) -> Tensor:
        return self.begin(block)()

    def begin(self, block: Tensor) -> Callable[[], Tensor]:
        """Send this process's rows, and return a function that waits for all, and returns its block."""
        finish = begin_transfers_together([self], [block])
        return lambda: finish()[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of this process's block on the destination's mesh; empty where it has none."""
        rank = rank_in(self.group)
        if rank not in self.plan.dst_devices:
            return torch.Size((0,))
        return torch.Size(self.plan.target.local_shape(self.plan.dst_devices.index(rank)))

    @property
    def is_linear(self) -> bool:
        return self.plan.src.is_linear

    @property
    def makes_new_tensor(self) -> bool:
        """Whether its result is no view of the block: steps or messages make it."""
        return self.sends or bool(self.on_source or self.on_target)

    @computed_once
    def backward(self) -> TransferExecutable:
        """Return the executable of the adjoint. Raises LinearityError, DtypeError."""
        return lower_transfer(self.plan.backward, self.tensor_device, self.group)

    @property
    def tangent(self) -> TransferExecutable:
        """The executable for tangents: the same, as nothing overlaps between two meshes."""
        return self

    def batched(self, n: int) -> NoReturn:
        raise PlanError(
            "torch.func.vmap does not reach over two meshes", hint="name the batch as a dim"
        )


@functools.lru_cache(maxsize=1024)
def lower_transfer(
    plan: Plan, tensor_device: torch.device, group: dist.ProcessGroup
) -> TransferExecutable:
    """Prepare a plan from one mesh to another for this process; all processes of `group` call this.

    The transfer is the step that sends from mesh to mesh. The steps before it run on the source's
    mesh, those after it on the destination's; a process that is in one mesh only has no steps on
    the other. Raises DtypeError for a reduction without arithmetic, MeshError for ranks that are
    threads.
    """
    transfer = plan.transfer  # the step from mesh to mesh; None if the blocks stay where they are
    if transfer and transfer.op and getattr(torch, plan.dtype) in CARRIERS:
        raise no_arithmetic(transfer.op, plan.dtype)
    number = plan.steps.index(transfer) if transfer else len(plan.steps)
    before = plan.stages[:number]
    after = plan.stages[number + 1 :]
    on_source = _lower_on_mesh(plan, before, plan.src_devices, tensor_device, group)
    on_target = _lower_on_mesh(plan, after, plan.dst_devices, tensor_device, group)
    rank = rank_in(group)
    outgoing: list[Part] = []
    incoming: list[Part] = []
    assembly = None
    sends = transfer is not None and not transfer.is_in_place
    if transfer and sends:
        _prepare_to_send(plan, tensor_device, group)
        outgoing, incoming = _parts(plan, tensor_device, rank)
        if rank in plan.dst_devices:
            shape = transfer.target.local_shape(plan.dst_devices.index(rank))
            in_order = plan.profile.adds_in_order
            assembly = Assembly.of(
                shape, outgoing, incoming, rank, transfer.op, rounds_once=in_order
            )
    # Rows that stay on this rank do not travel: the assembly reads them from the block.
    sent = tuple(part for part in outgoing if part.peer != rank)
    received = tuple(part for part in incoming if part.peer != rank)
    return TransferExecutable(
        plan, tensor_device, group, on_source, sent, received, assembly, on_target, sends
    )


def _lower_on_mesh(
    plan: Plan,
    stages: tuple[Stage, ...],
    ranks: tuple[int, ...],
    tensor_device: torch.device,
    group: dist.ProcessGroup,
) -> Executable | None:
    """Return some steps on the mesh of `ranks`, as this process executes them; None if it has none."""
    if not stages or rank_in(group) not in ranks:
        return None
    part = plan.sub_plan(stages)
    return lower(part, _processes(part.mesh, ranks, group), tensor_device)


def _prepare_to_send(plan: Plan, tensor_device: torch.device, group: dist.ProcessGroup) -> None:
    """Connect all processes of the group. Raises MeshError if they are threads."""
    if "threaded" in dist.get_backend_config(group):
        message = "ranks that are threads cannot send messages to each other, "
        message += "which a move between meshes needs"
        raise MeshError(message, hint="run them as processes: torch_bridge.run_ranks, or torchrun")
    if tensor_device.type != "meta":
        place = functools.partial(_place, plan)
        ranks = ranks_of_plans([plan])
        with_place_in_errors(
            place, call_backend, "an exchange", ranks, _connect, tensor_device, group
        )


def ranks_of_plans(plans: Sequence[Plan]) -> list[int]:
    """Return the ranks of all meshes of some plans, ascending."""
    ranks: set[int] = set()
    for plan in plans:
        ranks.update(plan.src_devices, plan.dst_devices)
    return sorted(ranks)


def _parts(plan: Plan, tensor_device: torch.device, rank: int) -> tuple[list[Part], list[Part]]:
    """List the messages of one rank in a transfer: what it sends, and what it receives.

    Each is the other rank and the rows: of this rank's block on the source's mesh, or of its block
    on the destination's. A rank in both meshes may keep rows: then it is its own peer, in both
    lists.
    """
    transfer = plan.transfer
    assert transfer is not None
    # Messages name devices of the two meshes; the group knows ranks.
    sent: list[Part] = []
    received: list[Part] = []
    for message in transfer.messages:
        sender = plan.src_devices[message.src]
        receiver = plan.dst_devices[message.dst]
        if sender == rank:
            shape = transfer.source.local_shape(message.src)
            rows = box_rows(message.box, 0)
            sent.append(Part(receiver, subarray(shape, rows, tensor_device)))
        if receiver == rank:
            shape = transfer.target.local_shape(message.dst)
            rows = box_rows(message.box, 1)
            received.append(Part(sender, subarray(shape, rows, tensor_device)))
    return sent, received


def run_transfers_together(
    crossings: Sequence[TransferExecutable], blocks: Sequence[Tensor]
) -> list[Tensor]:
    """Run several moves between meshes at once: `begin_transfers_together` and its end."""
    return begin_transfers_together(crossings, blocks)()


def begin_transfers_together(
    crossings: Sequence[TransferExecutable], blocks: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """Begin several moves between meshes, with one message for each pair of processes.

    Args:
        crossings: The moves, all of one group of processes.
        blocks: This process's block of each, on its source's mesh; empty where it has none.

    Returns:
        A function that waits, and returns its block of each on the destination's mesh, new tensors.
    """
    outs: list[Tensor] = []
    for crossing, block in zip(crossings, blocks, strict=True):
        out = _run_steps(crossing.on_source, dense(block))
        # Some dtypes cannot be sent: their bits travel as another dtype of the same size. The steps
        # on each mesh see the values.
        outs.append(_seen_as(CARRIERS.get(block.dtype, block.dtype), out))
    plans = [crossing.plan for crossing in crossings if crossing.sends]
    place = functools.partial(_place, crossings[0].plan)
    arrive = with_place_in_errors(place, _begin_exchange, crossings, outs, ranks_of_plans(plans))
    dtypes = [block.dtype for block in blocks]

    def finish() -> list[Tensor]:
        arrived = with_place_in_errors(place, arrive)
        return [
            _run_steps(crossing.on_target, _seen_as(dtype, out))
            for crossing, dtype, out in zip(crossings, dtypes, arrived, strict=True)
        ]

    return finish


def _run_steps(steps: Executable | None, block: Tensor) -> Tensor:
    """Run the steps on one mesh; there are none for a process outside of it."""
    return block if steps is None else steps(block)


def _begin_exchange(
    crossings: Sequence[TransferExecutable], blocks: Sequence[Tensor], ranks: Sequence[int]
) -> Callable[[], list[Tensor]]:
    """Begin to send the messages of several moves; the function returned waits for all blocks.

    All rows for one rank, of all moves, travel in one message of bytes.

    Args:
        crossings: The moves between meshes. Some may send nothing.
        blocks: This process's block of each, after the steps on the source's mesh.
        ranks: The processes that send or receive, for errors.
    """
    outgoing: dict[int, list[Tensor]] = {}  # to each rank, in the order of the crossings
    expected: dict[int, list[Tensor]] = {}  # from each rank, likewise: tensors without data
    for crossing, block in zip(crossings, blocks, strict=True):
        for part in crossing.sent:
            outgoing.setdefault(part.peer, []).append(part.rows.read(block))
        for part in crossing.received:
            like = block.new_empty(part.rows.shape, device="meta")
            expected.setdefault(part.peer, []).append(like)
    incoming = {
        rank: _Message.like(tensors, blocks[0].device) for rank, tensors in expected.items()
    }
    works: list[dist.Work] = []
    peers: list[Sequence[int]] = []  # those that each work waits for
    operations: list[dist.P2POp] = []
    # Only shapes are asked for on meta.
    if (outgoing or incoming) and not blocks[0].is_meta:
        operations = _operations(outgoing, incoming, crossings[0].group)
        works = call_backend("an exchange", ranks, dist.batch_isend_irecv, operations)
        peers = [[operation.peer] for operation in operations]
        if len(works) < len(operations):  # NCCL has one work for all
            peers = [ranks] * len(works)
    # While messages travel: of a move that does nothing, the result must be no view of the block.
    outs = [
        block if crossing.makes_new_tensor else block.clone(memory_format=torch.contiguous_format)
        for crossing, block in zip(crossings, blocks, strict=True)
    ]

    def arrive() -> list[Tensor]:
        for work, others in zip(works, peers, strict=True):
            call_backend("an exchange", others, work.wait)
        operations.clear()  # which kept what is sent until now
        arrived = {rank: iter(message.tensors) for rank, message in incoming.items()}
        return [
            _assembled(crossing, out, arrived)
            for crossing, out in zip(crossings, outs, strict=True)
        ]

    return arrive


def _operations(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, _Message],
    group: dist.ProcessGroup,
) -> list[dist.P2POp]:
    """List the receives and sends of this process, by the rank at the other end."""
    # Receives first: a gloo sender waits until the receiver says that it is ready, and that notice
    # would come behind all that this rank sends.
    operations = [
        dist.P2POp(dist.irecv, message.buffer, rank, group) for rank, message in incoming.items()
    ]
    for rank, tensors in outgoing.items():
        operations.append(dist.P2POp(dist.isend, _bytes_of(tensors), rank, group))
    return operations


def _assembled(
    crossing: TransferExecutable, block: Tensor, arrived: Mapping[int, Iterator[Tensor]]
) -> Tensor:
    """Put together this rank's block on the new mesh, of what arrived and what it keeps.

    Args:
        crossing: The move between meshes.
        block: This process's block on the source's mesh, of which it keeps rows.
        arrived: What has arrived from each rank, from this crossing on.
    """
    if not crossing.sends:
        return block
    if crossing.assembly is None:
        # An empty tensor for a process without a block: see the top of the file.
        return block.new_empty(0)
    # In the order of the messages: those that share rows are added in it, and sums of floats depend
    # on the order.
    messages = [next(arrived[part.peer]) for part in crossing.received]
    return crossing.assembly.place(block, messages)


class _Message(NamedTuple):
    """Tensors of any dtypes as bytes, since not every backend sends booleans and complex numbers.

    Attributes:
        buffer: The bytes.
        tensors: Views of them.
    """

    buffer: Tensor
    tensors: list[Tensor]

    @classmethod
    def like(cls, tensors: Sequence[Tensor], device: torch.device) -> _Message:
        """Allocate a message for tensors like these, which may be on `meta`.

        A float32 [2, 3] and an int64 [4] have 24 and 32 bytes, at 0:24 and 32:64 of the buffer.
        """
        places: list[slice] = []
        end = 0
        for tensor in tensors:
            # A view of a dtype begins at a multiple of its size: the next multiple after the end.
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.nbytes
            places.append(slice(start, end))
        buffer = torch.empty(end, dtype=torch.uint8, device=device)
        views = [
            buffer[place].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        return cls(buffer, views)


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as the bytes of a message. A single one is viewed, not copied."""
    if len(tensors) == 1:
        x = tensors[0].contiguous()
        # The strides of a single element count for nothing, except when its bytes are viewed.
        return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    message = _Message.like(tensors, tensors[0].device)
    for view, tensor in zip(message.tensors, tensors, strict=True):
        view.copy_(tensor)
    return message.buffer


def _place(plan: Plan) -> str:
    return f"the messages between the meshes of '{plan.src} -> {plan.dst}'"


@functools.lru_cache(maxsize=256)
def _processes(mesh: Mesh, ranks: tuple[int, ...], world: dist.ProcessGroup) -> ProcessMesh:
    """Return the processes of a mesh. Cached by the world too: its groups end with it."""
    if isinstance(mesh, SubAxisMesh):
        return _processes(mesh.base, ranks, world).factored(mesh.split)
    return mesh_of_ranks(mesh, ranks, world=world)


@functools.cache
def _connect(tensor_device: torch.device, group: dist.ProcessGroup) -> None:
    """Call the whole group once, which NCCL wants; later some processes may have nothing to send."""
    meet = functools.partial(dist.all_reduce, torch.zeros(1, device=tensor_device), group=group)
    ranks = dist.get_process_group_ranks(group)
    _, store = backend_and_store(group)
    name = f"xshard/meeting on {tensor_device}"
    naming_who_has_not_come(name, ranks, rank_in(group), store, timeout_of(group), meet)


def _seen_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return the same bits as another dtype of the same size."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
