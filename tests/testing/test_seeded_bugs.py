"""Programs that are right pass; each of the classic mistakes is found, and called by its name."""

from __future__ import annotations

import pytest

from tests.testing.programs import BUGS, PROGRAMS
from xshard.testing import CAUSES, EquivalenceError, assert_equivalent


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_passes(name: str) -> None:
    program = PROGRAMS[name]
    assert_equivalent(
        program.torch, program.jax, args=program.args, layouts=program.layouts, mesh=program.mesh
    )


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_named(name: str) -> None:
    bug = BUGS[name]
    program = PROGRAMS[bug.program]._replace(**{bug.side: bug.function})
    with pytest.raises(EquivalenceError) as raised:
        assert_equivalent(
            program.torch,
            program.jax,
            args=program.args,
            layouts=program.layouts,
            mesh=program.mesh,
            reference=program.whole,
        )
    assert all(bug.side in (m.subject.runtime, m.subject.against) for m in raised.value.mismatches)
    first = raised.value.mismatches[0]
    assert f"{first.subject.kind} {first.subject.name}" == bug.array, raised.value
    assert first.cause is not None, raised.value
    assert (first.cause.name, bug.words in first.cause.text) == (bug.cause, True), raised.value
    if bug.cause == "replica":  # of which every array that the gather touches is told
        assert [(m.subject.name, m.cause) for m in raised.value.mismatches] == [
            ("x", first.cause),
            ("scale", first.cause),
        ]
    assert "right rows: " in str(raised.value)


def test_every_cause_has_a_bug() -> None:
    """Except causes of plain arithmetic, which `test_causes` makes by hand."""
    by_hand = {"averaged", "scaled", "other axes", "own factors", "exchanged"}
    assert set(CAUSES) - {bug.cause for bug in BUGS.values()} == by_hand
