"""`debug=True`: ranks compare what they are about to do, before any of them does it.

They meet in the store of the world: each writes a report of its call, and reads those of all others. Meetings
of the same ranks are numbered, and keys in the store have the ranks and the number. So ranks find each other
even if they are about to call different collectives, where a collective would hang.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction

from torch_bridge.errors import DesyncError
from torch_bridge.mesh.failures import call_within, timeout_of
from torch_bridge.mesh.process_groups import ranks_digest
from torch_bridge.mesh.process_mesh import calling_ranks
from torch_bridge.versions.functorch import active_transforms, is_batched, is_forward_mode
from torch_bridge.versions.process_groups import default_store
from xshard.arguments import is_on
from xshard.errors import MeshError
from xshard.layout.runs import run_columns

# The environment is read once, at import: it has to be set before the program starts, and equal for
# all ranks. A rank that turned comparisons on later would wait for others that do not come.
# Whether every call is compared, as with `debug=True`.
ALWAYS = is_on("XSHARD_DEBUG")
# Whether each new plan is compared when it is first used.
NEW = os.environ.get("XSHARD_DEBUG") != "0"
MAX_LISTED = 8  # facts in an error
ABSENT = b"absent"  # in the place of a report that did not come in time


class Sent(NamedTuple):
    """Whatever changes what a call sends, now or in its backward pass: all of it is compared.

    The first five are facts of every call; each of the others is a fact of some.
    """

    shape: object
    dtype: object
    plan: object
    profile: object
    requires_grad: object
    check_replicated: object = False
    comm_dtype: object = ""
    device: object = ""
    transforms: object = ""
    async_op: object = False
    save: object = ""
    bucket_bytes: object = ""

    @property
    def facts(self) -> dict[str, str]:
        """The facts as text, by name."""
        return {name: str(value) for name, value in self._asdict().items()}


def derivative_facts(*blocks: Tensor) -> dict[str, str]:
    """Return whether each block needs a gradient now, and the `transforms` that blocks are in.

    They change what a call sends: a tangent travels beside its block, a batch in one message.
    """
    transforms = [*_function_transforms(blocks), *_tangents(blocks)]
    is_recording = torch.is_grad_enabled()
    needed = [str(is_recording and x.requires_grad) for x in blocks]
    return {"requires_grad": ", ".join(needed), "transforms": ", ".join(transforms)}


def _function_transforms(blocks: Sequence[Tensor]) -> list[str]:
    """Return the active transforms of `torch.func`, and which blocks are batched."""
    transforms = active_transforms()
    if not transforms:
        return []
    batched = [f"batched {is_batched(x)}" for x in blocks]
    return [*transforms, *batched]


def _tangents(blocks: Sequence[Tensor]) -> list[str]:
    """Return which blocks have a tangent, inside `forward_ad.dual_level`."""
    if not is_forward_mode():
        return []
    return [f"tangent {forward_ad.unpack_dual(x).tangent is not None}" for x in blocks]


def sent_facts(plan: Any, steps: Iterable[object], **sent: object) -> dict[str, str]:
    """Return the facts of `Sent`, with the steps of a plan.

    The profile's numbers count too, since they decide on phases: a digest stands for them.
    """
    digest = hashlib.sha1(repr(plan.profile).encode(), usedforsecurity=False).hexdigest()[:8]
    profile = f"{plan.profile.name} ({digest})"
    steps_text = "; ".join(map(str, steps))
    return Sent(plan=steps_text, profile=profile, **sent).facts  # type: ignore[arg-type]  # by name


@dataclass(frozen=True)
class CallFacts:
    """A call that a rank is about to make, as facts by name.

    Attributes:
        equal_on_all: Facts that are equal on all ranks that meet.
        equal_on_peers: Facts that are equal on the ranks of `peers`.
        peers: The ranks with which this one communicates.
        not_compared: Facts that may differ: errors show them.
    """

    equal_on_all: dict[str, str] = field(default_factory=dict)
    equal_on_peers: dict[str, str] = field(default_factory=dict)
    peers: Sequence[int] = ()
    not_compared: dict[str, str] = field(default_factory=dict)


# What a rank says about its call: "call_text", and the fields of `CallFacts` or "failure".
Report = dict[str, Any]


def compare_ranks(
    ranks: Sequence[int],
    call_text: str,
    prepare: Callable[[], CallFacts],
    timeout: timedelta | None = None,
) -> dict[int, Report]:
    """Check that all ranks are about to make the same collective call.

    Ranks exchange reports of the call through the store, before anything else is sent: ranks that
    made different calls would wait for each other for ever.

    Args:
        ranks: The ranks.
        call_text: The call in the user's words.
        prepare: Checks the arguments and describes the call; it sends nothing.
        timeout: How long to wait for the other ranks; None: as long as a collective does.

    Returns:
        The report of each rank.

    Raises:
        DesyncError: On all ranks, if reports differ, or if `prepare` raised on some. If it raised on
            all, each raises its own error.
    """
    world = dist.group.WORLD
    if world is None:
        hint = "destroy_process_group() comes last: after the wait() of a save, too"
        raise MeshError(f"{call_text}: the process group has been destroyed", hint=hint)
    error: Exception | None = None
    try:
        report = {"call_text": call_text, **asdict(prepare())}
    except Exception as raised:
        # Other ranks wait for this one: they learn of its error, and raise too.
        error = raised
        report = {"call_text": call_text, "failure": f"{type(raised).__name__}: {raised}"}
    if timeout is None:
        timeout = timeout_of(world)
    reports = _meeting_point(tuple(sorted(ranks)), world).exchange(report, timeout)
    has_failed = ["failure" in report for report in reports.values()]
    if error is not None and all(has_failed):
        raise error
    if any(has_failed):
        raise _failure_error(reports) from error
    differing = _differing(reports)
    if differing:
        raise _desync_error(reports, differing[:MAX_LISTED])
    return reports


class Compared(NamedTuple):
    """A call that ranks have compared.

    Attributes:
        call_text: The call in the user's words.
        call_number: The number of the ranks' meetings so far, which is equal on all.
        ranks: Those that send to each other: they compare its gradients, too.
    """

    call_text: str
    call_number: int
    ranks: tuple[int, ...]

    def compare_gradients_of(self, result: Tensor, *blocks: Tensor) -> Tensor:
        """Add hooks by which ranks compare, in the backward pass, the gradients that they send.

        Each of our autograd nodes between the result and the blocks of the call gets a hook. It runs
        before the node: ranks tell each other which gradient they are about to send. Returns the
        result.
        """
        node_number = 0
        for node in graph_nodes([result], blocks):
            # Results that were moved together share a node: the first of them has added its hook.
            if isinstance(node, BackwardCFunction) and "has_compare_hook" not in node.metadata:
                node.metadata["has_compare_hook"] = True
                node_number += 1
                executable = getattr(node, "executable", None)  # some nodes of layers have none
                compare = functools.partial(self._compare_gradient, executable, node_number)
                node.register_prehook(compare)
        return result

    def _compare_gradient(self, executable: Any, node_number: int, _: object) -> None:
        """Raise DesyncError on all ranks unless all are about to send the gradient of this node.

        Args:
            executable: What the node runs; None if it is not known: it may send.
            node_number: The number of the node in the call's graph.
        """
        if len(self.ranks) == 1 or (executable is not None and not executable.sends_gradient):
            return
        facts = {"gradient": f"of call {self.call_number}", "part": str(node_number)}
        compare_ranks(self.ranks, self.call_text, lambda: CallFacts(facts, peers=self.ranks))


def graph_nodes(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of autograd between tensors, each once, from the outputs on."""
    nodes: list[Any] = [y.grad_fn for y in outputs]
    seen = {None, *(x.grad_fn for x in inputs)}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [next_node for next_node, _ in node.next_functions]


