"""`Publisher` and `Subscriber`: versions of a trainer's weights reach another program.

The protocol, in keys of the store: the trainer writes an "offer" and its number as "latest"; a
server writes "taken", plans the same transfer and writes its plan as the "answer"; both execute it;
the server reports "done", with the text of its error, if any.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from torch_bridge.errors import DesyncError
from torch_bridge.live.endpoint import PAUSE_S, Endpoint, LostVersionError
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import DeviceLike
from torch_bridge.redistribution.blocks import tensor_device_of
from torch_bridge.state.facts import PROFILE, describe_tree, first_on_device, rebuild_tree
from xshard import ProfileLike, XshardError, load_profile
from xshard.errors import api_boundary
from xshard.signatures import NonNegative
from xshard.state import TreePlan
from xshard.state.progress import Progress


class _Content(NamedTuple):
    """What a version sends: the description of its tree, the plan, and this rank's blocks by name."""

    facts: dict[str, str]
    plan: TreePlan
    blocks: dict[str, Tensor]


@api_boundary
@dataclass(kw_only=True)
class Publisher(Endpoint):
    """The trainer's endpoint: `publish` sends a tree to the server, as its next version.

        publisher = Publisher(store=store, rules=rules, src_mesh=Mesh(dp=8), dst_mesh=Mesh(tp=2))
        version = publisher.publish(model.state_dict())

    Args:
        store: A `TCPStore` or `FileStore` that both programs reach.
        rules: As in `transfer`, equal in both programs.
        src_mesh: The mesh of all processes of the trainer.
        dst_mesh: The mesh of all processes of the server.
        names: As in `transfer`, equal in both programs.
        bucket_bytes: As in `transfer`, equal in both programs.
        timeout_s: Seconds that you wait for the other program.
        silent_s: Seconds without a sign of life from a rank of the other program, or without an
            answer of the store, after which a version is lost.
        name: The name of the stream, if a store has several.
        profile: As in `transfer`. It goes to the server, which may run on another machine and plans
            for the same.

    Raises:
        MeshError: This program has another number of processes than its mesh.

    Examples:
        >>> import inspect
        >>> list(inspect.signature(Publisher.publish).parameters)
        ['self', 'tree', 'shapes', 'progress']
    """

    is_trainer = True
    profile: ProfileLike = "auto"

    @api_boundary
    def publish(
        self,
        tree: Any,
        shapes: Mapping[str, Sequence[int]] | None = None,
        progress: Progress = None,
    ) -> int:
        """Send the local blocks of a tree, and wait until the server has received them.

        All ranks of the trainer call it.

        Args:
            tree: As in `transfer`.
            shapes: Global shapes by name, if blocks differ in size.
            progress: As in `transfer`.

        Returns:
            The number of the version.

        Raises:
            DesyncError: The server plans another transfer; on all ranks of the trainer, as for all
                errors.
            LostVersionError: The server does not have the version whole.
            XshardError: As for `transfer`.
        """
        ranks = tuple(range(dist.get_world_size()))
        prepared: list[_Content] = []  # filled by `facts`

        def facts() -> CallFacts:
            """Prepare the content, and describe it by texts that ranks compare."""
            content = self._content(tree, shapes)
            prepared.append(content)
            equal_on_all = {"plan": self.plan_text(content.plan)}
            return CallFacts(equal_on_all, equal_on_peers=content.facts, peers=ranks)

        self.start_session()
        compare_ranks(ranks, "publish", facts)  # calls `facts` once
        (content,) = prepared
        try:
            with self.heart.beating(self.session, self.silent_s):
                self.version = self._deliver(content, progress)
        finally:
            # No offer stands any more: a server that starts later finds none to wait for. If the
            # store is gone, so is the offer.
            if dist.get_rank() == 0:
                with suppress(LostVersionError):
                    self.store_call("set", self.key("latest"), "0")
        return self.version

    def _content(self, tree: Any, shapes: Mapping[str, Sequence[int]] | None) -> _Content:
        """Describe a tree, and plan its transfer."""
        blocks, facts = describe_tree(tree, self.rules, self.src_mesh, shapes)
        # The server may be another machine: it plans for the trainer's.
        facts[PROFILE] = load_profile(machine_profile(self.profile)).to_json()
        return _Content(facts, self.plan(facts), blocks)

    def _deliver(self, content: _Content, progress: Progress) -> int:
        """Offer a version to the server, send it, and return its number.

        Both programs write texts to keys of a store:

        - The trainer writes an "offer": a description of the tree, and its plan as text.
        - The server writes "taken", and as "answer" its own plan. If both plans are equal, tensors
          are sent.
        - The server writes "done": "" if it has all tensors, else an error.

        Raises LostVersionError if no server takes the offer or the transfer fails, DesyncError for
        unequal plans.
        """
        own_plan_text = self.plan_text(content.plan)
        version, server_session = self.broadcast(partial(self._offer, content.facts, own_plan_text))
        if server_session is None:
            hint = "all its ranks call Subscriber.receive, on the same store and name"
            reason = f"no server took version {version} within {self.timeout_s:g} s"
            raise LostVersionError(reason, hint=hint)
        # From now on heartbeats are watched: if a rank of the server stops, waiting for it ends.
        self.heart.watch("server", int(server_session), self.dst_mesh.n_devices, version)
        device = tensor_device_of(first_on_device(content.blocks))
        failed = f"version {version} did not reach the server"
        try:
            server_plan_text = self.broadcast(partial(self.recv_or_raise, "answer", version))
        except (DesyncError, LostVersionError) as error:
            raise self.lost_version(failed, error) from error
        # Both programs plan on their own. Unequal plans would send messages that nobody takes.
        if server_plan_text != own_plan_text:
            raise _differing(own_plan_text, server_plan_text)

        def send() -> None:
            """Send this rank's blocks; the first rank waits for the server to have them all."""
            sessions = f"{self.session}-{server_session}"
            self.execute(content.plan, content.blocks, sessions, device, progress)
            if dist.get_rank() == 0:
                server_error = self.recv_or_raise("done", version)
                if server_error:
                    raise LostVersionError(f"the server reports: {server_error}")

        try:
            self.all_or_disconnect(send)
        except Exception as error:
            raise self.lost_version(failed, error) from error
        return version

    def _offer(self, facts: Mapping[str, str], plan_text: str) -> tuple[int, str | None]:
        """Write an offer; return the version, and the session of the server that takes it."""
        version = self.store_call("add", self.key("versions"), 1)
        offer = {"facts": facts, "plan": plan_text, "session": self.session}
        self.store_call("set", self.key("offer", version), json.dumps(offer))
        # After the offer: a server that reads the number finds the offer.
        self.store_call("set", self.key("latest"), str(version))
        return version, self.recv("taken", version)


