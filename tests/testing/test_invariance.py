"""Right programs mean the same on every mesh; each mistake is found, named, and located."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.testing.mistakes import IN_JAX, MISTAKES, PROGRAMS, Jax, Mistake, Program, Torch, sharded, together
from xshard.testing import EquivalenceError, Mismatch, assert_mesh_invariant


def alone(name: str) -> dict[str, Any]:
    """The options for one mistake in torch."""
    wrong, program = MISTAKES[name], PROGRAMS[MISTAKES[name].program]
    layouts, function = (program.layouts, program.result), sharded(Torch, wrong.function)
    return {"function": function, "args": program.args, "layouts": layouts, "mesh": wrong.mesh}


def all_of(library: Callable, functions: dict[str, Callable], programs: dict[str, Program]) -> dict[str, Any]:
    """The options for many at once. programs: the arguments of each."""
    layouts = {name: list(program.layouts) for name, program in programs.items()}
    return {
        "function": sharded(library, together(functions)),
        "args": [{name: list(program.args) for name, program in programs.items()}],
        "layouts": ([layouts], {name: program.result for name, program in programs.items()}),
    }


def found(function: Callable, **options: Any) -> EquivalenceError:
    with pytest.raises(EquivalenceError) as raised:
        assert_mesh_invariant(function, **options)
    return raised.value


@pytest.mark.parametrize(
    ("framework", "mesh"), [("torch", "dp=2,tp=1; dp=1,tp=3; dp=2,tp=2; dp=3,tp=2"), ("jax", "dp=2,tp=3")]
)
def test_right_programs_are_not_accused(framework: str, mesh: str) -> None:
    right = {name: program.function for name, program in PROGRAMS.items()}
    library = Torch if framework == "torch" else Jax
    assert_mesh_invariant(**all_of(library, right, PROGRAMS), framework=framework, mesh=mesh)


def check(wrong: Mistake, first: Mismatch) -> None:
    kind, _, place = wrong.array.partition(" ")
    assert first.subject.kind == kind and first.subject.name.endswith(place), first
    assert first.cause is not None and first.cause.name == wrong.cause and wrong.words in first.cause.text, (
        first
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_named_and_located(name: str) -> None:
    error = found(**alone(name))
    check(MISTAKES[name], error.mismatches[0])
    assert MISTAKES[name].first in error.mismatches[0].first, error


def test_mistakes_in_jax() -> None:
    functions = {name: MISTAKES[name].function for name in IN_JAX}
    options = all_of(Jax, functions, {name: PROGRAMS[MISTAKES[name].program] for name in IN_JAX})
    error = found(**options, framework="jax", mesh="dp=2,tp=3", check_vma=False)
    for name in IN_JAX:
        check(MISTAKES[name], next(m for m in error.mismatches if repr(name) in m.subject.name))
