"""Shared by the JAX tests: a process with host devices, where they run, and one with a GPU.

JAX makes its devices once per process, so pytest's own process never asks for any. A test under
`@in_jax` runs in the process that `xshard.testing` keeps for JAX, one for each process of pytest; one under
`@on_gpu` in another, that has a GPU, and nowhere without one.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from xshard.runtimes.backends import kit_process
from xshard.runtimes.processes import Process, running
from xshard.testing import FunctionError
from xshard.testing.pickling import packed

TIMEOUT_S = 600.0
CALL = "jax_bridge.testing.worker.call_packed"

gc.set_threshold(50_000, 20, 20)  # tracing makes many objects, and little garbage that is in cycles


# Memory as it is needed, since others share the GPU; products of float32 that are not rounded first (TF32).
GPU = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
HAS_GPU = Path("/dev/nvidiactl").exists() and any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device is here that JAX could use")
needs_flax = pytest.mark.skipif(
    Version(version("jax")) >= Version("0.12") and Version(version("flax")) <= Version("0.12.8"),
    reason="flax 0.12.8 and before cannot be imported with jax 0.12",
)


def in_jax(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in the process with devices; it fails with the traceback from there."""
    return _run_in(functools.partial(kit_process, "jax"), test)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in a process with a GPU."""
    return needs_gpu(_run_in(functools.partial(running, "jax", GPU), test))


def _run_in(process: Callable[[], Process], test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def there(**arguments: object) -> None:
        sent = packed(_run_here, test.__module__, test.__name__, arguments)
        try:
            process().ask(CALL, sent, timeout_s=TIMEOUT_S)
        except FunctionError as error:
            pytest.fail(str(error), pytrace=False)

    there.here = test  # type: ignore[attr-defined]
    return there


def _run_here(module: str, name: str, arguments: dict[str, object]) -> None:
    getattr(importlib.import_module(module), name).here(**arguments)
