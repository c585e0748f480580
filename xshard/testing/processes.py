"""One process per framework, in which the functions under test run: started once, asked many times.

Decides how they start, how functions reach them, and how what goes wrong there is told here. Torch
ranks are forked from a process that has imported torch and done nothing else; JAX has its devices
in a process of its own, for it makes them once. So neither framework is touched in the caller's.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from xshard.errors import MeshError, XshardError

HOST_DEVICES = "XSHARD_HOST_DEVICES"  # environment: as many devices as a mesh may have here
_OURS = ("xshard", "torch_bridge", "jax_bridge")
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_PATIENCE_S = 10.0  # beyond the limit that a process keeps itself


class FunctionError(XshardError):
    """A function that raised, or did not end, in the process that ran it; its traceback is in the text."""


class Process:
    """A running `python -m xshard.testing.server MODULE`, which calls functions of the module."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module = module
        self._turn = Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "xshard.testing.server", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._owner = os.getpid()
        atexit.register(self._leave)
        self._send(sys.path)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        """What `module.name(*arguments)` returns there. Raises the XshardError that it raises; FunctionError
        for any other, and where no answer comes in time, which ends the process."""
        with self._turn:
            try:
                self._send((name, arguments))
                answer = self._receive(timeout_s + _PATIENCE_S)
            except (EOFError, BrokenPipeError, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                self.end()
                why = (
                    f"gave no answer within {timeout_s:g} s" if late else f"ended ({self._child.returncode})"
                )
                raise FunctionError(f"the process of {self.module} {why}") from None
            except BaseException:  # interrupted: its answer would be taken for that to the next question
                self.end()
                raise
        if isinstance(answer, XshardError):
            raise answer
        return answer

    def end(self) -> None:
        """Kill it and all that it has forked."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _leave(self) -> None:
        if os.getpid() == self._owner:  # a fork of the owner leaves it alone
            self.end()

    def _send(self, value: Any) -> None:
        assert self._child.stdin is not None
        pickle.dump(value, self._child.stdin)
        self._child.stdin.flush()

    def _receive(self, timeout_s: float) -> Any:
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], timeout_s)[0]:
            raise TimeoutError
        return pickle.load(self._child.stdout)


def torch_process() -> Process:
    """The process that forks gloo ranks. Raises FunctionError where torch is not installed."""
    return _started("torch", "torch_bridge.testing", ())


def jax_process() -> Process:
    """The process in which JAX has host devices. Raises FunctionError where JAX is not installed."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(host_devices()),
        # Two programs at once need a thread for each of their devices: with fewer they wait for
        # each other for ever, and XLA makes as many as there are cores.
        "PJRT_NPROC": str(max(64, 2 * host_devices())),
        # Every program runs once or twice: what the compiler saves there it takes itself.
        "XLA_FLAGS": f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}".strip(),
    }
    return _started("jax", "jax_bridge.testing", tuple(environment.items()))


def host_devices() -> int:
    """As many devices as a mesh may have here: 16, or what the environment says."""
    given = os.environ.get(HOST_DEVICES, "16")
    if not given.isdecimal() or int(given) < 1:
        raise MeshError(f"{HOST_DEVICES}={given!r} in the environment is no number of devices")
    return int(given)


def check_size(n: int) -> None:
    """Raise MeshError for more devices than there are."""
    if not 1 <= n <= host_devices():
        raise MeshError(
            f"{n} devices, this host has 1 to {host_devices()}",
            hint=f"a smaller mesh, or {HOST_DEVICES}={n} in the environment before the first test",
        )


def packed(function: Callable[..., Any], *arguments: Any) -> bytes:
    """A function, closures too, and its arguments, to be sent to a process.

    What stands in the user's own file goes as it is, so that the process need not import the file,
    which may import the other framework; installed modules are imported there.
    """
    cloudpickle = _needed("cloudpickle")
    module = inspect.getmodule(inspect.unwrap(function)) if callable(function) else None
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module.__name__)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps((function, arguments))
    except Exception as error:
        raise FunctionError(
            f"{getattr(function, '__name__', function)} cannot be sent to another process: {error}",
            hint="it may close over arrays, modules and functions, not over locks, files or process groups",
        ) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def _needed(name: str) -> Any:
    if find_spec(name) is None:
        raise XshardError(f"{name} is not installed", hint="pip install 'xshard[testing]'")
    return import_module(name)


def _is_installed(module: str) -> bool:
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    places = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")]
    return root in _OURS or file is None or any(Path(file).is_relative_to(place) for place in places)


def _started(framework: str, module: str, environment: tuple[tuple[str, str], ...]) -> Process:
    if find_spec(framework) is None:
        raise FunctionError(f"{framework} is not installed", hint=f"pip install 'xshard[{framework}]'")
    key = module, environment, os.getpid()  # a forked process does not share its parent's
    if key not in _RUNNING or not _RUNNING[key].is_alive:
        _RUNNING[key] = Process(module, dict(environment))
    return _RUNNING[key]


_RUNNING: dict[tuple[str, tuple[tuple[str, str], ...], int], Process] = {}
