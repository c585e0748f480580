"""One of two programs that meet in a store: its processes, those of the other, and the group of both.

Decides how the ranks of a program act as one, and when the two programs connect anew. Knows no versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from torch_bridge.mesh.process_groups import group_of_programs
from torch_bridge.mesh.process_mesh import check_world
from torch_bridge.mesh.waiting import within
from torch_bridge.state.carry import carry
from torch_bridge.state.facts import PROFILE, asked, planned, rules_there
from torch_bridge.state.heartbeat import PAUSE_S, Heartbeat, LostVersionError
from torch_bridge.state.processes import together
from xshard import Mesh
from xshard.cost.profile_files import profile_of
from xshard.errors import MeshError
from xshard.state import Names, TreePlan
from xshard.state.progress import Progress
from xshard.state.transfer import BUCKET

T = TypeVar("T")


@dataclass(kw_only=True)
class End:
    """One of the two programs; all processes of it make one, with equal arguments.

    store: a `TCPStore` or `FileStore` in which both programs meet. rules, names, bucket_bytes: as in
    `transfer`, equal in both programs. src_mesh, dst_mesh: of all processes of the trainer and of the server.
    timeout_s: how long one program waits for the other. silent_s: how long a rank of the other may show no
    sign of life amid a version before that is lost, and how long the store may take for an answer.
    name: of the stream, where a store has several.
    """

    is_trainer: ClassVar[bool]
    store: Store
    rules: Any
    src_mesh: Mesh
    dst_mesh: Mesh
    names: Names | None = None
    bucket_bytes: int | str | None = BUCKET
    timeout_s: float = 60.0
    silent_s: float = 5.0
    name: str = "weights"
    version: int = field(default=0, init=False)
    _group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    _sessions: str = field(default="", init=False, repr=False)
    session: int = field(default=0, init=False, repr=False)
    heart: Heartbeat = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_world()
        own = self.src_mesh if self.is_trainer else self.dst_mesh
        if own.n_devices != (n := dist.get_world_size()):
            raise MeshError(
                f"{own!r} has {own.n_devices} devices, this program {n} processes",
                hint="src_mesh is of all processes of the trainer, dst_mesh of all of the server",
            )
        self.heart = Heartbeat(self.ask, self.key)

    def begin(self) -> None:
        """Count this program anew after a failure: its connections are of no use then."""
        if not self.session:
            self.session = self.told(lambda: self.ask("add", self.key("sessions"), 1))

    def key(self, *parts: object) -> str:
        return "/".join(("xshard", self.name, *map(str, parts)))

    def ask(self, call: str, *args: Any) -> Any:
        """What a call of the store returns. Raises LostVersionError where that does not answer in time."""
        try:
            return within(timedelta(seconds=self.silent_s), getattr(self.store, call), *args)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise LostVersionError(f"the store of both programs does not answer: {error}") from error

    def told(self, say: Callable[[], Any], wait_s: float = 0.0) -> Any:
        """What the first rank says -> the same on all ranks of this program; an error of one is of all."""
        return self._together(lambda: say() if dist.get_rank() == 0 else None, wait_s)[0]

    def all_did(self, act: Callable[[], T]) -> T:
        """What `act` returns if no rank of this program has an error; else all raise and leave the group."""
        found: list[T] = []
        try:
            self._together(lambda: found.append(act()))
        except Exception:
            self.join("")
            self.session = 0
            raise
        return found[0]

    def _together(self, work: Callable[[], Any], wait_s: float = 0.0) -> list[Any]:
        # The first rank may wait for the other program first.
        timeout = timedelta(seconds=2 * self.timeout_s + wait_s)
        return together(range(dist.get_world_size()), self.key(), work, timeout=timeout)

    def planned(self, facts: Mapping[str, str]) -> TreePlan:
        n, there = self.src_mesh.n_devices, rules_there(self.rules)
        devices = tuple(range(n)), tuple(range(n, n + self.dst_mesh.n_devices))
        options = devices, profile_of("of the trainer", facts[PROFILE]), self.bucket_bytes
        return planned(tuple(facts.items()), there, self.names, self.dst_mesh, *options)

    def text(self, plan: TreePlan) -> str:
        return "\n".join((str(plan), *asked(self.rules, self.names).values()))

    def wait(self, *parts: object) -> str | None:
        """What the other program writes there, or None if it does not come in time, while that is at work."""
        key, end_s = self.key(*parts), time.monotonic() + self.timeout_s
        while not self.ask("check", [key]):
            self.heart.check()
            if time.monotonic() > end_s:
                return None
            time.sleep(PAUSE_S)
        return str(self.ask("get", key).decode())

    def heard(self, *parts: object) -> str:
        """The same. Raises LostVersionError where it does not come in time."""
        if (found := self.wait(*parts)) is None:
            raise LostVersionError(f"the other program says nothing for {self.timeout_s:g} s")
        return found

    def join(self, sessions: str) -> dist.ProcessGroup | None:
        """The group of both programs; of others of their numbers, or none, after the last one has ended."""
        if sessions != self._sessions:
            if self._group is not None:
                dist.destroy_process_group(self._group)
            self._group, self._sessions = None, sessions
            if sessions:
                ranks = self.src_mesh.n_devices, self.dst_mesh.n_devices
                first = 0 if self.is_trainer else ranks[0]
                timeout = timedelta(seconds=self.timeout_s)
                places = self.key(sessions), first + dist.get_rank(), sum(ranks), timeout
                store: Any = self.store  # of which nobody else can ask anything while they wait
                self._group = self.heart.guarded(lambda: group_of_programs(store.clone(), *places))
        return self._group

    def moved(
        self,
        plan: TreePlan,
        blocks: dict[str, Tensor],
        sessions: str,
        device: torch.device,
        progress: Progress,
    ) -> dict[str, Tensor] | None:
        group = self.join(sessions)
        assert group is not None
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def carried() -> dict[str, Tensor] | None:
            with torch.cuda.stream(stream):  # that of this thread
                return carry(plan, blocks, device, group, progress=progress)

        return self.heart.guarded(carried)

    def lost(self, reason: str, error: Exception) -> LostVersionError:
        """The error of a version that did not arrive because of this one, which may name ranks of both."""
        n = self.src_mesh.n_devices
        hint = f"{error}\n  where ranks of both programs are named, the first {n} are the trainer's"
        return LostVersionError(reason, hint=hint)
