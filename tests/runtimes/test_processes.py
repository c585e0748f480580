"""Processes that are asked: functions that fail, die or hang, and how a hang differs from slow work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from xshard.errors import MeshError
from xshard.runtimes import processes
from xshard.runtimes.processes import FunctionError, Process, Watch, processor_time, running

FUNCTIONS = """
import os, pathlib, sys, time

import xshard as xs


def length(text, timeout_s):
    print("counted", flush=True)
    return len(text)


def refuses(timeout_s):
    raise xs.errors.MeshError("no such axis", hint="another")


def fails(timeout_s):
    raise KeyError("lost")


def dies(timeout_s):
    os.write(2, b"my last words")
    os.kill(os.getpid(), 9)


def dies_while_its_child_lives(file, timeout_s):
    child = os.fork()
    if child:
        pathlib.Path(file).write_text(str(child))
        os._exit(3)
    time.sleep(600)


def hangs(file, timeout_s):
    child = os.fork()
    if child:
        pathlib.Path(file).write_text(str(child))
        print("waiting for ever")
        sys.stdout.flush()
    time.sleep(600)


def unpicklable(timeout_s):
    return lambda: None
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A process that has no patience, and can import `asked_functions`, which are found since it runs."""
    (tmp_path / "asked_functions.py").write_text(FUNCTIONS)
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.0)
    started = Process({"ASKED": "1"})
    monkeypatch.syspath_prepend(tmp_path)
    yield started
    started.end()


def error_of(process: Process, name: str, *arguments: object, timeout_s: float = 60.0) -> str:
    with pytest.raises(FunctionError) as raised:
        process.ask(f"asked_functions.{name}", *arguments, timeout_s=timeout_s)
    return str(raised.value)


def has_ended(file: Path) -> bool:
    """True if the process with the number in the file has ended, or does so in time."""
    status = Path("/proc", file.read_text(), "stat")
    for _ in range(6000):  # a slow machine is no reason to fail
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_what_is_printed_is_shown_or_not(
    process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    for quiet, shown in ((True, ""), (False, "counted\n")):
        assert process.ask("asked_functions.length", "four", timeout_s=60.0, quiet=quiet) == 4
        assert capsys.readouterr().err == shown


def test_an_error_leaves_the_process_to_answer_on(process: Process) -> None:
    with pytest.raises(MeshError, match="no such axis\n  another"):
        process.ask("asked_functions.refuses", timeout_s=60.0)
    message = error_of(process, "fails")
    assert message.startswith("KeyError in asked_functions.fails\n") and message.endswith(
        "KeyError: 'lost'"
    )
    assert "in asked_functions.unpicklable" in error_of(process, "unpicklable")
    assert process.ask("asked_functions.length", "four", timeout_s=60.0) == 4


def test_a_process_that_is_killed_leaves_its_last_words(process: Process) -> None:
    message = error_of(process, "dies")
    assert message == "asked_functions.dies ended its process with status -9\n  my last words"
    assert not process.is_alive


@pytest.mark.parametrize(
    ("name", "timeout_s", "why"),
    [
        ("dies_while_its_child_lives", 60.0, "ended its process with status 3"),
        ("hangs", 2.0, "did not finish: it stood still for 2 s\n  waiting for ever"),
    ],
)
def test_all_that_a_function_has_forked_ends_with_it(
    process: Process, tmp_path: Path, name: str, timeout_s: float, why: str
) -> None:
    """A child keeps the pipe open."""
    message = error_of(process, name, str(tmp_path / "child"), timeout_s=timeout_s)
    assert message == f"asked_functions.{name} {why}"
    assert has_ended(tmp_path / "child")


def test_equal_environments_share_a_process() -> None:
    found = running("none", {"A": "1", "B": "2"})
    assert running("none", {"B": "2", "A": "1"}) is found
    other = running("none", {"A": "1"})
    assert other is not found
    for each in (found, other):
        each.end()
    assert running("none", {"A": "1"}) is not other
    running("none", {"A": "1"}).end()


@pytest.mark.parametrize(
    ("grace_s", "measured", "phases"),
    [
        (0, True, [(300, 0.05, None)]),
        (5, True, [(30, 0.5, None), (15, 0.001, None), (1, 0.001, "it stood still for 10 s")]),
        (0, True, [(10, 2.0, None), (1, 2.0, "it took more than 20 s of processor time")]),
        (0, True, [(8, 1.0, None), (1, -7.0, None), (10, 0.0, None)]),
        (0, False, [(10, 0.0, None), (1, 0.0, "it took more than 10 s")]),
    ],
    ids=["slow", "stands still", "computes for ever", "a process has ended", "no processor time"],
)
def test_a_slow_machine_is_no_hang(
    grace_s: int,
    measured: bool,
    phases: list[tuple[int, float, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Phases: seconds, the share of one of two cores, and why the watch then says that it is over."""
    now_s = [0.0]
    spent_s = [0.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(processes, "_CORES", 2)
    watched = Watch(lambda: spent_s[0] if measured else None, 10, grace_s)
    assert watched.why_over() is None  # the first look
    for seconds, share, expected in phases:
        for _ in range(seconds):
            now_s[0] += 1
            spent_s[0] += share
            if why := watched.why_over():
                break
        assert why == expected


def test_processor_time_counts_children_that_have_ended() -> None:
    def spend(seconds: float) -> None:
        start = time.process_time()
        while time.process_time() - start < seconds:
            pass

    before = processor_time([os.getpid()])
    assert before is not None
    child = os.fork()
    if not child:
        spend(0.3)
        os._exit(0)
    os.waitpid(child, 0)
    after = processor_time([os.getpid()])
    assert after is not None and after - before >= 0.25


def test_no_process_takes_no_processor_time() -> None:
    assert processor_time([]) == 0
