"""TODO."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from xshard.errors import MeshError, XshardError
from xshard.plans.plan import Plan
from xshard.runtimes.tasks import Task

HOST_DEVICES = "XSHARD_HOST_DEVICES"  # environment: as many devices as a mesh may have here


_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


_PATIENCE_S = 10.0  # beyond the limit that a process keeps itself


class FunctionError(XshardError):
    """A function that raised, or did not end, in the process that ran it; its traceback is in the text."""


class Process:
    """A running `python -m xshard.runtimes.server MODULE`, which calls functions of the module."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module = module
        self._turn = Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "xshard.runtimes.server", module],
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
    return _started("torch", "torch_bridge.testing.equivalence", ())


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
    return _started("jax", "jax_bridge.testing.equivalence", tuple(environment.items()))


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


def _started(framework: str, module: str, environment: tuple[tuple[str, str], ...]) -> Process:
    if find_spec(framework) is None:
        raise FunctionError(f"{framework} is not installed", hint=f"pip install 'xshard[{framework}]'")
    key = module, environment, os.getpid()  # a forked process does not share its parent's
    if key not in _RUNNING or not _RUNNING[key].is_alive:
        _RUNNING[key] = Process(module, dict(environment))
    return _RUNNING[key]


_RUNNING: dict[tuple[str, tuple[tuple[str, str], ...], int], Process] = {}


class WorkerError(XshardError):
    """A runtime's process failed; its own message is in the text."""


def run_worker(
    module: str, tasks: Sequence[Task | Plan], *options: str, timeout_s: float | None = None
) -> list[Any]:
    """What another runtime answers to every task, in a process of its own. Raises WorkerError.

    module: as in `"torch_bridge.testing.worker"`, which answers a `Task` with an `Outcome`; `torch_bridge.testing.timing`
    answers a plan with seconds. options: passed on to it. timeout_s: None waits forever.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "tasks.pickle"), Path(folder, "outcomes.pickle")
        asked.write_bytes(pickle.dumps(list(tasks)))
        command = [sys.executable, "-m", module, str(asked), str(answered), *options]
        status, said = _run_group(command, timeout_s)
        name, hint = " ".join((module, *options)), said[-4000:].strip() or None
        if status is None:
            raise WorkerError(f"{name} did not finish within {timeout_s:g} s", hint=hint)
        if status or not answered.exists():
            raise WorkerError(f"{name} failed with status {status}", hint=hint)
        outcomes: list[Any] = pickle.loads(answered.read_bytes())
    if len(outcomes) != len(tasks):
        raise WorkerError(f"{name} answered {len(outcomes)} of {len(tasks)} tasks")
    return outcomes


def _run_group(command: Sequence[str], timeout_s: float | None) -> tuple[int | None, str]:
    """Exit status (None where time ran out) and standard error of a command.

    However it ends, the processes that the command forked end with it: ranks that wait for each
    other in a collective would stay for ever.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        status: int | None = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return status, said.read()
