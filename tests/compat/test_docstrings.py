"""The examples of the drop-ins run, torch's in a clean process, since they fork ranks."""

from __future__ import annotations

import doctest
import importlib
import inspect
from types import ModuleType

import pytest

import jax_bridge.compat
import torch_bridge.compat
from tests.jax_bridge.helpers import in_jax
from tests.torch_bridge.helpers import failed_examples

SYSTEMS = ("credit", "ksuit", "nvsubquadratic", "poptorch")


def test_examples_of_torch() -> None:
    assert failed_examples([f"torch_bridge.compat.{system}" for system in (*SYSTEMS, "spmd_types")]) == {}


@pytest.mark.parametrize("system", SYSTEMS)
@in_jax
def test_examples_of_jax(system) -> None:
    tried = doctest.testmod(importlib.import_module(f"jax_bridge.compat.{system}"))
    assert tried.attempted and not tried.failed


def test_both_frameworks_have_the_functions() -> None:
    """Except functions of managers, which hold process groups, and modules."""
    torch_only = {
        "convert_to_domain_parallel", "get_domain_parallel_manager", "initialize_domain_parallel",
        "sync_domain_gradients",
    }  # fmt: skip
    ours, theirs = map(functions, (torch_bridge.compat, jax_bridge.compat))
    assert ours - theirs == torch_only
    assert theirs - ours == {"halo_exchange", "trim"}


def functions(compat: ModuleType) -> set[str]:
    """The public functions of all systems."""
    systems = [getattr(compat, system) for system in SYSTEMS]
    return {
        name
        for system in systems
        for name, value in vars(system).items()
        if inspect.isfunction(value) and value.__module__ == system.__name__ and not name.startswith("_")
    }
