"""Causes that another run shows, where the blocks alone do not: the same run with one thing changed.

Decides what is tried, and for which mismatches. What the blocks alone show is in `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from xshard.errors import XshardError
from xshard.layout import Mesh
from xshard.testing.comparison import mismatches
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.mismatch import Mismatch
from xshard.testing.runs import SIDES, Asked, Side, Truth

_MOST = 8  # arguments that are transposed one at a time


def explained(found: Sequence[Mismatch], asked: Asked, truth: Truth, tol: float | None) -> Iterator[Mismatch]:
    """The mismatches; those without a cause have the one that a trial of their run shows."""
    causes: dict[tuple[Side, Mesh], Cause | None] = {}
    for runtime, mesh in dict.fromkeys(map(_run, found)):
        own = [m for m in found if _run(m) == (runtime, mesh)]
        wrong = [m for m in own if m.subject.kind == "output"]
        if wrong:
            tried = _transposition(asked, truth, tol, runtime, mesh) if any(map(_is_open, wrong)) else None
            causes[runtime, mesh] = tried or Cause("output", "an output is wrong already")
        elif mesh.n_devices > 1 and any(map(_is_open, own)):
            causes[runtime, mesh] = _replica(asked, truth, runtime, mesh)
    for m in found:
        cause = causes.get(_run(m)) if _is_open(m) else None
        is_own = cause is not None and cause.name == "output" and m.subject.kind == "output"
        yield replace(m, cause=cause) if cause and not is_own else m


def _run(m: Mismatch) -> tuple[Side, Mesh]:
    return SIDES[m.subject.runtime == SIDES[1]], m.subject.mesh


def _is_open(m: Mismatch) -> bool:
    """Whether nothing explains it, or statistics alone explain a gradient."""
    return not m.problem and (
        m.cause is None or (m.subject.kind == "gradient" and m.cause.name == "one addend")
    )


def _transposition(asked: Asked, truth: Truth, tol: float | None, runtime: Side, mesh: Mesh) -> Cause | None:
    """The outputs are right if square arguments are transposed, one of them or all."""
    given = asked.problem
    square = [i for i, x in enumerate(given.values) if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1]
    for numbers in [[i] for i in square[:_MOST]] + ([square] if len(square) > 1 else []):
        values = tuple(np.swapaxes(x, -1, -2) if i in numbers else x for i, x in enumerate(given.values))
        try:
            run = replace(asked, problem=replace(given, values=values)).run(runtime, mesh, truth)
        except XshardError:
            continue
        if not any(m.subject.kind == "output" for m in mismatches(given, truth, [run], tol)[0]):
            names = ", ".join(given.names[i] for i in numbers)
            return Cause("transposed", f"right if {names} is transposed: one side has the transposed weight")
    return None


def _replica(asked: Asked, truth: Truth, runtime: Side, mesh: Mesh) -> Cause | None:
    """Cotangents differ where a redistribution means one value, as `check_replicated=True` finds it."""
    try:
        fault = asked.replica_fault(runtime, mesh, truth)
    except XshardError:
        return None
    if fault is None:
        return None
    reason, text, _, *rest = (line.strip() for line in fault.splitlines())
    told = "; ".join((f"{reason} {text}", *rest))
    return Cause("replica", f"gathered as a replica, and used by each device in its own way: {told}")
