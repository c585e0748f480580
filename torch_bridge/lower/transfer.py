"""A plan between two meshes as one process executes it: steps on its own mesh, and messages.

A transfer moves an array from a source mesh to a target mesh. It has three phases: steps among the source's
processes, messages from the source's processes to the target's (none if rows stay on their ranks), and
steps among the target's. A process may be in one of the meshes, in both, or in none.

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
from torch_bridge.lower.exchange import Assembly, PeerMessage
from torch_bridge.lower.executable import Executable, computed_once, dense
from torch_bridge.lower.rules import lower, no_arithmetic
from torch_bridge.lower.subarray import AFTER, BEFORE, box_rows, subarray
from torch_bridge.mesh.failures import call_backend, timeout_of, with_place_in_errors
from torch_bridge.mesh.process_groups import naming_who_has_not_come, rank_in
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of_ranks
from torch_bridge.versions.process_groups import backend_and_store
from xshard import Mesh, Plan
from xshard.errors import MeshError, PlanError
from xshard.layout.partition import ceil_div
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
    sent: tuple[PeerMessage, ...]  # to other ranks: rows of its block on the source's mesh
    received: tuple[PeerMessage, ...]  # from other ranks: rows of its block on the target's mesh
    # Makes the block on the target's mesh, of received rows and of rows that stay on this rank.
    assembly: Assembly | None  # None if this process is not in the target's mesh
    on_target: Executable | None  # the steps on the target's mesh
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
        """The shape of this process's block on the target's mesh; empty where it has none."""
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
    mesh, those after it on the target's; a process that is in one mesh only has no steps on the
    other. Raises DtypeError for a reduction without arithmetic, MeshError for ranks that are
    threads.
    """
    transfer = plan.transfer  # the step from mesh to mesh; None if the blocks stay where they are
    if transfer and transfer.op and getattr(torch, plan.dtype) in CARRIERS:
        raise no_arithmetic(transfer.op, plan.dtype)
    transfer_index = plan.steps.index(transfer) if transfer else len(plan.steps)
    source_stages = plan.stages[:transfer_index]
    target_stages = plan.stages[transfer_index + 1 :]
    on_source = _lower_on_mesh(plan, source_stages, plan.src_devices, tensor_device, group)
    on_target = _lower_on_mesh(plan, target_stages, plan.dst_devices, tensor_device, group)
    sends = transfer is not None and not transfer.is_in_place
    messages = _Messages()
    if sends:
        _prepare_to_send(plan, tensor_device, group)
        messages = _messages_of_rank(plan, tensor_device, rank_in(group))
    return TransferExecutable(
        plan=plan,
        tensor_device=tensor_device,
        group=group,
        on_source=on_source,
        sent=messages.sent,
        received=messages.received,
        assembly=messages.assembly,
        on_target=on_target,
        sends=sends,
    )


def _lower_on_mesh(
    plan: Plan,
    stages: tuple[Stage, ...],
    ranks: tuple[int, ...],
    tensor_device: torch.device,
    group: dist.ProcessGroup,
) -> Executable | None:
    """Lower the stages of a plan that run on the mesh of `ranks`; None if this process runs none."""
    if not stages or rank_in(group) not in ranks:
        return None
    steps_on_mesh = plan.sub_plan(stages)
    return lower(steps_on_mesh, _processes(steps_on_mesh.mesh, ranks, group), tensor_device)


def _prepare_to_send(plan: Plan, tensor_device: torch.device, group: dist.ProcessGroup) -> None:
    """Connect all processes of the group. Raises MeshError if they are threads."""
    if "threaded" in dist.get_backend_config(group):
        reason = "ranks that are threads cannot send messages to each other, "
        reason += "which a move between meshes needs"
        raise MeshError(reason, hint="run them as processes: torch_bridge.run_ranks, or torchrun")
    if tensor_device.type != "meta":
        title = functools.partial(_title, plan)
        ranks = ranks_of_plans([plan])
        with_place_in_errors(
            title, call_backend, "an exchange", ranks, _connect, tensor_device, group
        )


def ranks_of_plans(plans: Sequence[Plan]) -> list[int]:
    """Return the ranks of all meshes of some plans, ascending."""
    ranks: set[int] = set()
    for plan in plans:
        ranks.update(plan.src_devices, plan.dst_devices)
    return sorted(ranks)


class _Messages(NamedTuple):
    """What a rank sends and receives in a transfer: see the fields of `TransferExecutable`."""

    sent: tuple[PeerMessage, ...] = ()
    received: tuple[PeerMessage, ...] = ()
    assembly: Assembly | None = None