@api_boundary
@dataclass(kw_only=True)
class Subscriber(Endpoint):
    """The server's endpoint: `receive` takes the next version.

    `tree` is the last whole one, or None.

        while serving:
            if subscriber.receive(wait_s=1.0):
                model.load_state_dict(subscriber.tree)

    Args:
        store: A `TCPStore` or `FileStore` that both programs reach.
        rules: As in `transfer`, equal in both programs.
        src_mesh: The mesh of all processes of the trainer.
        dst_mesh: The mesh of all processes of the server.
        names: As in `transfer`, equal in both programs.
        bucket_bytes: As in `transfer`, equal in both programs.
        timeout_s: Seconds that you wait for the other program.
        silent_s: Seconds without a sign of life from a rank of the other program, or without an
            answer of the store, after which a version is lost.
        name: The name of the stream, if a store has several.
        device: The device of the tensors.

    Raises:
        MeshError: This program has another number of processes than its mesh.
    """

    is_trainer = False
    device: DeviceLike | None = None
    tree: Any = field(default=None, init=False, repr=False)
    _latest: int = field(default=0, init=False, repr=False)

    @api_boundary
    def receive(self, wait_s: NonNegative = 0.0, progress: Progress = None) -> bool:
        """Receive the latest version that the trainer has sent, if there is a new one.

        All ranks of the server call it. `tree` and `version` change when all ranks have all of the
        new version, and not before: a thread may receive while others serve the old one.

        Args:
            wait_s: How long to wait for a new version.
            progress: True for a bar, or a function called with the bytes done and the total.

        Returns:
            True if there is a new version, False if none comes within `wait_s`.

        Raises:
            DesyncError: The trainer plans another transfer; on all ranks of the server, as for all
                errors.
            LostVersionError: The trainer has ended in the middle. The old version stays, and later
                versions, of a new trainer too, can be received.
        """
        self.start_session()
        offer = self.broadcast(partial(self._latest_offer, wait_s), wait_s)
        if not offer:
            return False
        # Before it is received: an offer that gets lost is not taken a second time.
        self._latest = offer["version"]
        with self.heart.beating(self.session, self.silent_s):
            self.tree = self._take(offer, progress)
            self.version = offer["version"]
        return True

    def _take(self, offer: Mapping[str, Any], progress: Progress) -> Any:
        """Receive a version that the trainer offers, and return its tree.

        Texts in a store tell the trainer of each step: "taken", "answer" with this program's plan,
        and "done" when all ranks of the server have all tensors. Raises LostVersionError if they do
        not get them, DesyncError if the trainer plans another transfer.

        Args:
            offer: The trainer's message: "version", a number; "session", of the trainer's run;
                "plan", as text; "facts", the description of the tree.
            progress: Learns the bytes that have arrived.
        """
        version = offer["version"]
        self._tell("taken", version, str(self.session))
        plan = self._answered_plan(offer)
        # From now on heartbeats are watched: if the trainer stops, waiting for its messages ends.
        self.heart.watch("trainer", offer["session"], self.src_mesh.n_devices, version)
        device = tensor_device_of(device=self.device)
        sessions = f"{offer['session']}-{self.session}"
        receive = partial(self.execute, plan, {}, sessions, device, progress)
        try:
            blocks = self.all_or_disconnect(receive)
        except Exception as error:
            self._tell_outcome(version, str(error))
            stays = f"version {self.version} stays" if self.version else "there was none before it"
            reason = f"version {version} did not arrive whole; {stays}"
            raise self.lost_version(reason, error) from error
        self._tell_outcome(version, "")  # no error
        return rebuild_tree(blocks, plan, offer["facts"], self.names)

    def _answered_plan(self, offer: Mapping[str, Any]) -> TreePlan:
        """Plan the transfer that the trainer offers, and tell it the text of this plan.

        If no plan can be made, the trainer is told the error's text in place of it, and the error
        is raised. Both programs must come to the same plan: raises DesyncError if the trainer's,
        in the offer, is another one.
        """
        version = offer["version"]
        try:
            plan = self.plan(offer["facts"])
        except XshardError as error:
            self._tell("answer", version, str(error))
            raise
        own_plan_text = self.plan_text(plan)
        self._tell("answer", version, own_plan_text)
        if own_plan_text != offer["plan"]:
            raise _differing(own_plan_text, offer["plan"])
        return plan

    def _tell(self, key: str, version: int, text: str) -> None:
        """Write a text for the trainer, on the first rank alone."""
        if dist.get_rank() == 0:
            self.store_call("set", self.key(key, version), text)

    def _tell_outcome(self, version: int, error: str) -> None:
        """Tell the trainer, who may be gone: what was received is whole even then."""
        with suppress(LostVersionError):
            self._tell("done", version, error)

    def _latest_offer(self, wait_s: float) -> dict[str, Any]:
        """Wait up to `wait_s` for an offer that is newer than the last one taken; {} if none comes."""
        end_s = time.monotonic() + wait_s
        latest = self.key("latest")
        while True:
            version = 0
            if self.store_call("check", [latest]):
                version = int(self.store_call("get", latest))
            if version > self._latest:
                offer = json.loads(self.store_call("get", self.key("offer", version)))
                return {"version": version, **offer}
            if time.monotonic() >= end_s:
                return {}
            time.sleep(PAUSE_S)


def _differing(own_plan: str, other_plan: str) -> DesyncError:
    """Make the error about two plans that differ, with the first line in which they do.

    Lines keep their line breaks, as texts may differ in these alone.
    """
    own_lines = own_plan.splitlines(keepends=True)
    other_lines = other_plan.splitlines(keepends=True)
    hint = ""
    for line, other_line in itertools.zip_longest(own_lines, other_lines, fillvalue=""):
        if line != other_line:
            hint = f"here:  {line!r}\n  there: {other_line!r}"
            break
    return DesyncError("the two programs plan different transfers", hint=hint)
