"""Where a function first means something else on a mesh than on one device.

The redistributions of both runs are compared in the order in which they ran. Where they say
nothing, the way in which an error grows with the number of devices may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xshard.errors import XshardError
from xshard.layout import Mesh
from xshard.steps.base import Block
from xshard.testing.comparison import whole_of
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.mismatch import DIFFERENCES, Mismatch, Subject
from xshard.testing.moves import calls_in_order, find_wrong_input
from xshard.testing.runs import Runs, Truth
from xshard.testing.trials import OUTPUT_IS_WRONG

_PER_DEVICE_CAUSES = ("own factors", "own statistics")
# How an error grows from 2 to 3 devices: with n parts in place of one part it is (n - 1) parts, and
# with 1/n of a part it is (1 - 1/n) of it.
_LAWS = (
    (2, "counted", "counted once on every device along {}, so the error grows"),
    (4 / 3, "divided", "divided by the number of devices along {}"),
)
_LAW_TOLERANCE = 1e-3  # of the largest error: how closely an error keeps to a law


class FirstWrong(NamedTuple):
    """The first wrong redistribution of a run.

    Attributes:
        text: Where it is, or after what; "" if nothing was recorded.
        cause: Of its wrong blocks, if one is known.
    """

    text: str
    cause: Cause | None = None


def locate_first_wrong(found: Sequence[Mismatch], runs: Runs, truth: Truth) -> list[Mismatch]:
    """Add to mismatches where in the function they begin, and causes that follow from it.

    Functions call `redistribute` in several places. What each call is given on a mesh is compared
    with what it is given on one device, and the first call whose input is wrong is named.

    A mismatch that nothing explains, or statistics alone, takes the first of these causes that there
    is: that call's; the one of the same array on an earlier mesh; one that follows from how the error
    grows with the number of devices; its own; the one of another array of the same run.

    Args:
        found: The mismatches, outputs before gradients.
        runs: Runs the function again and records the calls.
        truth: The right values, from a run on one device.

    Returns:
        The same mismatches in the same order, with what was found.
    """
    # Mismatches with finite differences are on one device, where nothing is redistributed.
    sharded = [m for m in found if m.subject.against != DIFFERENCES]
    if not sharded:
        return list(found)

    # The first mismatch is the one nearest to the function's own mistake: outputs come first.
    subject = sharded[0].subject
    first_wrong = _first_wrong_redistribution(subject, runs, truth)
    # On earlier meshes, by kind ("output", "gradient" or "parameter") and name of the array.
    causes: dict[tuple[str, str], Cause] = {}
    located = []
    for mismatch in found:
        array = (mismatch.subject.kind, mismatch.subject.name)
        is_recorded = mismatch in sharded and mismatch.subject.mesh == subject.mesh
        # Calls were recorded on one mesh only, and their cause is known for one direction, forward or
        # backward: it explains arrays of the same kind.
        is_explained_by_call = is_recorded and mismatch.subject.kind == subject.kind
        cause = None
        if _may_have_better_cause(mismatch):
            if is_explained_by_call:
                cause = first_wrong.cause
            if cause is None:
                cause = causes.get(array)
            if cause is None:
                cause = _law_of_growth(mismatch.subject, runs, truth)
        if cause is None:
            cause = mismatch.cause
        if cause is None:
            cause = _cause_by_other_arrays(mismatch, sharded)

        if cause is not None:
            # Mismatches of this array on further meshes refer to the first mesh with a cause.
            reference = cause._replace(text=f"as on {mismatch.subject.mesh}: {cause.text}")
            causes.setdefault(array, reference)
        first = first_wrong.text if is_recorded else ""
        located.append(replace(mismatch, cause=cause, first=first))
    return located


def _may_have_better_cause(mismatch: Mismatch) -> bool:
    """Tell whether nothing explains a mismatch of values, or statistics alone."""
    if mismatch.problem:
        return False
    return mismatch.cause is None or mismatch.cause.name == "one addend"


def _cause_by_other_arrays(mismatch: Mismatch, sharded: Sequence[Mismatch]) -> Cause | None:
    """Explain an array by others of the same run: a wrong output makes wrong gradients."""
    same_mesh = [other for other in sharded if other.subject.mesh == mismatch.subject.mesh]
    is_gradient = mismatch.subject.kind == "gradient"
    if is_gradient and any(other.subject.kind == "output" for other in same_mesh):
        return OUTPUT_IS_WRONG
    for other in same_mesh:
        if other.cause is None:
            continue
        # A loss of one number cannot show a factor per device: its gradients do.
        if is_gradient or other.cause.name in _PER_DEVICE_CAUSES:
            return other.cause
    return None


def _first_wrong_redistribution(subject: Subject, runs: Runs, truth: Truth) -> FirstWrong:
    """Find the first call of `redistribute` whose input on a mesh is not that on one device.

    If only gradients are wrong, the gradients that come back to each call are compared instead, in
    the order of the backward. Returns a text such as "what <call 2> is given; right is what <call
    1> is given", and the cause where it is known. If all calls are right, the text says after which
    call the mistake is; "" if nothing could be compared.
    """
    runtime = subject.runtime
    mesh = subject.mesh
    is_backward = subject.kind != "output"
    try:
        seen_on_one = runs.seen(runtime, truth.mesh, truth)
        seen_on_mesh = runs.seen(runtime, mesh, truth)
    except XshardError:  # the place is only an addition to the report, which is made anyway
        return FirstWrong("")

    calls_on_one = calls_in_order(seen_on_one, 1, is_backward)
    calls_on_mesh = calls_in_order(seen_on_mesh, mesh.n_devices, is_backward)
    right_input = ""  # of the last call that was compared, in words
    # Not strict: a function may redistribute more often on one of them.
    for on_one, on_mesh in zip(calls_on_one, calls_on_mesh, strict=False):
        # The calls are no longer the same ones, so they cannot be compared.
        if on_one.check.text != on_mesh.check.text:
            break
        given = f"what {on_mesh} is given"
        if is_backward:
            given = f"the gradient that comes back to {on_mesh}"
        mismatch = find_wrong_input(on_one, on_mesh, mesh, runtime, runs.problem.arrays)
        if mismatch is not None:
            text = f"{given}; right is {right_input}" if right_input else given
            return FirstWrong(text, mismatch.cause)
        right_input = given
    return FirstWrong(f"after {right_input}, which is right" if right_input else "")


def _law_of_growth(subject: Subject, runs: Runs, truth: Truth) -> Cause | None:
    """Guess a cause from how the error grows along one mesh axis, by runs on 2 and on 3 devices.

    A part of the result, such as a bias, that is counted on each of n devices makes the error
    (n - 1) times that part: twice as large on 3 devices as on 2. A part that is divided by n makes
    it (1 - 1/n) times the part: 4/3 times as large. Returns None if neither holds along any axis.
    """
    for axis in subject.mesh.long_axes:
        try:
            # The whole array as it is on 2 and on 3 devices, and as it should be.
            on_two, right = _whole_along(axis, 2, subject, runs, truth)
            on_three, _ = _whole_along(axis, 3, subject, runs, truth)
        except XshardError:  # the shapes do not divide so, or the function fails there
            continue
        # The law may hold for the value, or for its square: a norm is a root, and its square is the
        # sum that has a part for each device.
        for power, part in ((1, "a part"), (2, "of a sum of squares a part")):
            error_on_two = on_two**power - right**power
            error_on_three = on_three**power - right**power
            tolerance = _LAW_TOLERANCE * np.abs(error_on_three).max(initial=0)
            if not tolerance:  # no error on three devices
                continue
            for growth, name, mistake in _LAWS:
                if np.allclose(error_on_three, growth * error_on_two, rtol=0, atol=tolerance):
                    return Cause(name, f"{part} is {mistake.format(axis)}")
    return None


def _whole_along(
    axis: str, n_devices: int, subject: Subject, runs: Runs, truth: Truth
) -> tuple[Block, Block]:
    """Run on a mesh that is long along one axis alone -> the subject's whole array, and the right one."""
    sizes = dict.fromkeys(subject.mesh.axes, 1)
    sizes[axis] = n_devices
    run = runs.run(subject.runtime, Mesh(sizes), truth)
    return whole_of(runs.problem, truth, run, subject.kind, subject.name)
