"""Cases by the thousand: which seeds fail on a runtime, and the simplest cases that still do.

A seed names its case for ever.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.fuzz import contractions, judge, owned, runtimes, trees
from tests.fuzz.chains import random_chain, random_crossing, random_mesh
from tests.fuzz.shrinking import shrunk


@dataclass(frozen=True)
class Subject:
    """Draws a case for a seed; makes a trip of it, None if it is refused; and judges the result."""

    draw: Callable[..., Any]
    trip: Callable[[Any], Any]
    judge: Callable[[Any, Any], None]


CHAINS = Subject(random_chain, judge.trip, judge.judge)
CROSSINGS = Subject(random_crossing, judge.trip, judge.judge)
OWNED = Subject(owned.random_owned, judge.trip, owned.judged)
EINSUMS = Subject(contractions.random_contraction, contractions.planned, contractions.judge)
TREES = Subject(trees.random_tree, trees.carried, trees.judge)
EVEN = Subject(partial(trees.random_tree, even=True), trees.carried, trees.judge)


@dataclass(frozen=True)
class Runtime:
    """A subject, the function that runs it, cases at once, and devices. alike: a batch has one mesh."""

    subject: Subject
    ask: Callable[[Sequence[Any]], list[Any]]
    batch: int
    devices: tuple[int | None, ...] = (None,)
    alike: bool = False


_NUMPY = (runtimes.on_numpy, 50)
_TORCH = (runtimes.on_torch, 100, (4, 8))
_JAX = (16, (2, 3, 4, 6, 8), True)
RUNTIMES = {
    "numpy": Runtime(CHAINS, *_NUMPY),
    "torch": Runtime(CHAINS, *_TORCH),
    "jax": Runtime(CHAINS, runtimes.on_jax, *_JAX),
    "jax-novma": Runtime(CHAINS, partial(runtimes.on_jax, mode="novma"), *_JAX),
    "numpy-owners": Runtime(OWNED, *_NUMPY),
    "torch-owners": Runtime(OWNED, *_TORCH),
    "jax-owners": Runtime(OWNED, runtimes.on_jax, *_JAX),
    "numpy-between": Runtime(CROSSINGS, *_NUMPY),
    "torch-between": Runtime(CROSSINGS, *_TORCH),
    "numpy-einsum": Runtime(EINSUMS, *_NUMPY),
    "torch-einsum": Runtime(EINSUMS, *_TORCH),
    "jax-einsum": Runtime(EINSUMS, runtimes.on_jax, *_JAX),
    "numpy-trees": Runtime(TREES, *_NUMPY),
    "torch-trees": Runtime(TREES, *_TORCH),
    "jax-trees": Runtime(EVEN, runtimes.on_jax, 16, (8,)),
    "jax-novma-einsum": Runtime(EINSUMS, partial(runtimes.on_jax, mode="novma"), *_JAX),
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
        drawn = f"{self.chains} cases, {self.moves} moves, {self.pulled} cases with gradients"
        return f"{drawn}, {self.refused} refused at their first move, {len(self.failures)} failures"


def fuzz(name: str, seed: int, moves: int, shrink: bool = True) -> Iterator[Report]:
    """Run at least so many moves on a runtime; yields the report after every batch."""
    runtime = RUNTIMES[name]
    report = Report()
    batch = 0
    while report.moves < moves:
        devices = runtime.devices[batch % len(runtime.devices)]
        chains = list(_batch(runtime, f"{seed}.{batch}", devices))[:moves]
        for number, why in _failures(runtime, chains, report):
            chain = chains[number]
            if shrink:
                chain = shrunk(
                    chain, lambda each, why=why: _kind(_failure(runtime, each)) == _kind(why)
                )
            report.failures[f"{name} {seed}.{batch}.{number}"] = (
                f"{_failure(runtime, chain) or why}\n    {chain}"
            )
        batch += 1
        yield report


def _batch(runtime: Runtime, seed: str, devices: int | None) -> Iterator[Any]:
    mesh = random_mesh(random.Random(seed), devices) if runtime.alike else None
    for number in range(runtime.batch):
        yield runtime.subject.draw(f"{seed}.{number}", devices, mesh)


def _failures(runtime: Runtime, chains: Sequence[Any], report: Report) -> Iterator[tuple[int, str]]:
    """The numbers of chains that fail in a batch, and why."""
    trips: dict[int, Any] = {}
    for number, chain in enumerate(chains):
        report.chains += 1
        try:
            found = runtime.subject.trip(chain)
        except Exception as error:
            yield number, _text(error)
            continue
        if found is None:
            report.refused += 1
        else:
            trips[number] = found
            report.moves += found.moves
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
            runtime.subject.judge(found, there)
        except Exception as error:
            yield number, _text(error)


def _failure(runtime: Runtime, chain: Any) -> str:
    """Why a chain fails, or nothing."""
    try:
        if (found := runtime.subject.trip(chain)) is not None:
            runtime.subject.judge(found, runtime.ask([found])[0])
    except Exception as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    return (
        said if isinstance(error, AssertionError) else f"{said}\n{traceback.format_exc(limit=-2)}"
    )


def _kind(why: str) -> str:
    return "".join(char for char in why[:60] if not char.isdigit())
