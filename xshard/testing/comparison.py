"""All arrays of all runs against the truth, in the report's order; causes that another run shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

import numpy as np

from xshard import reference
from xshard.errors import XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.steps.base import Block
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.diagnosis.evidence import in_double, largest_value, whole
from xshard.testing.mismatch import DIFFERENCES, Mismatch, Subject, find_mismatch
from xshard.testing.moves import find_wrong, in_turn
from xshard.testing.question import Devices
from xshard.testing.runs import SIDES, Problem, RunAnswer, Runs, Side, Truth, wanted_gradient
from xshard.tolerances import DERIVATIVE, rounding

KINDS = ("output", "gradient", "parameter")


@dataclass(frozen=True)
class ComparedArray:
    """Blocks of one array of a run, the whole array that they should make, and the array's sharding."""

    kind: str
    name: str
    got: Devices
    whole: Block
    sharding: Sharding

    @property
    def blocks(self) -> Sharding:
        return self.sharding.dual if self.kind == "gradient" else self.sharding

    @property
    def want(self) -> Devices:
        if self.kind == "gradient":
            return wanted_gradient(self.whole, self.sharding)
        return tuple(reference.scatter(self.whole, self.sharding.layout, self.sharding.mesh))


def mismatches(
    problem: Problem, truth: Truth, runs: Sequence[RunAnswer], tol: float | None
) -> tuple[list[Mismatch], int]:
    """All mismatches, outputs before gradients before parameters, and the number of comparisons. runs: one
    device first; an array that differs there is then compared with the function's own result on one.
    """
    arguments = dict(zip(problem.names, problem.values, strict=True))
    arrays = truth.outputs.values(), truth.gradients.values(), truth.updated.values()
    largest = dict(zip(KINDS, map(largest_value, arrays), strict=True))
    wrong = list(_wrong_derivatives(problem, truth, runs[0].runtime))
    compared = len(truth.derivatives)
    draws = truth.draws or any(run.answer.draws for run in runs)

    def differs(array: ComparedArray, want: Devices, runtime: str, against: str) -> Mismatch | None:
        nonlocal compared
        compared += 1
        subject = Subject(array.kind, array.name, runtime, array.sharding.mesh, against)
        mismatch = find_mismatch(
            subject, array.got, want, array.blocks, tol, largest[array.kind], arguments
        )
        if mismatch is not None:
            wrong.append(_explained(mismatch, wrong, draws))
        return mismatch

    alone: dict[tuple[str, str, str], Block] = {}  # arrays that differ on one device
    right: dict[tuple[str, str, str, str], ComparedArray] = {}
    for run in runs:
        for array in _arrays(problem, truth, run):
            place = (run.runtime, array.kind, array.name)
            against = truth.source
            if place in alone:
                array = replace(array, whole=alone[place])
                against = f"{run.runtime} on one device"
            mismatch = differs(array, array.want, run.runtime, against)
            if mismatch is None:
                right[str(run.mesh), *place] = array
            elif run.mesh.n_devices == 1 and not mismatch.problem:
                alone[place] = whole(array.got, array.blocks)
    for (
        mesh,
        runtime,
        kind,
        name,
    ), array in right.items():  # both are right, and may differ all the same
        other = right.get((mesh, SIDES[1], kind, name)) if runtime == SIDES[0] else None
        if other is not None and (SIDES[1], kind, name) not in alone:
            differs(array, other.got, runtime, SIDES[1])
    return sorted(wrong, key=lambda m: KINDS.index(m.subject.kind)), compared


def _wrong_derivatives(problem: Problem, truth: Truth, runtime: str) -> Iterator[Mismatch]:
    """Gradients of the truth that are not its function's."""
    most = max((size for *_, size in truth.derivatives.values()), default=0.0)
    for i, (got, want, size) in truth.derivatives.items():
        subject = Subject("gradient", problem.names[i], runtime, truth.mesh, DIFFERENCES)
        sharding = Sharding(Layout.parse("direction"), truth.mesh, got[0].shape)
        tolerance = max(DERIVATIVE, rounding([problem.values[i].dtype.name]))
        if wrong := find_mismatch(
            subject, got, want, sharding, tolerance, max(100 * size, most), {}
        ):
            yield _explained(wrong, (), truth.draws)


