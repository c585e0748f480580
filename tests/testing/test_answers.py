"""What was asked before is not run again; ranks begin with the modules that are preloaded."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import xshard as xs
from tests.testing.programs import normal
from xshard.runtimes.processes import FunctionError, Process
from xshard.testing import EquivalenceError, assert_equivalent
from xshard.testing.answers import remembered
from xshard.testing.plugin import _on_ranks
from xshard.testing.question import Answer, Question

QUESTION = Question(b"f", xs.Mesh(tp=2), (), (), (), None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bridges that are asked, in turn."""
    found: list[str] = []
    ask = Process.ask

    def heard(self: Process, function: str, *arguments: Any, **options: Any) -> Any:
        found.append(function.partition("_")[0])
        return ask(self, function, *arguments, **options)

    monkeypatch.setattr(Process, "ask", heard)
    return found


def test_the_side_that_has_not_changed_is_not_run_again(asked: list[str]) -> None:
    given = {"args": [normal(6, 3, seed=9)], "layouts": (["n/tp d"], "n/tp d"), "mesh": "tp=2"}
    assert_equivalent(abs, abs, **given)
    assert sorted(asked) == ["jax", "jax", "torch", "torch"]
    assert_equivalent(abs, abs, **given)
    assert len(asked) == 4
    with pytest.raises(EquivalenceError):
        assert_equivalent(abs, lambda x: x, **given)
    assert asked[4:] == ["jax", "jax"]


def test_equal_questions_are_asked_anew_when_a_file_of_the_user_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "layers_of_mine.py"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "layers_of_mine", importlib.import_module("layers_of_mine"))
    counted = iter(range(9))

    def number() -> int:
        given = remembered("torch", QUESTION, lambda: Answer({}, None, {}, {}, next(counted)))
        return given.tree

    assert [number(), number()] == [0, 0]
    os.utime(file, ns=(1, 1))
    assert [number(), number()] == [1, 1]


def test_ranks_begin_with_preloaded_modules() -> None:
    def loaded() -> bool:
        return "wave" in sys.modules

    assert _on_ranks(2, loaded) == [False, False]
    assert _on_ranks(2, loaded, preload=["wave"]) == [True, True]
    with pytest.raises(FunctionError, match="preload: 'no_such_module' cannot be imported\n"):
        assert_equivalent(
            abs, abs, args=[normal(4, seed=8)], layouts=(["n"], "n"), mesh="tp=2", preload=["no_such_module"]
        )
