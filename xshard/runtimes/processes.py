"""Processes that import frameworks and call functions for this one: each is started once and asked often."""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from xshard.errors import XshardError

_PATIENCE_S = 10.0  # beyond the limit that a function keeps itself
_STILL = 0.01  # seconds of processor time per second of the clock, below which nothing happens
_CORES = os.cpu_count() or 1
_LAST = 4000  # characters of standard error that an error quotes


class FunctionError(XshardError):
    """A function that raised, or did not end, in its process; the text has its traceback or output."""


class Process:
    """A running `python -m xshard.runtimes.server`, which calls functions of any module. environment:
    variables that it has beside this process's. prefix: a command that runs it elsewhere.
    """

    def __init__(self, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self._turn = Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        command = [*prefix, sys.executable, "-m", "xshard.runtimes.server"]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._stderr,
        }
        self._child = subprocess.Popen(
            command, **pipes, env=os.environ | environment, start_new_session=True
        )
        self._owner = os.getpid()
        atexit.register(self._leave)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, function: str, *arguments: Any, timeout_s: float, quiet: bool = False) -> Any:
        """What `function(*arguments, timeout_s)` returns there. function: with its module. timeout_s: the
        longest time without progress, see `Watch`; then the process ends, with all its forks. quiet: do not
        show on standard error what it printed. Raises the XshardError that the function raises; FunctionError
        for others, or if the process ends.
        """
        with self._turn:
            heard = os.fstat(self._stderr.fileno()).st_size
            try:
                self._send(sys.path)  # each time: it may have grown since
                self._send((function, (*arguments, timeout_s)))
                answer = self._receive(timeout_s)
            except (EOFError, BrokenPipeError, TimeoutError) as error:
                self.end()
                ended = f"ended its process with status {self._child.returncode}"
                why = f"did not finish: {error}" if isinstance(error, TimeoutError) else ended
                raise FunctionError(
                    f"{function} {why}", hint=self._said(heard)[-_LAST:] or None
                ) from None
            except (
                BaseException
            ):  # interrupted: its answer would be taken for that to the next question
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
    """The process for a package, or of another name, with these variables, started unless it is running."""
    # A forked process does not share its parent's.
    key = package, tuple(sorted(environment.items())), os.getpid()
    if key not in _RUNNING or not _RUNNING[key].is_alive:
        _RUNNING[key] = Process(environment)
    return _RUNNING[key]


def end_all() -> None:
    """End the processes that `running` has started for this one; their questions end in FunctionError."""
    for (*_, owner), process in list(_RUNNING.items()):
        if owner == os.getpid():
            process.end()


_RUNNING: dict[tuple[str, tuple[tuple[str, str], ...], int], Process] = {}


class Watch:
    """Looks at processes again and again; `why_over` says why they should be given up. spent_s: seconds of
    processor time that they have used, None where the system does not say. limit_s: the longest time without
    progress, and of processor time per core, which an idle machine cannot spend sooner. grace_s: added to the
    limit, but not to the limit in the message.
    """

    def __init__(
        self, spent_s: Callable[[], float | None], limit_s: float, grace_s: float = 0.0
    ) -> None:
        self._spent_s = spent_s
        self._stated_s = limit_s
        self._limit_s = limit_s + grace_s
        self._start_s: float | None = (
            None  # from the first look on: most questions are answered before it
        )
        self._seen_s, self._since_s = 0.0, time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks."""
        return min(1.0, self._limit_s / 8)

    def why_over(self) -> str | None:
        """None while the processes may go on."""
        now_s = time.monotonic()
        spent_s = self._spent_s()
        if self._start_s is None:
            self._start_s = self._seen_s = spent_s or 0.0
        is_late = now_s - self._since_s > self._limit_s
        if spent_s is None:
            return f"it took more than {self._stated_s:g} s" if is_late else None
        if spent_s - self._start_s > self._limit_s * _CORES:
            return f"it took more than {self._stated_s * _CORES:g} s of processor time"
        # Less than before: one of the processes has ended, which is progress.
        if not 0 <= spent_s - self._seen_s < _STILL * self._limit_s:
            self._seen_s = spent_s
            self._since_s = now_s
            return None
        return f"it stood still for {self._stated_s:g} s" if is_late else None


def processor_time(pids: Iterable[int]) -> float | None:
    """Seconds of processor time of these processes and all that they have started; None off Linux."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            with open(f"/proc/{pid}/stat") as stat:
                fields = (
                    stat.read().rpartition(")")[2].split()
                )  # what stands before is the program's name
            children[int(fields[1])].append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    tree = [pid for pid in pids if pid in ticks]
    for pid in tree:  # which grows as it goes
        tree += children[pid]
    return sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")
