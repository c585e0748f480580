"""Right programs pass in both frameworks; each classic mistake in one of them is found and named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.testing.programs import (
    ALONE,
    BUGS,
    MISTAKES,
    TWINS,
    Jax,
    Torch,
    all_of,
    sharded,
    together,
    unsharded,
)  # fmt: skip
from xshard.testing import CAUSES, EquivalenceError, assert_equivalent

MESH = "dp=2,tp=4"


def test_right_programs_pass() -> None:
    right = together({name: program.function for name, program in TWINS.items()})
    assert_equivalent(sharded(Torch, right), sharded(Jax, right), **all_of(TWINS), mesh=MESH)


def error_of(names: Sequence[str], mesh: str) -> EquivalenceError:
    """The error of these mistakes in one run."""
    programs = {name: TWINS[BUGS[name].program] for name in names}
    sides = {
        side: together(
            {
                name: BUGS[name].function if BUGS[name].side == side else program.function
                for name, program in programs.items()
            }
        )
        for side in ("torch", "jax")
    }
    whole = together({name: program.whole or program.function for name, program in programs.items()})
    with pytest.raises(EquivalenceError) as raised:
        assert_equivalent(
            sharded(Torch, sides["torch"]),
            sharded(Jax, sides["jax"]),
            **all_of(programs),
            mesh=mesh,
            reference=unsharded(whole),
        )
    return raised.value


def check(name: str, error: EquivalenceError) -> None:
    bug, own = BUGS[name], [m for m in error.mismatches if repr(name) in m.subject.name]
    assert all(bug.side in (m.subject.runtime, m.subject.against) for m in own)
    kind, _, place = bug.array.partition(" ")
    first = own[0]
    assert (first.subject.kind, first.subject.name.endswith(place)) == (kind, True), first
    assert first.cause is not None, first
    assert (first.cause.name, bug.words in first.cause.text) == (bug.cause, True), first


def test_mistakes_that_blocks_show_are_named() -> None:
    names = [name for name in BUGS if name not in ALONE]
    error = error_of(names, MESH)
    for name in names:
        check(name, error)
    assert "right rows: " in str(error)


@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_with_a_run_of_its_own_is_named(name: str) -> None:
    error = error_of([name], BUGS[name].mesh)
    check(name, error)
    if BUGS[name].cause == "replica":  # it is told of every array that the gather touches
        assert [m.subject.name[-3:] for m in error.mismatches] == ["[0]", "[1]"]
        assert len({m.cause for m in error.mismatches}) == 1


def test_every_cause_has_a_mistake() -> None:
    """Except causes of plain arithmetic, which `test_causes` makes by hand."""
    by_hand = {"averaged", "scaled", "other axes", "exchanged"}
    tables = (*BUGS.values(), *MISTAKES.values())
    assert set(CAUSES) - {mistake.cause for mistake in tables} == by_hand - {"averaged"}
