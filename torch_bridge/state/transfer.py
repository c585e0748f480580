"""`transfer`: a tree of local blocks on one mesh of processes becomes a tree on another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.calls.move import ranks_of
from torch_bridge.lower.collectives import CARRIERS
from torch_bridge.lower.transfer import lower_transfer, run_transfers_together
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_groups import rank_in
from torch_bridge.mesh.process_mesh import DeviceLike, MeshLike, check_world, mesh_of
from torch_bridge.redistribution.blocks import tensor_device_of
from torch_bridge.state import facts as tree_facts
from xshard import ProfileLike
from xshard.errors import MeshError, api_boundary
from xshard.signatures import Bytes
from xshard.state import Names
from xshard.state.progress import Progress, reporting
from xshard.state.transfer import BUCKET, TransferKeywords, TransferRules
from xshard.state.tree_plan import ArrayPlan, PartMove, TreePlan

T = TypeVar("T")


class TorchTransferKeywords(TransferKeywords, total=False):
    """The keywords of `transfer` on which the type of its result does not depend."""

    src_mesh: MeshLike | None
    names: Names | None
    shapes: Mapping[str, Sequence[int]] | None
    device: DeviceLike | None


@overload
def transfer(
    tree: object,
    rules: TransferRules,
    dst_mesh: MeshLike,
    *,
    dry_run: Literal[True],
    **options: Unpack[TorchTransferKeywords],
) -> TreePlan: ...


@overload
def transfer(
    tree: T,
    rules: TransferRules,
    dst_mesh: MeshLike,
    *,
    dry_run: bool = False,
    **options: Unpack[TorchTransferKeywords],
) -> T: ...


@api_boundary
def transfer(  # noqa: PLR0913  both meshes, and options of plans and of their execution
    tree: Any,
    rules: TransferRules,
    dst_mesh: MeshLike,
    *,
    src_mesh: MeshLike | None = None,
    names: Names | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    bucket_bytes: Bytes = BUCKET,
    donate: bool = False,
    progress: Progress = None,
    dry_run: bool = False,
    profile: ProfileLike = "auto",
    device: DeviceLike | None = None,
) -> Any:
    """Move a tree of local blocks to another mesh.

        state = xt.transfer(state, {"w": "o/dp i -> o i/tp"}, serve_mesh, src_mesh=train_mesh)

    All processes of the world call it, with equal arguments except for `tree` and `device`.
    Processes outside of the source pass None; processes outside of the destination get None.

    Args:
        tree: Nested dicts and lists of tensors, DTensors, numbers and text, such as the state of a
            module or an optimizer.
        rules: "layout -> layout" by patterns over names, or a pair of rules, as in
            `xshard.state.plan_transfer`. A DTensor brings its source layout: a rule without an
            arrow is its destination layout, and `rules=(None, there)` is enough with `names`.
        dst_mesh: The mesh of the result.
        src_mesh: The mesh of a tree of other tensors than DTensors.
        names: As in `xshard.state.plan_transfer`.
        shapes: Global shapes by name, if blocks differ in size.
        bucket_bytes: As in `xshard.state.plan_transfer`.
        donate: Free the memory of the tree bucket by bucket.
        progress: True for a bar, or a function called with the bytes done and the total. None shows
            a bar for large trees on a terminal.
        dry_run: Send nothing and return the plan, which prints as a table.
        profile: As in `xshard.state.plan_transfer`.
        device: For the result on a process that has no tree.

    Returns:
        The tree, with new tensors; with `names`, a dict by destination names.

    Raises:
        DesyncError: Ranks disagree, or one of them fails; on all ranks, before anything is sent.
        MeshError: A tree or a mesh is missing, or a tensor is on another mesh; likewise.
        XshardError: As for `xshard.state.plan_transfer`; likewise.

    Examples:
        >>> import torch_bridge as xt
        >>> from xshard import Mesh
        >>> def move():
        ...     state = {"w": torch.ones(2, 4), "step": torch.tensor(3.0)}
        ...     rules = {"w": "o/dp i -> o i/tp", "**": "..."}
        ...     return xt.transfer(state, rules, Mesh(tp=2), src_mesh=Mesh(dp=2))
        >>> {name: tuple(x.shape) for name, x in xt.testing.run_ranks(2, move)[0].items()}
        {'w': (4, 2), 'step': ()}
    """
    check_world()
    blocks: dict[str, torch.Tensor] = {}

    def prepared() -> CallFacts:
        """Describe the tree and the options by texts for other ranks; fills `blocks`, too.

        `compare_ranks` calls it once on each rank: if one rank cannot describe its tree, all raise.
        Ranks of the source mesh have a tree, and compare their descriptions of it with each other;
        on the others it is None. The options must be equal on all.
        """
        equal_on_all = {
            "destination": f"{mesh_of(dst_mesh)!r} on {ranks_of(dst_mesh)}",
            **tree_facts.rules_text(rules, names),
            "bucket_bytes": str(bucket_bytes),
        }
        facts: dict[str, str] = {}
        senders: tuple[int, ...] = ()  # the ranks of the source mesh
        if tree is not None:
            local, facts = tree_facts.describe_tree(tree, rules, src_mesh, shapes)
            blocks.update(local)
            _, senders = tree_facts.mesh_in(facts)
        # Senders compare their descriptions with each other.
        return CallFacts(equal_on_all, equal_on_peers=facts, peers=senders)

    reports = compare_ranks(range(dist.get_world_size()), "transfer", prepared)
    facts = _facts_of_senders(reports)
    _, senders = tree_facts.mesh_in(facts)
    route = tree_facts.Route(
        dst_mesh=mesh_of(dst_mesh),
        src_devices=senders,
        dst_devices=ranks_of(dst_mesh),
        profile=machine_profile(profile),
        bucket_bytes=bucket_bytes,
    )
    dst_rules = tree_facts.target_rules(rules)
    # All ranks plan from the same text, and so reach the same plan.
    plan = tree_facts.plan_described(tuple(facts.items()), dst_rules, names, route)
    if dry_run:
        return plan
    # A process without a tree says by `device` where its result goes.
    tensor_device = tensor_device_of(tree_facts.first_on_device(blocks), device, dst_mesh)
    group = dist.group.WORLD
    assert group is not None
    received = execute(plan, blocks, tensor_device, group, donate=donate, progress=progress)
    if received is None:  # this process is outside of the destination
        return None
    return tree_facts.rebuild_tree(received, plan, facts, names)


def _facts_of_senders(reports: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Pick the description of the tree to send out of the reports of all ranks.

    A report has it under "within". It is equal on all ranks of the source mesh, which have compared
    it, and empty on all others. Raises MeshError unless each rank of the source mesh has one.

    Args:
        reports: The reports, by rank.
    """
    descriptions = {}
    for rank, report in reports.items():
        if report["equal_on_peers"]:
            descriptions[rank] = report["equal_on_peers"]
    if not descriptions:
        hint = "ranks of src_mesh pass theirs, all others None"
        raise MeshError("no rank brings a tree", hint=hint)
    facts, *_ = descriptions.values()
    _, senders = tree_facts.mesh_in(facts)
    # Each sender's block is needed: nobody can stand in for it.
    missing = [rank for rank in senders if rank not in descriptions]
    if missing:
        hint = f"all of {senders} pass theirs"
        raise MeshError(f"ranks {missing} of the source bring no tree", hint=hint)
    return facts


