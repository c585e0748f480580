"""The examples in the docstrings of torch_interop run."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.jax_bridge.helpers import in_jax
from tests.jax_bridge.test_docstrings import INTEROP


@pytest.mark.parametrize("module", INTEROP)
@in_jax
def test_examples_in_docstrings(module) -> None:
    tried = doctest.testmod(importlib.import_module(module))
    assert tried.attempted and not tried.failed
