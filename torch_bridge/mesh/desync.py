"""`debug=True`: ranks compare what they are about to do, before any of them does it. They meet in the store
under their ranks and a number, and find each other even if they are about to call different collectives."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_bridge.errors import DesyncError
from torch_bridge.mesh.failures import timeout_of, within
from torch_bridge.mesh.process_groups import ranks_digest
from torch_bridge.mesh.process_mesh import callers
from xshard.arguments import is_on

# Whether every call is compared, as with `debug=True`.
ALWAYS = is_on("XSHARD_DEBUG")
LISTED = 8  # most facts that an error lists


class CallFacts(NamedTuple):
    """A call that a rank is about to make, as facts by name. Equal are `everywhere` on all ranks that meet,
    and `within` on the ranks of `part`, with which this rank communicates. `own` may differ, for the
    error."""

    everywhere: dict[str, str]
    within: dict[str, str]
    part: Sequence[int]
    own: dict[str, str]


def compare_ranks(
    ranks: Sequence[int], asked: str, prepare: Callable[[], CallFacts], timeout: timedelta | None = None
) -> dict[int, dict[str, Any]]:
    """Meet other ranks -> the facts of each if all are about to make the same call. Else all raise
    DesyncError; if all fail, the error of `prepare`, which sends nothing. asked: the call in the user's
    words."""
    world = dist.group.WORLD
    assert world is not None  # there are no ranks without a world
    error: Exception | None = None
    try:
        mine = {"asked": asked, **prepare()._asdict()}
    except Exception as raised:
        error, mine = raised, {"asked": asked, "failure": f"{type(raised).__name__}: {raised}"}
    reports = _channel(tuple(sorted(ranks)), world).exchange(mine, timeout or timeout_of(world))
    if error is not None and all("failure" in one for one in reports.values()):
        raise error
    if any("failure" in one for one in reports.values()):
        raise _failed(reports) from error
    differing = _differing(reports)
    if differing:
        raise _desync(reports, differing[:LISTED])
    return reports


def compare_call(mesh: object, text: str, prepare: Callable[[], CallFacts]) -> None:
    """Raise on all ranks of a mesh, as `compare_ranks` does. A rank outside returns: its call raises
    later."""
    if dist.is_initialized() and dist.get_rank() in (ranks := callers(mesh)):
        compare_ranks(ranks, text, prepare)


@dataclass
class _Channel:
    """A place in the store where some ranks meet, and the number of their meetings."""

    ranks: tuple[int, ...]
    world: dist.ProcessGroup
    meetings: int = 0

    def exchange(self, mine: Mapping[str, object], timeout: timedelta) -> dict[int, dict]:
        """The report of this rank -> the reports of all ranks, by rank."""
        store, rank, number = c10d._get_default_store(), dist.get_rank(), self.meetings
        self.meetings += 1
        try:
            return within(timeout, self._meet, store, rank, number, mine, timeout)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise DesyncError(
                f"rank {rank} cannot compare '{mine['asked']}' with {_ranks_text(self.ranks)}: no store",
                hint=f"the process or node that has it has ended, or cannot be reached: {error}",
            ) from error

    def _meet(
        self, store: Any, rank: int, number: int, mine: Mapping[str, object], timeout: timedelta
    ) -> dict[int, dict]:
        store.set(self._key(number, rank), json.dumps(mine))
        if number > 1:  # while others come; all ranks that came to the last meeting have read this one
            store.delete_key(self._key(number - 2, rank))
        keys = [self._key(number, r) for r in self.ranks]
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:  # DistStoreError, of a TCPStore
            missing = [r for r, key in zip(self.ranks, keys, strict=True) if not store.check([key])]
            if missing:  # else all have come since
                call, callers_ = f"'{mine['asked']}'", _ranks_text(self.ranks)
                raise DesyncError(
                    f"{_ranks_text(missing)} did not come to {call} within {timeout.total_seconds():g} s",
                    hint=f"{callers_} of the mesh all call it, in the same order, with equal debug=",
                ) from error
        return dict(zip(self.ranks, map(json.loads, store.multi_get(keys)), strict=True))

    def _key(self, number: int, rank: int) -> str:
        return f"xshard/debug/{ranks_digest(self.ranks)}/{number}/{rank}"


# Cached by the world too: its store ends with it, and threads may each have their own.
_channel = functools.cache(_Channel)


def _differing(reports: Mapping[int, dict]) -> list[str]:
    """The names of facts that must be equal and differ, in a fixed order."""
    parts: dict[tuple[int, ...], list[dict[str, str]]] = {}
    for one in reports.values():
        parts.setdefault(tuple(one["part"]), []).append(one["within"])
    names: dict[str, None] = {}
    for facts in ([one["everywhere"] for one in reports.values()], *parts.values()):
        everything = dict.fromkeys(name for one in facts for name in one)
        names |= {name: None for name in everything if len({one.get(name) for one in facts}) > 1}
    return list(names)


def _desync(reports: Mapping[int, dict], differing: Sequence[str]) -> DesyncError:
    def describe(one: dict) -> str:
        facts = {**one["own"], **one["within"], **one["everywhere"]}
        shown = (f"{name} {facts.get(name)}" for name in (*one["own"], *differing))
        return ", ".join([f"'{one['asked']}'", *shown])

    return DesyncError(
        f"the ranks disagree about a redistribution: {', '.join(differing)}",
        hint=_lines(reports, describe) + "\n  all ranks of a mesh call it with equal arguments",
    )


def _failed(reports: Mapping[int, dict]) -> DesyncError:
    def describe(one: dict) -> str:
        return "\n    ".join([f"'{one['asked']}'", *one.get("failure", "").splitlines()])

    bad = [rank for rank, one in reports.items() if "failure" in one]
    return DesyncError(f"{_ranks_text(bad)} cannot do what the others can", hint=_lines(reports, describe))


def _lines(reports: Mapping[int, dict], describe: Callable[[dict], str]) -> str:
    """One line per description, with the ranks that have it."""
    by_text: dict[str, list[int]] = {}
    for rank, one in reports.items():
        by_text.setdefault(describe(one), []).append(rank)
    return "\n  ".join(f"{_ranks_text(ranks)}: {text}" for text, ranks in by_text.items())


def _ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0, 2 to 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"
