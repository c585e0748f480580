"""The examples of the drop-ins and of torch_interop run, torch's in a clean process: they fork ranks."""

from __future__ import annotations

import doctest
import importlib
import inspect
from types import ModuleType

import pytest

import jax_bridge.compat
import torch_bridge.compat
from tests.jax_bridge.helpers import in_jax
from tests.jax_bridge.test_docstrings import INTEROP
from tests.torch_bridge.helpers import failed_examples

SYSTEMS = ("credit", "ksuit", "nvsubquadratic", "poptorch")


def test_examples_of_torch() -> None:
    assert (
        failed_examples([f"torch_bridge.compat.{system}" for system in (*SYSTEMS, "spmd_types")])
        == {}
    )


@pytest.mark.parametrize(
    "module", [*INTEROP, *(f"jax_bridge.compat.{system}" for system in SYSTEMS)]
)
@in_jax
def test_examples_of_jax(module) -> None:
    tried = doctest.testmod(importlib.import_module(module))
    assert tried.attempted and not tried.failed


def test_both_frameworks_have_the_functions() -> None:
    """Except functions of managers, which hold process groups, and modules."""
    managers = {
        "get_domain_parallel_manager",
        "initialize_domain_parallel",
        "sync_domain_gradients",
    }
    ours, theirs = map(functions, (torch_bridge.compat, jax_bridge.compat))
    assert ours - theirs == {"convert_to_domain_parallel", *managers}
    assert theirs - ours == {"halo_exchange", "trim"}


def functions(compat: ModuleType) -> set[str]:
    """The public functions of all systems."""
    found = [
        (name, member) for name in SYSTEMS for member in inspect.getmembers(getattr(compat, name))
    ]
    return {
        name
        for system, (name, value) in found
        if inspect.isfunction(value) and value.__module__.endswith(f".{system}") and name[0] != "_"
    }
