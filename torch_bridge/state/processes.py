"""All processes of a mesh at one piece of work: each learns what the others found, or why not.

Decides how errors of one become errors of all, so that none waits for it. Knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch_bridge.mesh.desync import CallFacts, compare_ranks


def together(
    ranks: Sequence[int],
    asked: str,
    work: Callable[[], Any],
    *,
    agree: bool = False,
    timeout: timedelta | None = None,
) -> list[Any]:
    """Do this on all of these ranks -> what it returns on each of them, as JSON has it.

    agree: it returns facts by name, which have to be the same on all. timeout: how long they wait for each
    other.
    Raises DesyncError on all where one fails or, with `agree`, differs; where all fail, the error of each.
    """
    if len(ranks) == 1:
        return [work()]

    def facts() -> CallFacts:
        found = work()
        if agree:
            return CallFacts({name: str(fact) for name, fact in found.items()}, {}, (), {})
        return CallFacts({}, {}, (), {"found": json.dumps(found)})

    reports = compare_ranks(ranks, asked, facts, timeout)
    return [reports[r]["everywhere"] or json.loads(reports[r]["own"]["found"]) for r in ranks]
