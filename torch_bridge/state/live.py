"""`Publisher` and `Subscriber`: a trainer's weights reach a server, which is another program.

Decides what the two programs compare before anything is sent, and when a version is visible.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.between import tensor_device_of
from torch_bridge.errors import DesyncError
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine
from torch_bridge.state.ends import End
from torch_bridge.state.facts import PROFILE, described, first_on_device, tree_of
from torch_bridge.state.heartbeat import PAUSE_S, LostVersionError
from xshard import Profile, XshardError
from xshard.cost.profile_files import load_profile
from xshard.state import TreePlan
from xshard.state.progress import Progress


@dataclass(kw_only=True)
class Publisher(End):
    """The trainer's end: `publish` sends a tree to the server, as its next version.

    profile: as in `transfer`. It goes to the server, which may run on another machine and plans for the same.

    >>> import inspect
    >>> list(inspect.signature(Publisher.publish).parameters)
    ['self', 'tree', 'shapes', 'progress']
    """

    is_trainer = True
    profile: str | Path | Profile = "auto"

    def publish(
        self, tree: Any, shapes: Mapping[str, Sequence[int]] | None = None, progress: Progress = False
    ) -> int:
        """The blocks of a tree here -> the version as which the server has them. All ranks call it.

        Waits until the server receives. Raises, on all ranks of the trainer, as `transfer` does; DesyncError
        where the server plans another transfer, LostVersionError where it does not have the version whole.
        """
        everyone = tuple(range(dist.get_world_size()))
        blocks: dict[str, Tensor] = {}
        known: dict[str, Any] = {}

        def prepared() -> CallFacts:
            own, facts = described(tree, self.rules, self.src_mesh, shapes)
            facts[PROFILE] = load_profile(machine(self.profile)).to_json()
            known["facts"], known["plan"] = facts, self.planned(facts)
            blocks.update(own)
            return CallFacts({"plan": self.text(known["plan"])}, facts, everyone, {})

        self.begin()
        compare_ranks(everyone, "publish", prepared)
        try:
            with self.heart.beating(self.session, self.silent_s):
                self.version = self._delivered(known["facts"], known["plan"], blocks, progress)
        finally:
            if dist.get_rank() == 0:  # a server that starts later finds nothing to wait for
                with suppress(LostVersionError):
                    self.ask("set", self.key("latest"), "0")
        return self.version

    def _delivered(
        self, facts: Mapping[str, str], plan: TreePlan, blocks: dict[str, Tensor], progress: Progress
    ) -> int:
        """Offer a version, and send it to the server that answers -> its number."""
        text = self.text(plan)

        def offered() -> dict[str, Any]:
            version = self.ask("add", self.key("versions"), 1)
            offer = {"facts": facts, "plan": text, "session": self.session}
            self.ask("set", self.key("offer", version), json.dumps(offer))
            self.ask("set", self.key("latest"), str(version))
            return {"version": version, "server": self.wait("taken", version)}

        told = self.told(offered)
        version, server = told["version"], told["server"]
        if server is None:
            raise LostVersionError(
                f"no server took version {version} within {self.timeout_s:g} s",
                hint="all its ranks call Subscriber.receive, on the same store and name",
            )
        self.heart.watch("server", int(server), self.dst_mesh.n_devices, version)
        device = tensor_device_of(first_on_device(blocks), None, None)
        try:
            answer = self.told(lambda: self.heard("answer", version))
        except (DesyncError, LostVersionError) as error:
            raise self.lost(f"version {version} did not reach the server", error) from error
        if answer != text:
            raise _differing(text, answer)

        def sent() -> None:
            self.moved(plan, blocks, f"{self.session}-{server}", device, progress)
            if dist.get_rank() == 0 and (failed := self.heard("done", version)):
                raise LostVersionError(f"the server says {failed}")

        try:
            self.all_did(sent)
        except Exception as error:
            raise self.lost(f"version {version} did not reach the server", error) from error
        return version


@dataclass(kw_only=True)
class Subscriber(End):
    """The server's end: `receive` takes the next version, `tree` is the last whole one, or None.

    device: where the tensors go.
    """

    is_trainer = False
    device: torch.device | str | None = None
    tree: Any = field(default=None, init=False, repr=False)
    _seen: int = field(default=0, init=False, repr=False)

    def receive(self, wait_s: float = 0.0, progress: Progress = False) -> bool:
        """Take the latest version, if a new one comes within `wait_s` -> whether one came. All ranks call it.

        `tree` and `version` change when all ranks of the server have all of it, and not before: a thread may
        receive while others serve the old one. Raises, on all ranks of the server, DesyncError where the
        trainer plans another transfer, and LostVersionError where it has ended in the middle; the old version
        stays, and later versions, of a new trainer too, can be received.
        """
        self.begin()
        told = self.told(lambda: self._offered(wait_s), wait_s)
        if not told:
            return False
        self._seen = told["version"]
        with self.heart.beating(self.session, self.silent_s):
            self.tree, self.version = self._taken(told, progress), told["version"]
        return True

    def _taken(self, told: Mapping[str, Any], progress: Progress) -> Any:
        """Answer an offer, and receive the version -> its tree."""
        rank, version, facts = dist.get_rank(), told["version"], told["facts"]
        error: Exception | None = None
        if rank == 0:
            self.ask("set", self.key("taken", version), str(self.session))
        try:
            plan = self.planned(facts)
            answer = self.text(plan)
        except XshardError as raised:
            answer, error = str(raised), raised
        if rank == 0:
            self.ask("set", self.key("answer", version), answer)
        if error is not None:
            raise error
        if answer != told["plan"]:
            raise _differing(answer, told["plan"])
        self.heart.watch("trainer", told["session"], self.src_mesh.n_devices, version)
        device, sessions = tensor_device_of(None, self.device, None), f"{told['session']}-{self.session}"
        found: dict[str, Tensor] = {}
        try:
            found = self.all_did(lambda: self.moved(plan, {}, sessions, device, progress) or {})
        except Exception as raised:
            error = raised
        if rank == 0:
            with suppress(LostVersionError):
                self.ask("set", self.key("done", version), "" if error is None else str(error))
        if error is not None:
            kept = f"version {self.version} stays" if self.version else "there is none before it"
            raise self.lost(f"version {version} did not arrive whole; {kept}", error) from error
        return tree_of(found, plan, facts, self.names)

    def _offered(self, wait_s: float) -> dict[str, Any]:
        """The latest offer that is new; nothing if there is none in time."""
        end_s = time.monotonic() + wait_s
        while True:
            latest = self.key("latest")
            version = int(self.ask("get", latest)) if self.ask("check", [latest]) else 0
            if version > self._seen:
                return {"version": version, **json.loads(self.ask("get", self.key("offer", version)))}
            if time.monotonic() >= end_s:
                return {}
            time.sleep(PAUSE_S)


def _differing(here: str, there: str) -> DesyncError:
    """The first lines in which two plans differ, with their breaks: they may differ in no more."""
    lines = itertools.zip_longest(here.splitlines(True), there.splitlines(True), fillvalue="")
    one, two = next((a, b) for a, b in lines if a != b)
    return DesyncError("the two programs plan different transfers", hint=f"here:  {one!r}\n  there: {two!r}")
