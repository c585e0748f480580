"""`transfer`: a tree of blocks on one mesh of processes becomes one on another.

Decides what processes tell each other before anything is sent, and what each of them gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_bridge.between import tensor_device_of
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, check_world, mesh_of
from torch_bridge.planning import ranks_of
from torch_bridge.state.carry import carry
from torch_bridge.state.facts import asked, described, first_on_device, mesh_in, planned, rules_there, tree_of
from xshard import Profile
from xshard.errors import MeshError
from xshard.state import Names
from xshard.state.progress import Progress
from xshard.state.transfer import BUCKET


def transfer(
    tree: Any,
    rules: Any,
    *,
    src_mesh: MeshLike | None = None,
    dst_mesh: MeshLike,
    names: Names | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    bucket_bytes: int | str | None = BUCKET,
    donate: bool = False,
    progress: Progress = False,
    dry_run: bool = False,
    profile: str | Path | Profile = "auto",
    device: torch.device | str | None = None,
) -> Any:
    """This process's blocks of a tree on one mesh -> its blocks on another, as new tensors.

    All processes of the world call it, with equal arguments but for `tree` and `device`; None is the tree of
    those that are not in the source, and the result of those that are not in the destination. The tree may
    be nested dicts and lists of tensors, DTensors, numbers and text: the state of a module or an optimizer.
    With `names` the result is a dict by the names there.

    rules, names, bucket_bytes, profile: as in `xshard.state.plan_transfer`. The layout of a DTensor here is
    its own: of a rule without an arrow it takes the layout there, and `rules=(None, there)` will do.
    src_mesh: not needed by a tree of DTensors. shapes: global shapes by name, where blocks differ in size.
    donate: the tree's memory is given back bucket by bucket; its tensors are empty then.
    progress: a bar by bytes, or a function that is called with the bytes done and all bytes.
    dry_run: nothing is sent, and the result is the plan, which prints as a table.
    device: where a process that has no tree wants the result.

    Raises DesyncError where ranks disagree or one of them cannot do it, MeshError, and as `plan_transfer`
    does, on all ranks alike, before anything is sent.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> def move():
    ...     state = {"w": torch.ones(2, 4), "step": torch.tensor(3.0)}
    ...     rules = {"w": "o/dp i -> o i/tp", "**": "..."}
    ...     return xt.transfer(state, rules, src_mesh=Mesh(dp=2), dst_mesh=Mesh(tp=2))
    >>> {name: tuple(x.shape) for name, x in xt.testing.run_ranks(2, move)[0].items()}
    {'w': (4, 2), 'step': ()}
    """
    check_world()
    everyone = range(dist.get_world_size())
    blocks: dict[str, torch.Tensor] = {}

    def prepared() -> CallFacts:
        ends = {"destination": f"{mesh_of(dst_mesh)!r} on {ranks_of(dst_mesh)}"}
        options = asked(rules, names) | {"bucket_bytes": str(bucket_bytes)}
        if tree is None:
            return CallFacts(ends | options, {}, (), {})
        own, facts = described(tree, rules, src_mesh, shapes)
        blocks.update(own)
        return CallFacts(ends | options, facts, mesh_in(facts)[1], {})

    reports = compare_ranks(everyone, "transfer", prepared)
    facts = next((one["within"] for one in reports.values() if one["within"]), None)
    if facts is None:
        raise MeshError("no rank brings a tree", hint="those of src_mesh pass theirs, all others None")
    givers = mesh_in(facts)[1]
    if missing := [r for r in givers if not reports[r]["within"]]:
        raise MeshError(
            f"ranks {missing} of the source bring no tree", hint=f"all of {givers} pass their blocks"
        )
    plan = planned(
        tuple(facts.items()),
        rules_there(rules),
        names,
        mesh_of(dst_mesh),
        (givers, ranks_of(dst_mesh)),
        machine(profile),
        bucket_bytes,
    )
    if dry_run:
        return plan
    where = tensor_device_of(first_on_device(blocks), device, dst_mesh)
    group = dist.group.WORLD
    assert group is not None
    found = carry(plan, blocks, where, group, donate=donate, progress=progress)
    return None if found is None else tree_of(found, plan, facts, names)
