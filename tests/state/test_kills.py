"""Processes that are killed while they save or load, between two lines of code: the same on every machine."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import xshard.state.files
from tests.state.checkpoints import ONE, arrays, load, save, sources
from xshard.state.files import FileError, latest, open_checkpoint, verify
from xshard.state.files.background import save_beside
from xshard.state.files.folder import INDEX
from xshard.state.files.saving import SaveTask, plan_save

pytestmark = pytest.mark.long
ROOM = str(Path(xshard.state.files.__file__).parent)


def lines_of(work: Callable[[], object], kill_at: int | None = None) -> list[str]:
    """Do the work in a process of its own -> the functions of the lines that it ran, of the room of files.

    kill_at: the line before which the process is killed; nothing is returned of it then.
    """
    receives, sends = os.pipe()
    pid = os.fork()
    if pid == 0:
        seen: list[str] = []

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(ROOM):
                return None
            if event == "line":
                if len(seen) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen.append(frame.f_code.co_name)
            return trace

        try:
            for where in (sys, threading):
                where.settrace(trace)
            work()
            sys.settrace(None)
            os.write(sends, "\n".join(seen).encode())
        finally:
            os._exit(0)
    os.close(sends)
    with os.fdopen(receives) as pipe:
        found = pipe.read().split()
    status = os.waitpid(pid, 0)[1]
    assert (os.WTERMSIG(status) == signal.SIGKILL) == (not found)
    return found


def moments(work: Callable[[], object], all_of: str, seed: int) -> list[int]:
    """Twenty moments at random, and each line of one function, which decides."""
    lines = lines_of(work)
    decisive = [i for i, name in enumerate(lines) if name == all_of]
    return random.Random(seed).sample(range(len(lines)), 20) + decisive


def has(folder: Path, expected: dict[str, np.ndarray]) -> bool:
    assert verify(open_checkpoint(folder)) == 3
    found = load(folder)
    return all(np.array_equal(found[name][0], x) for name, x in expected.items())


@pytest.mark.parametrize("fresh", [False, True], ids=["over another", "fresh"])
def test_a_killed_save(fresh: bool, tmp_path: Path) -> None:
    """Leaves the old checkpoint or the new one, whole; the next save leaves nothing but its own."""
    old, new, next_one = (arrays(seed) for seed in range(3))
    seen = set()
    dry = tmp_path / "dry"
    if not fresh:
        save(dry, old)
    for i, moment in enumerate(moments(lambda: save(dry, new), "commit", fresh)):
        folder = tmp_path / str(i)
        if not fresh:
            save(folder, old)
        lines_of(lambda folder=folder: save(folder, new), kill_at=moment)
        if fresh and not (folder / INDEX).exists():
            with pytest.raises(FileError):
                open_checkpoint(folder)
            seen.add("nothing")
        else:
            is_new = has(folder, new)
            assert is_new or (not fresh and has(folder, old))
            seen.add("new" if is_new else "old")
        save(folder, next_one)
        assert has(folder, next_one)
        assert {path.name for path in folder.iterdir()} == {
            INDEX,
            *open_checkpoint(folder).places.values(),
        }
    assert seen == {"new", "nothing" if fresh else "old"}


def test_a_killed_load(tmp_path: Path) -> None:
    """Has changed nothing."""
    save(tmp_path, arrays())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for moment in moments(lambda: load(tmp_path), "read_block", seed=2):
        lines_of(lambda: load(tmp_path), kill_at=moment)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert has(tmp_path, arrays())


def run_of(folder: Path, steps: int = 4) -> None:
    """Save beside the program, step after step, and keep two."""
    for step in range(1, steps + 1):
        values = arrays(step)
        plan = plan_save(sources(values, {}, ONE))
        path = folder / f"step_{step}"
        save_beside(
            SaveTask(plan, path, lambda name, *_, values=values: values[name], keep=2)
        ).wait()


def test_a_killed_run(tmp_path: Path) -> None:
    """Has a newest checkpoint that is whole, from the first one on, and goes on from there."""
    n_lines = len(lines_of(lambda: run_of(tmp_path / "dry")))
    assert {path.name for path in (tmp_path / "dry").iterdir()} == {"step_3", "step_4"}
    seen = set()
    # Threads take turns as they like: the last lines may not be reached.
    for i, moment in enumerate(random.Random(3).sample(range(n_lines - 20), 50)):
        folder = tmp_path / str(i)
        folder.mkdir()
        lines_of(lambda folder=folder: run_of(folder), kill_at=moment)
        newest = latest(folder)
        if newest is None:
            seen.add(0)
        else:
            step = int(newest.name.removeprefix("step_"))
            assert verify(open_checkpoint(newest)) == 2
            found = load(newest)
            assert all(np.array_equal(found[name][0], x) for name, x in arrays(step).items())
            seen.add(step)
        run_of(folder)
        assert {path.name for path in folder.iterdir()} == {"step_3", "step_4"}
    assert seen >= {0, 1, 2, 3}
