"""Processes that call functions for this one: each is started once and asked many times.

A framework is imported there and never here; which one, and with which settings, is in `backends`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.watch import Watch, processor_time

_PATIENCE_S = 10.0  # beyond the limit that a function keeps itself
_LAST = 4000  # characters of standard error that an error quotes


class FunctionError(XshardError):
    """A function that raised, or did not end, in its process; the text has its traceback or output."""


class Process:
    """A running `python -m xshard.runtimes.server`, which calls functions of any module.

    environment: variables that it has beside this process's. prefix: a command that runs it elsewhere.
    """

    def __init__(self, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self._turn = Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self._child = subprocess.Popen(
            [*prefix, sys.executable, "-m", "xshard.runtimes.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._owner = os.getpid()
        atexit.register(self._leave)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, function: str, *arguments: Any, timeout_s: float, quiet: bool = False) -> Any:
        """What `function(*arguments, timeout_s)` returns there.

        function: with its module, as in "torch_bridge.testing.worker.run_tasks".
        timeout_s: the longest time without progress, see `Watch`; then the process is ended, and all that it
        has forked. quiet: do not show on standard error what it printed.
        Raises the XshardError that the function raises; FunctionError for other errors, and where the process
        ends or is given up.
        """
        with self._turn:
            heard = os.fstat(self._stderr.fileno()).st_size
            try:
                self._send(sys.path)  # each time: it may have grown since
                self._send((function, (*arguments, timeout_s)))
                answer = self._receive(timeout_s)
            except (EOFError, BrokenPipeError, TimeoutError) as error:
                self.end()
                if isinstance(error, TimeoutError):
                    why = f"did not finish: {error}"
                else:
                    why = f"ended its process with status {self._child.returncode}"
                raise FunctionError(f"{function} {why}", hint=self._said(heard)[-_LAST:] or None) from None
            except BaseException:  # interrupted: its answer would be taken for that to the next question
                self.end()
                raise
            if not quiet and (said := self._said(heard)):
                print(said, file=sys.stderr)
        if isinstance(answer, XshardError):
            raise answer
        return answer

    def end(self) -> None:
        """Kill it and all that it has forked: ranks that wait for each other would stay for ever."""
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
        watch = Watch(lambda: processor_time([self._child.pid]), timeout_s, _PATIENCE_S)
        while not select.select([self._child.stdout], [], [], watch.pause_s)[0]:
            if not self.is_alive:  # its forks may keep the pipe open
                raise EOFError
            if (why := watch.why_over()) is not None:
                raise TimeoutError(why)
        return pickle.load(self._child.stdout)

    def _said(self, start: int) -> str:
        """What was printed there since its standard error was `start` bytes long."""
        n = os.fstat(self._stderr.fileno()).st_size - start
        return os.pread(self._stderr.fileno(), n, start).decode(errors="replace").strip()


def running(package: str, environment: Mapping[str, str]) -> Process:
    """The process for a package with these variables, started where it is not running yet."""
    # A forked process does not share its parent's.
    key = package, tuple(sorted(environment.items())), os.getpid()
    if key not in _RUNNING or not _RUNNING[key].is_alive:
        _RUNNING[key] = Process(environment)
    return _RUNNING[key]


_RUNNING: dict[tuple[str, tuple[tuple[str, str], ...], int], Process] = {}
