"""Programs as forks of a process that has imported torch, which takes longer than most of them.

Such a program gets its arguments, its environment and its output as if it were started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import itertools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, util
from typing import Any
from unittest import mock

TIMEOUT_S = 1800.0  # an example takes up to a minute: this ends what hangs
FORK = multiprocessing.get_context("fork")


def printed(path: str, _timeout_s: float = 0.0) -> str:
    """The output of a script of the documents, run in this process as `python path` would in its folder."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(os.path.dirname(path)), in_this_world():
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def all_printed(paths: Sequence[str]) -> list[str]:
    """The output of each of several scripts."""
    return [printed(path) for path in paths]


@contextlib.contextmanager
def in_this_world() -> Iterator[None]:
    """A rank of a test is in a process group already: `init_process_group` does nothing inside."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        yield
        return
    with mock.patch.object(dist, "init_process_group"):
        yield


class Forked:
    """What `subprocess.Popen` is to examples: `python -m MODULE ...`, whose lines are read."""

    def __init__(
        self, command: list[str], env: Mapping[str, str] = os.environ, **_: object
    ) -> None:
        out, into = os.pipe()
        self.process = FORK.Process(target=_module, args=(command[2:], dict(env), into))
        self.process.start()
        os.close(into)
        self.stdout = os.fdopen(out)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.returncode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def communicate(self) -> None:
        self.stdout.read()
        self.wait()


def _module(arguments: list[str], environment: dict[str, str], into: int) -> None:
    os.dup2(into, 1)
    os.close(into)
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # which torch has read when it was imported
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = arguments
    _serve_forks()
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def script(
    program: str, options: list[str], environment: Mapping[str, str]
) -> tuple[int, str, str]:
    """`python program *options` in this process, which does nothing else: its exit status, output and errors.

    program: the path of a script, or the name of a module, as after `-m`.
    """
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    start: Any = subprocess.Popen

    def popen(command: list[str], *args: Any, **more: Any) -> Any:
        return (
            Forked(command, **more)
            if command[:2] == [sys.executable, "-m"]
            else start(command, *args, **more)
        )

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    os.environ.update(environment)
    sys.argv = [program, *options]
    status = 0
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        os.dup2(printed.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        _serve_forks()
        try:
            if program.endswith(".py"):
                sys.path.insert(0, os.path.dirname(program))
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = int(end.code or 0)
        sys.stdout.flush()
        printed.seek(0)
        errors.seek(0)
        return status, printed.read(), errors.read()


def _serve_forks() -> None:
    """Start the server that forks ranks as a fork of this process: an interpreter imports torch again."""
    interpreter = util.spawnv_passfds

    def fork(_: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        util.spawnv_passfds = interpreter
        kept = sorted({0, 1, 2, *passed, os.sysconf("SC_OPEN_MAX")})
        for last, after in itertools.pairwise(
            kept
        ):  # the server ends when a pipe's other end is closed
            os.closerange(last + 1, after)
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)

    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]  a parent's is none of this one's
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()
