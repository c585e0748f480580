"""A peer's plan as steps of ours, so that one model prices both.

Shardy splits axes: its plans use a refined mesh with the same devices. A peer's operation that is several of
our steps (a gather along two dims) has the price of these in the best order, or of one: one launch, one copy
of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import xshard as xs
from benchmarks.cases import Case, layout_of
from xshard.notation.parser import Shard
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Mask,
    Permute,
    ReduceScatter,
    Slice,
    Step,
    Traffic,
)

NODE_DEVICES = 8  # consecutive devices that share a node, here and in the shipped profiles
Cuts = tuple[tuple[str, ...], ...]  # per dim, the axes that cut it, outermost first


class NotConvertibleError(Exception):
    """Our steps cannot express a peer's plan; the message says why."""


@dataclass(frozen=True)
class Spot:
    """The layout between two operations: the axes that cut every dim, and the axes that hold addends."""

    cuts: Cuts
    sums: tuple[str, ...] = ()

    @property
    def layout(self) -> xs.Layout:
        return layout_of(self.cuts, self.sums)


@dataclass(frozen=True)
class PeerPlan:
    """A peer's plan for a case.

    mesh: the case's mesh, with some axes split. spots: before the first operation and after each. kinds: the
    operations, by our names.
    """

    mesh: xs.Mesh
    spots: tuple[Spot, ...]
    kinds: tuple[str, ...]
    plan_s: float

    @cached_property
    def operations(self) -> tuple[tuple[Step, ...], ...]:
        """Every operation as steps of ours. Raises NotConvertibleError."""
        operations = zip(self.kinds, self.spots[:-1], self.spots[1:], strict=True)
        return tuple(_steps(kind, a, b) for kind, a, b in operations)

    def plan(self, case: Case, profile: xs.Profile) -> xs.Plan:
        """The steps as a plan, which checks that they lead from end to end. Raises PlanError."""
        steps = tuple(itertools.chain.from_iterable(self.operations))
        first = self.spots[0].layout
        last = self.spots[-1].layout
        return xs.Plan(first, last, self.mesh, case.shape, case.dtype, steps, profile=profile)

    def seconds(self, case: Case, profile: xs.Profile) -> float:
        """Predicted time by our model."""
        here = xs.Sharding(self.spots[0].layout, self.mesh, case.shape)
        itemsize = self.plan(case, profile).itemsize
        total = 0.0
        for steps in self.operations:
            total += min(
                _seconds(order, here, itemsize, profile) for order in itertools.permutations(steps)
            )
            for step in steps:
                here = step.after(here)
        return total

    def received_bytes(self, case: Case) -> int:
        """Bytes that the busiest device receives, summed over the steps."""
        return self.plan(case, xs.load_profile("bandwidth")).bytes_received

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PeerPlan:
        spots = tuple(Spot(tuple(map(tuple, s["cuts"])), tuple(s["sums"])) for s in data["spots"])
        return cls(xs.Mesh(data["mesh"]), spots, tuple(data["kinds"]), data["plan_s"])


def _seconds(
    steps: Sequence[Step], before: xs.Sharding, itemsize: int, profile: xs.Profile
) -> float:
    """Time of one operation, as its steps one by one or all that they move at once, whichever is less."""
    spans = profile.link_spans(before.mesh)
    traffics = []
    here = before
    for step in steps:
        traffics.append(step.traffic(here, spans))
        here = step.after(here)
    each = [
        profile.fabric(before.mesh).seconds(step.kind, traffic, itemsize)
        for step, traffic in zip(steps, traffics, strict=True)
    ]
    if len(steps) == 1:
        return each[0]
    hops = tuple(hop for traffic in traffics for hop in traffic.hops)
    fused = Traffic(sum(t.received for t in traffics), here.max_local_size, hops)
    return min(sum(each), profile.fabric(before.mesh).seconds(steps[0].kind, fused, itemsize))


