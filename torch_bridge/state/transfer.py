"""`transfer`: a tree of local blocks on one mesh of processes becomes a tree on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_bridge.calls.move import ranks_of
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, check_world, mesh_of
from torch_bridge.redistribution.blocks import tensor_device_of
from torch_bridge.state.execute import execute
from torch_bridge.state.facts import (
    described,
    first_on_device,
    mesh_in,
    plan_described,
    rules_text,
    target_rules,
    tree_of,
)
from xshard import Profile
from xshard.errors import MeshError
from xshard.state import Names
from xshard.state.progress import Progress
from xshard.state.transfer import BUCKET


def transfer(
    tree: Any,
    rules: Any,
    dst_mesh: MeshLike,
    *,
    src_mesh: MeshLike | None = None,
    names: Names | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    bucket_bytes: int | str | None = BUCKET,
    donate: bool = False,
    progress: Progress = None,
    dry_run: bool = False,
    profile: str | Path | Profile = "auto",
    device: torch.device | str | None = None,
) -> Any:
    """Move a tree of local blocks to another mesh; returns new tensors.

    All processes of the world call it, with equal arguments except for `tree` and `device`. Processes outside
    of the source pass None; processes outside of the destination get None. The tree may be nested dicts and
    lists of tensors, DTensors, numbers and text: the state of a module or an optimizer. With `names` the
    result is a dict by destination names.

    rules, names, bucket_bytes, profile: as in `xshard.state.plan_transfer`. A DTensor brings its source
    layout: a rule without an arrow is its destination layout, and `rules=(None, there)` is enough with
    `names`. src_mesh: the mesh of the tree; a tree of DTensors brings it. shapes: global shapes by name, if
    blocks differ in size. donate: free the memory of the tree bucket by bucket; its tensors are empty
    afterwards. progress: True for a bar, or a function called with the bytes done and the total; None shows a
    bar for large trees on a terminal. dry_run: send nothing and return the plan, which prints as a table.
    device: the device of the result on a process that has no tree.

    Raises DesyncError if ranks disagree or one of them fails, MeshError, and as `plan_transfer` does, on all
    ranks, before anything is sent.

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
        everywhere = {
            "destination": f"{mesh_of(dst_mesh)!r} on {ranks_of(dst_mesh)}",
            **rules_text(rules, names),
            "bucket_bytes": str(bucket_bytes),
        }
        if tree is None:
            return CallFacts(everywhere, {}, (), {})
        local, facts = described(tree, rules, src_mesh, shapes)
        blocks.update(local)
        return CallFacts(everywhere, facts, mesh_in(facts)[1], {})

    reports = compare_ranks(range(dist.get_world_size()), "transfer", prepared)
    facts = next((report["within"] for report in reports.values() if report["within"]), None)
    if facts is None:
        raise MeshError("no rank brings a tree", hint="ranks of src_mesh pass theirs, all others None")
    senders = mesh_in(facts)[1]
    if missing := [r for r in senders if not reports[r]["within"]]:
        raise MeshError(
            f"ranks {missing} of the source bring no tree", hint=f"all of {senders} pass their blocks"
        )
    plan = plan_described(
        tuple(facts.items()),
        target_rules(rules),
        names,
        mesh_of(dst_mesh),
        (senders, ranks_of(dst_mesh)),
        machine(profile),
        bucket_bytes,
    )
    if dry_run:
        return plan
    tensor_device = tensor_device_of(first_on_device(blocks), device, dst_mesh)
    group = dist.group.WORLD
    assert group is not None
    received = execute(plan, blocks, tensor_device, group, donate=donate, progress=progress)
    return None if received is None else tree_of(received, plan, facts, names)