@torch.no_grad()
def execute(
    plan: TreePlan,
    blocks: MutableMapping[str, Tensor],
    tensor_device: torch.device,
    group: dist.ProcessGroup,
    *,
    donate: bool = False,
    progress: Progress = None,
) -> dict[str, Tensor] | None:
    """Send the blocks of a tree from a source mesh to a destination mesh, bucket by bucket.

    All processes of both meshes, which make up `group`, call it.

    Args:
        plan: The plan of the tree.
        blocks: This process's blocks of the source, by name; empty outside of the source.
        tensor_device: The device on which blocks travel.
        group: The processes of both meshes.
        donate: Whether to remove source blocks from `blocks`, and free them, after the last bucket
            that reads them.
        progress: Learns the bytes that have been sent.

    Returns:
        This process's blocks of the destination, by name; None outside of it.
    """
    # The group may join two programs, each with a world of its own: the rank counts in the group.
    rank = rank_in(group)
    src_device = _position(plan.src_devices, rank)
    dst_device = _position(plan.dst_devices, rank)
    received = {}
    with reporting(progress, plan.bytes_moved, group.rank() == 0) as report:
        for bucket, released in zip(plan.buckets, plan.released, strict=True):
            parts_of_arrays = _exchange_bucket(bucket, blocks, src_device, tensor_device, group)
            if dst_device is not None:
                for array, parts in zip(bucket, parts_of_arrays, strict=True):
                    received[array.name] = _join_parts(array, parts, dst_device)
            if donate and src_device is not None:
                for name in released:
                    _free(blocks.pop(name))
            report(sum(array.traffic.total() for array in bucket))
    return None if dst_device is None else received


