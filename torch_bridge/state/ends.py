"""One of two programs that meet in a store: its processes, those of the other, and the group of both.

Decides how the ranks of a program act as one, and when the two programs connect anew. Knows no versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_groups import group_of_programs
from torch_bridge.mesh.process_mesh import check_world
from torch_bridge.state.carry import Progress, carry
from torch_bridge.state.facts import asked, planned, rules_there
from torch_bridge.state.processes import together
from xshard import Mesh, MeshError, Profile
from xshard.state import Names, TreePlan
from xshard.state.transfer import BUCKET

T = TypeVar("T")

PAUSE_S = 0.02  # between two looks into the store


@dataclass(kw_only=True)
class End:
    """One of the two programs; all processes of it make one, with equal arguments.

    store: a `TCPStore` or `FileStore` in which both programs meet. rules, names, bucket_bytes, profile: as in
    `transfer`, equal in both programs: the machines that they would find may differ. src_mesh, dst_mesh: of
    all processes of the trainer and of the server. timeout_s: how long one program waits for the other.
    name: of the stream, where a store has several.
    """

    is_trainer: ClassVar[bool]
    store: Store
    rules: Any
    src_mesh: Mesh
    dst_mesh: Mesh
    names: Names | None = None
    bucket_bytes: int | str | None = BUCKET
    profile: str | Path | Profile = "h100"
    timeout_s: float = 60.0
    name: str = "weights"
    version: int = field(default=0, init=False)
    _group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    _sessions: str = field(default="", init=False, repr=False)
    session: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_world()
        own = self.src_mesh if self.is_trainer else self.dst_mesh
        if own.n_devices != (n := dist.get_world_size()):
            raise MeshError(
                f"{own!r} has {own.n_devices} devices, this program {n} processes",
                hint="src_mesh is of all processes of the trainer, dst_mesh of all of the server",
            )

    def begin(self) -> None:
        """Count this program anew after a failure: its connections are of no use then."""
        if not self.session:
            self.session = self.told(lambda: self.store.add(self.key("sessions"), 1))

    def key(self, *parts: object) -> str:
        return "/".join(("xshard", self.name, *map(str, parts)))

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
        options = devices, machine(self.profile), self.bucket_bytes
        return planned(tuple(facts.items()), there, self.names, self.dst_mesh, *options)

    def text(self, plan: TreePlan) -> str:
        return "\n".join((str(plan), *asked(self.rules, self.names).values()))

    def wait(self, *parts: object) -> str | None:
        """What the other program writes there, or None if it does not come in time."""
        key, end_s = self.key(*parts), time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            if time.monotonic() > end_s:
                return None
            time.sleep(PAUSE_S)
        return self.store.get(key).decode()

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
                self._group = group_of_programs(self.store, *places)
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
        return carry(plan, blocks, device, group, progress=progress)
