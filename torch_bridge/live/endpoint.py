"""One of two programs that meet in a store.

Its processes act as one, and watch the other's heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, and in no `__all__`

from torch_bridge.mesh import failures, process_mesh
from torch_bridge.mesh.process_groups import group_of_programs
from torch_bridge.state.facts import PROFILE, Route, plan_described, rules_text, target_rules
from torch_bridge.state.leaves import all_or_none
from torch_bridge.state.transfer import execute
from xshard import Mesh, XshardError
from xshard.cost.machine import profile_of
from xshard.errors import MeshError
from xshard.rules import RulesLike
from xshard.signatures import Bytes, NonNegative
from xshard.state import Names, TreePlan, transfer
from xshard.state.progress import Progress

PAUSE_S = 0.02  # between two looks at the store or at a thread
BEAT_S = 0.5  # between two counts
T = TypeVar("T")


class LostVersionError(XshardError, RuntimeError):
    """A version did not arrive whole: the other program has ended, failed, or is late."""


class _Count(NamedTuple):
    """The last count that a rank was seen with, and how many more looks have shown the same."""

    value: int = -1
    n_same: int = 0


class Heartbeat:
    """A count in the store that grows while this rank works, and a watch on others' counts.

    Each rank has a thread that adds 1 to its own count every `BEAT_S` seconds. The thread of the
    first rank then looks at the counts of the other program's ranks. One that has not grown for too
    many looks belongs to a rank that has stopped: the first rank writes a notice with that rank's
    name to the store. All ranks of this program read the notice, and `check` raises.

    It counts looks, not seconds: if a whole machine stands still, no rank has stopped. Timeouts of a
    process group would not do: NCCL ends the process that waits, and a server has to go on.
    """

    def __init__(self, store_call: Callable[..., Any], key: Callable[..., str]) -> None:
        self._store_call = store_call
        self._key = key
        # A rank has stopped if as many looks in a row saw no new count.
        self._looks_until_stopped = 0.0
        # Written by the thread, read by `check`: why this version is lost; "" if it is not.
        self._error = ""
        # Written by `watch`, read by the thread.
        self._notice_key = ""
        self._watched: dict[str, str] = {}  # the key of a count -> "rank 3 of the server"

    @contextmanager
    def beating(self, session: int, silent_s: float) -> Iterator[None]:
        """Count in the store, in a thread, while the context is open: a sign that this rank works.

        The thread also watches the other program's ranks, from the call of `watch` on.

        Args:
            session: The number of this program's run.
            silent_s: Seconds after which a rank whose count stands still has stopped.
        """
        is_over = threading.Event()
        self._error = ""
        self._watched = {}
        self._looks_until_stopped = silent_s / BEAT_S
        own_key = self._key("beats", session, dist.get_rank())
        thread = threading.Thread(target=self._beat, args=(own_key, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            # A thread that still waits for a lost store is left: it ends with its call.
            thread.join(2 * BEAT_S)

    def watch(self, program: str, session: int, n_ranks: int, version: int) -> None:
        """Watch the ranks of the other program from now on, while this version is on its way."""
        self._notice_key = self._key("stopped", session, version)
        # In one assignment, as the thread of `_beat` reads it meanwhile.
        self._watched = {
            self._key("beats", session, rank): f"rank {rank} of the {program}"
            for rank in range(n_ranks)
        }

    def check(self) -> None:
        """Raise LostVersionError if a rank of the other program has stopped, or the store."""
        if self._error:
            raise LostVersionError(self._error)

    def run_watched(self, call: Callable[[], T]) -> T:
        """Call what waits for the other program, and return its result, or raise as `check`."""
        # In a thread, since a call that waits for a rank that has ended cannot be interrupted.
        future = failures.in_thread(call)
        while not wait([future], PAUSE_S).done:
            self.check()
        return future.result()

    def _beat(self, own_key: str, is_over: threading.Event) -> None:
        """Count until `is_over`, and look at the other program's counts each time; the thread.

        Args:
            own_key: The key of this rank's count.
            is_over: Set when the context of `beating` ends.
        """
        counts: dict[str, _Count] = {}
        try:
            while not is_over.wait(BEAT_S):
                self._store_call("add", own_key, 1)
                if dist.get_rank() == 0:
                    self._look(counts)
                if self._watched and self._store_call("check", [self._notice_key]):
                    rank = self._store_call("get", self._notice_key).decode()
                    self._error = f"{rank} has stopped"
        except LostVersionError as error:
            self._error = str(error)  # `check` raises it in the thread that works

    def _look(self, counts: dict[str, _Count]) -> None:
        """Look at the counts of the watched ranks, and leave a notice of one that has stopped."""
        for key, rank in self._watched.items():
            value = self._store_call("add", key, 0)  # adds nothing: it reads
            earlier = counts.get(key, _Count())
            n_same = earlier.n_same + 1 if value == earlier.value else 0
            counts[key] = _Count(value, n_same)
            if n_same >= self._looks_until_stopped:
                self._store_call("set", self._notice_key, rank)


@dataclass(kw_only=True)
class Endpoint:
    """One of the two programs; all its processes make one, with equal arguments.

    Args:
        store: A `TCPStore` or `FileStore` that both programs reach.
        rules: As in `transfer`, equal in both programs.
        src_mesh: The mesh of all processes of the trainer.
        dst_mesh: The mesh of all processes of the server.
        names: As in `transfer`, equal in both programs.
        bucket_bytes: As in `transfer`, equal in both programs.
        timeout_s: Seconds that one program waits for the other.
        silent_s: Seconds without a sign of life from a rank of the other program, or without an
            answer of the store, after which a version is lost.
        name: The name of the stream, if a store has several.

    Raises:
        MeshError: This program has another number of processes than its mesh.
    """

    is_trainer: ClassVar[bool]
    store: Store
    rules: RulesLike
    src_mesh: Mesh
    dst_mesh: Mesh
    names: Names | None = None
    bucket_bytes: Bytes = transfer.BUCKET
    timeout_s: NonNegative = 60.0
    silent_s: NonNegative = 5.0
    name: str = "weights"
    version: int = field(default=0, init=False)
    session: int = field(default=0, init=False, repr=False)
    heart: Heartbeat = field(init=False, repr=False)
    _group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    _sessions: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        process_mesh.check_world()
        # A mesh has all processes of its program: device i is rank i.
        mesh = self.src_mesh if self.is_trainer else self.dst_mesh
        n_processes = dist.get_world_size()
        if mesh.n_devices != n_processes:
            reason = f"{mesh!r} has {mesh.n_devices} devices, this program {n_processes} processes"
            hint = "src_mesh has all processes of the trainer, dst_mesh all of the server"
            raise MeshError(reason, hint=hint)
        self.heart = Heartbeat(self.store_call, self.key)

    def start_session(self) -> None:
        """Get a new number for this program after a failure, when its connections are useless."""
        if not self.session:
            next_number = partial(self.store_call, "add", self.key("sessions"), 1)
            self.session = self.broadcast(next_number)

    def key(self, *parts: object) -> str:
        """Return a key of this stream in the store: ("offer", 3) -> "xshard/weights/offer/3"."""
        return "/".join(("xshard", self.name, *map(str, parts)))

    def store_call(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Raises LostVersionError if it does not answer in time."""
        limit = timedelta(seconds=self.silent_s)
        try:
            return failures.call_within(limit, getattr(self.store, method), *args)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            reason = f"the store of both programs does not answer: {error}"
            raise LostVersionError(reason) from error

    def broadcast(self, function: Callable[[], Any], wait_s: float = 0.0) -> Any:
        """Return the result of `function` on the first rank, on all ranks of this program.

        If it fails, all raise.

        Args:
            function: A function whose result JSON can hold.
            wait_s: How long `function` itself may wait.
        """

        def on_first_rank() -> Any:
            return function() if dist.get_rank() == 0 else None

        return self._all_or_none(on_first_rank, wait_s)[0]

    def all_or_disconnect(self, function: Callable[[], T]) -> T:
        """Run a function on all ranks of this program, and return this rank's own result.

        If it fails on one rank, all raise. They also leave the process group that they share with
        the other program, in which messages may still be under way, and start a new session next.
        """
        # Results stay on their ranks, as they may be tensors: others only learn of success.
        results: list[T] = []

        def keep_result() -> None:
            results.append(function())

        try:
            self._all_or_none(keep_result)
        except BaseException:  # also when it is interrupted: messages may be on the way
            self.disconnect()
            self.session = 0  # none: `start_session` gets a new number
            raise
        return results[0]

    def _all_or_none(self, function: Callable[[], Any], wait_s: float = 0.0) -> list[Any]:
        # The first rank may wait for the other program first.
        timeout = timedelta(seconds=2 * self.timeout_s + wait_s)
        return all_or_none(range(dist.get_world_size()), self.key(), function, timeout=timeout)

    def plan(self, facts: Mapping[str, str]) -> TreePlan:
        """Plan how a tree of tensors is sent from the trainer's mesh to the server's.

        Trainer and server compute this plan each on their own. One process group joins them, in which
        the trainer's ranks come first: 4 trainers and 2 servers are ranks 0 to 3 and 4 to 5.

        Args:
            facts: The trainer's description of the tree, as texts by key.
        """
        n_src = self.src_mesh.n_devices
        n_all = n_src + self.dst_mesh.n_devices
        route = Route(
            self.dst_mesh,
            src_devices=tuple(range(n_src)),
            dst_devices=tuple(range(n_src, n_all)),
            profile=profile_of("of the trainer", facts[PROFILE]),
            bucket_bytes=self.bucket_bytes,
        )
        return plan_described(tuple(facts.items()), target_rules(self.rules), self.names, route)

    def plan_text(self, plan: TreePlan) -> str:
        """Return the text that both programs compare."""
        return "\n".join((str(plan), *rules_text(self.rules, self.names).values()))

    def recv(self, *parts: object) -> str | None:
        """Return the text that the other program writes to a key.

        None if it does not come in time.
        """
        key = self.key(*parts)
        end_s = time.monotonic() + self.timeout_s
        # Short looks, not one long wait: a store that waits answers no other call of this process.
        while not self.store_call("check", [key]):
            self.heart.check()
            if time.monotonic() > end_s:
                return None
            time.sleep(PAUSE_S)
        return str(self.store_call("get", key).decode())

    def recv_or_raise(self, *parts: object) -> str:
        """Return the text as `recv` does. Raises LostVersionError if it does not come in time."""
        message = self.recv(*parts)
        if message is None:
            reason = f"the other program has written nothing for {self.timeout_s:g} s"
            raise LostVersionError(reason)
        return message

    def connect(self, sessions: str) -> dist.ProcessGroup:
        """Return the process group that joins this run of the trainer with this run of the server.

        Args:
            sessions: The numbers of both runs, as in "7-9". When these change, the group of earlier
                runs is destroyed, and a new one made.
        """
        if self._group is None or sessions != self._sessions:
            self.disconnect()
            self._group = self.heart.run_watched(partial(self._new_group, sessions))
            self._sessions = sessions
        return self._group

    def disconnect(self) -> None:
        """Destroy the process group of both programs, if there is one.

        After a failure messages may be under way in it: it is of no use any more.
        """
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None

    def _new_group(self, sessions: str) -> dist.ProcessGroup:
        """Make the group of both programs, in which the ranks of the trainer come first."""
        n_src = self.src_mesh.n_devices
        rank = dist.get_rank()
        if not self.is_trainer:
            rank += n_src
        store: Any = self.store
        return group_of_programs(
            store.clone(),  # nothing else can use a store while ranks wait in it
            name=self.key(sessions),
            rank=rank,
            size=n_src + self.dst_mesh.n_devices,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def execute(
        self,
        plan: TreePlan,
        blocks: dict[str, Tensor],
        sessions: str,
        device: torch.device,
        report: Progress,
    ) -> dict[str, Tensor]:
        """Send and receive the tensors of a plan between trainer and server.

        Returns the blocks that arrive on this rank, by name; empty on the trainer.

        Args:
            plan: The plan.
            blocks: This rank's blocks, by name; empty on the server.
            sessions: The numbers of both programs' runs, for their common process group.
            device: The device on which blocks travel.
            report: Learns the progress in bytes, or None.
        """
        group = self.connect(sessions)
        # `guarded` runs this in another thread, which would have the default stream of CUDA: it gets
        # the stream of this thread. None, on a CPU, sets no stream.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def run() -> dict[str, Tensor]:
            with torch.cuda.stream(stream):
                received = execute(plan, blocks, device, group, progress=report)
            return {} if received is None else received

        return self.heart.run_watched(run)

    def lost_version(self, reason: str, error: Exception) -> LostVersionError:
        """Return the error of a version that did not arrive because of another error."""
        n = self.src_mesh.n_devices
        hint = f"{error}\n  if it names ranks of both programs, the first {n} are the trainer's"
        return LostVersionError(reason, hint=hint)