def _explained(wrong: Mismatch, before: Sequence[Mismatch], draws: bool) -> Mismatch:
    """Without a cause, random numbers are one. If a parameter's gradient is wrong, that is the cause."""
    if draws and not wrong.problem and (wrong.cause is None or wrong.cause.name in _CHANCE):
        wrong = replace(wrong, cause=_RANDOM)
    gradient = replace(wrong.subject, kind="gradient")
    if wrong.subject.kind == "parameter" and any(m.subject == gradient for m in before):
        return replace(wrong, cause=Cause("gradient", "its gradient is wrong"))
    return wrong


def _arrays(problem: Problem, truth: Truth, run: RunAnswer) -> Iterator[ComparedArray]:
    """Every array of a run."""
    answer = run.answer
    shardings = problem.shardings(run.mesh)
    for name, got in answer.outputs.items():
        whole = truth.outputs[name]
        yield ComparedArray(
            "output", name, got, whole, Sharding(truth.layouts[name], run.mesh, whole.shape)
        )
    for i, got in (answer.gradients or {}).items():
        yield ComparedArray("gradient", problem.names[i], got, truth.gradients[i], shardings[i])
    for i, got in answer.updated.items():
        yield ComparedArray("parameter", problem.names[i], got, truth.updated[i], shardings[i])


def whole_of(
    problem: Problem, truth: Truth, run: RunAnswer, kind: str, name: str
) -> tuple[Block, Block]:
    """The whole array that blocks of a run stand for, and the one that they should; in double precision."""
    (array,) = (
        each for each in _arrays(problem, truth, run) if (each.kind, each.name) == (kind, name)
    )
    return in_double(whole(array.got, array.blocks)), in_double(array.whole)


_OWN = "own factors", "own statistics"
_RANDOM = Cause(
    "random",
    "each device draws from torch's own generator for its own block, as F.dropout does: leave that out "
    "(eval, p=0), or draw for the whole array by a seed",
)
_CHANCE = "first only right", "one addend"  # which random numbers of one generator resemble
_OUTPUT = Cause("output", "an output is wrong already")
_LAW = 1e-3  # how well an error keeps to a law
_MOST = 12  # sets of arguments that are transposed, beside the set of all


def explained(
    found: Sequence[Mismatch], runs: Runs, truth: Truth, tol: float | None
) -> Iterator[Mismatch]:
    """The mismatches; those without a cause have the one that a trial of their run shows."""
    causes: dict[tuple[Side, Mesh], Cause | None] = {}
    tried: dict[Side, Cause | None] = {}
    for runtime, mesh in dict.fromkeys(map(_run, found)):
        own = [m for m in found if _run(m) == (runtime, mesh)]
        if wrong := [m for m in own if m.subject.kind == "output"]:
            if (
                any(map(_is_open, wrong)) and runtime not in tried
            ):  # on the first mesh that shows it
                tried[runtime] = _transposition(runs, truth, tol, runtime, mesh)
            causes[runtime, mesh] = tried.get(runtime) or _OUTPUT
        elif mesh.n_devices > 1 and any(map(_is_open, own)):
            causes[runtime, mesh] = _replica(runs, truth, runtime, mesh)
    for m in found:
        cause = causes.get(_run(m)) if _is_open(m) else None
        is_own = cause is not None and cause.name == "output" and m.subject.kind == "output"
        yield replace(m, cause=cause) if cause and not is_own else m


