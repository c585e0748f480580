"""Ranks in the middle of all operations at once, and what each of these ends in.

Decides how the parent and its ranks find out about each other: by files in a folder, which stay when a rank
or its node does not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.torch_bridge.faults.operations import (
    ROWS,
    SERVER,
    TRAINER,
    cold_operations,
    next_version,
    operations,
)
from xshard.runtimes.processes import Watch, processor_time

N = 4  # of the world of all operations but one
# That one is of two programs; the processes of all three worlds are numbered on.
WORLDS = {"world": range(N), TRAINER: range(4, 6), SERVER: range(6, 8)}
ALL = range(8)
STILL_S = 120.0  # without progress: a hang
NAP_S = 0.05


class _Naps:
    """Seconds as this process gets them: where others take all cores, naps are few, and nothing is late."""

    seconds = 0.0

    def count(self) -> None:
        while True:
            time.sleep(NAP_S)
            self.seconds += NAP_S


_naps = _Naps()


@dataclass(frozen=True)
class End:
    """What an operation ended in on one rank: "right", "wrong", or the class and the text of an error."""

    row: str
    direction: str
    kind: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Act:
    """One call that is to be interrupted. expected: its result where nothing happens."""

    row: str
    direction: str
    call: Callable[[], Any]
    expected: Any

    def end(self) -> End:
        """Make the call."""
        start = _naps.seconds
        try:
            kind = "right" if self._is_right(self.call()) else "wrong"
            text = ""
        except BaseException as error:
            kind = type(error).__name__
            text = str(error)
        return End(self.row, self.direction, kind, text, _naps.seconds - start)

    def _is_right(self, found: Any) -> bool:
        return found is self.expected is None or torch.equal(found, self.expected)


def enter(number: int, store: dist.Store, timeout_s: float) -> str:
    """Make the world of a process with others -> its name. store: of the world, or of both programs."""
    name, numbers = next((name, numbers) for name, numbers in WORLDS.items() if number in numbers)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=numbers.index(number),
        world_size=len(numbers),
        timeout=timedelta(seconds=timeout_s),
    )
    return name


def take_part(folder: Path, number: int, meeting: dist.Store, width: int, timeout_s: float) -> None:
    """A process: begin all operations when the parent says so, and write down what becomes of them.

    meeting: the store of the two programs. timeout_s: of each collective, from then on; getting ready may
    take its time.
    """
    os.environ["XSHARD_PROFILE"] = "h100"  # plans of one step, in no group but the operation's own
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # by which launchers end the others of a killed rank
    if number in WORLDS["world"]:
        at_once = [
            Act(operation.row, direction, getattr(operation, direction)(), expected)
            for direction in ("forward", "backward")
            for operation in operations(width, timeout_s, direction)
            for expected in [getattr(operation, direction)()()]
        ]
        ones = torch.ones(N * ROWS, width)
        in_turn = [
            Act(each.row, "forward", each.forward(), ones) for each in cold_operations(width)
        ]
    else:
        program = TRAINER if number in WORLDS[TRAINER] else SERVER
        version, expected = next_version(program, meeting.clone(), width, timeout_s)
        at_once = [Act(version.row, "forward", version.forward(), expected)]
        in_turn = []
    for group in c10d._world.pg_map:
        c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    act(folder, number, at_once, in_turn)


def act(folder: Path, rank: int, at_once: Sequence[Act], in_turn: Sequence[Act]) -> None:
    """Begin when the parent says so, write down the ends, and stay until it says that all is over."""
    ends: list[End] = []
    threading.Thread(target=_naps.count, daemon=True).start()
    say(folder, f"ready{rank}")
    wait_for(folder, "go")
    groups = [*([each] for each in at_once), in_turn]
    threads = [
        threading.Thread(target=lambda some=some: ends.extend(a.end() for a in some))
        for some in groups
    ]
    for thread in threads:
        thread.start()
    say(folder, f"begun{rank}")
    for thread in threads:
        thread.join()
    say(folder, f"ends{rank}", json.dumps([asdict(end) for end in ends]))
    wait_for(folder, "over")


def say(folder: Path, name: str, text: str = "") -> None:
    """Write a file, which others see whole or not at all."""
    (part := folder / f"{name}.part").write_text(text)
    part.rename(folder / name)


def wait_for(folder: Path, *names: str) -> None:
    """Wait for files. Raises TimeoutError when those are gone that should write them."""
    end = time.monotonic() + 5 * STILL_S
    while not all((folder / name).exists() for name in names):
        time.sleep(0.05)
        if time.monotonic() > end:
            raise TimeoutError(f"no {', '.join(names)}")


def ends_of(folder: Path, ranks: Sequence[int]) -> dict[int, list[End]]:
    """What these ranks have written down."""
    return {
        r: [End(**each) for each in json.loads((folder / f"ends{r}").read_text())] for r in ranks
    }


class Ranks:
    """Forked processes that call `function(folder, number, store, *args)`, in worlds that wait for so long.

    The parent has the store of their worlds, as under torchrun.
    """

    def __init__(
        self,
        folder: Path,
        numbers: range,
        timeout_s: float,
        function: Callable[..., None],
        *args: Any,
    ) -> None:
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        given = (timeout_s, function, folder, *args)
        self.processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(i, numbers, self._store.port, *given))
            for i in numbers
        ]
        for process in self.processes:
            process.start()

    def send(self, rank: int, number: int) -> None:
        """Send a rank a signal."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for(self, *names: str) -> None:
        """Wait for files of the ranks. Raises AssertionError when these stand still, or end."""

        def are_there() -> bool:
            missing = [name for name in names if not (self.folder / name).exists()]
            ended = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
            unasked = {i: code for i, code in ended.items() if code != -signal.SIGKILL}
            assert not missing or not unasked, f"no {', '.join(missing)}; exit codes {unasked}"
            return not missing

        self._wait(are_there, f"waiting for {names}")

    def exit_codes(self) -> list[int | None]:
        """Wait for the end of all ranks -> how each of them ended."""
        self._wait(lambda: all(process.exitcode is not None for process in self.processes), "exit")
        return [process.exitcode for process in self.processes]

    def _wait(self, is_over: Callable[[], bool], what: str) -> None:
        pids = [process.pid for process in self.processes if process.pid is not None]
        watch = Watch(lambda: processor_time(pids), STILL_S)
        look = time.monotonic()
        while not is_over():
            time.sleep(0.05)
            if (
                time.monotonic() > look
            ):  # looking at all processes takes more than what is waited for
                look = time.monotonic() + watch.pause_s
                why = watch.why_over()
                assert why is None, f"{what}: {why}"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()


