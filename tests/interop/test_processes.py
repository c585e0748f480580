"""torch's ranks and JAX's processes as the same processes: 4 with a device each, 2 with two."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import xshard as xs
from jax_bridge.torch_interop import initialize
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected

TIMEOUT_S = 900  # against a hang: about fifty times what it takes


@pytest.mark.parametrize(("processes", "devices"), [(4, 1), (2, 2)])
def test_arrays_and_functions_over_processes(processes, devices, tmp_path) -> None:
    """Started by torchrun; set up by one call."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "tests.interop.processes", str(devices), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(processes):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("processes") == [rank, processes, rank, processes]
        assert [what for what, holds in found.items() if holds is not True] == []
        assert len(found) > 10


def without_jax_set_up() -> tuple[tuple[str, str], bool]:
    """JAX without `initialize`: every rank is a process of its own that knows no other."""
    import jax
    import torch

    from jax_bridge.torch_interop import to_jax

    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((1,), ("a",))
    return error_of(lambda: to_jax(torch.zeros(3), "n/a", mesh)), still_connected()


def too_late() -> tuple[tuple[str, str], bool]:
    """JAX set up after it has made its devices."""
    import jax

    from jax_bridge.torch_interop import initialize

    jax.config.update("jax_platforms", "cpu")
    jax.devices()
    return error_of(initialize), still_connected()


def wrong_calls() -> list[tuple[tuple[str, str], bool]]:
    return [without_jax_set_up(), too_late()]


def test_processes_that_differ_are_refused() -> None:
    """On all ranks alike, and nothing hangs."""
    for rank, ((differ, here), (late, there)) in enumerate(on_ranks(2, wrong_calls)):
        assert here and there
        assert differ[0] == "MeshError"
        assert f"for torch this is process {rank} of 2, for JAX process 0 of 1" in differ[1]
        assert "initialize()" in differ[1]
        assert late[0] == "MeshError" and "JAX cannot join the 2 processes of torch" in late[1]
        assert "before JAX makes its devices" in late[1]


def test_without_processes_there_is_nothing_to_set_up(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(xs.errors.MeshError, match="start the program by torchrun"):
        initialize()
