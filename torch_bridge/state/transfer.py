"""`transfer`: a tree of local blocks on one mesh of processes becomes a tree on another."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.calls.move import ranks_of
from torch_bridge.lower.collectives import CARRIERS
from torch_bridge.lower.transfer import cross, run_together
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_groups import rank_in
from torch_bridge.mesh.process_mesh import MeshLike, check_world, mesh_of
from torch_bridge.redistribution.blocks import tensor_device_of
from torch_bridge.state import facts as tree_facts
from xshard import ProfileLike
from xshard.errors import MeshError
from xshard.rules import RulesLike
from xshard.state import Names
from xshard.state.progress import Progress, reporting
from xshard.state.transfer import BUCKET
from xshard.state.tree_plan import ArrayPlan, TreePlan


def transfer(
    tree: Any,
    rules: RulesLike | tuple[RulesLike | None, RulesLike],
    dst_mesh: MeshLike,
    *,
    src_mesh: MeshLike | None = None,
    names: Names | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    bucket_bytes: int | str | None = BUCKET,
    donate: bool = False,
    progress: Progress = None,
    dry_run: bool = False,
    profile: ProfileLike = "auto",
    device: torch.device | str | None = None,
) -> Any:
    """Move a tree of local blocks to another mesh; returns new tensors.

    All processes of the world call it, with equal arguments except for `tree` and `device`. Processes outside
    of the source pass None; processes outside of the destination get None. tree: nested dicts and lists of
    tensors, DTensors, numbers and text, as the state of a module or an optimizer. With `names` the result is
    a dict by destination names.

    rules, names, bucket_bytes, profile: as in `xshard.state.plan_transfer`. A DTensor brings its source
    layout: a rule without an arrow is its destination layout, and `rules=(None, there)` is enough with
    `names`. src_mesh: the mesh of a tree of other tensors. shapes: global shapes by name, if blocks differ in
    size. donate: free the memory of the tree bucket by bucket. progress: True for a bar, or a function called
    with the bytes done and the total; None shows a bar for large trees on a terminal. dry_run: send nothing
    and return the plan, which prints as a table. device: for the result on a process that has no tree.
    Raises, on all ranks, before anything is sent: DesyncError if ranks disagree or one of them fails,
    MeshError, and as `plan_transfer` does.

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
        destination = f"{mesh_of(dst_mesh)!r} on {ranks_of(dst_mesh)}"
        everywhere = {"destination": destination, **tree_facts.rules_text(rules, names)}
        everywhere["bucket_bytes"] = str(bucket_bytes)
        if tree is None:
            return CallFacts(everywhere, {}, (), {})
        local, facts = tree_facts.described(tree, rules, src_mesh, shapes)
        blocks.update(local)
        return CallFacts(everywhere, facts, tree_facts.mesh_in(facts)[1], {})

    reports = compare_ranks(range(dist.get_world_size()), "transfer", prepared)
    facts = next((report["within"] for report in reports.values() if report["within"]), None)
    if facts is None:
        raise MeshError(
            "no rank brings a tree", hint="ranks of src_mesh pass theirs, all others None"
        )
    senders = tree_facts.mesh_in(facts)[1]
    if missing := [r for r in senders if not reports[r]["within"]]:
        raise MeshError(
            f"ranks {missing} of the source bring no tree", hint=f"all of {senders} pass theirs"
        )
    where = mesh_of(dst_mesh), (senders, ranks_of(dst_mesh)), machine(profile), bucket_bytes
    plan = tree_facts.plan_described(
        tuple(facts.items()), tree_facts.target_rules(rules), names, *where
    )
    if dry_run:
        return plan
    tensor_device = tensor_device_of(tree_facts.first_on_device(blocks), device, dst_mesh)
    group = dist.group.WORLD
    assert group is not None
    received = execute(plan, blocks, tensor_device, group, donate=donate, progress=progress)
    return None if received is None else tree_facts.tree_of(received, plan, facts, names)


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
    """Source blocks by name -> destination blocks; None outside of that mesh. All of `group` call it."""
    rank = rank_in(group)
    both = (plan.src_devices, plan.dst_devices)
    src, dst = (devices.index(rank) if rank in devices else None for devices in both)
    last = {
        move.name: bucket for bucket in plan.buckets for array in bucket for move in array.moves
    }
    received: dict[str, Tensor] = {}
    with reporting(progress, plan.bytes_moved, group.rank() == 0) as report:
        for bucket in plan.buckets:
            moves = [move for array in bucket for move in array.moves]
            nothing = torch.empty(0, device=tensor_device)
            parts = list[Tensor]()
            for move in moves:
                part = (
                    nothing if src is None else _part(blocks[move.name], move.src.numpy_index(src))
                )
                parts.append(part.to(tensor_device, getattr(torch, move.plan.dtype)))
            results = iter(
                run_together([cross(move.plan, tensor_device, group) for move in moves], parts)
            )
            for array in bucket:
                arrived = [next(results) for _ in array.moves]
                if dst is not None:
                    received[array.name] = _assembled(array, arrived, dst)
            if donate:
                for name in [name for name in blocks if last.get(name) is bucket]:
                    _free(blocks.pop(name))
            report(sum(array.traffic.total() for array in bucket))
    return received if dst is not None else None


def _assembled(array: ArrayPlan, parts: list[Tensor], device: int) -> Tensor:
    """The block of an array from the parts that its moves bring."""
    dtype = getattr(torch, array.dtype)
    if len(parts) == 1 and not array.moves[0].dst.part.numpy_index:
        return parts[0].to(dtype)
    out = parts[0].new_empty(array.sharding.local_shape(device), dtype=dtype)
    for move, part in zip(array.moves, parts, strict=True):
        _bits(out)[_index(move.dst.numpy_index(device))] = _bits(part.to(dtype))
    return out


def _part(block: Tensor, index: tuple[Any, ...]) -> Tensor:
    return _bits(block)[_index(index)].view(block.dtype) if index else block


def _bits(x: Tensor) -> Tensor:
    """The same bits as a dtype that torch can index and copy."""
    return x.view(CARRIERS.get(x.dtype, x.dtype))


def _index(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows for rows in index)


def _free(block: Tensor) -> None:
    """Free the memory of a block, unless it is a view of a larger tensor."""
    storage = block.untyped_storage()
    if storage.nbytes() == block.nbytes and storage.resizable():
        storage.resize_(0)
