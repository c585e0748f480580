"""The examples of the drop-ins run, torch's in a clean process, since they fork ranks."""

from __future__ import annotations

import doctest
import importlib

import pytest

import jax_bridge.compat
import torch_bridge.compat
from tests.jax_bridge.helpers import in_jax
from tests.torch_bridge.helpers import failed_examples

SYSTEMS = ("credit", "ksuit", "nvsubquadratic", "poptorch")


def test_examples_of_torch() -> None:
    assert (
        failed_examples(
            [f"torch_bridge.compat.{system}" for system in (*SYSTEMS, "credit_layers", "spmd_types")]
        )
        == {}
    )


@pytest.mark.parametrize("system", SYSTEMS)
@in_jax
def test_examples_of_jax(system) -> None:
    tried = doctest.testmod(importlib.import_module(f"jax_bridge.compat.{system}"))
    assert tried.attempted and not tried.failed


def test_both_frameworks_have_the_functions() -> None:
    """But for classes, whose functions JAX has, what holds process groups, and modules."""
    torch_only = {
        "AllGatherGradAutograd", "AllGatherGradOverwrite", "AllToAllSingleFunction",
        "HaloExchange", "convert_to_domain_parallel", "get_domain_parallel_manager",
        "initialize_domain_parallel", "sync_domain_gradients",
    }  # fmt: skip
    layers = {name for name in torch_bridge.compat.__all__ if name.startswith("DomainParallel")}
    ours, theirs = set(torch_bridge.compat.__all__) - layers, set(jax_bridge.compat.__all__)
    assert ours - theirs == torch_only
    assert theirs - ours == {"halo_exchange", "trim"}
