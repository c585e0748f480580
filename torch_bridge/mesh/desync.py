"""`debug=True`: ranks compare what they are about to do, before any of them does it. They meet in the store
under their ranks and a number, and find each other even if they are about to call different collectives.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.distributed import distributed_c10d as c10d

from torch_bridge.errors import DesyncError
from torch_bridge.mesh.failures import timeout_of, within
from torch_bridge.mesh.process_groups import ranks_digest
from torch_bridge.mesh.process_mesh import callers
from xshard.arguments import is_on

# Whether every call is compared, as with `debug=True`, and whether each new plan is, when it is first used.
ALWAYS = is_on("XSHARD_DEBUG")
NEW = os.environ.get("XSHARD_DEBUG") != "0"
LISTED = 8  # most facts that an error lists
ABSENT = b"absent"  # in the place of a report that did not come in time


class Sent(NamedTuple):
    """Whatever changes what a call sends, now or in its backward pass: all of it is compared."""

    shape: object
    dtype: object
    plan: object
    profile: object
    requires_grad: object
    check_replicated: object = False
    comm_dtype: object = ""  # of verbs that have one, as the next ones
    device: object = ""
    transforms: object = ""
    async_op: object = False
    save: object = ""
    bucket_bytes: object = ""

    @property
    def facts(self) -> dict[str, str]:
        """The facts as text, by name."""
        return {name: str(value) for name, value in self._asdict().items()}


def derivatives_of(*blocks: Tensor) -> dict[str, str]:
    """`requires_grad` of every block while gradients are recorded, and the `transforms` that it is in."""
    inside: list[str] = []
    if stack := torch._C._functorch.get_interpreter_stack():
        from torch._functorch.pyfunctorch import (
            VmapInterpreter,
            coerce_cinterpreter,
        )  # slow to import

        for level in map(coerce_cinterpreter, stack):
            inside += [
                f"vmap of {level.batch_size()}" if isinstance(level, VmapInterpreter) else "grad"
            ]
        inside += [f"batched {torch._C._functorch.is_batchedtensor(x)}" for x in blocks]
    if forward_ad._current_level >= 0:
        inside += [f"tangent {forward_ad.unpack_dual(x).tangent is not None}" for x in blocks]
    needed = ", ".join(str(torch.is_grad_enabled() and x.requires_grad) for x in blocks)
    return {"requires_grad": needed, "transforms": ", ".join(inside)}


def sent_facts(plan: Any, steps: Iterable[object], **sent: object) -> dict[str, str]:
    """The facts of `Sent`, with the steps of a plan, and its profile's numbers, which decide on phases."""
    digest = hashlib.sha1(repr(plan.profile).encode(), usedforsecurity=False).hexdigest()[:8]
    profile = f"{plan.profile.name} ({digest})"
    return Sent(plan="; ".join(map(str, steps)), profile=profile, **sent).facts  # type: ignore[arg-type]


class CallFacts(NamedTuple):
    """A call that a rank is about to make, as facts by name."""

    everywhere: dict[str, str]  # equal on all ranks that meet
    within: dict[str, str]  # equal on the ranks of `part`
    part: Sequence[int]  # the ranks with which this one communicates
    own: dict[str, str]  # may differ; for the error


def compare_ranks(
    ranks: Sequence[int],
    asked: str,
    prepare: Callable[[], CallFacts],
    timeout: timedelta | None = None,
) -> dict[int, dict[str, Any]]:
    """The facts of each rank if all are about to make the same call. Else all raise DesyncError; if all fail,
    the error of `prepare`, which sends nothing. asked: the call in the user's words.
    """
    world = dist.group.WORLD
    assert world is not None  # there are no ranks without a world
    error: Exception | None = None
    try:
        mine = {"asked": asked, **prepare()._asdict()}
    except Exception as raised:
        error = raised
        mine = {"asked": asked, "failure": f"{type(raised).__name__}: {raised}"}
    reports = _channel(tuple(sorted(ranks)), world).exchange(mine, timeout or timeout_of(world))
    if error is not None and all("failure" in one for one in reports.values()):
        raise error
    if any("failure" in one for one in reports.values()):
        raise _failed(reports) from error
    differing = _differing(reports)
    if differing:
        raise _desync(reports, differing[:LISTED])
    return reports


class Compared(NamedTuple):
    """A call that ranks have compared."""

    asked: str
    number: int  # how often they have met, equal on all
    ranks: tuple[int, ...]  # they send to each other, and compare its gradients, too

    def watched(self, result: Tensor, *blocks: Tensor) -> Tensor:
        """The result; each part of the backward pass from it to the blocks is compared before it sends."""
        # Tensors of a tree share a part: the first of them compares it.
        nodes = (
            node for node in graph_nodes([result], blocks) if isinstance(node, BackwardCFunction)
        )
        for part, node in enumerate((node for node in nodes if "compared" not in node.metadata), 1):
            node.metadata["compared"] = part
            compare = functools.partial(
                self._compare_gradient, getattr(node, "executable", None), part
            )
            node.register_prehook(compare)
        return result

    def _compare_gradient(self, executable: Any, part: int, _: object) -> None:
        """Raise DesyncError on all ranks unless all are about to send the gradient of this part."""
        if len(self.ranks) > 1 and (executable is None or executable.sends_gradient):
            facts = {"gradient": f"of call {self.number}", "part": str(part)}
            compare_ranks(self.ranks, self.asked, lambda: CallFacts(facts, {}, self.ranks, {}))


