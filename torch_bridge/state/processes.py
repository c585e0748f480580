"""The processes of a mesh: which ranks they are, and work that all of them do, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.process_mesh import MeshLike, mesh_of, process_mesh
from xshard import Mesh


def rank() -> int:
    """The rank of this process; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes_of(mesh: MeshLike | None) -> tuple[int, ...]:
    """The ranks of a mesh; for None, the ranks of the world, or this process alone."""
    if not dist.is_initialized():
        if mesh is not None and mesh_of(mesh).n_devices > 1:
            process_mesh(mesh)  # raises
        return (0,)
    return tuple(range(dist.get_world_size())) if mesh is None else process_mesh(mesh).ranks


def axes_of(mesh: MeshLike | None) -> Mesh:
    """The axes of a mesh; None is the world as one axis."""
    return mesh_of(mesh) if mesh is not None else Mesh(world=len(processes_of(None)))


def all_or_none(
    ranks: Sequence[int],
    call: str,
    work: Callable[[], Any],
    *,
    agree: bool = False,
    timeout: timedelta | None = None,
) -> list[Any]:
    """Do the work on all of these ranks -> the result of each, as JSON has it.

    call: the text of the call in errors. agree: the results are facts by name, equal on all ranks. timeout:
    how long ranks wait for each other. Raises DesyncError on all ranks if one fails or, with `agree`,
    differs; if all fail, each raises its error.
    """
    if len(ranks) == 1:
        return [work()]

    def facts() -> CallFacts:
        result = work()
        if agree:
            return CallFacts({name: str(fact) for name, fact in result.items()}, {}, (), {})
        return CallFacts({}, {}, (), {"result": json.dumps(result)})

    reports = compare_ranks(ranks, call, facts, timeout)
    return [reports[r]["everywhere"] or json.loads(reports[r]["own"]["result"]) for r in ranks]
