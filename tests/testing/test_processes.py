"""The processes of the kit start once, no framework is touched in the caller's, and functions get there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.testing.programs import normal
from xshard.runtimes.backends import host_devices, kit_process
from xshard.testing.plugin import _on_devices, _on_ranks

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0  # a few seconds, as a rule


def test_the_kit_and_its_plugin_load_no_framework() -> None:
    code = (
        "import sys, xshard.testing, xshard.testing.plugin\n"
        "assert not {'torch', 'jax', 'hypothesis', 'cloudpickle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=TIMEOUT_S)


def test_a_comparison_of_torch_functions_needs_no_jax(tmp_path: Path) -> None:
    """Neither here, where torch is not imported either, nor in the process that forks ranks."""
    code = """
import sys
import numpy as np
from xshard.testing import EquivalenceError, assert_mesh_invariant
def mean(x):
    return x.mean()
given = {"args": [np.arange(4.0)], "layouts": (["n/tp"], "()"), "mesh": "tp=2"}
assert_mesh_invariant(abs, **given | {"layouts": (["n/tp"], "n/tp")})
try:
    assert_mesh_invariant(mean, **given)
except EquivalenceError as error:
    assert "likely cause" in str(error)
else:
    raise SystemExit("a mean of each block is no mean")
assert "torch" not in sys.modules
"""
    (tmp_path / "jax.py").write_text("raise ImportError('JAX is forbidden here')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=TIMEOUT_S, env=environment)


def test_processes_stay() -> None:
    assert kit_process("torch") is kit_process("torch")
    assert kit_process("jax") is kit_process("jax")
    assert kit_process("torch") is not kit_process("jax")


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another() -> None:
    """As after Ctrl-C in a notebook."""

    def slow():
        import time

        time.sleep(600)
        return "old"

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        _on_devices(slow)

    before = signal.signal(signal.SIGALRM, interrupt)
    _on_devices(len, "ready")
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _on_devices(len, "new") == 3


def test_closures_and_what_they_hold_are_sent() -> None:
    offset = normal(3)

    def shifted(by):
        return offset + by + dist.get_rank()

    found = _on_ranks(2, shifted, 1.0)
    assert [np.allclose(x, offset + 1 + rank) for rank, x in enumerate(found)] == [True, True]


def test_jax_has_its_devices_and_keeps_them() -> None:
    def count():
        import os

        import jax

        return os.getpid(), jax.device_count(), jax.default_backend()

    first, second = _on_devices(count), _on_devices(count)
    assert first == second
    assert first[1:] == (host_devices(), "cpu")