def _exchange_bucket(
    bucket: Sequence[ArrayPlan],
    blocks: Mapping[str, Tensor],
    src_device: int | None,
    tensor_device: torch.device,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send the parts of a bucket's arrays, and return those that arrive: for each array one per move.

    All messages of a bucket travel together: small arrays cost little more than one.
    """
    moves = list(itertools.chain.from_iterable(array.moves for array in bucket))
    sent_parts = _parts_to_send(moves, blocks, src_device, tensor_device)
    exchanges = [lower_transfer(move.plan, tensor_device, group) for move in moves]
    arrived = iter(run_transfers_together(exchanges, sent_parts))  # in the order of `moves`
    return [list(itertools.islice(arrived, len(array.moves))) for array in bucket]


def _position(ranks: Sequence[int], rank: int) -> int | None:
    """Return the device of a rank in a mesh; None if it is not in the mesh."""
    return ranks.index(rank) if rank in ranks else None


def _parts_to_send(
    moves: Sequence[PartMove],
    blocks: Mapping[str, Tensor],
    src_device: int | None,
    tensor_device: torch.device,
) -> list[Tensor]:
    """Cut the part of an array that each move sends out of this process's source blocks.

    Returns one tensor per move, on `tensor_device`, in the dtype that travels.

    Args:
        moves: The moves.
        blocks: The blocks, by name.
        src_device: This process's position in the source mesh; None: it is outside, and its parts
            are empty, as moves take one on every process.
        tensor_device: The device on which parts travel.
    """
    parts = []
    for move in moves:
        part = torch.empty(0, device=tensor_device)
        if src_device is not None:
            part = _part(blocks[move.name], move.src.numpy_index(src_device))
        parts.append(part.to(tensor_device, getattr(torch, move.plan.dtype)))
    return parts


def _join_parts(array: ArrayPlan, parts: list[Tensor], device: int) -> Tensor:
    """Return the block of an array from the parts that its moves bring."""
    dtype = getattr(torch, array.dtype)
    if len(parts) == 1 and array.moves[0].dst.part.is_whole:
        return parts[0].to(dtype)  # the part is the whole block
    out = parts[0].new_empty(array.sharding.local_shape(device), dtype=dtype)
    # Several stored arrays make one array, or one makes a part of it.
    for move, part in zip(array.moves, parts, strict=True):
        index = _torch_index(move.dst.numpy_index(device))
        _bits(out)[index] = _bits(part.to(dtype))
    return out


def _part(block: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return some rows of a block; an empty index is the whole block."""
    if not index:
        return block
    return _bits(block)[_torch_index(index)].view(block.dtype)


def _bits(x: Tensor) -> Tensor:
    """Return the same bits as a dtype that torch can index and copy."""
    return x.view(CARRIERS.get(x.dtype, x.dtype))


def _torch_index(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows for rows in index)


def _free(block: Tensor) -> None:
    """Free the memory of a block, unless it is a view of a larger tensor."""
    # A view's storage has elements that the caller still needs.
    storage = block.untyped_storage()
    if storage.nbytes() == block.nbytes and storage.resizable():
        # Others may still hold the tensor, which would keep its memory: take it from the storage.
        storage.resize_(0)
