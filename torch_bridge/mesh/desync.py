"""`debug=True`: ranks compare what they are about to do, before any of them does it.

Decides how ranks tell each other, and what is raised where they differ or one of them cannot go on. They
meet in the store of the process group, under their ranks and the number of the meeting: ranks that
are about to call different collectives still find each other there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_bridge.mesh.process_groups import name_of, timeout_of
from xshard import XshardError
from xshard.environment import is_on

# Whether every call is compared, as if all had `debug=True`.
ALWAYS = is_on("XSHARD_DEBUG")


class DesyncError(XshardError):
    """Ranks are about to do different things, or one of them cannot do what the others can."""


class CallFacts(NamedTuple):
    """What a rank is about to do: name -> value, as text.

    everywhere: what all ranks that meet must have equal. within: what only the ranks of `part` must, with
    which this one communicates. own: what may differ, and is told.
    """

    everywhere: dict[str, str]
    within: dict[str, str]
    part: Sequence[int]
    own: dict[str, str]


def compare_ranks(ranks: Sequence[int], asked: str, prepare: Callable[[], CallFacts]) -> None:
    """Meet with other ranks; return when all of them are about to do the same, else raise on all of them.

    ranks: the global ranks that meet, this one among them. asked: the user's own words. prepare: what finds
    out the facts; what it raises here is told to the others. It sends nothing.
    Raises DesyncError; where all ranks fail, what `prepare` raised.
    """
    world = dist.group.WORLD
    assert world is not None  # whoever has ranks has initialised the world
    error: Exception | None = None
    try:
        mine = {"asked": asked, **prepare()._asdict()}
    except Exception as raised:
        error, mine = raised, {"asked": asked, "failure": f"{type(raised).__name__}: {raised}"}
    told = _channel(tuple(sorted(ranks)), world).exchange(mine)
    if error is not None and all("failure" in one for one in told.values()):
        raise error
    if any("failure" in one for one in told.values()):
        raise _failed(told) from error
    differing = _differing(told)
    if differing:
        raise _desync(told, differing)


@dataclass
class _Channel:
    """Where some ranks meet, and how often they have."""

    ranks: tuple[int, ...]
    world: dist.ProcessGroup
    meetings: int = 0

    def exchange(self, mine: Mapping[str, object]) -> dict[int, dict]:
        """What this rank has to say -> what every rank said, by rank."""
        store, rank, number = c10d._get_default_store(), dist.get_rank(), self.meetings
        self.meetings += 1
        store.set(self._key(number, rank), json.dumps(mine))
        keys = [self._key(number, r) for r in self.ranks]
        try:
            store.wait(keys, timeout_of(self.world))
        except RuntimeError as error:  # DistStoreError, of a TCPStore
            self._missed(
                [r for r, key in zip(self.ranks, keys, strict=True) if not store.check([key])], mine, error
            )
        told = {r: json.loads(store.get(key)) for r, key in zip(self.ranks, keys, strict=True)}
        if number:
            store.delete_key(self._key(number - 1, rank))  # all who came to this meeting have read it
        return told

    def _key(self, number: int, rank: int) -> str:
        return f"xshard/compare_ranks/{name_of(self.ranks)}/{number}/{rank}"

    def _missed(self, missing: Sequence[int], mine: Mapping[str, object], error: Exception) -> NoReturn:
        waited_s = timeout_of(self.world).total_seconds()
        raise DesyncError(
            f"{_named(missing)} did not come to '{mine['asked']}' within {waited_s:g} s",
            hint=f"{_named(self.ranks)} of the mesh all call it, in the same order, with equal debug=",
        ) from error


@functools.cache
def _channel(ranks: tuple[int, ...], world: dist.ProcessGroup) -> _Channel:
    """Cached by the world too: its store ends with it, and threads may each have their own."""
    return _Channel(ranks, world)


def _differing(told: Mapping[int, dict]) -> list[str]:
    """The names of facts that should be equal and are not, in a fixed order."""
    everything = list(told.values())
    parts: dict[tuple[int, ...], list[dict]] = {}
    for one in everything:
        parts.setdefault(tuple(one["part"]), []).append(one)
    found = _unequal([one["everywhere"] for one in everything])
    for members in parts.values():
        found += _unequal([one["within"] for one in members])
    return list(dict.fromkeys(found))


def _unequal(facts: Sequence[Mapping[str, str]]) -> list[str]:
    return [name for name in facts[0] if len({one[name] for one in facts}) > 1]


def _desync(told: Mapping[int, dict], differing: Sequence[str]) -> DesyncError:
    def describe(one: dict) -> str:
        facts = {**one["own"], **one["within"], **one["everywhere"]}
        return ", ".join(
            [f"'{one['asked']}'", *(f"{name} {facts[name]}" for name in (*one["own"], *differing))]
        )

    return DesyncError(
        f"the ranks disagree about a redistribution: {', '.join(differing)}",
        hint=_lines(told, describe) + "\n  all ranks of a mesh call it with equal arguments",
    )


def _failed(told: Mapping[int, dict]) -> DesyncError:
    def describe(one: dict) -> str:
        return f"'{one['asked']}'" + (
            f"\n{one['failure']}".replace("\n", "\n    ") if "failure" in one else ""
        )

    bad = [rank for rank, one in told.items() if "failure" in one]
    return DesyncError(f"{_named(bad)} cannot do what the others can", hint=_lines(told, describe))


def _lines(told: Mapping[int, dict], describe: Callable[[dict], str]) -> str:
    """A line for every description, with the ranks it fits."""
    by_text: dict[str, list[int]] = {}
    for rank, one in told.items():
        by_text.setdefault(describe(one), []).append(rank)
    return "\n  ".join(f"{_named(ranks)}: {text}" for text, ranks in by_text.items())


def _named(ranks: Iterable[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0, 2 to 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"