def compare_call(
    mesh: object,
    call_text: str,
    prepare: Callable[[], CallFacts],
    ranks: Sequence[int] | None = None,
) -> Compared | None:
    """Check that all ranks of a mesh are about to make the same collective call.

    Raises as `compare_ranks` does.

    Args:
        mesh: The mesh.
        call_text: The call in the user's words.
        prepare: Checks and describes the call.
        ranks: The ranks that compare; None for those of the mesh.

    Returns:
        What the backward pass needs to compare, too; None without a process group, and on ranks
        outside of the mesh, where the call itself raises.
    """
    if not dist.is_initialized():
        return None
    if not ranks:
        ranks = calling_ranks(mesh)
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    report = compare_ranks(ranks, call_text, prepare)[rank]
    # They have just met: the number of their meetings, equal on all, is that of the call.
    call_number = _meeting_point(tuple(sorted(ranks)), dist.group.WORLD).meetings
    return Compared(call_text, call_number, tuple(report["peers"]))


@dataclass
class _MeetingPoint:
    """Keys in the store at which some ranks meet, and the number of their meetings so far.

    At a meeting each rank writes its report under its key, and waits for those of all other ranks.
    """

    ranks: tuple[int, ...]
    world: dist.ProcessGroup
    meetings: int = 0

    def exchange(self, own_report: Mapping[str, object], timeout: timedelta) -> dict[int, Report]:
        """Exchange reports, as JSON can hold them, with all other ranks; return the reports by rank.

        If other ranks have waited in vain in a meeting to which this rank is late, it goes on to the
        next one. Raises DesyncError for ranks that do not come within `timeout`, and for a store
        that does not answer.
        """
        store = default_store()
        rank = dist.get_rank()
        reports: dict[int, Report] | None = None
        # None: other ranks have waited for this one in vain, in the meeting of this number.
        while reports is None:
            meeting = self.meetings
            self.meetings = meeting + 1  # also if this one fails: the next call is another meeting
            try:
                reports = call_within(
                    timeout, self._meet, store, rank, meeting, own_report, timeout
                )
            except RuntimeError as error:  # DistStoreError, DistNetworkError
                ranks_text = _ranks_text(self.ranks)
                reason = f"rank {rank} cannot compare '{own_report['call_text']}' with {ranks_text}: no store"
                hint = f"the process or node that has it has ended, or cannot be reached: {error}"
                raise DesyncError(reason, hint=hint) from error
        return reports

    def _meet(
        self,
        store: Any,
        rank: int,
        meeting: int,
        own_report: Mapping[str, object],
        timeout: timedelta,
    ) -> dict[int, Report] | None:
        """Write this rank's report to the store, and wait for those of all other ranks.

        Returns the reports by rank; None if another rank waited in vain, and has marked this one as
        absent. Raises DesyncError if some ranks do not come within `timeout`.
        """
        if meeting > 1:
            # Coming to the last meeting shows that a rank has read the one before: its report there
            # can be deleted.
            store.delete_key(self._key(meeting - 2, rank))
        own_key = self._key(meeting, rank)
        own_text = json.dumps(own_report)
        # Writes the report unless another rank has written ABSENT under this key. The store decides
        # which of the two came first, so that all ranks see the same.
        if store.compare_set(own_key, "", own_text) == ABSENT:
            return None
        store.set(own_key, own_text)  # wakes those who wait, in every kind of store
        keys = [self._key(meeting, other_rank) for other_rank in self.ranks]
        try:
            store.wait(keys, timeout)
        except RuntimeError:  # DistStoreError, of a TCPStore
            for key in keys:  # a rank that comes later goes on to the next meeting
                store.compare_set(key, "", ABSENT)
        texts = dict(zip(self.ranks, store.multi_get(keys), strict=True))
        self._check_all_came(texts, str(own_report["call_text"]), timeout)
        return {other_rank: json.loads(text) for other_rank, text in texts.items()}

    def _check_all_came(
        self, texts: Mapping[int, bytes], call_text: str, timeout: timedelta
    ) -> None:
        """Raise DesyncError if some ranks did not come in time: their text is ABSENT."""
        missing = [rank for rank, text in texts.items() if text == ABSENT]
        if not missing:
            return
        limit = f"{timeout.total_seconds():g} s"
        ranks = _ranks_text(self.ranks)
        hint = f"{ranks} of the mesh all call it, in the same order, with equal debug="
        reason = f"{_ranks_text(missing)} did not come to '{call_text}' within {limit}"
        raise DesyncError(reason, hint=hint)

    def _key(self, meeting: int, rank: int) -> str:
        return f"xshard/debug/{ranks_digest(self.ranks)}/{meeting}/{rank}"


