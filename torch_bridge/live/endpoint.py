"""One of two programs that meet in a store: its processes act as one, and watch the other's heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from torch_bridge.mesh import failures, process_mesh
from torch_bridge.mesh.process_groups import group_of_programs
from torch_bridge.state.facts import PROFILE, Route, plan_described, rules_text, target_rules
from torch_bridge.state.leaves import all_or_none
from torch_bridge.state.transfer import execute
from xshard import Mesh, XshardError
from xshard.cost.machine import profile_of
from xshard.errors import MeshError
from xshard.rules import RulesLike
from xshard.state import Names, TreePlan, transfer
from xshard.state.progress import Progress

PAUSE_S = 0.02  # between two looks at the store or at a thread
BEAT_S = 0.5  # between two counts


class LostVersionError(XshardError, RuntimeError):
    """A version did not arrive whole: the other program has ended, failed, or did not come in time."""


class Heartbeat:
    """A count in the store that grows while this rank works, and a watch on the counts of the other program.
    The first rank watches all ranks of the other program, and leaves a notice for the ranks of its own. It
    counts looks, not seconds: if a whole machine stands still, no rank has stopped. Timeouts of a process
    group would not do: NCCL ends the process that waits, and a server has to go on.
    """

    def __init__(self, store_call: Callable[..., Any], key: Callable[..., str]) -> None:
        self._store_call = store_call
        self._key = key
        self._max_looks = 0.0
        self._error = ""
        self._notice = ""
        self._watched: dict[str, str] = {}

    @contextmanager
    def beating(self, session: int, silent_s: float) -> Iterator[None]:
        """Count in a thread. silent_s: a rank without a new count for so long has stopped."""
        over = threading.Event()
        self._error = ""
        self._watched = {}
        self._max_looks = silent_s / BEAT_S
        own = self._key("beats", session, dist.get_rank())
        thread = threading.Thread(target=self._beat, args=(own, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * BEAT_S)

    def watch(self, program: str, session: int, n: int, version: int) -> None:
        """From now on watch the `n` ranks of the other program, while this version is on its way."""
        self._notice = self._key("stopped", session, version)
        self._watched = {
            self._key("beats", session, r): f"rank {r} of the {program}" for r in range(n)
        }

    def check(self) -> None:
        """Raise LostVersionError if a rank of the other program has stopped, or the store does not answer."""
        if self._error:
            raise LostVersionError(self._error)

    def guarded(self, call: Callable[[], T]) -> T:
        """The result of a call that waits for the other program, unless `check` raises first."""
        future = failures.in_thread(call)
        while not wait([future], PAUSE_S).done:
            self.check()
        return future.result()

    def _beat(self, own: str, over: threading.Event) -> None:
        looks: dict[
            str, tuple[int, int]
        ] = {}  # the last count of a rank, and how many looks have shown it
        try:
            while not over.wait(BEAT_S):
                self._store_call("add", own, 1)
                for key, rank in self._watched.items() if dist.get_rank() == 0 else ():
                    count, (last, n) = self._store_call("add", key, 0), looks.get(key, (-1, 0))
                    looks[key] = count, n + 1 if count == last else 0
                    if looks[key][1] >= self._max_looks:
                        self._store_call("set", self._notice, rank)
                if self._watched and self._store_call("check", [self._notice]):
                    self._error = self._store_call("get", self._notice).decode() + " has stopped"
        except LostVersionError as error:
            self._error = str(error)


T = TypeVar("T")


@dataclass(kw_only=True)
class Endpoint:
    """One of the two programs; all its processes make one, with equal arguments.

    store: a `TCPStore` or `FileStore` that both programs reach. rules, names, bucket_bytes: as in `transfer`,
    equal in both programs. src_mesh, dst_mesh: the meshes of all processes of the trainer and of the server.
    timeout_s: seconds that one program waits for the other. silent_s: seconds without a sign of life from a
    rank of the other program, or without an answer of the store, after which a version is lost. name: the
    name of the stream, if a store has several.
    """

    is_trainer: ClassVar[bool]
    store: Store
    rules: RulesLike
    src_mesh: Mesh
    dst_mesh: Mesh
    names: Names | None = None
    bucket_bytes: int | str | None = transfer.BUCKET
    timeout_s: float = 60.0
    silent_s: float = 5.0
    name: str = "weights"
    version: int = field(default=0, init=False)
    session: int = field(default=0, init=False, repr=False)
    heart: Heartbeat = field(init=False, repr=False)
    _group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    _sessions: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        process_mesh.check_world()
        mesh = self.src_mesh if self.is_trainer else self.dst_mesh
        if mesh.n_devices != (n := dist.get_world_size()):
            hint = "src_mesh has all processes of the trainer, dst_mesh all of the server"
            raise MeshError(
                f"{mesh!r} has {mesh.n_devices} devices, this program {n} processes", hint=hint
            )
        self.heart = Heartbeat(self.store_call, self.key)

    def start_session(self) -> None:
        """Get a new number for this program after a failure, when its connections are useless."""
        if not self.session:
            self.session = self.broadcast(lambda: self.store_call("add", self.key("sessions"), 1))

    def key(self, *parts: object) -> str:
        return "/".join(("xshard", self.name, *map(str, parts)))

    def store_call(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Raises LostVersionError if it does not answer in time."""
        try:
            return failures.within(
                timedelta(seconds=self.silent_s), getattr(self.store, method), *args
            )
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise LostVersionError(
                f"the store of both programs does not answer: {error}"
            ) from error

    def broadcast(self, work: Callable[[], Any], wait_s: float = 0.0) -> Any:
        """The result of `work` on the first rank, on all ranks of this program; if it fails, all raise."""
        return self._all_or_none(lambda: work() if dist.get_rank() == 0 else None, wait_s)[0]

    def all_or_disconnect(self, work: Callable[[], T]) -> T:
        """The result of `work`, done on all ranks of this program; if one fails, all raise and disconnect."""
        results: list[T] = []
        try:
            self._all_or_none(lambda: results.append(work()))
        except Exception:
            self.connect("")
            self.session = 0
            raise
        return results[0]

    def _all_or_none(self, work: Callable[[], Any], wait_s: float = 0.0) -> list[Any]:
        # The first rank may wait for the other program first.
        timeout = timedelta(seconds=2 * self.timeout_s + wait_s)
        return all_or_none(range(dist.get_world_size()), self.key(), work, timeout=timeout)

    def plan(self, facts: Mapping[str, str]) -> TreePlan:
        """The plan for a tree of the trainer; its ranks come first in the group of both programs."""
        n_src = self.src_mesh.n_devices
        route = Route(
            self.dst_mesh,
            src_devices=tuple(range(n_src)),
            dst_devices=tuple(range(n_src, n_src + self.dst_mesh.n_devices)),
            profile=profile_of("of the trainer", facts[PROFILE]),
            bucket_bytes=self.bucket_bytes,
        )
        return plan_described(tuple(facts.items()), target_rules(self.rules), self.names, route)

    def plan_text(self, plan: TreePlan) -> str:
        """The text that both programs compare."""
        return "\n".join((str(plan), *rules_text(self.rules, self.names).values()))

    def recv(self, *parts: object) -> str | None:
        """The text that the other program writes to a key; None if it does not come in time."""
        key = self.key(*parts)
        end_s = time.monotonic() + self.timeout_s
        while not self.store_call("check", [key]):
            self.heart.check()
            if time.monotonic() > end_s:
                return None
            time.sleep(PAUSE_S)
        return str(self.store_call("get", key).decode())

    def recv_or_raise(self, *parts: object) -> str:
        if (text := self.recv(*parts)) is None:
            raise LostVersionError(
                f"the other program has written nothing for {self.timeout_s:g} s"
            )
        return text

    def connect(self, sessions: str) -> dist.ProcessGroup | None:
        """The group of these two sessions; the group of others is left first. "" only leaves it."""
        if sessions != self._sessions:
            if self._group is not None:
                dist.destroy_process_group(self._group)
            self._group = None
            self._sessions = sessions
            if sessions:
                n_src = self.src_mesh.n_devices
                n_dst = self.dst_mesh.n_devices
                rank = dist.get_rank() + (0 if self.is_trainer else n_src)
                store: Any = (
                    self.store
                )  # a clone, as nothing else can use a store while ranks wait in it
                options = self.key(sessions), rank, n_src + n_dst, timedelta(seconds=self.timeout_s)
                self._group = self.heart.guarded(lambda: group_of_programs(store.clone(), *options))
        return self._group

    def execute(
        self,
        plan: TreePlan,
        blocks: dict[str, Tensor],
        sessions: str,
        device: torch.device,
        report: Progress,
    ) -> dict[str, Tensor]:
        """Execute the plan in the group of both sessions -> the blocks that arrive here."""
        group = self.connect(sessions)
        assert group is not None
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def run() -> dict[str, Tensor] | None:
            with torch.cuda.stream(stream):  # the stream of the caller's thread
                return execute(plan, blocks, device, group, progress=report)

        return self.heart.guarded(run) or {}

    def lost_version(self, reason: str, error: Exception) -> LostVersionError:
        """The error of a version that did not arrive because of another error."""
        n = self.src_mesh.n_devices
        hint = f"{error}\n  if it names ranks of both programs, the first {n} are the trainer's"
        return LostVersionError(reason, hint=hint)
