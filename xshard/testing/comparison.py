"""Compare every array of every run with the truth: outputs, gradients and updated parameters.

Why arrays differ is decided elsewhere: by the traces in the blocks (`diagnosis`), by further runs
(`trials`), and by the recorded redistributions (`first_wrong`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xshard import reference
from xshard.layout import Layout, Mesh, Sharding
from xshard.steps.base import Block
from xshard.testing.blocks import wanted_gradient
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.diagnosis.evidence import Case, in_double, largest_value, whole
from xshard.testing.mismatch import DIFFERENCES, Mismatch, Subject, find_mismatch
from xshard.testing.problem import Problem
from xshard.testing.question import Devices, Side
from xshard.testing.runs import RunAnswer, Truth
from xshard.tolerances import DERIVATIVE, rounding

KINDS = ("output", "gradient", "parameter")  # in the order of a report
RESEMBLE_CHANCE = ("first only right", "one addend", "seam")  # causes that random numbers look like
RANDOM_NUMBERS = Cause(
    "random",
    "each device draws from torch's own generator for its own block, as F.dropout does: leave that out "
    "(eval, p=0), or draw for the whole array by a seed",
)


class ComparisonResult(NamedTuple):
    """What differs, and the number of comparisons that were made."""

    mismatches: list[Mismatch]
    n_compared: int


class ArrayKey(NamedTuple):
    """One array of one runtime's function, on whatever mesh it runs."""

    runtime: Side
    kind: str
    name: str


@dataclass(frozen=True)
class ComparedArray:
    """The blocks of one array of a run, and the whole array that they should stand for.

    Attributes:
        kind: One of `KINDS`.
        name: Of the output, or of the argument that a gradient or parameter belongs to.
        got: The run's blocks, one per device.
        whole: The right array.
        sharding: Of the output or argument; gradients are under its dual.
    """

    kind: str
    name: str
    got: Devices
    whole: Block
    sharding: Sharding

    @property
    def block_sharding(self) -> Sharding:
        """The sharding under which the blocks are held: the dual one for gradients."""
        return self.sharding.dual if self.kind == "gradient" else self.sharding

    @property
    def want(self) -> Devices:
        """The right blocks."""
        if self.kind == "gradient":
            return wanted_gradient(self.whole, self.sharding)
        return tuple(reference.scatter(self.whole, self.sharding.layout, self.sharding.mesh))


def compare_runs(
    problem: Problem, truth: Truth, runs: Sequence[RunAnswer], tol: float | None
) -> ComparisonResult:
    """Compare outputs, gradients and updated parameters of all runs with the right values.

    The runs of torch and of JAX are compared with each other, too. Where a function is wrong on one
    device already, its sharded runs are compared with its own result on one device: so the report
    still tells whether the sharding is right.

    Args:
        problem: The checked input: arguments, layouts and meshes.
        truth: The right values, from a run on one device.
        runs: The runs of each runtime, those on one device first.
        tol: The largest error, relative to the largest value of an array. None: by the dtype.

    Returns:
        The mismatches, outputs before gradients before parameters, and the number of comparisons.
    """
    comparison = _Comparison(problem, truth, runs, tol)
    comparison.compare_derivatives(runs[0].runtime)
    for run in runs:
        comparison.compare_with_truth(run)
    comparison.compare_runtimes()

    mismatches = sorted(comparison.mismatches, key=lambda m: KINDS.index(m.subject.kind))
    return ComparisonResult(mismatches, comparison.n_compared)