def _messages_of_rank(plan: Plan, tensor_device: torch.device, rank: int) -> _Messages:
    """List the messages that one rank sends in a transfer, and those that it receives.

    Rows of a sent message are rows of this rank's block on the source's mesh, those of a received
    one of its block on the target's.
    """
    transfer = plan.transfer
    assert transfer is not None
    # Messages name devices of the two meshes; the group knows ranks. A rank in both meshes may keep
    # rows: then it is its own peer, in both lists.
    sent: list[PeerMessage] = []
    received: list[PeerMessage] = []
    for message in transfer.messages:
        sender = plan.src_devices[message.src]
        receiver = plan.dst_devices[message.dst]
        if sender == rank:
            shape = transfer.source.local_shape(message.src)
            rows = box_rows(message.box, BEFORE)
            sent.append(PeerMessage(receiver, subarray(shape, rows, tensor_device)))
        if receiver == rank:
            shape = transfer.target.local_shape(message.dst)
            rows = box_rows(message.box, AFTER)
            received.append(PeerMessage(sender, subarray(shape, rows, tensor_device)))
    assembly = None
    if rank in plan.dst_devices:
        new_shape = transfer.target.local_shape(plan.dst_devices.index(rank))
        adds_in_order = plan.profile.adds_in_order
        assembly = Assembly.of(
            new_shape, sent, received, rank, transfer.op, rounds_once=adds_in_order
        )
    return _Messages(_travelling(sent, rank), _travelling(received, rank), assembly)


def _travelling(messages: Sequence[PeerMessage], rank: int) -> tuple[PeerMessage, ...]:
    """Leave out what stays on this rank: the assembly reads these rows from the block."""
    return tuple(message for message in messages if message.peer != rank)


def run_transfers_together(
    transfers: Sequence[TransferExecutable], blocks: Sequence[Tensor]
) -> list[Tensor]:
    """Run several transfers at once, with one message for each pair of processes."""
    return begin_transfers_together(transfers, blocks)()


