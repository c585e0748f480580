"""Errors of a backend, reported in terms of the plan that was running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_bridge.errors import CollectiveError
from torch_bridge.mesh.waiting import timeout_of


def name_place(error: Exception, place: str) -> None:
    """Add the part of a plan to its error: to a CollectiveError, which is raised again, or as a note."""
    if isinstance(error, CollectiveError):
        raise CollectiveError(_failed(place), hint=error.hint) from error.__cause__
    error.add_note(f"in {place}")


def during(place: Callable[[], str], act: Callable[..., Any], *args: Any) -> Any:
    """Call a part of a plan; its errors name the `place`, as in `name_place`."""
    try:
        return act(*args)
    except Exception as error:
        name_place(error, place())
        raise


def raise_lost_peer(error: RuntimeError, what: str, ranks: Sequence[int]) -> None:
    """Raise CollectiveError if a backend's error in the operation `what` of some ranks means a lost peer."""
    # gloo has no class for a lost peer, NCCL has; a lack of memory has another.
    if type(error) is RuntimeError or isinstance(error, dist.DistError):
        raise CollectiveError(_failed(what), hint=_explained(ranks, error)) from error


def call_backend(what: str, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that only communicates. Raises CollectiveError as `raise_lost_peer` does."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise_lost_peer(error, what, ranks)
        raise


def _failed(what: str) -> str:
    return f"{what} failed on rank {dist.get_rank()}"


def _explained(ranks: Sequence[int], error: RuntimeError) -> str:
    world = dist.group.WORLD
    waits = "" if world is None else f" within {timeout_of(world).total_seconds():g} s"
    said = str(error).strip().splitlines()
    return (
        f"one of the ranks {', '.join(map(str, ranks))} has ended, has failed, did not come{waits},"
        " or made another call"
        + (f"\n  the backend says: {said[0]}" if said else "")
        + "\n  with XSHARD_DEBUG=1 in the environment the ranks compare their calls, and say what differs"
    )
