"""Causes that another run shows, with one thing changed; `diagnosis` has those that blocks alone show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

import numpy as np

from xshard.errors import XshardError
from xshard.layout import Mesh
from xshard.testing.comparison import mismatches, whole_of
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.mismatch import DIFFERENCES, Mismatch, Subject
from xshard.testing.moves import find_wrong, in_turn
from xshard.testing.runs import SIDES, Runs, Side, Truth

_OUTPUT = Cause("output", "an output is wrong already")
_LAW = 1e-3  # how well an error keeps to a law
_MOST = 12  # sets of arguments that are transposed, beside the set of all


def explained(found: Sequence[Mismatch], runs: Runs, truth: Truth, tol: float | None) -> Iterator[Mismatch]:
    """The mismatches; those without a cause have the one that a trial of their run shows."""
    causes: dict[tuple[Side, Mesh], Cause | None] = {}
    tried: dict[Side, Cause | None] = {}
    for runtime, mesh in dict.fromkeys(map(_run, found)):
        own = [m for m in found if _run(m) == (runtime, mesh)]
        wrong = [m for m in own if m.subject.kind == "output"]
        if wrong:
            if any(map(_is_open, wrong)) and runtime not in tried:  # on the first mesh that shows it
                tried[runtime] = _transposition(runs, truth, tol, runtime, mesh)
            causes[runtime, mesh] = tried.get(runtime) or _OUTPUT
        elif mesh.n_devices > 1 and any(map(_is_open, own)):
            causes[runtime, mesh] = _replica(runs, truth, runtime, mesh)
    for m in found:
        cause = causes.get(_run(m)) if _is_open(m) else None
        is_own = cause is not None and cause.name == "output" and m.subject.kind == "output"
        yield replace(m, cause=cause) if cause and not is_own else m


def located(found: Sequence[Mismatch], runs: Runs, truth: Truth) -> Iterator[Mismatch]:
    """Mismatches of a function with itself on one device, with causes and the first wrong redistribution.

    The first mesh is run again to find it. A mismatch without its own cause inherits the cause of that
    redistribution, or a law by which the error grows with the number of devices.
    """
    several = [m for m in found if m.subject.against != DIFFERENCES]
    wrong, first = _first_wrong(several[0].subject, runs, truth) if several else (None, "")
    earlier: dict[tuple[str, str], Cause] = {}
    for m in found:
        kind, mesh, array = m.subject.kind, m.subject.mesh, (m.subject.kind, m.subject.name)
        here = [other for other in several if other.subject.mesh == mesh]
        is_first, cause = m in several and mesh == several[0].subject.mesh, m.cause
        if not m.problem and (cause is None or cause.name == "one addend"):
            shown = wrong.cause if wrong and is_first and kind == several[0].subject.kind else None
            cause = shown or earlier.get(array) or _law(m, runs, truth) or cause
        if cause is None and kind == "gradient" and any(other.subject.kind == "output" for other in here):
            cause = _OUTPUT
        elif cause is None:  # a factor per device shows in gradients alone
            causes = (other.cause for other in here if other.cause is not None)
            cause = next((c for c in causes if kind == "gradient" or c.name == "own factors"), None)
        if cause is not None:
            earlier.setdefault(array, cause._replace(text=f"as on {mesh}: {cause.text}"))
        yield replace(m, cause=cause, first=first if is_first else "")


def _first_wrong(wrong: Subject, runs: Runs, truth: Truth) -> tuple[Mismatch | None, str]:
    """The first redistribution with a wrong block (cotangent if only gradients are wrong), and a sentence."""
    runtime, mesh, back = _side(wrong), wrong.mesh, wrong.kind != "output"
    try:
        one, many = (runs.seen(runtime, each, truth) for each in (truth.mesh, mesh))
    except XshardError:
        return None, ""
    arguments, before = dict(zip(runs.problem.names, runs.problem.values, strict=True)), ""
    for a, b in zip(in_turn(one, 1, back), in_turn(many, mesh.n_devices, back), strict=False):
        if a.check.text != b.check.text:
            break
        mismatch = find_wrong(a, b, mesh, runtime, arguments)
        what = f"the gradient that comes back to {b}" if back else f"what {b} is given"
        if mismatch is not None:
            return mismatch, what + (f"; right is {before}" if before else "")
        before = what
    return None, before and f"after {before}, which is right"


def _law(m: Mismatch, runs: Runs, truth: Truth) -> Cause | None:
    """A cause by how the error grows along an axis, on which two and three devices are run."""
    kind, name, mesh = m.subject.kind, m.subject.name, m.subject.mesh
    for axis in (a for a in mesh.axes if mesh.size(a) > 1):
        try:
            meshes = [Mesh({a: n if a == axis else 1 for a in mesh.axes}) for n in (2, 3)]
            own = [runs.run(_side(m.subject), each, truth) for each in meshes]
            (two, want), (three, _) = (whole_of(runs.problem, truth, run, kind, name) for run in own)
        except XshardError:
            continue
        for power, of in ((1, "a part"), (2, "of a sum of squares a part")):
            first, then = two**power - want**power, three**power - want**power
            slack = _LAW * np.abs(then).max(initial=0)
            if slack and np.allclose(then, 2 * first, 0, slack):
                return Cause(
                    "counted", f"{of} is counted once on every device along {axis}, so the error grows"
                )
            if slack and np.allclose(then, 4 / 3 * first, 0, slack):
                return Cause("divided", f"{of} is divided by the number of devices along {axis}")
    return None


def _side(subject: Subject) -> Side:
    return SIDES[subject.runtime == SIDES[1]]


def _run(m: Mismatch) -> tuple[Side, Mesh]:
    return _side(m.subject), m.subject.mesh


def _is_open(m: Mismatch) -> bool:
    """True if nothing explains it, or only statistics explain a gradient."""
    return not m.problem and (
        m.cause is None or (m.subject.kind == "gradient" and m.cause.name == "one addend")
    )


def _transposition(runs: Runs, truth: Truth, tol: float | None, runtime: Side, mesh: Mesh) -> Cause | None:
    """The outputs are right if square arguments are transposed, one of them or all."""
    problem = runs.problem
    square = [i for i, x in enumerate(problem.values) if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1]
    sets = islice((s for n in range(1, len(square)) for s in combinations(square, n)), _MOST)
    for numbers in (*sets, square) if square else ():
        values = tuple(np.swapaxes(x, -1, -2) if i in numbers else x for i, x in enumerate(problem.values))
        try:
            run = replace(runs, problem=replace(problem, values=values)).run(runtime, mesh, truth)
        except XshardError:
            continue
        if not any(m.subject.kind == "output" for m in mismatches(problem, truth, [run], tol)[0]):
            names = " and ".join(problem.names[i] for i in numbers)
            return Cause("transposed", f"right with {names} transposed: one side has the transpose")
    return None


def _replica(runs: Runs, truth: Truth, runtime: Side, mesh: Mesh) -> Cause | None:
    """Cotangents differ where a redistribution means one value, as `check_replicated=True` finds it."""
    try:
        seen = runs.seen(runtime, mesh, truth)
    except XshardError:
        return None
    moves = (each for cotangents in (False, True) for each in in_turn(seen, mesh.n_devices, cotangents))
    fault = next((fault for each in moves if (fault := each.replica_fault)), None)
    if fault is None:
        return None
    reason, text, _, *rest = (line.strip() for line in str(fault).splitlines())
    said = "; ".join((f"{reason} {text}", *rest))
    return Cause("replica", f"gathered as a replica, and used by each device in its own way: {said}")
