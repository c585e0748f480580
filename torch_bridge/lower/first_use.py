"""The first use of a plan: ranks compare it once, before it sends, by a small reduction in the groups that it
uses. The store would be asked by all ranks of a cluster at once."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.errors import DesyncError
from torch_bridge.lower.collectives import Collective
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.mesh.desync import CallFacts, compare_ranks


@functools.cache
def _agreed(world: object) -> set[int]:
    """Hashes of plans that ranks have compared: executables may be made again."""
    return set()


def compare_new(executables: Sequence[Any], device: torch.device) -> None:
    """Raise DesyncError unless all ranks that these executables send to are about to run the same plans. All
    of those ranks raise it, or none: 16 bytes are reduced per group."""
    agreed = _agreed(dist.group.WORLD)
    keyed = {hash((e.plan, e.processes.ranks, e.processes.device, device.type)): e for e in executables}
    new = [executable for key, executable in keyed.items() if key not in agreed]
    moves = [move for each in new for move in each.moves if isinstance(move, PackedCollective)]
    groups = list(dict.fromkeys(move.collective.group for move in moves))
    if groups and device.type != "meta" and not groups[0].graph_name:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        new[0].guarded(moves[0], _compare, [each.plan for each in new], groups, device)
    agreed.update(keyed)
    for executable in executables:
        executable.__dict__["is_new"] = False


def _compare(plans: Sequence[Any], groups: Sequence[Any], device: torch.device) -> None:
    text = ", ".join(f"{plan.src} -> {plan.dst}" for plan in plans)
    facts = {name: ", ".join(str(getattr(plan, name)) for plan in plans) for name in ("shape", "dtype")}
    facts["plan"] = "; ".join(str(step) for plan in plans for step in plan.steps)
    digest = hashlib.sha1(f"{text} {facts}".encode(), usedforsecurity=False).digest()
    number = int.from_bytes(digest[:7], "little")
    with _disable_current_modes(), torch.no_grad():
        values = torch.tensor([number, -number], device=device)
        for group in groups:
            values = Collective("all_reduce", group, (2,), (2,), "max").run(values, (2,))
        most, least = values.tolist()
    if most != -least:
        for group in groups:
            compare_ranks(group.ranks, text, functools.partial(CallFacts, facts, {}, group.ranks, {}))
        raise DesyncError(f"other ranks run another plan than '{text}'", hint="all make the same calls")
