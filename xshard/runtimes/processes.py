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
_PROGRESS = 0.01  # seconds of processor time per second of the clock, below which nothing happens
_CORES = os.cpu_count() or 1
_MAX_QUOTED = 4000  # characters of standard error that an error quotes


class FunctionError(XshardError):
    """A function that raised, or did not end, in its process; the text has its traceback or output."""


class Process:
    """A running `python -m xshard.runtimes.server`, which calls functions of any module.

    Args:
        environment: Variables that it has beside this process's.
        prefix: A command that runs it elsewhere.
    """

    def __init__(self, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self._asking = Lock()  # one question at a time
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self._child = subprocess.Popen(
            [*prefix, sys.executable, "-m", "xshard.runtimes.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | environment,
            start_new_session=True,  # a group of its own, which `end` kills with all forks
        )
        self._owner_pid = os.getpid()
        atexit.register(self._end_at_exit)

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._child.poll() is None

    def ask(self, function: str, *arguments: Any, timeout_s: float, quiet: bool = False) -> Any:
        """Call `function(*arguments, timeout_s)` in the other process, and wait for its result.

        Args:
            function: The function's name with its module.
            *arguments: Its arguments, which are pickled.
            timeout_s: The longest time without progress, see `Watch`. Then the process is ended,
                with all its forks.
            quiet: Do not show on standard error what the function printed.

        Returns:
            What the function returns.

        Raises:
            XshardError: The function raised it.
            FunctionError: The function raised another error, or the process ended.
        """
        with self._asking:
            start = self._printed_bytes()
            try:
                self._send(sys.path)  # each time: it may have grown since
                self._send((function, (*arguments, timeout_s)))
                answer = self._receive(timeout_s)
            except BaseException as error:
                # Also when interrupted: the answer would be taken for that to the next question.
                self.end()
                if isinstance(error, TimeoutError):
                    why = f"did not finish: {error}"
                elif isinstance(error, EOFError | BrokenPipeError):
                    why = f"ended its process with status {self._child.returncode}"
                else:
                    raise
                printed = self._printed_since(start)[-_MAX_QUOTED:]
                raise FunctionError(f"{function} {why}", hint=printed or None) from None
            printed = self._printed_since(start)
            if printed and not quiet:
                print(printed, file=sys.stderr)
        if isinstance(answer, XshardError):
            raise answer
        return answer

    def end(self) -> None:
        """Kill it and all that it has forked: ranks that wait for each other would stay for ever."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _end_at_exit(self) -> None:
        if os.getpid() == self._owner_pid:  # a fork of the owner leaves it alone
            self.end()

    def _send(self, value: Any) -> None:
        assert self._child.stdin is not None
        pickle.dump(value, self._child.stdin)
        self._child.stdin.flush()

    def _receive(self, timeout_s: float) -> Any:
        """Wait for the other process's answer and unpickle it.

        Raises EOFError if the process ends, and TimeoutError if it makes no progress for
        `timeout_s`. Progress is processor time that it uses, so slow work goes on and a deadlock
        does not.
        """
        assert self._child.stdout is not None

        def spent_s() -> float | None:
            return processor_time([self._child.pid])

        watch = Watch(spent_s, timeout_s, _PATIENCE_S)
        while not select.select([self._child.stdout], [], [], watch.pause_s)[0]:
            # Its forks may keep the pipe open, so that no end of the file tells that it has ended.
            if not self.is_alive:
                raise EOFError
            why = watch.why_over()
            if why is not None:
                raise TimeoutError(why)
        return pickle.load(self._child.stdout)

    def _printed_bytes(self) -> int:
        """Return how long its standard error is by now."""
        return os.fstat(self._stderr.fileno()).st_size

    def _printed_since(self, start: int) -> str:
        """Return what was printed there since its standard error was `start` bytes long."""
        n_bytes = self._printed_bytes() - start
        return os.pread(self._stderr.fileno(), n_bytes, start).decode(errors="replace").strip()


def running(package: str, environment: Mapping[str, str]) -> Process:
    """Return the process for a package, or of another name, with these variables.

    It is started unless it is running.
    """
    # A forked process does not share its parent's.
    key = (package, tuple(sorted(environment.items())), os.getpid())
    if key not in _RUNNING or not _RUNNING[key].is_alive:
        _RUNNING[key] = Process(environment)
    return _RUNNING[key]


def end_all() -> None:
    """End the processes that `running` has started for this one; their questions end in FunctionError."""
    for (*_, owner_pid), process in list(_RUNNING.items()):
        if owner_pid == os.getpid():
            process.end()


_RUNNING: dict[tuple[str, tuple[tuple[str, str], ...], int], Process] = {}


class Watch:
    """Look at processes again and again, and say when they should be given up.

    A slow machine is not a process that stands still: what counts is the time without progress, and
    the processor time per core, which an idle machine cannot spend sooner.

    Args:
        spent_s: Returns the seconds of processor time that they have used, None where the system does
            not say.
        limit_s: The longest time without progress, and the most processor time per core.
        grace_s: Added to the limit, but not to the limit in the message.
    """

    def __init__(
        self, spent_s: Callable[[], float | None], limit_s: float, grace_s: float = 0.0
    ) -> None:
        self._spent_s = spent_s
        self._stated_s = limit_s
        self._limit_s = limit_s + grace_s
        # From the first look on: most questions are answered before it.
        self._start_s: float | None = None
        # The last progress: processor time then, and the time on the clock.
        self._progress_spent_s = 0.0
        self._progress_at_s = time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks."""
        return min(1.0, self._limit_s / 8)

    def why_over(self) -> str | None:
        """Return why the watched processes should be ended, as text; None while they may go on.

        Such as "it stood still for 60 s": they used hardly any processor time for that long. Using
        very much of it in all is a reason, too. Where processor time is not known, elapsed time
        counts. Each look that finds progress is noted, and the time without progress begins anew.

        `_limit_s` is `_stated_s`, the limit that the texts name, and some grace for slow machines.
        """
        now_s = time.monotonic()
        spent_s = self._spent_s()
        is_late = now_s - self._progress_at_s > self._limit_s
        if spent_s is None:
            return f"it took more than {self._stated_s:g} s" if is_late else None
        if self._start_s is None:  # the first look
            self._start_s = spent_s
            self._progress_spent_s = spent_s
        if spent_s - self._start_s > self._limit_s * _CORES:
            return f"it took more than {self._stated_s * _CORES:g} s of processor time"
        since_progress_s = spent_s - self._progress_spent_s
        # A negative number means that one of the processes has ended, and its time no longer counts:
        # that is progress, too.
        is_idle = 0 <= since_progress_s < _PROGRESS * self._limit_s
        if not is_idle:
            self._progress_spent_s = spent_s
            self._progress_at_s = now_s
            return None
        return f"it stood still for {self._stated_s:g} s" if is_late else None


def processor_time(pids: Iterable[int]) -> float | None:
    """Return the seconds of processor time that processes and their descendants have used in all.

    It tells whether they still work or only wait. None on systems without Linux's /proc.
    """
    if not Path("/proc/self/stat").exists():
        return None
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            with open(f"/proc/{pid}/stat") as stat:
                # What stands before the last parenthesis is the program's name, with any characters.
                fields = stat.read().rpartition(")")[2].split()
            parent_pid = int(fields[1])
            children[parent_pid].append(pid)
            # utime, stime, cutime and cstime: its own, and of children that have ended.
            ticks[pid] = sum(map(int, fields[11:15]))
    tree = [pid for pid in pids if pid in ticks]
    for pid in tree:  # the list grows in the loop, so children of children are reached, too
        tree += children[pid]
    return sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")
