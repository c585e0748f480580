"""torch's ranks and JAX's processes as the same processes: 4 with a device each, 2 with two."""

from __future__ import annotations

import jax
import pytest
import torch
import torch.distributed as dist

import xshard as xs
from jax_bridge.torch_interop import initialize, to_jax
from tests.interop.processes import everything
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected, torchrun


@pytest.mark.parametrize(("processes", "devices"), [(4, 1), (2, 2)])
def test_everything_works_over_processes(processes, devices) -> None:
    """Started as torchrun does; set up by one call."""
    torchrun(processes, everything, devices)


def wrong_calls() -> None:
    """On all ranks alike, and nothing hangs."""
    jax.config.update("jax_platforms", "cpu")
    # Every rank is a process of its own for JAX, that knows no other.
    kind, text = error_of(lambda: to_jax(torch.zeros(3), "n/a", jax.make_mesh((1,), ("a",))))
    assert f"for torch this is process {dist.get_rank()} of 2, for JAX process 0 of 1" in text
    assert kind == "MeshError" and "initialize()" in text and still_connected()
    # JAX has made its devices.
    kind, text = error_of(initialize)
    assert kind == "MeshError" and "JAX cannot join the processes of torch" in text
    assert "before JAX makes its devices" in text and still_connected()


def test_processes_that_differ_are_refused() -> None:
    on_ranks(2, wrong_calls)


def test_without_processes_there_is_nothing_to_set_up(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(xs.errors.MeshError, match="start the program by torchrun"):
        initialize()
