"""Causes that only further runs show: transposed arguments, and replicas that are used in different ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice

import numpy as np

from xshard.errors import XshardError
from xshard.layout import Mesh
from xshard.steps.base import Block
from xshard.testing.comparison import compare_runs
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.mismatch import Mismatch
from xshard.testing.moves import calls_in_order
from xshard.testing.problem import Problem
from xshard.testing.question import Side
from xshard.testing.runs import Runs, Truth

OUTPUT_IS_WRONG = Cause("output", "an output is wrong already")
_MAX_SUBSETS = 12  # of arguments that are transposed, beside the set of all: each is a run


def explain_by_trials(
    found: Sequence[Mismatch], runs: Runs, truth: Truth, tol: float | None
) -> list[Mismatch]:
    """Find causes of mismatches by experiments: run the function again with something changed.

    Each run, by framework and mesh, gets one cause at most. Where outputs are wrong, square
    arguments are transposed: if that makes outputs right, it is the cause. If not, the wrong output
    explains the wrong gradients. Where only gradients are wrong, replicas that devices use in
    different ways are looked for.

    Args:
        found: The mismatches of all runs.
        runs: Runs the function again.
        truth: The right values, from a run on one device.
        tol: The largest relative error. None: by the dtype.

    Returns:
        The same mismatches; those without a cause have the one that was found.
    """
    mismatches_of_run: dict[tuple[Side, Mesh], list[Mismatch]] = {}
    for mismatch in found:
        mismatches_of_run.setdefault(_run_of(mismatch), []).append(mismatch)

    causes: dict[tuple[Side, Mesh], Cause | None] = {}
    # By framework: a transposed argument is wrong on every mesh, so only the first wrong one is tried.
    # None: no transposition helps.
    transpositions: dict[Side, Cause | None] = {}
    for (runtime, mesh), mismatches in mismatches_of_run.items():
        outputs = [m for m in mismatches if m.subject.kind == "output"]
        if outputs:
            if runtime not in transpositions and any(map(_lacks_cause, outputs)):
                transpositions[runtime] = _find_transposition(runs, truth, tol, runtime, mesh)
            transposition = transpositions.get(runtime)
            causes[runtime, mesh] = transposition if transposition else OUTPUT_IS_WRONG
        # Outputs are right: then devices may use copies of one value in different ways.
        elif mesh.n_devices > 1 and any(map(_lacks_cause, mismatches)):
            causes[runtime, mesh] = _find_replica_fault(runs, truth, runtime, mesh)

    return [_with_cause_of_run(m, causes.get(_run_of(m))) for m in found]


def _with_cause_of_run(mismatch: Mismatch, cause: Cause | None) -> Mismatch:
    """Add the cause of the whole run, unless the mismatch has its own or is that cause."""
    if cause is None or not _lacks_cause(mismatch):
        return mismatch
    # "An output is wrong already" explains gradients and parameters.
    if cause is OUTPUT_IS_WRONG and mismatch.subject.kind == "output":
        return mismatch
    return replace(mismatch, cause=cause)


def _run_of(mismatch: Mismatch) -> tuple[Side, Mesh]:
    return mismatch.subject.runtime, mismatch.subject.mesh


def _lacks_cause(mismatch: Mismatch) -> bool:
    """Tell whether nothing explains a mismatch, or only statistics explain a gradient."""
    if mismatch.problem:  # of shape or dtype: it needs no cause
        return False
    if mismatch.cause is None:
        return True
    return mismatch.subject.kind == "gradient" and mismatch.cause.name == "one addend"


def _find_transposition(
    runs: Runs, truth: Truth, tol: float | None, runtime: Side, mesh: Mesh
) -> Cause | None:
    """Run the function with square arguments transposed, and see whether its outputs are right.

    A weight of shape [in, out] in one framework is [out, in] in another. If in = out, no shape
    tells. Sets of square arguments are tried, small ones first. Returns the cause with the names of
    the first set that helps, or None.
    """
    problem = runs.problem
    for transposed in _transposable(problem):
        values = list(problem.values)
        for i in transposed:
            values[i] = np.swapaxes(values[i], -1, -2)
        trial = replace(runs, problem=replace(problem, values=tuple(values)))
        try:
            run = trial.run(runtime, mesh, truth)
        except XshardError:  # the function takes no such arguments
            continue
        # Compared with the right values for the arguments as the user gave them.
        mismatches = compare_runs(problem, truth, [run], tol).mismatches
        if not any(m.subject.kind == "output" for m in mismatches):
            names = " and ".join(problem.names[i] for i in transposed)
            return Cause("transposed", f"right with {names} transposed: one side has the transpose")
    return None


def _transposable(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield sets of arguments to transpose, small ones first, then the set of all."""
    square = tuple(i for i, x in enumerate(problem.values) if _is_square(x))
    if not square:
        return
    # Small sets first, since they say more; lazily, since there are 2^n.
    proper_subsets = chain.from_iterable(combinations(square, n) for n in range(1, len(square)))
    yield from islice(proper_subsets, _MAX_SUBSETS)
    yield square


def _is_square(x: Block) -> bool:
    return x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1


def _find_replica_fault(runs: Runs, truth: Truth, runtime: Side, mesh: Mesh) -> Cause | None:
    """Find a call of `redistribute` whose replicas differ, though its layout says they are equal.

    All inputs are looked at first, then all gradients that come back. Returns a cause with the
    error that `check_replicated=True` would raise for that call, or None.
    """
    try:
        seen = runs.seen(runtime, mesh, truth)  # runs the function again, and records its calls
    except XshardError:  # the cause is only an addition to the report, which is made anyway
        return None
    inputs = calls_in_order(seen, mesh.n_devices, cotangents=False)
    cotangents = calls_in_order(seen, mesh.n_devices, cotangents=True)
    for redistribution in (*inputs, *cotangents):
        fault = redistribution.replica_fault
        if fault is not None:
            return Cause(
                "replica",
                "gathered as a replica, and used by each device in its own way: "
                + _on_one_line(str(fault)),
            )
    return None


def _on_one_line(message: str) -> str:
    """Join the lines of an error: the reason with the text, without the caret below it, then the rest."""
    # An error marks a place in a text: reason, text, caret, and then what to do.
    reason, text, _, *details = (line.strip() for line in message.splitlines())
    return "; ".join([f"{reason} {text}", *details])
