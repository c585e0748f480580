"""Ranks that are killed between two lines of code, while a version is published or `xt.save` writes.

Nothing is half-visible and nothing is lost: who is left goes on, and the next version arrives.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import tests.torch_bridge.helpers  # noqa: F401  the server of forks has torch_bridge already
import torch_bridge as xt
from torch_bridge.live import endpoint
from torch_bridge.state import files, leaves, transfer
from xshard import Mesh, XshardError
from xshard.state.files import open_checkpoint, saving, verify

# The files whose lines are counted.
LIVE = str(Path(endpoint.__file__).parent), str(Path(transfer.__file__).parent)
FILES = tuple(str(module.__file__) for module in (files, leaves, saving))
# How often their lines run is a matter of time.
WAITING = {"recv", "_offered", "guarded", "check", "_beat", "_look", "store_call"}
TAKEN = "plan"  # what a server calls before it answers
OFFERED = "connect"  # what both call when a version has been offered and taken
AMID = "amid a message"
AMID_NUMBER = 3  # a version of messages of 4 MiB
LARGE = {"w": (8, 1 << 19)}
TRAINERS = 6
SERVERS = 2  # how many are killed elsewhere
SHAPES = {"w": (8, 6), "b": (6,), "e": (4, 8)}
BOTH: dict[str, Any] = {
    "rules": {"b": "o", "**": "o/dp i -> o i/tp"},
    "src_mesh": Mesh(dp=2),
    "dst_mesh": Mesh(tp=2),
    "bucket_bytes": 64,
    "timeout_s": 3600.0,  # nobody waits that long for who has been killed
}


class Order(NamedTuple):
    """What a rank is to do. line: before which it is killed, or a function's name; brief_s: of silence."""

    number: int = 0
    line: int | str | None = None
    brief_s: float = 2.0
    wait_s: float = 0.0


class Said(NamedTuple):
    """What came of it. done: whether a version came or went. number: of what the rank has. lines: it ran."""

    error: str
    done: bool
    number: int
    lines: int


class Trainer(xt.live.Publisher):
    answer_s: float

    def act(self, order: Order) -> bool:
        return self.publish(state(order.number, 0)) > 0

    def recv(self, *parts: object) -> str | None:
        """A server that is to take the version may be dead before it says so."""
        with mock.patch.object(
            self, "timeout_s", self.answer_s if parts[0] == "taken" else self.timeout_s
        ):
            return super().recv(*parts)

    def has(self) -> int:
        return 0


class Server(xt.live.Subscriber):
    def act(self, order: Order) -> bool:
        return self.receive(order.wait_s)

    def has_taken(self) -> bool:
        return bool(self.store.check([self.key("taken", self._latest)]))

    def has(self) -> int:
        if self.tree is None:
            return 0
        number = int(self.tree["b"][0]) // 1000
        expected = state(number, 1)
        assert self.tree.keys() == expected.keys()
        assert all(torch.equal(self.tree[name], x) for name, x in expected.items())
        return number


def state(number: int, cut: int) -> dict[str, torch.Tensor]:
    """This rank's blocks of a tree whose every element says which one it is."""
    shapes = SHAPES | (LARGE if number == AMID_NUMBER else {})
    whole = {name: torch.empty(s).fill_(1000.0 * number) for name, s in shapes.items()}
    whole = {name: x + torch.arange(x.numel()).reshape(x.shape) for name, x in whole.items()}
    return {
        name: x if x.ndim == 1 else x.chunk(2, cut)[dist.get_rank()].clone()
        for name, x in whole.items()
    }


@contextmanager
def killed_before(
    line: int | str | None, rooms: tuple[str, ...], is_due: Callable[[], bool] = lambda: True
) -> Iterator[list[str]]:
    """The lines of the rooms that run, and the end of this process before one of them, or after the last."""
    lines: list[str] = []
    begin = dist.batch_isend_irecv

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(rooms) or frame.f_code.co_name in WAITING:
            return None
        if event == "line":
            if line in (len(lines), frame.f_code.co_name):
                while not is_due():
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
            lines.append(frame.f_code.co_name)
        return trace

    if line == AMID:
        dist.batch_isend_irecv = lambda work: (begin(work), os.kill(os.getpid(), signal.SIGKILL))
    for where in (sys, threading):  # blocks are carried in a thread
        where.settrace(trace)
    try:
        yield lines
    finally:
        for where in (sys, threading):
            where.settrace(None)
        if line is not None:
            os.kill(os.getpid(), signal.SIGKILL)


