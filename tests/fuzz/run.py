"""Chains by the thousand: which seeds fail on a runtime, and the simplest chains that still do.

Decides how chains are batched, and what is reported. A seed names its chain for ever.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.fuzz import runtimes
from tests.fuzz.chains import Chain, random_chain, random_mesh
from tests.fuzz.judge import Arrived, Trip, judge, trip
from tests.fuzz.shrinking import shrunk

Ask = Callable[[Sequence[Trip]], list[Arrived]]


@dataclass(frozen=True)
class Runtime:
    """Who moves, how many chains at once, on meshes of how many devices; alike: a batch has one mesh."""

    ask: Ask
    batch: int
    devices: tuple[int | None, ...] = (None,)
    alike: bool = False


RUNTIMES = {
    "numpy": Runtime(runtimes.on_numpy, 50),
    "torch": Runtime(runtimes.on_torch, 100, (4, 8)),
    "jax": Runtime(runtimes.on_jax, 16, (2, 3, 4, 6, 8), alike=True),
    "jax-novma": Runtime(partial(runtimes.on_jax, mode="novma"), 16, (2, 3, 4, 6, 8), alike=True),
}


@dataclass
class Report:
    """What happened so far. failures: seed -> the error, and the simplest chain."""

    chains: int = 0
    moves: int = 0
    refused: int = 0
    pulled: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.chains} chains, {self.moves} redistributions, {self.pulled} chains with gradients, "
            f"{self.refused} chains refused at their first move, {len(self.failures)} failures"
        )


def fuzz(name: str, seed: int, moves: int, shrink: bool = True) -> Iterator[Report]:
    """Run at least so many redistributions on a runtime; yields the report after every batch."""
    runtime, report, batch = RUNTIMES[name], Report(), 0
    while report.moves < moves:
        devices = runtime.devices[batch % len(runtime.devices)]
        chains = list(_batch(runtime, f"{seed}.{batch}", devices))
        for number, why in _failures(runtime, chains, report):
            chain = chains[number]
            if shrink:
                chain = shrunk(chain, lambda each, why=why: _kind(_failure(runtime, each)) == _kind(why))
            report.failures[f"{name} {seed}.{batch}.{number}"] = (
                f"{_failure(runtime, chain) or why}\n    {chain}"
            )
        batch += 1
        yield report


def _batch(runtime: Runtime, seed: str, devices: int | None) -> Iterator[Chain]:
    import random

    mesh = random_mesh(random.Random(seed), devices) if runtime.alike else None
    for number in range(runtime.batch):
        yield random_chain(f"{seed}.{number}", devices, mesh)


def _failures(runtime: Runtime, chains: Sequence[Chain], report: Report) -> Iterator[tuple[int, str]]:
    """The numbers of chains that fail in a batch, and why."""
    trips: dict[int, Trip] = {}
    for number, chain in enumerate(chains):
        report.chains += 1
        try:
            found = trip(chain)
        except Exception as error:
            yield number, _text(error)
            continue
        if found is None:
            report.refused += 1
        else:
            trips[number] = found
            report.moves += len(found.plans)
            report.pulled += found.cotangents is not None
    try:
        arrived = runtime.ask(list(trips.values()))
    except Exception:  # which of them, those that travel alone say
        for number in trips:
            if why := _failure(runtime, chains[number]):
                yield number, why
        return
    for (number, found), there in zip(trips.items(), arrived, strict=True):
        try:
            judge(found, there)
        except Exception as error:
            yield number, _text(error)


def _failure(runtime: Runtime, chain: Chain) -> str:
    """Why a chain fails, or nothing."""
    try:
        if (found := trip(chain)) is not None:
            judge(found, runtime.ask([found])[0])
    except Exception as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    return said if isinstance(error, AssertionError) else f"{said}\n{traceback.format_exc(limit=-2)}"


def _kind(why: str) -> str:
    return "".join(char for char in why[:60] if not char.isdigit())
