"""What a backend raises, told in terms of the plan that it was carrying out.

Decides which of its errors mean that a peer is gone, and what is said then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from torch_bridge.mesh.process_groups import timeout_of
from xshard import Plan, XshardError


class CollectiveError(XshardError, RuntimeError):
    """A collective failed: a process of its group has ended, has failed, or has not come in time.

    The backend's own error is its cause. Nothing that is sent afterwards in this world is to be relied on.
    """


def is_loss(error: RuntimeError) -> bool:
    """Whether it is what backends raise when a peer is lost: gloo has no class for it, NCCL has."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def lost(plan: Plan, where: str, ranks: Sequence[int], error: RuntimeError) -> CollectiveError:
    """The error of a plan in which the backend lost a peer. where: the step, in words."""
    world = dist.group.WORLD
    waits = "" if world is None else f" within {timeout_of(world).total_seconds():g} s"
    said = str(error).strip().splitlines()
    return CollectiveError(
        f"{where} of '{plan.src} -> {plan.dst}' failed on rank {dist.get_rank()}",
        hint=f"one of the ranks {', '.join(map(str, ranks))} has ended, has failed, or did not come{waits}"
        + (f"\n  the backend says: {said[0]}" if said else ""),
    )
