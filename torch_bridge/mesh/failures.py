"""Errors of a backend, reported in terms of the plan that was running.

Decides which errors of a backend mean that a peer is lost, and what the error says then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from torch_bridge.mesh.process_groups import timeout_of
from xshard import Plan, XshardError


class CollectiveError(XshardError, RuntimeError):
    """A collective failed: a process of its group has ended, has failed, or has not come in time.

    The backend's own error is its cause. Later communication in this world is unreliable.
    """


def is_loss(error: RuntimeError) -> bool:
    """Whether backends raise such an error when a peer is lost: gloo has no class for it, NCCL has."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def collective_error(plan: Plan, where: str, ranks: Sequence[int], error: RuntimeError) -> CollectiveError:
    """The error of a plan in which the backend lost a peer. where: the step, in words."""
    world = dist.group.WORLD
    waits = "" if world is None else f" within {timeout_of(world).total_seconds():g} s"
    said = str(error).strip().splitlines()
    return CollectiveError(
        f"{where} of '{plan.src} -> {plan.dst}' failed on rank {dist.get_rank()}",
        hint=f"one of the ranks {', '.join(map(str, ranks))} has ended, has failed, or did not come{waits}"
        + (f"\n  the backend says: {said[0]}" if said else ""),
    )