def begin_transfers_together(
    transfers: Sequence[TransferExecutable], blocks: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """Begin several transfers, with one message for each pair of processes.

    Args:
        transfers: The transfers, all of one group of processes.
        blocks: This process's block of each, on its source's mesh; empty where it has none.

    Returns:
        A function that waits, and returns its block of each on the target's mesh, new tensors.
    """
    sent_blocks: list[Tensor] = []
    for transfer, block in zip(transfers, blocks, strict=True):
        sent_block = _run_steps(transfer.on_source, dense(block))
        # Some dtypes cannot be sent: their bits travel as another dtype of the same size. The steps
        # on each mesh see the values.
        sent_blocks.append(_view_as(CARRIERS.get(block.dtype, block.dtype), sent_block))
    plans = [transfer.plan for transfer in transfers if transfer.sends]
    title = functools.partial(_title, transfers[0].plan)
    arrive = with_place_in_errors(
        title, _begin_exchange, transfers, sent_blocks, ranks_of_plans(plans)
    )
    dtypes = [block.dtype for block in blocks]

    def finish() -> list[Tensor]:
        arrived = with_place_in_errors(title, arrive)
        return [
            _run_steps(transfer.on_target, _view_as(dtype, sent_block))
            for transfer, dtype, sent_block in zip(transfers, dtypes, arrived, strict=True)
        ]

    return finish


def _run_steps(steps: Executable | None, block: Tensor) -> Tensor:
    """Run the steps on one mesh; a process outside of it has none, and keeps its block."""
    return block if steps is None else steps(block)


def _begin_exchange(
    transfers: Sequence[TransferExecutable], blocks: Sequence[Tensor], ranks: Sequence[int]
) -> Callable[[], list[Tensor]]:
    """Begin to send the messages of several transfers; the function returned waits for all blocks.

    All rows for one rank, of all transfers, travel in one message of bytes.

    Args:
        transfers: Some may send nothing.
        blocks: This process's block of each, after the steps on the source's mesh.
        ranks: The processes that send or receive, for errors.
    """
    rows_to_rank = _read_rows_to_send(transfers, blocks)
    message_from_rank = _allocate_messages(transfers, blocks)
    operations: list[dist.P2POp] = []
    # Only shapes are asked for on meta.
    if (rows_to_rank or message_from_rank) and not blocks[0].is_meta:
        operations = _operations(rows_to_rank, message_from_rank, transfers[0].group)
    works = _start(operations, ranks)
    # While messages travel: the result of a transfer that does nothing must be no view of the block.
    source_blocks = [
        block if transfer.makes_new_tensor else block.clone(memory_format=torch.contiguous_format)
        for transfer, block in zip(transfers, blocks, strict=True)
    ]

    def arrive() -> list[Tensor]:
        for work, awaited_ranks in works:
            call_backend("an exchange", awaited_ranks, work.wait)
        operations.clear()  # it kept the buffers that are sent alive until now
        tensors_from_rank = {
            rank: iter(message.tensors) for rank, message in message_from_rank.items()
        }
        return [
            _assemble(transfer, block, tensors_from_rank)
            for transfer, block in zip(transfers, source_blocks, strict=True)
        ]

    return arrive


def _read_rows_to_send(
    transfers: Sequence[TransferExecutable], blocks: Sequence[Tensor]
) -> dict[int, list[Tensor]]:
    """Return the rows to send to each rank, in the order of the transfers."""
    rows_to_rank: dict[int, list[Tensor]] = {}
    for transfer, block in zip(transfers, blocks, strict=True):
        for message in transfer.sent:
            rows_to_rank.setdefault(message.peer, []).append(message.rows.read(block))
    return rows_to_rank


def _allocate_messages(
    transfers: Sequence[TransferExecutable], blocks: Sequence[Tensor]
) -> dict[int, _Message]:
    """Allocate the message that arrives from each rank, with its rows in the order of the transfers."""
    rows_from_rank: dict[int, list[Tensor]] = {}  # tensors without data
    for transfer, block in zip(transfers, blocks, strict=True):
        for message in transfer.received:
            rows = block.new_empty(message.rows.shape, device="meta")
            rows_from_rank.setdefault(message.peer, []).append(rows)
    device = blocks[0].device
    return {rank: _Message.like(rows, device) for rank, rows in rows_from_rank.items()}


def _operations(
    rows_to_rank: Mapping[int, Sequence[Tensor]],
    message_from_rank: Mapping[int, _Message],
    group: dist.ProcessGroup,
) -> list[dist.P2POp]:
    """List the receives and sends of this process, one for each peer."""
    # Receives first: a gloo sender waits until the receiver says that it is ready, and that notice
    # would come behind all that this rank sends.
    operations = [
        dist.P2POp(dist.irecv, message.buffer, rank, group)
        for rank, message in message_from_rank.items()
    ]
    for rank, rows in rows_to_rank.items():
        operations.append(dist.P2POp(dist.isend, _bytes_of(rows), rank, group))
    return operations


def _start(
    operations: Sequence[dist.P2POp], ranks: Sequence[int]
) -> list[tuple[dist.Work, Sequence[int]]]:
    """Start receives and sends; return their handles, each with the ranks that it waits for."""
    if not operations:
        return []
    works = call_backend("an exchange", ranks, dist.batch_isend_irecv, operations)
    if len(works) < len(operations):  # NCCL returns one handle for all
        return [(work, ranks) for work in works]
    peers = [[operation.peer] for operation in operations]
    return list(zip(works, peers, strict=True))


def _assemble(
    transfer: TransferExecutable, block: Tensor, tensors_from_rank: Mapping[int, Iterator[Tensor]]
) -> Tensor:
    """Put together this rank's block on the target's mesh, of rows that arrived and rows that it keeps.

    Args:
        transfer: The transfer.
        block: This process's block on the source's mesh, of which it keeps rows.
        tensors_from_rank: Yields what arrived from each rank; those of earlier transfers are taken.
    """
    if not transfer.sends:
        return block
    if transfer.assembly is None:
        # An empty tensor for a process without a block: see the top of the file.
        return block.new_empty(0)
    # In the order of the messages: those that share rows are added in it, and sums of floats depend
    # on the order.
    tensors = [next(tensors_from_rank[message.peer]) for message in transfer.received]
    return transfer.assembly.place(block, tensors)


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
        slices: list[slice] = []
        end = 0
        for tensor in tensors:
            # A view of a dtype begins at a multiple of its size: the next multiple after the end.
            start = ceil_div(end, _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.nbytes
            slices.append(slice(start, end))
        buffer = torch.empty(end, dtype=torch.uint8, device=device)
        views = [
            buffer[interval].view(tensor.dtype).view(tensor.shape)
            for interval, tensor in zip(slices, tensors, strict=True)
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


def _title(plan: Plan) -> str:
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
    reduce_on_all = functools.partial(
        dist.all_reduce, torch.zeros(1, device=tensor_device), group=group
    )
    ranks = dist.get_process_group_ranks(group)
    _, store = backend_and_store(group)
    name = f"xshard/meeting on {tensor_device}"
    naming_who_has_not_come(name, ranks, rank_in(group), store, timeout_of(group), reduce_on_all)


def _view_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return the same bits as another dtype of the same size."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
