"""All arrays of all runs against the truth, and both runtimes against each other, in the report's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xshard import reference
from xshard.layout import Layout, Sharding
from xshard.steps.base import Block
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.diagnosis.evidence import in_double
from xshard.testing.mismatch import DIFFERENCES, Mismatch, Subject, find_mismatch
from xshard.testing.problem import Problem, wanted_gradient
from xshard.testing.question import Devices
from xshard.testing.runs import SIDES, RunAnswer, Truth, whole
from xshard.tolerances import DERIVATIVE, rounding

KINDS = ("output", "gradient", "parameter")


@dataclass(frozen=True)
class ComparedArray:
    """Blocks of one array of a run, and the whole array that they should make.

    sharding: the output's or argument's; blocks of a gradient are under its dual.
    """

    kind: str
    name: str
    got: Devices
    whole: Block
    sharding: Sharding

    @property
    def blocks(self) -> Sharding:
        layout = self.sharding.layout
        return self.sharding.with_layout(layout.dual if self.kind == "gradient" else layout)

    @property
    def want(self) -> Devices:
        if self.kind == "gradient":
            return wanted_gradient(self.whole, self.sharding)
        return tuple(reference.scatter(self.whole, self.sharding.layout, self.sharding.mesh))


def mismatches(
    problem: Problem, truth: Truth, runs: Sequence[RunAnswer], tol: float | None
) -> tuple[list[Mismatch], int]:
    """All mismatches, outputs before gradients before parameters, and the number of comparisons.

    On one device gradients are compared with differences, if the truth has them.

    runs: one device first. If an array differs on one device already, that is reported once: on several
    devices it is then compared with the function's own result on one.
    """
    arguments = dict(zip(problem.names, problem.values, strict=True))
    largest = {
        "output": _largest(truth.outputs.values()),
        "gradient": _largest(truth.gradients.values()),
        "parameter": _largest(truth.updated.values()),
    }
    wrong = list(_wrong_derivatives(problem, truth, runs[0].runtime))
    compared = len(truth.derivatives)

    def differs(array: ComparedArray, want: Devices, subject: Subject) -> Mismatch | None:
        nonlocal compared
        compared += 1
        mismatch = find_mismatch(subject, array.got, want, array.blocks, tol, largest[array.kind], arguments)
        if mismatch is not None:
            wrong.append(_explained(mismatch, wrong))
        return mismatch

    alone: dict[tuple[str, str, str], Block] = {}  # arrays that differ on one device
    right: dict[tuple[str, str, str, str], ComparedArray] = {}
    for run in runs:
        for array in _arrays(problem, truth, run):
            place = run.runtime, array.kind, array.name
            against = truth.source
            if place in alone:
                array, against = replace(array, whole=alone[place]), f"{run.runtime} on one device"
            subject = Subject(array.kind, array.name, run.runtime, run.mesh, against)
            mismatch = differs(array, array.want, subject)
            if mismatch is None:
                right[str(run.mesh), *place] = array
            elif run.mesh.n_devices == 1 and not mismatch.problem:
                alone[place] = whole(array.got, array.blocks)
    for (mesh, runtime, kind, name), array in right.items():  # both are right, and may differ all the same
        other = right.get((mesh, SIDES[1], kind, name)) if runtime == SIDES[0] else None
        if other is not None and (SIDES[1], kind, name) not in alone:
            differs(array, other.got, Subject(kind, name, runtime, array.sharding.mesh, SIDES[1]))
    return sorted(wrong, key=lambda m: KINDS.index(m.subject.kind)), compared


def _wrong_derivatives(problem: Problem, truth: Truth, runtime: str) -> Iterator[Mismatch]:
    """Gradients of the truth that are not its function's."""
    most = max((size for *_, size in truth.derivatives.values()), default=0.0)
    for i, (got, want, size) in truth.derivatives.items():
        subject = Subject("gradient", problem.names[i], runtime, truth.mesh, DIFFERENCES)
        sharding = Sharding(Layout.parse("direction"), truth.mesh, got[0].shape)
        tolerance = max(DERIVATIVE, rounding([problem.values[i].dtype.name]))
        wrong = find_mismatch(subject, got, want, sharding, tolerance, max(100 * size, most), {})
        if wrong is not None:
            yield wrong


def _explained(wrong: Mismatch, before: Sequence[Mismatch]) -> Mismatch:
    """If a parameter's gradient is wrong, that is the cause."""
    gradient = replace(wrong.subject, kind="gradient")
    if wrong.subject.kind == "parameter" and any(m.subject == gradient for m in before):
        return replace(wrong, cause=Cause("gradient", "its gradient is wrong"))
    return wrong


def _arrays(problem: Problem, truth: Truth, run: RunAnswer) -> Iterator[ComparedArray]:
    """Every array of a run."""
    mesh, answer = run.mesh, run.answer
    for name, got in answer.outputs.items():
        whole = truth.outputs[name]
        yield ComparedArray("output", name, got, whole, Sharding(truth.layouts[name], mesh, whole.shape))
    for kind, arrays, wholes in (
        ("gradient", answer.gradients or {}, truth.gradients),
        ("parameter", answer.updated, truth.updated),
    ):
        for i, got in arrays.items():
            sharding = Sharding(problem.layouts[i], mesh, problem.values[i].shape)
            yield ComparedArray(kind, problem.names[i], got, wholes[i], sharding)


def whole_of(problem: Problem, truth: Truth, run: RunAnswer, kind: str, name: str) -> tuple[Block, Block]:
    """The whole array that blocks of a run stand for, and the one that they should; in double precision."""
    (array,) = (each for each in _arrays(problem, truth, run) if (each.kind, each.name) == (kind, name))
    return in_double(whole(array.got, array.blocks)), in_double(array.whole)


def _largest(arrays: Iterable[Block]) -> float:
    sizes = (np.abs(x).max(initial=0, where=np.isfinite(x)) for x in map(in_double, arrays))
    return float(max(sizes, default=0.0))
