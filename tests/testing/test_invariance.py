"""Right programs mean the same on every mesh; each mistake is found, named, and located."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_bridge as xt
from tests.testing.programs import MISTAKES, PROGRAMS, Jax, Mistake, Torch, normal, sharded, wide
from xshard import Mesh
from xshard.testing import EquivalenceError, Mismatch, assert_equivalent, assert_mesh_invariant
from xshard.testing.mismatch import DIFFERENCES
from xshard.testing.problem import usual_meshes

RIGHT = {name: program.function for name, program in PROGRAMS.items()}
LIBRARIES = {"torch": Torch, "jax": Jax}


def given(names: list[str]) -> dict[str, Any]:
    """The arguments and layouts of programs or mistakes in one run."""
    programs = {
        name: PROGRAMS[MISTAKES[name].program if name in MISTAKES else name] for name in names
    }
    layouts = {name: list(program.layouts) for name, program in programs.items()}
    return {
        "args": [{name: list(program.args) for name, program in programs.items()}],
        "layouts": ([layouts], {name: program.result for name, program in programs.items()}),
    }


def found(function: Callable, **options: Any) -> EquivalenceError:
    with pytest.raises(EquivalenceError) as raised:
        assert_mesh_invariant(function, **options)
    return raised.value


def error_of(names: list[str], framework: str = "torch", **options: Any) -> EquivalenceError:
    """The error of these mistakes in one run."""
    function = sharded(LIBRARIES[framework], {name: MISTAKES[name].function for name in names})
    return found(function, **given(names), framework=framework, **options)


def check(wrong: Mistake, first: Mismatch) -> None:
    kind, _, place = wrong.array.partition(" ")
    assert first.subject.kind == kind and first.subject.name.endswith(place), first
    assert first.cause is not None and first.cause.name == wrong.cause, first
    assert wrong.words in first.cause.text, first


def test_right_programs_are_not_accused() -> None:
    options = {**given(list(RIGHT)), "mesh": "dp=2,tp=3"}
    assert_mesh_invariant(sharded(Torch, RIGHT), **options)
    assert_mesh_invariant(sharded(Jax, RIGHT), **options, framework="jax")
    assert_equivalent(sharded(Torch, RIGHT), sharded(Jax, RIGHT), **options)


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.first])
def test_a_mistake_is_located(name: str) -> None:
    mismatch = error_of([name], mesh=MISTAKES[name].mesh).mismatches[0]
    check(MISTAKES[name], mismatch)
    assert MISTAKES[name].first in mismatch.first


@pytest.mark.parametrize("framework", LIBRARIES)
def test_mistakes_that_blocks_show_are_named_in_one_run(framework: str) -> None:
    names = [
        n
        for n, m in MISTAKES.items()
        if m.leaves_a_trace and not (m.first and framework == "torch")
    ]
    error = error_of(names, framework, mesh="dp=2,tp=3", check_vma=False)
    where = error.mismatches[0].first
    assert where.startswith("what 'b o | sum(tp) -> b o' (programs.py:"), where
    for name in names:
        check(MISTAKES[name], next(m for m in error.mismatches if repr(name) in m.subject.name))


def straight_through(x, mesh):
    return x + (x.round() - x).detach()


SHORT = {"args": [normal(6)], "layouts": (["n/tp"], "n/tp"), "mesh": "tp=2"}


def test_a_gradient_that_differences_deny_is_told() -> None:
    error = found(straight_through, **SHORT)
    (first,) = error.mismatches
    assert (first.subject.against, first.subject.mesh.n_devices) == (DIFFERENCES, 1)
    assert "they differ on one device already" not in str(error)


def test_differences_may_be_left_out() -> None:
    assert_mesh_invariant(straight_through, **SHORT, differences=False)


def test_short_floats_agree_with_differences() -> None:
    assert_mesh_invariant(torch.tanh, **SHORT)


def test_what_has_no_gradient_is_no_mistake() -> None:
    def function(x, unused, mesh):
        return torch.relu(x) + 0 * unused.sum()

    x = np.array([1e-6, -1e-6, 1.0, 2.0, 0.0, 3.0])  # kinks within the first step
    assert_mesh_invariant(
        function, args=[x[:4], x], layouts=(["n/tp", "m | copy(tp)"], "n/tp"), mesh="tp=2"
    )


def test_uneven_blocks_on_the_usual_meshes() -> None:
    def swapped(x, mesh):
        return xt.redistribute(x, "n/tp d -> n d/tp", mesh, shape=(7, 5))

    assert usual_meshes(["tp"]) == [Mesh(tp=2), Mesh(tp=3)]
    assert_mesh_invariant(swapped, args=[wide(7, 5)], layouts=(["n/tp d"], "n d/tp"))


def test_the_first_wrong_line_is_told() -> None:
    def twice(x, w, mesh):
        h = xt.ops.all_reduce(x @ w, "tp", mesh, grad="replicated")
        return torch.tanh(xt.ops.all_reduce(h, "tp", mesh, grad="replicated"))

    layouts = (["b/zigzag(dp) d/tp", "d/tp f | copy(dp)"], "b/zigzag(dp) f")
    error = found(twice, args=[wide(8, 6), wide(6, 3, seed=1)], layouts=layouts, mesh="dp=2,tp=3")
    first = error.mismatches[0]
    assert first.cause.name == "summed" and "size of tp" in first.cause.text
    line = twice.__code__.co_firstlineno
    assert first.first == (
        f"what 'd0 d1 | sum(tp) -> d0 d1' (test_invariance.py:{line + 2}) is given; "
        f"right is what 'd0 d1 | sum(tp) -> d0 d1' (test_invariance.py:{line + 1}) is given"
    )
    assert f"\n  first wrong: {first.first}" in str(error)


def test_what_devices_hold_under_a_max_is_right() -> None:
    def own_sum(x, mesh):
        most = xt.redistribute(x.detach().amax(), "() | max(tp) -> ()", mesh)
        return xt.redistribute((x - most).sum(), "() -> () | copy(tp)", mesh)

    error = found(
        own_sum, args=[wide(6)], layouts=(["n/tp"], "() | copy(tp)"), mesh="tp=2", differences=False
    )
    first = error.mismatches[0].first
    assert (
        first.startswith("what '() -> () | copy(tp)' (")
        and "; right is what '() | max(tp) -> ()' (" in first
    )


def test_the_share_of_a_mean_is_right() -> None:
    def copied(x, mesh):
        x = xt.ops.copy_to(x, "tp", mesh)
        return xt.redistribute(
            xt.redistribute(x, "n -> n | mean(tp)", mesh), "n | mean(tp) -> n", mesh
        )

    error = found(copied, args=[wide(6)], layouts=(["n"], "n"), mesh="tp=2")
    first = error.mismatches[0].first
    assert first.startswith("the gradient that comes back to 'd0 -> d0 | copy(tp)' (")
    assert "; right is the gradient that comes back to 'n -> n | mean(tp)' (" in first
