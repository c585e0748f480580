"""Errors of a backend, reported in terms of the plan that was running.

Decides which errors of a backend mean that a peer is lost, and what the error says then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_bridge.errors import CollectiveError
from torch_bridge.mesh.waiting import timeout_of


def during(place: Callable[[], str], act: Callable[..., Any], *args: Any) -> Any:
    """Call a part of a plan. A CollectiveError then says in which `place`; another error has it as a note."""
    try:
        return act(*args)
    except CollectiveError as error:
        raise CollectiveError(_failed(place()), hint=error.hint) from error.__cause__
    except Exception as error:
        error.add_note(f"in {place()}")
        raise


def call_backend(what: str, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that does nothing but communicate. Raises CollectiveError for a lost peer.

    what, ranks: what it does and who takes part, for the error.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        # gloo has no class for a lost peer, NCCL has; a lack of memory has another.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise CollectiveError(_failed(what), hint=_explained(ranks, error)) from error


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
