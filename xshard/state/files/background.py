"""A save beside a program that goes on: blocks are copied, and then a thread of each process writes.

The threads send nothing, since what is sent belongs to the program: they report to the first
process by files in the folder of the unfinished save, and it puts the new files in place.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.errors import api_boundary
from xshard.state.files.folder import AllOrNone
from xshard.state.files.header import FileError
from xshard.state.files.saving import (
    SaveTask,
    abort,
    begun,
    commit,
    disk_errors,
    is_free,
    lock,
    merge_sums,
    unfinished,
    untold,
    write,
)

_POLL_S = 0.05  # between two looks for reports
_LONGEST_S = 1800.0  # that the first process waits for a report, on a file system without locks


@api_boundary
class BackgroundSave:
    """A save that is being written beside the program.

    The checkpoint appears in its folder at once, when all processes have written their blocks, also
    if nobody waits for it. A program that ends waits for it. A save that fails warns, and the next one
    raises its error if nobody has waited.

    Args:
        future: What the thread of this process does.
        all_or_none: Calls a function in all processes, or raises in all.
        token: What names the files of the save.
    """

    def __init__(self, future: Future[None], all_or_none: AllOrNone, token: str) -> None:
        self._future = future
        self._all_or_none = all_or_none
        self._token = token

    def done(self) -> bool:
        """Return whether this process has nothing more to do for the save."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is in its place. All processes call it.

        Raises:
            FileError: The save has failed; the folder has the checkpoint that it had before.
        """

        def result() -> None:
            try:
                self._future.result()
            finally:
                untold.pop(self._token, None)

        self._all_or_none(result)


def save_beside(task: SaveTask) -> BackgroundSave:
    """Begin a save: copy the blocks of this process, and let a thread write them.

    All processes call this.

    Raises:
        FileError: As `save_blocks` does, of what is found out before the first byte is written.
    """
    copies: dict[tuple[str, int, str], NDArray[Any]] = {}

    def copy_blocks() -> None:
        # Free when this process has ended, also without a report.
        own_process = task.writers.own
        lock(unfinished(task.path, token) / _file_of(own_process), stack, os.O_CREAT)
        for name, device, boxes in task.plan.writes(own_process):
            for dtype in {task.plan.arrays[common_box.name].dtype for common_box in boxes}:
                copies[name, device, dtype] = np.array(task.block_of(name, device, dtype))

    with ExitStack() as stack, begun(task, stack) as token:
        task.all_or_none(copy_blocks)
        locked = stack.pop_all()

    def write_copies() -> None:
        copied = task._replace(block_of=lambda *block: copies[block])
        try:
            with locked, disk_errors(task.path):
                _write_and_commit(copied, token)
        except Exception as error:
            untold[token] = FileError(f"the save into {task.path} has failed: {error}")
            with suppress(Warning):  # which a program may have made an error
                warnings.warn(str(untold[token]), stacklevel=1)
            raise

    threads = ThreadPoolExecutor(1, thread_name_prefix="xshard-save")
    future = threads.submit(write_copies)
    threads.shutdown(wait=False)
    return BackgroundSave(future, task.all_or_none, token)


def _write_and_commit(task: SaveTask, token: str) -> None:
    """Write the blocks of this process and report it; the first one waits for all, and commits."""
    folder = unfinished(task.path, token)
    leader, *other_processes = task.writers.processes
    own_process = task.writers.own
    try:
        sums = write(task, token)
        if own_process != leader:
            _write_report(folder, own_process, {"sums": sums})
            return
        reports = [_read_report(folder, process) for process in other_processes]
        sums_of_all = merge_sums(task.plan, [sums, *[report["sums"] for report in reports]])
        commit(task, token, sums_of_all)
    except BaseException as error:  # of any kind: the first process waits for a report
        if own_process == leader:
            # One that still writes into the folder would keep it from being removed.
            for process in other_processes:
                _wait_for_report(folder, process)
            abort(task, token)
        else:
            _write_report(folder, own_process, {"error": str(error)})
        raise


def _file_of(process: int) -> str:
    """Return the name of the file into which a process writes its report."""
    return f"{process}.writing"


def _write_report(folder: Path, process: int, report: dict[str, Any]) -> None:
    """Write what one process has to say, so that it is seen whole or not at all."""
    file = folder / _file_of(process)
    file.write_text(json.dumps(report))
    file.rename(file.with_suffix(".json"))


def _wait_for_report(folder: Path, process: int) -> Path | None:
    """Wait until a process has reported; return its report, or None if it has ended without one."""
    locked = folder / _file_of(process)
    file = locked.with_suffix(".json")
    give_up_s = time.monotonic() + _LONGEST_S
    while not file.exists():
        has_ended = is_free(locked) and not file.exists()  # it is renamed at the end
        if has_ended or time.monotonic() > give_up_s:
            return None
        time.sleep(_POLL_S)
    return file


def _read_report(folder: Path, process: int) -> dict[str, Any]:
    """Wait for the report of a process. Raises FileError if it has failed, or ended without one."""
    file = _wait_for_report(folder, process)
    if file is None:
        raise FileError(f"process {process} has ended, and has not reported its blocks")
    report: dict[str, Any] = json.loads(file.read_text())
    if "error" in report:
        raise FileError(f"process {process} failed: {report['error']}")
    return report
