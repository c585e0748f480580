"""`Publisher` and `Subscriber`: a trainer's weights reach a server, which is another program.

Decides how the two meet in a store, what they compare before anything is sent, and when a version is visible.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torch_bridge.between import tensor_device_of
from torch_bridge.mesh.desync import CallFacts, DesyncError, compare_ranks
from torch_bridge.mesh.process_groups import group_of_programs
from torch_bridge.mesh.process_mesh import check_world
from torch_bridge.state.carry import Progress, carry
from torch_bridge.state.leaves import asked, described, on_its_device, planned, rebuilt, rules_there
from xshard import Mesh, MeshError, Profile, XshardError
from xshard.state import Names, TreePlan
from xshard.state.transfer import BUCKET

PAUSE_S = 0.02  # between two looks into the store


class LostVersionError(XshardError, RuntimeError):
    """A version did not arrive whole: the other program has ended, failed, or did not come in time."""


@dataclass(kw_only=True)
class _End:
    """One of the two programs; all processes of it make one, with equal arguments.

    store: a `TCPStore` or `FileStore` in which both programs meet. rules, names, bucket_bytes, profile: as in
    `transfer`, equal in both programs. src_mesh, dst_mesh: of all processes of the trainer and of the server.
    timeout_s: how long one program waits for the other. name: of the stream, where a store has several.
    """

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
    _session: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_world()
        if self._mesh.n_devices != dist.get_world_size():
            raise MeshError(f"{self._mesh!r} is not the {dist.get_world_size()} processes of this program")

    @property
    def _mesh(self) -> Mesh:
        raise NotImplementedError

    @property
    def _first(self) -> int:
        """The number of this program's first process among those of both."""
        return 0 if self._mesh is self.src_mesh else self.src_mesh.n_devices

    def _begin(self) -> None:
        """Count this program anew after a failure: its connections are of no use then."""
        if not self._session:
            number = self.store.add(self._key("sessions"), 1) if dist.get_rank() == 0 else 0
            self._session = self._told({"session": number})["session"]

    def _leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._session = None, 0

    def _key(self, *parts: object) -> str:
        return "/".join(("xshard", self.name, *map(str, parts)))

    def _told(
        self, mine: dict[str, Any], error: Exception | None = None, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """What the first rank says -> the same on all ranks of this program; an error of one is of all."""

        def facts() -> CallFacts:
            if error is not None:
                raise error
            return CallFacts({}, {}, (), {"said": json.dumps(mine)})

        timeout = timedelta(seconds=self.timeout_s + wait_s)
        reports = compare_ranks(range(dist.get_world_size()), self._key(), facts, timeout)
        return json.loads(reports[0]["own"]["said"])  # type: ignore[no-any-return]

    def _planned(self, facts: Mapping[str, str]) -> TreePlan:
        n = self.src_mesh.n_devices
        devices = tuple(range(n)), tuple(range(n, n + self.dst_mesh.n_devices))
        profile = self.profile if isinstance(self.profile, Profile) else str(self.profile)
        there = rules_there(self.rules)
        return planned(
            tuple(facts.items()), there, self.names, self.dst_mesh, devices, profile, self.bucket_bytes
        )

    def _text(self, plan: TreePlan) -> str:
        return "\n".join((str(plan), *asked(self.rules, self.names).values()))

    def _wait(self, *parts: object) -> str | None:
        """What the other program writes there, or None if it does not come in time."""
        key, end_s = self._key(*parts), time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            if time.monotonic() > end_s:
                return None
            time.sleep(PAUSE_S)
        return self.store.get(key).decode()

    def _moved(
        self,
        plan: TreePlan,
        blocks: dict[str, torch.Tensor],
        sessions: str,
        device: torch.device,
        **options: Any,
    ) -> dict[str, torch.Tensor] | None:
        if sessions != self._sessions or self._group is None:
            if self._group is not None:
                dist.destroy_process_group(self._group)
            size, rank = self.src_mesh.n_devices + self.dst_mesh.n_devices, self._first + dist.get_rank()
            timeout = timedelta(seconds=self.timeout_s)
            self._group = group_of_programs(self.store, self._key(sessions), rank, size, timeout)
            self._sessions = sessions
        return carry(plan, blocks, device, self._group, **options)


def _differing(here: str, there: str) -> DesyncError:
    """The first lines in which two plans differ."""
    mine, other = here.splitlines(), there.splitlines()
    rows = [(a, b) for a, b in zip(mine, other, strict=False) if a != b] or [
        (str(len(mine)), str(len(other)))
    ]
    return DesyncError(
        "the two programs plan different transfers", hint=f"here:  {rows[0][0]}\n  there: {rows[0][1]}"
    )


class Publisher(_End):
    """The trainer's end: `publish` sends a tree to the server, as its next version.

    >>> import inspect
    >>> list(inspect.signature(Publisher.publish).parameters)
    ['self', 'tree', 'shapes', 'progress']
    """

    @property
    def _mesh(self) -> Mesh:
        return self.src_mesh

    def publish(
        self, tree: Any, shapes: Mapping[str, Sequence[int]] | None = None, progress: Progress = False
    ) -> int:
        """The blocks of a tree here -> the version as which the server has them. All ranks call it.

        Waits until the server receives. Raises, on all ranks of the trainer, as `transfer` does; DesyncError
        where the server plans another transfer, LostVersionError where it does not have the version whole.
        """
        rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
        blocks: dict[str, torch.Tensor] = {}
        known: dict[str, Any] = {}

        def prepared() -> CallFacts:
            own = described(tree, self.rules, self.src_mesh, shapes, rank)
            known["facts"], known["plan"] = own.facts, self._planned(own.facts)
            blocks.update(own.blocks)
            return CallFacts({"plan": self._text(known["plan"])}, own.facts, everyone, {})

        self._begin()
        compare_ranks(everyone, "publish", prepared)
        text, answer = self._text(known["plan"]), None
        if rank == 0:
            version = self.store.add(self._key("versions"), 1)
            offer = {"facts": known["facts"], "plan": text, "session": self._session}
            self.store.set(self._key("offer", version), json.dumps(offer))
            self.store.set(self._key("latest"), str(version))
            answer = {"version": version, "answer": self._wait("answer", version)}
            if answer["answer"] is None:
                self.store.set(self._key("latest"), "0")
        told = self._told(answer or {})
        if told["answer"] is None:
            raise LostVersionError(
                f"no server took version {told['version']} within {self.timeout_s:g} s",
                hint="all its ranks call Subscriber.receive, on the same store and name",
            )
        server = json.loads(told["answer"])
        if server["plan"] != text:
            raise _differing(text, server["plan"])
        error = done = None
        try:
            device = tensor_device_of(next(iter(blocks.values()), None), None, None)
            self._moved(
                known["plan"], blocks, f"{self._session}-{server['session']}", device, progress=progress
            )
            done = self._wait("done", told["version"]) if rank == 0 else ""
            if done != "":
                raise LostVersionError(f"the server says: {done or f'nothing within {self.timeout_s:g} s'}")
        except Exception as raised:
            error = raised
        try:
            self._told({}, error)
        except Exception as raised:
            self._leave()
            text = f"version {told['version']} did not reach the server"
            raise LostVersionError(text, hint=str(raised)) from error
        self.version = told["version"]
        return self.version


@dataclass(kw_only=True)
class Subscriber(_End):
    """The server's end: `receive` takes the next version, `tree` is the last whole one, or None.

    device: where the tensors go.
    """

    device: torch.device | str | None = None
    tree: Any = field(default=None, init=False, repr=False)
    _seen: int = field(default=0, init=False, repr=False)

    @property
    def _mesh(self) -> Mesh:
        return self.dst_mesh

    def receive(self, wait_s: float = 0.0, progress: Progress = False) -> bool:
        """Take the latest version, if a new one comes within `wait_s` -> whether one came. All ranks call it.

        `tree` and `version` change when all ranks of the server have all of it, and not before: a thread may
        receive while others serve the old one. Raises, on all ranks of the server, DesyncError where the
        trainer plans another transfer, and LostVersionError where it has ended in the middle; the old version
        stays, and later versions, of a new trainer too, can be received.
        """
        rank = dist.get_rank()
        self._begin()
        told = self._told(self._offered(wait_s) if rank == 0 else {}, wait_s=wait_s)
        if not told:
            return False
        version, facts = told["version"], told["facts"]
        self._seen = version
        answer = {"session": self._session, "plan": ""}
        error: Exception | None = None
        try:
            plan = self._planned(facts)
            answer["plan"] = self._text(plan)
        except XshardError as raised:
            answer["plan"], error = str(raised), raised
        if rank == 0:
            self.store.set(self._key("answer", version), json.dumps(answer))
        if error is not None:
            raise error
        if answer["plan"] != told["plan"]:
            raise _differing(answer["plan"], told["plan"])
        found = None
        try:
            device = tensor_device_of(None, self.device, None)
            found = self._moved(plan, {}, f"{told['session']}-{self._session}", device, progress=progress)
            assert found is not None  # all processes of the server are in the destination
            found = on_its_device(found, plan, facts)
        except Exception as raised:
            error = raised
        failed: Exception | None = None
        try:
            self._told({}, error)
        except Exception as raised:
            failed = raised
        if rank == 0:
            self.store.set(self._key("done", version), "" if failed is None else str(failed))
        if failed is not None:
            self._leave()
            kept = f"version {self.version} stays" if self.version else "there is none before it"
            raise LostVersionError(
                f"version {version} did not arrive whole; {kept}", hint=str(failed)
            ) from error
        self.tree, self.version = found if self.names else rebuilt(found or {}, facts), version
        return True

    def _offered(self, wait_s: float) -> dict[str, Any]:
        """The latest offer that is new; nothing if there is none in time."""
        end_s = time.monotonic() + wait_s
        while True:
            latest = self._key("latest")
            version = int(self.store.get(latest)) if self.store.check([latest]) else 0
            if version > self._seen:
                return {"version": version, **json.loads(self.store.get(self._key("offer", version)))}
            if time.monotonic() >= end_s:
                return {}
            time.sleep(PAUSE_S)