def located(found: Sequence[Mismatch], runs: Runs, truth: Truth) -> Iterator[Mismatch]:
    """Mismatches of a function with itself on one device, with the first wrong redistribution. One without
    a cause of its own has the redistribution's, or a law by which the error grows with the devices.
    """
    several = [m for m in found if m.subject.against != DIFFERENCES]
    wrong, first = _first_wrong(several[0].subject, runs, truth) if several else (None, "")
    earlier: dict[tuple[str, str], Cause] = {}
    for m in found:
        kind = m.subject.kind
        mesh = m.subject.mesh
        array = (m.subject.kind, m.subject.name)
        here = [other for other in several if other.subject.mesh == mesh]
        is_first = m in several and mesh == several[0].subject.mesh
        cause = m.cause
        if not m.problem and (cause is None or cause.name == "one addend"):
            shown = wrong.cause if wrong and is_first and kind == several[0].subject.kind else None
            cause = shown or earlier.get(array) or _law(m, runs, truth) or cause
        if (
            cause is None
            and kind == "gradient"
            and any(other.subject.kind == "output" for other in here)
        ):
            cause = _OUTPUT
        elif cause is None:  # a factor per device shows in gradients alone
            causes = (other.cause for other in here if other.cause is not None)
            cause = next((c for c in causes if kind == "gradient" or c.name in _OWN), None)
        if cause is not None:
            earlier.setdefault(array, cause._replace(text=f"as on {mesh}: {cause.text}"))
        yield replace(m, cause=cause, first=first if is_first else "")


def _first_wrong(wrong: Subject, runs: Runs, truth: Truth) -> tuple[Mismatch | None, str]:
    """The first redistribution with a wrong block (cotangent if only gradients are wrong), and a sentence."""
    runtime = _side(wrong)
    mesh = wrong.mesh
    back = wrong.kind != "output"
    try:
        one, many = (runs.seen(runtime, each, truth) for each in (truth.mesh, mesh))
    except XshardError:
        return None, ""
    arguments = dict(zip(runs.problem.names, runs.problem.values, strict=True))
    before = ""
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
    kind = m.subject.kind
    name = m.subject.name
    mesh = m.subject.mesh
    for axis in mesh.long_axes:
        try:
            meshes = [Mesh({a: n if a == axis else 1 for a in mesh.axes}) for n in (2, 3)]
            own = [runs.run(_side(m.subject), each, truth) for each in meshes]
            (two, want), (three, _) = (
                whole_of(runs.problem, truth, run, kind, name) for run in own
            )
        except XshardError:
            continue
        for power, of in ((1, "a part"), (2, "of a sum of squares a part")):
            first = two**power - want**power
            then = three**power - want**power
            slack = _LAW * np.abs(then).max(initial=0)
            if slack and np.allclose(then, 2 * first, 0, slack):
                text = f"{of} is counted once on every device along {axis}, so the error grows"
                return Cause("counted", text)
            if slack and np.allclose(then, 4 / 3 * first, 0, slack):
                return Cause("divided", f"{of} is divided by the number of devices along {axis}")
    return None


def _side(subject: Subject) -> Side:
    return SIDES[subject.runtime == SIDES[1]]


def _run(m: Mismatch) -> tuple[Side, Mesh]:
    return _side(m.subject), m.subject.mesh


def _is_open(m: Mismatch) -> bool:
    """True if nothing explains it, or only statistics explain a gradient."""
    by_statistics = (
        m.subject.kind == "gradient" and m.cause is not None and m.cause.name == "one addend"
    )
    return not m.problem and (m.cause is None or by_statistics)


def _transposition(
    runs: Runs, truth: Truth, tol: float | None, runtime: Side, mesh: Mesh
) -> Cause | None:
    """The outputs are right if square arguments are transposed, one of them or all."""
    problem = runs.problem
    square = [
        i for i, x in enumerate(problem.values) if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1
    ]
    sets = islice((s for n in range(1, len(square)) for s in combinations(square, n)), _MOST)
    for numbers in (*sets, square) if square else ():
        values = tuple(
            np.swapaxes(x, -1, -2) if i in numbers else x for i, x in enumerate(problem.values)
        )
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
    moves = (
        each for cotangents in (False, True) for each in in_turn(seen, mesh.n_devices, cotangents)
    )
    fault = next((fault for each in moves if (fault := each.replica_fault)), None)
    if fault is None:
        return None
    reason, text, _, *rest = (line.strip() for line in str(fault).splitlines())
    said = "; ".join((f"{reason} {text}", *rest))
    return Cause(
        "replica", f"gathered as a replica, and used by each device in its own way: {said}"
    )
