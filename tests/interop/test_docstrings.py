"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.jax_bridge.helpers import in_jax


@pytest.mark.parametrize("module", ["callbacks", "calls", "trees", "verbs"])
@in_jax
def test_examples_in_docstrings(module) -> None:
    tried = doctest.testmod(importlib.import_module(f"jax_bridge.torch_interop.{module}"))
    assert tried.attempted and not tried.failed