def _steps(kind: str, before: Spot, after: Spot) -> tuple[Step, ...]:
    """One operation of a peer -> steps. Raises NotConvertibleError."""
    gone = _tails(before.cuts, after.cuts)
    new = _tails(after.cuts, before.cuts)
    if kind == "slice" and not gone:
        return (Slice(tuple((_dim(d), _shards(axes)) for d, axes in new.items())),)
    if kind == "all_gather" and not new:
        return tuple(AllGather(_dim(d), _shards(axes)) for d, axes in gone.items())
    if kind == "permute":
        return (Permute(after.layout),)
    if kind == "all_to_all" and gone and new:
        return (_all_to_all(gone, new, after),)
    ended = tuple(a for a in before.sums if a not in after.sums)
    if kind == "all_reduce" and ended and not gone and not new:
        return (AllReduce(ended),)
    if kind == "reduce_scatter" and ended and len(new) == 1 and not gone:
        ((d, axes),) = new.items()
        return (ReduceScatter(_dim(d), _shards(axes)),)
    if kind == "mask" and not gone and not new:
        return (Mask(tuple(a for a in after.sums if a not in before.sums)),)
    raise NotConvertibleError(f"{kind}: {before.layout} -> {after.layout}")


def _all_to_all(
    gone: Mapping[int, tuple[str, ...]], new: Mapping[int, tuple[str, ...]], after: Spot
) -> Step:
    """From one dim to another it is our step; between more dims an exchange, which moves as little."""
    if len(gone) == len(new) == 1:
        ((d, off),), ((e, on),) = gone.items(), new.items()
        if d != e and sorted(off) == sorted(on):
            return AllToAll(_dim(d), _shards(off), _dim(e), _shards(on))
    return Exchange(after.layout)


def _tails(cuts: Cuts, others: Cuts) -> dict[int, tuple[str, ...]]:
    """By dim, the innermost axes of `cuts` that `others` does not begin with."""
    tails = {}
    for d, (cut, other) in enumerate(zip(cuts, others, strict=True)):
        shared = sum(
            1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(cut, other, strict=False))
        )
        if cut[shared:]:
            tails[d] = cut[shared:]
    return tails


def _shards(axes: Sequence[str]) -> tuple[Shard, ...]:
    return tuple(Shard((axis,)) for axis in axes)


def _dim(index: int) -> str:
    return f"d{index}"


@dataclass(frozen=True)
class SubAxis:
    """A factor of a mesh axis: `size` positions, with `outer` to the left. The whole axis has outer 1."""

    axis: str
    outer: int
    size: int


def refined(
    mesh: xs.Mesh, subs: Sequence[SubAxis]
) -> tuple[xs.Mesh, dict[str, list[tuple[int, str]]]]:
    """A mesh -> the same devices with axes split wherever a sub-axis begins or ends.

    Also, by axis, its parts outermost first: (positions to the left of the part, its name).
    Raises NotConvertibleError if two sub-axes of an axis cross.
    """
    sizes: dict[str, int] = {}
    parts: dict[str, list[tuple[int, str]]] = {}
    for axis, n in zip(mesh.axes, mesh.sizes, strict=True):
        edges = sorted(
            {1, n, *(e for s in subs if s.axis == axis for e in (s.outer, s.outer * s.size))}
        )
        if any(b % a for a, b in itertools.pairwise(edges)):
            raise NotConvertibleError(f"sub-axes of {axis}={n} cross: {edges}")
        named = len(edges) > 2
        steps = list(itertools.pairwise(edges)) or [(1, n)]
        parts[axis] = [(a, f"{axis}_{i}" if named else axis) for i, (a, _) in enumerate(steps)]
        sizes |= {name: b // a for (a, b), (_, name) in zip(steps, parts[axis], strict=True)}
    return xs.Mesh(sizes), parts


def names_of(sub: SubAxis, parts: Mapping[str, list[tuple[int, str]]]) -> Iterator[str]:
    """The axes of the refined mesh that make up a sub-axis, outermost first."""
    for outer, name in parts[sub.axis]:
        if sub.outer <= outer < sub.outer * sub.size or (sub.size == 1 == outer == sub.outer):
            yield name
