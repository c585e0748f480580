"""Whole moves on several ranks: ours, DTensor's and one written by hand, by turns on the same block.

A round lasts from the start of its first rank to the end of its last; two ways are compared by the median
ratio of a round.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor.placement_types as placement_types
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torch_bridge as xt
import xshard as xs
from benchmarks.by_turns import ratio
from benchmarks.cases import Case
from benchmarks.claim import Row
from benchmarks.torch_calls import on_ranks
from benchmarks.torch_redistribute import by_hand
from torch_bridge.calls.move import MoveCall

WARM_UP = 3
# Between two readings of the clock: about so many seconds, at most so many calls.
TARGET_S = 0.02
MOST_CALLS = 16
# The last is the one before once more: it shows how far apart two times of one program are.
OURS = "xshard"
DTENSOR = "DTensor"
BY_HAND = "by hand"
AGAIN = "by hand again"


def end_to_end(
    cases: Sequence[Case], rounds: Sequence[int], profile: str, least: float
) -> list[Row]:
    """Time every case on as many gloo ranks as it has devices.

    least: a case that is not that many times as fast as by every other way is timed again, in three times the
    rounds, and the second time counts: two times of one program differ by as much.
    """
    rows = dict(enumerate(_rows(cases, rounds, profile)))
    doubtful = [
        i for i, row in rows.items() if min(row["faster_than"].values(), default=least) < least
    ]
    again = _rows([cases[i] for i in doubtful], [3 * rounds[i] for i in doubtful], profile)
    return list((rows | dict(zip(doubtful, again, strict=True))).values())


def _rows(cases: Sequence[Case], rounds: Sequence[int], profile: str) -> list[Row]:
    rows: dict[int, Row] = {}
    for n in sorted({case.mesh.n_devices for case in cases}):
        numbers = [i for i, case in enumerate(cases) if case.mesh.n_devices == n]
        asked = [cases[i] for i in numbers], [rounds[i] for i in numbers], profile
        by_rank = on_ranks(n, _measured, *asked)
        rows |= {i: _row(cases[i], spans) for i, *spans in zip(numbers, *by_rank, strict=True)}
    return [rows[i] for i in range(len(cases))]


class Span(NamedTuple):
    """When a rank began and ended some calls, by the clock that all processes of a machine share."""

    start: float
    end: float
    calls: int


def _seconds(spans: Sequence[Span]) -> float:
    """Seconds per call of all ranks together."""
    return (max(span.end for span in spans) - min(span.start for span in spans)) / spans[0].calls


def _row(case: Case, by_rank: Sequence[dict[str, list[Span]]]) -> Row:
    times = {
        way: [_seconds(spans) for spans in zip(*(rank[way] for rank in by_rank), strict=True)]
        for way in by_rank[0]
    }
    return case.facts() | {
        "bytes": torch.Size(case.shape).numel() * getattr(torch, case.dtype).itemsize,
        "seconds": {way: statistics.median(seconds) for way, seconds in times.items()},
        "faster_than": {way: ratio(times, way, OURS) for way in (DTENSOR, BY_HAND) if way in times},
        "noise": ratio(times, AGAIN, BY_HAND) if BY_HAND in times else None,
    }


def _measured(
    cases: Sequence[Case], rounds: Sequence[int], profile: str
) -> list[dict[str, list[Span]]]:
    placement_types.shard_dim_alltoall = (
        all_to_all  # DTensor gathers on CPUs, though gloo has an all-to-all
    )
    return [_times(_ways(case, profile), turns) for case, turns in zip(cases, rounds, strict=True)]


def all_to_all(block: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
    group = funcol._group_or_group_name(funcol._resolve_group((mesh, mesh_dim)))
    return torch.ops._dtensor.shard_dim_alltoall(block.contiguous(), gather_dim, shard_dim, group)


def _ways(case: Case, profile: str) -> dict[str, Callable[[], Tensor]]:
    """A call for every way. Raises AssertionError if the one by hand gives other values than ours."""
    mesh = init_device_mesh("cpu", case.mesh.sizes, mesh_dim_names=case.mesh.axes)
    local = xs.Sharding(case.src, case.mesh, case.shape).local_shape(dist.get_rank())
    # Whole numbers, so that sums are exact in any order; replicas are equal.
    first = case.mesh.index(dist.get_rank(), case.src.axes)
    values = torch.arange(float(torch.Size(local).numel())).view(local) % 13 + first
    block = values.to(getattr(torch, case.dtype))
    text = case.expression
    plan, part = MoveCall(text, mesh, case.shape, profile).plan((local, block.dtype, block.device))
    ways = {OURS: lambda: xt.redistribute(block, text, mesh, shape=case.shape, profile=profile)}
    hand_written = by_hand.sequence(plan, part)
    if hand_written is not None:
        ways[BY_HAND] = ways[AGAIN] = lambda: hand_written(block)
    expected = ways[OURS]()
    assert BY_HAND not in ways or torch.equal(ways[BY_HAND](), expected), (
        f"by hand differs in {case.name}: {text}"
    )
    theirs = dtensor_way(case, mesh, block)
    # A DTensor that cannot be placed so, or gives other values, is not timed.
    if theirs is not None and everywhere(torch.equal(theirs(), expected)):
        ways[DTENSOR] = theirs
    return ways


def dtensor_way(case: Case, mesh: DeviceMesh, block: Tensor) -> Callable[[], Tensor] | None:
    try:
        placed, target = (
            xt.dtensor.to_placements(end, mesh, case.shape) for end in (case.src, case.dst)
        )
    except xs.errors.PlanError:
        return None
    strides = torch.empty(case.shape, device="meta").stride()
    x = DTensor.from_local(
        block, mesh, placed, run_check=False, shape=torch.Size(case.shape), stride=strides
    )
    try:
        x.redistribute(mesh, target)
    except NotImplementedError:
        return None
    return lambda: x.redistribute(mesh, target).to_local()


def everywhere(holds: bool) -> bool:
    """Whether it holds on all ranks."""
    everyone = torch.tensor(float(holds))
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    return bool(everyone)


@torch.no_grad()
def _times(ways: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[Span]]:
    first = [_span(call, 1) for _ in range(WARM_UP) for call in ways.values()][-len(ways) :]
    slowest = torch.tensor(max(span.end - span.start for span in first))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks call equally often
    calls = int(min(MOST_CALLS, max(1.0, TARGET_S / slowest.item())))
    names = list(ways)
    spans = {way: list[Span]() for way in ways}
    for turn in range(rounds):
        # Each way comes first in its turn: the one before leaves traces in caches and memory.
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            spans[name].append(_span(ways[name], calls))
    return spans


def _span(call: Callable[[], Tensor], calls: int) -> Span:
    dist.barrier()
    call()  # ranks leave a barrier one after the other, a call together
    start = time.monotonic()
    for _ in range(calls):
        call()
    return Span(start, time.monotonic(), calls)
