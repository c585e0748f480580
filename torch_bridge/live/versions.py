"""`Publisher` and `Subscriber`: versions of a trainer's weights reach a server, which is another program."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.errors import DesyncError
from torch_bridge.live.endpoint import PAUSE_S, Endpoint, LostVersionError
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine
from torch_bridge.redistribution.blocks import tensor_device_of
from torch_bridge.state.facts import PROFILE, described, first_on_device, tree_of
from xshard import ProfileLike, XshardError, load_profile
from xshard.state import TreePlan
from xshard.state.progress import Progress


@dataclass(kw_only=True)
class Publisher(Endpoint):
    """The trainer's endpoint: `publish` sends a tree to the server, as its next version.

    profile: as in `transfer`. It goes to the server, which may run on another machine and plans for the same.

    >>> import inspect
    >>> list(inspect.signature(Publisher.publish).parameters)
    ['self', 'tree', 'shapes', 'progress']
    """

    is_trainer = True
    profile: ProfileLike = "auto"

    def publish(
        self,
        tree: Any,
        shapes: Mapping[str, Sequence[int]] | None = None,
        progress: Progress = None,
    ) -> int:
        """Send the local blocks of a tree -> the number of the version. All ranks call it.

        Waits until the server receives. Raises, on all ranks of the trainer, as `transfer` does; DesyncError
        if the server plans another transfer, LostVersionError if it does not have the version whole.
        """
        ranks = tuple(range(dist.get_world_size()))
        blocks: dict[str, Tensor] = {}
        facts: dict[str, str] = {}
        plans: list[TreePlan] = []

        def prepared() -> CallFacts:
            local, described_facts = described(tree, self.rules, self.src_mesh, shapes)
            facts.update(described_facts | {PROFILE: load_profile(machine(self.profile)).to_json()})
            plans.append(self.plan(facts))
            blocks.update(local)
            return CallFacts({"plan": self.plan_text(plans[0])}, facts, ranks, {})

        self.start_session()
        compare_ranks(ranks, "publish", prepared)
        try:
            with self.heart.beating(self.session, self.silent_s):
                self.version = self._deliver(facts, plans[0], blocks, progress)
        finally:
            if dist.get_rank() == 0:  # a server that starts later finds nothing to wait for
                with suppress(LostVersionError):
                    self.store_call("set", self.key("latest"), "0")
        return self.version

    def _deliver(
        self,
        facts: Mapping[str, str],
        plan: TreePlan,
        blocks: dict[str, Tensor],
        progress: Progress,
    ) -> int:
        """Offer a version, and send it to the server that answers -> its number."""
        text = self.plan_text(plan)

        def offered() -> tuple[int, str | None]:
            version = self.store_call("add", self.key("versions"), 1)
            offer = {"facts": facts, "plan": text, "session": self.session}
            self.store_call("set", self.key("offer", version), json.dumps(offer))
            self.store_call("set", self.key("latest"), str(version))
            return version, self.recv("taken", version)

        version, server = self.broadcast(offered)
        if server is None:
            hint = "all its ranks call Subscriber.receive, on the same store and name"
            raise LostVersionError(
                f"no server took version {version} within {self.timeout_s:g} s", hint=hint
            )
        self.heart.watch("server", int(server), self.dst_mesh.n_devices, version)
        device = tensor_device_of(first_on_device(blocks), None, None)
        failed = f"version {version} did not reach the server"
        try:
            answer = self.broadcast(lambda: self.recv_or_raise("answer", version))
        except (DesyncError, LostVersionError) as error:
            raise self.lost_version(failed, error) from error
        if answer != text:
            raise _differing(text, answer)

        def sent() -> None:
            self.execute(plan, blocks, f"{self.session}-{server}", device, progress)
            if dist.get_rank() == 0 and (reason := self.recv_or_raise("done", version)):
                raise LostVersionError(f"the server reports: {reason}")

        try:
            self.all_or_disconnect(sent)
        except Exception as error:
            raise self.lost_version(failed, error) from error
        return version


@dataclass(kw_only=True)
class Subscriber(Endpoint):
    """The server's endpoint: `receive` takes the next version; `tree` is the last whole one, or None.

    device: the device of the tensors.
    """

    is_trainer = False
    device: torch.device | str | None = None
    tree: Any = field(default=None, init=False, repr=False)
    _latest: int = field(default=0, init=False, repr=False)

    def receive(self, wait_s: float = 0.0, progress: Progress = None) -> bool:
        """Take the latest version -> True, or False if no new one comes within `wait_s`. All ranks call it.

        `tree` and `version` change when all ranks of the server have all of it, and not before: a thread may
        receive while others serve the old one. Raises, on all ranks of the server, DesyncError if the trainer
        plans another transfer, and LostVersionError if it has ended in the middle; the old version stays, and
        later versions, of a new trainer too, can be received.
        """
        self.start_session()
        offer = self.broadcast(lambda: self._offered(wait_s), wait_s)
        if not offer:
            return False
        self._latest = offer["version"]
        with self.heart.beating(self.session, self.silent_s):
            self.tree = self._take(offer, progress)
            self.version = offer["version"]
        return True

    def _take(self, offer: Mapping[str, Any], progress: Progress) -> Any:
        """Answer an offer, and receive the version -> its tree."""
        rank = dist.get_rank()
        version = offer["version"]
        facts = offer["facts"]
        error: Exception | None = None
        if rank == 0:
            self.store_call("set", self.key("taken", version), str(self.session))
        try:
            plan = self.plan(facts)
            answer = self.plan_text(plan)
        except XshardError as raised:
            answer = str(raised)
            error = raised
        if rank == 0:
            self.store_call("set", self.key("answer", version), answer)
        if error is not None:
            raise error
        if answer != offer["plan"]:
            raise _differing(answer, offer["plan"])
        self.heart.watch("trainer", offer["session"], self.src_mesh.n_devices, version)
        device = tensor_device_of(None, self.device, None)
        sessions = f"{offer['session']}-{self.session}"
        blocks: dict[str, Tensor] = {}
        try:
            blocks = self.all_or_disconnect(
                lambda: self.execute(plan, {}, sessions, device, progress)
            )
        except Exception as raised:
            error = raised
        if rank == 0:
            with suppress(LostVersionError):
                self.store_call(
                    "set", self.key("done", version), "" if error is None else str(error)
                )
        if error is not None:
            stays = f"version {self.version} stays" if self.version else "there was none before it"
            raise self.lost_version(
                f"version {version} did not arrive whole; {stays}", error
            ) from error
        return tree_of(blocks, plan, facts, self.names)

    def _offered(self, wait_s: float) -> dict[str, Any]:
        """The latest offer if it is new; nothing if none comes in time."""
        end_s = time.monotonic() + wait_s
        latest = self.key("latest")
        while True:
            version = (
                int(self.store_call("get", latest)) if self.store_call("check", [latest]) else 0
            )
            if version > self._latest:
                return {
                    "version": version,
                    **json.loads(self.store_call("get", self.key("offer", version))),
                }
            if time.monotonic() >= end_s:
                return {}
            time.sleep(PAUSE_S)


def _differing(here: str, there: str) -> DesyncError:
    """The first lines in which two plans differ, with their breaks: they may differ in no more."""
    lines = itertools.zip_longest(here.splitlines(True), there.splitlines(True), fillvalue="")
    one, two = next((a, b) for a, b in lines if a != b)
    return DesyncError(
        "the two programs plan different transfers", hint=f"here:  {one!r}\n  there: {two!r}"
    )