class Ranks:
    """Two processes, a world of their own, and pipes to them."""

    def __init__(self, folder: Path, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.folder = Path(mkdtemp(dir=folder))
        pipes = [context.Pipe() for _ in range(2)]
        self.pipes = [pipe for pipe, _ in pipes]
        self.processes = [
            context.Process(target=_rank, args=(rank, self.folder, work, pipe, *args), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, pipe) in zip(self.processes, pipes, strict=True):
            process.start()
            pipe.close()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def _rank(rank: int, folder: Path, work: Callable[..., None], pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=2)
    work(pipe, folder, *args)
    os._exit(0)  # the others may be gone


def _act(pipe: Connection, _: Path, kind: Callable[..., Any], port: int, name: str) -> None:
    """Do what is ordered, as one end of a stream."""
    endpoint.within = lambda timeout, call, *args: call(
        *args
    )  # the store is there, however slow the machine
    end = kind(store=dist.TCPStore("127.0.0.1", port), name=name, **BOTH)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        error = ""
        done = False
        end.silent_s = order.brief_s
        end.answer_s = order.wait_s or order.brief_s
        # Before its first rank has taken a version, nothing says that there is a server.
        is_due = end.has_taken if kind is Server and isinstance(order.line, str) else lambda: True
        with killed_before(order.line, LIVE, is_due) as lines:
            try:
                done = end.act(order)
            except xt.live.LostVersionError as raised:
                error = str(raised)
        pipe.send(Said(error, done, end.has(), len(lines)))


class Program(Ranks):
    """Two ranks. When one is killed the other is too, as torchrun does."""

    def __init__(self, folder: Path, *end: Any) -> None:
        super().__init__(folder, _act, *end)
        self.is_ready = False
        threading.Thread(target=self._end_together, daemon=True).start()

    def _end_together(self) -> None:
        wait([process.sentinel for process in self.processes])
        self.kill()

    def order(self, order: Order, killed: int | None = None) -> None:
        """Tell both ranks, when they are there; only one is killed at the line."""
        self.is_ready = self.is_ready or all(pipe.recv() == "ready" for pipe in self.pipes)
        for rank, pipe in enumerate(self.pipes):
            pipe.send(order if killed in (None, rank) else order._replace(line=None))

    def is_at_work(self) -> bool:
        return not all(pipe.poll(0.02) for pipe in self.pipes)

    def said(self) -> list[Said] | None:
        """What both ranks say, which agree but for their lines; None of killed ones."""
        try:
            one, two = found = [pipe.recv() for pipe in self.pipes]
        except (EOFError, ConnectionResetError):
            for process in self.processes:
                process.join()
            assert {process.exitcode for process in self.processes} == {-signal.SIGKILL}
            return None
        assert one[1:3] == two[1:3] and bool(one.error) == bool(two.error)
        return found


def test_who_is_left_goes_on(tmp_path: Path) -> None:
    """Of two streams at once: the trainers of one are killed, and the servers of the other."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def kills(kill: Callable[..., None]) -> None:
        programs: list[Program] = []

        def start(kind: Callable[..., Any]) -> Program:
            programs.append(Program(tmp_path, kind, meeting.port, kill.__name__))
            return programs[-1]

        try:
            kill(start, random.Random(0))
        finally:
            for program in programs:
                program.kill()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kills, (_kill_trainers, _kill_servers)))


def ahead(start: Callable[..., Program], kind: Callable[..., Any]) -> Iterator[Program]:
    """Programs, each of which starts while the one before is at work."""
    following = start(kind)
    while True:
        one = following
        following = start(kind)
        yield one


def _kill_trainers(start: Callable[..., Program], rng: random.Random) -> None:
    trainer = start(Trainer)
    server = start(Server)
    sent, _ = arrives(trainer, server, number := 1)
    has = number
    lost: list[str] = []
    trainers = ahead(start, Trainer)
    for line in (OFFERED, AMID, *itertools.repeat(None, TRAINERS)):
        number = number + 1
        killed = rng.randrange(2)
        doomed = next(trainers)
        doomed.order(Order(number, line or rng.randrange(sent[killed].lines), wait_s=600.0), killed)
        found = receiving(doomed, server)
        assert doomed.said() is None
        came = [said[0].done for said in found]
        for i, said in enumerate(found, 1):
            assert said[0].number == (number if any(came[:i]) else has)
        has = found[-1][0].number
        lost += [said[0].error for said in found if said[0].error]
    assert (
        "did not arrive whole; version 1 stays" in lost[0]
        and "of the trainer has stopped" in lost[0]
    )
    arrives(trainer, server, number + 1)


def _kill_servers(start: Callable[..., Program], rng: random.Random) -> None:
    trainer = start(Trainer)
    server = start(Server)
    _, received = arrives(trainer, server, number := 1)
    server.kill()
    servers = ahead(start, Server)
    for line, rank in (*itertools.product((TAKEN, OFFERED), (0, 1)), *[(None, None)] * SERVERS):
        number = number + 1
        killed = rng.randrange(2) if rank is None else rank
        doomed = next(servers)
        doomed.order(
            Order(line=line or rng.randrange(received[killed].lines), wait_s=600.0), killed
        )
        trainer.order(Order(number, wait_s=600.0 if line else 0.0))
        said = trainer.said()
        assert doomed.said() is None and said is not None
        assert not line or "of the server has stopped" in said[0].error
    arrives(trainer, next(servers), number + 1)


def receiving(trainer: Program, server: Program) -> list[list[Said]]:
    """What the server says while the trainer is at work, and after that."""
    found = []
    is_over = False
    while not is_over:
        is_over = not trainer.is_at_work()
        server.order(Order(wait_s=0.1))
        said = server.said()
        assert said is not None
        found.append(said)
    return found


def arrives(trainer: Program, server: Program, number: int) -> tuple[list[Said], list[Said]]:
    """Publish a state until the server has it, however slow they are -> what both say of it."""
    brief_s = 2.0
    while True:
        trainer.order(Order(number, brief_s=brief_s))
        server.order(Order(wait_s=brief_s, brief_s=brief_s))
        sent = trainer.said()
        received = server.said()
        assert sent is not None and received is not None
        if sent[0].done and received[0].done:
            assert received[0].number == number
            return sent, received
        brief_s *= 2


def _saved(
    pipe: Connection, folder: Path, killed: int | None = None, line: int | None = None
) -> None:
    """Of two versions that a half each is in a rank, the second."""
    c10d._set_pg_timeout(
        timedelta(seconds=3), dist.group.WORLD
    )  # of a rank that waits for a dead one
    old, new = ({f"w{i}": torch.full((2, 3), version) for i in range(2)} for version in (1.0, 2.0))
    xt.save(old, folder / "saved", {"**": "o/dp i"}, Mesh(dp=2), shard_bytes=30)
    error = ""
    with killed_before(line if dist.get_rank() == killed else None, FILES) as lines:
        try:
            xt.save(new, folder / "saved", {"**": "o/dp i"}, Mesh(dp=2), shard_bytes=30)
        except XshardError as raised:
            error = type(raised).__name__
    pipe.send((error, lines))


def said_of(ranks: Ranks, killed: int | None = None) -> list[tuple[str, list[str]]]:
    """The error and the lines of each rank that is left."""
    for process in ranks.processes:
        process.join()
    codes = [process.exitcode for process in ranks.processes]
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(2)]
    return [pipe.recv() for rank, pipe in enumerate(ranks.pipes) if rank != killed]


def test_of_two_that_save_one_is_killed(tmp_path: Path) -> None:
    """The old checkpoint is whole, or the new one; the other rank has an error, or all of it."""
    rng = random.Random(1)
    lines = [ran for _, ran in said_of(Ranks(tmp_path, _saved))]
    decisive = [(0, i) for i, function in enumerate(lines[0]) if function == "commit"]
    kills = [
        *rng.sample(decisive, 2),
        *((rank, rng.randrange(len(lines[rank]))) for rank in range(2)),
    ]
    worlds = [Ranks(tmp_path, _saved, *kill) for kill in kills]
    for world, (killed, _) in zip(worlds, kills, strict=True):
        ((error, _),) = said_of(world, killed)
        with open_checkpoint(world.folder / "saved") as checkpoint:
            assert verify(checkpoint) == 4
            (version,) = {float(x) for name in checkpoint for x in checkpoint.read(name).ravel()}
        assert version == 2 or error