def graph_nodes(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of autograd between tensors, each once."""
    nodes = list[Any](y.grad_fn for y in outputs)
    seen = {None, *(x.grad_fn for x in inputs)}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            yield node
            nodes += [before for before, _ in node.next_functions]


def compare_call(
    mesh: object, text: str, prepare: Callable[[], CallFacts], ranks: Sequence[int] | None = None
) -> Compared | None:
    """Raise on all `ranks`, or a mesh's, as `compare_ranks` does. None on others: they raise later."""
    if not dist.is_initialized() or dist.get_rank() not in (ranks := ranks or callers(mesh)):
        return None
    part = compare_ranks(ranks, text, prepare)[dist.get_rank()]["part"]
    return Compared(text, _channel(tuple(sorted(ranks)), dist.group.WORLD).meetings, tuple(part))


@dataclass
class _Channel:
    """A place in the store where some ranks meet, and the number of their meetings."""

    ranks: tuple[int, ...]
    world: dist.ProcessGroup
    meetings: int = 0

    def exchange(self, mine: Mapping[str, object], timeout: timedelta) -> dict[int, dict]:
        """The report of this rank -> the reports of all, by rank, in the first meeting not yet given up."""
        store = c10d._get_default_store()
        rank = dist.get_rank()
        reports: dict[int, dict] | None = None
        while reports is None:
            number = self.meetings
            self.meetings = self.meetings + 1
            try:
                reports = within(timeout, self._meet, store, rank, number, mine, timeout)
            except RuntimeError as error:  # DistStoreError, DistNetworkError
                others = _ranks_text(self.ranks)
                what = f"rank {rank} cannot compare '{mine['asked']}' with {others}: no store"
                hint = f"the process or node that has it has ended, or cannot be reached: {error}"
                raise DesyncError(what, hint=hint) from error
        return reports

    def _meet(
        self, store: Any, rank: int, number: int, mine: Mapping[str, object], timeout: timedelta
    ) -> dict[int, dict] | None:
        if number > 1:  # all ranks that came to the last meeting have read this one
            store.delete_key(self._key(number - 2, rank))
        if store.compare_set(self._key(number, rank), "", report := json.dumps(mine)) == ABSENT:
            return None
        store.set(self._key(number, rank), report)  # wakes those who wait, in every kind of store
        keys = [self._key(number, r) for r in self.ranks]
        try:
            store.wait(keys, timeout)
        except RuntimeError:  # DistStoreError, of a TCPStore
            for key in keys:  # whoever comes later goes on to the next meeting
                store.compare_set(key, "", ABSENT)
        reports = dict(zip(self.ranks, store.multi_get(keys), strict=True))
        if missing := [r for r, report in reports.items() if report == ABSENT]:
            late = _ranks_text(missing)
            limit = f"{timeout.total_seconds():g} s"
            hint = f"{_ranks_text(self.ranks)} of the mesh all call it, in the same order, with equal debug="
            raise DesyncError(f"{late} did not come to '{mine['asked']}' within {limit}", hint=hint)
        return {r: json.loads(report) for r, report in reports.items()}

    def _key(self, number: int, rank: int) -> str:
        return f"xshard/debug/{ranks_digest(self.ranks)}/{number}/{rank}"


# Cached by the world too: its store ends with it, and threads may each have their own.
_channel = functools.cache(_Channel)


def _differing(reports: Mapping[int, dict]) -> list[str]:
    """The names of facts that must be equal and differ, in a fixed order."""
    parts: dict[tuple[int, ...], list[dict[str, str]]] = {}
    for one in reports.values():
        parts.setdefault(tuple(one["part"]), []).append(one["within"])
    names: dict[str, None] = {}
    for facts in ([one["everywhere"] for one in reports.values()], *parts.values()):
        everything = dict.fromkeys(name for one in facts for name in one)
        names |= {name: None for name in everything if len({one.get(name) for one in facts}) > 1}
    return ["gradient"] if "gradient" in names else list(names)


def _desync(reports: Mapping[int, dict], differing: Sequence[str]) -> DesyncError:
    def describe(one: dict) -> str:
        facts = {**one["own"], **one["within"], **one["everywhere"]}
        shown = (f"{name} {facts.get(name)}" for name in (*one["own"], *differing))
        return ", ".join([f"'{one['asked']}'", *shown])

    hint = _lines(reports, describe) + "\n  all ranks of a mesh call it with equal arguments"
    return DesyncError(
        f"the ranks disagree about a redistribution: {', '.join(differing)}", hint=hint
    )


def _failed(reports: Mapping[int, dict]) -> DesyncError:
    def describe(one: dict) -> str:
        return "\n    ".join([f"'{one['asked']}'", *one.get("failure", "").splitlines()])

    bad = [rank for rank, one in reports.items() if "failure" in one]
    return DesyncError(
        f"{_ranks_text(bad)} cannot do what the others can", hint=_lines(reports, describe)
    )


def _lines(reports: Mapping[int, dict], describe: Callable[[dict], str]) -> str:
    """One line per description, with the ranks that have it."""
    by_text: dict[str, list[int]] = {}
    for rank, one in reports.items():
        by_text.setdefault(describe(one), []).append(rank)
    return "\n  ".join(f"{_ranks_text(ranks)}: {text}" for text, ranks in by_text.items())


def _ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0, 2 to 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs
    )
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"
