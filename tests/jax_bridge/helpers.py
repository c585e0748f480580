"""Shared by the JAX tests: processes with host devices or a GPU, where they run; meshes and arrays there.

JAX makes its devices once per process, so pytest's own process never asks for any. A test under
`@in_jax` runs in the process that `xshard.testing` keeps for JAX, one for each process of pytest; one under
`@on_gpu` in another, that has a GPU, and nowhere without one.
"""

import functools
import gc
import importlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import xshard as xs
from xshard.runtimes.backends import BACKENDS, QUICK_XLA_FLAGS, kit_process
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
HAS_GPU = Path("/dev/nvidiactl").exists() and any(
    map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))
)
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


def host(devices: int) -> dict[str, str]:
    """The environment of one of several processes."""
    flags = f"{QUICK_XLA_FLAGS} {os.environ['XLA_FLAGS']}"  # no bytes of compiled programs are counted there
    return BACKENDS["jax"].environment(devices) | {"PJRT_NPROC": "16", "XLA_FLAGS": flags}


@contextmanager
def joined(environments: Sequence[Mapping[str, str]]) -> Iterator[Callable[..., list[Any]]]:
    """Asks all of some processes that JAX has joined. One that fails takes the others along."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def all_of(asked: list[Future[Any]]) -> list[Any]:
        for each in as_completed(asked):
            each.result()
        return [each.result() for each in asked]

    with ThreadPoolExecutor(n := len(environments)) as threads, ExitStack() as ends:
        processes = [Process(environment) for environment in environments]
        for process in processes:
            ends.callback(process.end)
        ask = [
            functools.partial(threads.submit, process.ask, timeout_s=TIMEOUT_S)
            for process in processes
        ]
        all_of([one("jax_bridge.testing.worker.join", address, n, i) for i, one in enumerate(ask)])
        yield lambda function, *arguments: all_of([one(function, *arguments) for one in ask])


def device_mesh(mesh: xs.Mesh, kind: str = "Auto") -> Any:
    """JAX's, of the first devices; `kind` of axes: Auto or Explicit."""
    import jax

    kinds = (jax.sharding.AxisType[kind],) * len(mesh.axes)
    return jax.make_mesh(mesh.sizes, mesh.axes, kinds, devices=jax.devices()[: mesh.n_devices])


def placed(x: Any, mesh: Any, *spec: Any) -> Any:
    """The array on a mesh of JAX, cut as the spec says."""
    import jax

    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