class _Comparison:
    """The comparisons made so far, and their mismatches."""

    def __init__(
        self, problem: Problem, truth: Truth, runs: Sequence[RunAnswer], tol: float | None
    ) -> None:
        self.problem = problem
        self.truth = truth
        self.tol = tol
        self.mismatches: list[Mismatch] = []
        self.n_compared = 0
        self._draws_random_numbers = truth.draws or any(run.answer.draws for run in runs)
        # By kind of array. In an array that should be zero, an error is judged by the largest value
        # of all arrays of its kind: beside that, it may be rounding.
        self._largest_values = {
            "output": largest_value(truth.outputs.values()),
            "gradient": largest_value(truth.gradients.values()),
            "parameter": largest_value(truth.updated.values()),
        }
        # The whole arrays of functions that are wrong on one device already: their sharded runs are
        # compared with these.
        self._wrong_on_one_device: dict[ArrayKey, Block] = {}
        self._right: dict[tuple[Mesh, ArrayKey], ComparedArray] = {}

    def compare_derivatives(self, runtime: Side) -> None:
        """Compare the gradients of the run on one device with finite differences of its loss.

        They are compared along random directions d: the inner product of gradient and d, and
        (loss(x + h d) - loss(x - h d)) / 2h. `truth.derivatives` has both numbers for each direction,
        by number of the argument x. Mismatches are added to `mismatches`.

        `runtime` is the framework whose run is checked.
        """
        derivatives = self.truth.derivatives
        largest_size = max((slope.size for slope in derivatives.values()), default=0.0)
        # To `find_mismatch` the slopes are an array of one dim, on a mesh of one device.
        directions = Layout.parse("direction")
        for i, slope in derivatives.items():
            subject = Subject(
                "gradient", self.problem.names[i], runtime, self.truth.mesh, DIFFERENCES
            )
            dtype = self.problem.values[i].dtype.name
            case = Case(
                slope.of_gradient,
                slope.by_differences,
                Sharding(directions, self.truth.mesh, slope.of_gradient[0].shape),
                tolerance=max(DERIVATIVE, rounding([dtype])),
                # Errors are allowed relative to a hundredth of this, or to the wanted values if
                # these are larger. A slope may be near 0 by chance, so the error should be relative
                # to `size`, the size of its terms.
                largest=max(100 * slope.size, largest_size),
            )
            self._note(subject, case, self.truth.draws)

    def compare_with_truth(self, run: RunAnswer) -> None:
        """Compare all arrays of a run with the right ones."""
        for array in _arrays_of(self.problem, self.truth, run):
            key = ArrayKey(run.runtime, array.kind, array.name)
            against = self.truth.source
            if key in self._wrong_on_one_device:
                array = replace(array, whole=self._wrong_on_one_device[key])
                against = f"{run.runtime} on one device"

            mismatch = self._compare(array, array.want, run.runtime, against)
            if mismatch is None:
                self._right[run.mesh, key] = array
            elif run.mesh.n_devices == 1 and not mismatch.problem:
                self._wrong_on_one_device[key] = whole(array.got, array.block_sharding)

    def compare_runtimes(self) -> None:
        """Compare the torch arrays that are right with JAX's: they may lie on two sides of the truth."""
        for (mesh, key), array in self._right.items():
            jax_key = key._replace(runtime="jax")
            jax_array = self._right.get((mesh, jax_key))
            if key.runtime != "torch" or jax_array is None:
                continue
            # An array of JAX that was wrong on one device was compared with itself only.
            if jax_key not in self._wrong_on_one_device:
                self._compare(array, jax_array.got, "torch", "jax")

    def _compare(
        self, array: ComparedArray, want: Devices, runtime: Side, against: str
    ) -> Mismatch | None:
        """Compare one array's blocks with the right ones, and note a mismatch with its cause.

        Args:
            array: An output, gradient or parameter of a run, with its block on each device.
            want: The right blocks, one per device.
            runtime: The framework of the run, for the report.
            against: What the right blocks come from, for the report.

        Returns:
            The mismatch, which has been added to `mismatches`; None if all blocks agree.
        """
        subject = Subject(array.kind, array.name, runtime, array.sharding.mesh, against)
        largest = self._largest_values[array.kind]
        case = Case(array.got, want, array.block_sharding, self.tol, largest, self.problem.arrays)
        return self._note(subject, case, self._draws_random_numbers)

    def _note(self, subject: Subject, case: Case, draws_random_numbers: bool) -> Mismatch | None:
        """Compare blocks with the right ones, and note a mismatch, if any, with its cause."""
        self.n_compared += 1
        mismatch = find_mismatch(subject, case)
        if mismatch is not None:
            mismatch = _with_cause(mismatch, self.mismatches, draws_random_numbers)
            self.mismatches.append(mismatch)
        return mismatch


def _with_cause(
    mismatch: Mismatch, earlier: Sequence[Mismatch], draws_random_numbers: bool
) -> Mismatch:
    """Add a cause that lies outside of the array: random numbers, or a parameter's wrong gradient."""
    by_chance = mismatch.cause is None or mismatch.cause.name in RESEMBLE_CHANCE
    if draws_random_numbers and by_chance and not mismatch.problem:
        mismatch = replace(mismatch, cause=RANDOM_NUMBERS)

    if mismatch.subject.kind == "parameter":
        gradient = replace(mismatch.subject, kind="gradient")
        if any(other.subject == gradient for other in earlier):
            return replace(mismatch, cause=Cause("gradient", "its gradient is wrong"))
    return mismatch


def _arrays_of(problem: Problem, truth: Truth, run: RunAnswer) -> Iterator[ComparedArray]:
    """Yield every array of a run, with the right one: gradients before the parameters they update."""
    answer = run.answer
    shardings = problem.shardings(run.mesh)
    for name, got in answer.outputs.items():
        output = truth.outputs[name]
        sharding = Sharding(truth.layouts[name], run.mesh, output.shape)
        yield ComparedArray("output", name, got, output, sharding)
    for i, got in answer.gradients_if_any.items():
        yield ComparedArray("gradient", problem.names[i], got, truth.gradients[i], shardings[i])
    for i, got in answer.updated.items():
        yield ComparedArray("parameter", problem.names[i], got, truth.updated[i], shardings[i])


def whole_of(
    problem: Problem, truth: Truth, run: RunAnswer, kind: str, name: str
) -> tuple[Block, Block]:
    """Return the whole array that a run's blocks stand for, and the right one, in double precision."""
    for array in _arrays_of(problem, truth, run):
        if (array.kind, array.name) == (kind, name):
            got = whole(array.got, array.block_sharding)
            return in_double(got), in_double(array.whole)
    raise ValueError(f"the run has no {kind} {name}")