# Cached by the world too: its store ends with it, and threads may each have their own.
_meeting_point = functools.cache(_MeetingPoint)


def _differing(reports: Mapping[int, Report]) -> list[str]:
    """Return the names of facts that must be equal and differ, in a fixed order.

    Facts of whether a gradient is sent hide all others, which follow from it.
    """
    facts_by_peers: dict[tuple[int, ...], list[dict[str, str]]] = {}
    for report in reports.values():
        facts_by_peers.setdefault(tuple(report["peers"]), []).append(report["equal_on_peers"])
    facts_of_all = [report["equal_on_all"] for report in reports.values()]
    names: dict[str, None] = {}  # a set with an order
    for facts_of_ranks in (facts_of_all, *facts_by_peers.values()):
        names |= dict.fromkeys(_differing_names(facts_of_ranks))
    return ["gradient"] if "gradient" in names else list(names)


def _differing_names(facts_of_ranks: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the names of facts that are not equal on all of some ranks, or missing on one."""
    names: dict[str, None] = {}
    for facts in facts_of_ranks:
        names |= dict.fromkeys(facts)
    for name in names:
        if len({facts.get(name) for facts in facts_of_ranks}) > 1:
            yield name


def _desync_error(reports: Mapping[int, Report], differing: Sequence[str]) -> DesyncError:
    """Return the error of ranks that disagree.

    Args:
        reports: The call of each rank, with its facts: see `CallFacts`.
        differing: The names of facts that differ, and should be equal. The error shows them, and
            those that were not compared.
    """

    def describe(report: Report) -> str:
        """Return a call and its facts: "'redistribute(...)', shape (4, 2), dtype float32"."""
        all_facts = {
            **report["not_compared"],
            **report["equal_on_peers"],
            **report["equal_on_all"],
        }
        shown_names = (*report["not_compared"], *differing)
        facts_text = [f"{name} {all_facts.get(name)}" for name in shown_names]
        return ", ".join([f"'{report['call_text']}'", *facts_text])

    hint = _lines(reports, describe) + "\n  all ranks of a mesh call it with equal arguments"
    if "shape" in differing:
        # Without `shape=` it follows from a rank's own block, as if all were equally long.
        hint += "; blocks of unequal lengths need shape=, or a layout with them: v/sizes(tp,31,30)"
    names = ", ".join(differing)
    return DesyncError(f"the ranks disagree about a redistribution: {names}", hint=hint)


def _failure_error(reports: Mapping[int, Report]) -> DesyncError:
    """Return the error of ranks that cannot make a call that others can, with their own errors."""

    def describe(report: Report) -> str:
        failure = report.get("failure", "").splitlines()
        return "\n    ".join([f"'{report['call_text']}'", *failure])

    failed_ranks = [rank for rank, report in reports.items() if "failure" in report]
    reason = f"{_ranks_text(failed_ranks)} cannot do what the others can"
    return DesyncError(reason, hint=_lines(reports, describe))


def _lines(reports: Mapping[int, Report], describe: Callable[[Report], str]) -> str:
    """Return one line per description, with the ranks that have it."""
    ranks_by_description: dict[str, list[int]] = {}
    for rank, report in reports.items():
        ranks_by_description.setdefault(describe(report), []).append(rank)
    lines = [
        f"{_ranks_text(ranks)}: {description}"
        for description, ranks in ranks_by_description.items()
    ]
    return "\n  ".join(lines)


def _ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks as text for an error: [3] -> "rank 3"; [0, 2, 3, 4, 5] -> "ranks 0, 2 to 5".

    Two neighbours are listed one by one: [1, 2] -> "ranks 1, 2".
    """
    starts, lengths = run_columns(np.array(sorted(ranks)))  # of runs of consecutive ranks
    texts: list[str] = []
    for first_rank, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        last_rank = first_rank + length - 1
        if length > 2:
            texts.append(f"{first_rank} to {last_rank}")
        else:
            texts += map(str, range(first_rank, last_rank + 1))
    noun = "rank" if lengths.sum() == 1 else "ranks"
    return f"{noun} {', '.join(texts)}"