def _rank(
    number: int,
    numbers: range,
    port: int,
    timeout_s: float,
    function: Any,
    folder: Path,
    *args: Any,
):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    say(folder, f"here{number}")
    wait_for(folder, *(f"here{other}" for other in numbers))
    enter(number, store, timeout_s)
    function(folder, number, store, *args)
    with suppress(RuntimeError):
        dist.destroy_process_group()


def take_part_on_node(folder: Path, width: int, timeout_s: float) -> None:
    """A process of a node that has four: two of the world, and two of a program with a store of its own."""
    node = int(os.environ["GROUP_RANK"])
    at = int(os.environ["LOCAL_RANK"])
    number = 2 * node + at + (at > 1) * 2
    meeting = store = c10d._get_default_store()
    # A rank that is connected may go on, and end its connections, before others have theirs.
    dist.monitored_barrier(timeout=timedelta(seconds=STILL_S))
    meeting.set_timeout(timedelta(seconds=timeout_s))
    dist.destroy_process_group()
    if at == 2:
        store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        say(folder, f"port{node}", str(store.port))
    elif at == 3:
        wait_for(folder, f"port{node}")
        store = dist.TCPStore(socket.gethostname(), int((folder / f"port{node}").read_text()))
    enter(number, store, timeout_s)
    take_part(folder, number, meeting, width, timeout_s)
    dist.destroy_process_group()  # what torchrun's ranks do at the end waits for nobody who is lost
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
