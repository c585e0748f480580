"""Plans -> what this process executes: one short rule per step.

Decides how torch carries out a step that the plan has decided on. Rows, sizes and groups are
settled here, once per plan and mesh; running it only moves data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge.collectives import CARRIERS, Group
from torch_bridge.failures import CollectiveError, is_loss, lost
from torch_bridge.groups import ProcessMesh
from torch_bridge.packing import Fill, Message, Packing, message
from xshard import DtypeError, Layout, Plan, PlanError, Sharding
from xshard.notation import Dim
from xshard.ownership import Run, Runs
from xshard.planner import find_plan
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Mask,
    Permute,
    ReduceScatter,
    Retag,
    Scale,
    Slice,
    Step,
)
from xshard.steps.base import DimCut, axes_of, even_parts, own_part
from xshard.steps.exchange import filled, messages_from, messages_to
from xshard.steps.permute import senders
from xshard.steps.reach import moving
from xshard.steps.sources import view_pairs
from xshard.winners import winner_plans

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Relay:
    """A move in which messages travel; what comes before and after them can be done by itself.

    exchange: a block -> what arrived. begin: the same begun. finish: the block and what arrived -> the
    result.
    """

    exchange: Move
    begin: Callable[[Tensor], Callable[[], Tensor]]
    finish: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, block: Tensor) -> Tensor:
        return self.finish(block, self.exchange(block))


@dataclass(frozen=True, eq=False)
class Executable:
    """A plan as this process executes it: its block under `plan.src` -> its block under `plan.dst`.

    The result is a new tensor; the block is left as it is.
    """

    plan: Plan
    processes: ProcessMesh
    tensor_device: torch.device
    moves: tuple[Move, ...]

    def __call__(self, block: Tensor) -> Tensor:
        carrier = CARRIERS.get(block.dtype)
        if carrier is not None:
            return self._moved(block.view(carrier)).view(block.dtype)
        return self._moved(block)

    def _moved(self, block: Tensor) -> Tensor:
        out = block
        try:
            for move in self.moves:
                out = move(out)
        except RuntimeError as error:
            if is_loss(error):
                raise self._lost(move, error) from error
            raise
        # Where nothing moves the result still is the caller's own, to write to as they like.
        return block.clone(memory_format=torch.contiguous_format) if out is block else out

    def begin(self, block: Tensor) -> Callable[[], Tensor]:
        """The plan begun -> what ends it and returns the result. What travels last travels in between.

        For dtypes that travel as they are. All processes begin and end their plans in the same order.
        """
        last = max((i for i, move in enumerate(self.moves) if isinstance(move, Relay)), default=-1)
        relay = self.moves[last] if last >= 0 else None
        if not isinstance(relay, Relay):
            return lambda: self(block)
        out = block
        for move in self.moves[:last]:
            out = self._guarded(move, move, out)
        arrive = self._guarded(relay, relay.begin, out)

        def end() -> Tensor:
            result = relay.finish(out, self._guarded(relay, arrive))
            for move in self.moves[last + 1 :]:
                result = self._guarded(move, move, result)
            return result

        return end

    def _guarded(self, move: Move, act: Callable[..., Any], *args: Any) -> Any:
        """`act(*args)`, which is a part of a move: a lost peer is told with its step."""
        try:
            return act(*args)
        except RuntimeError as error:
            if is_loss(error):
                raise self._lost(move, error) from error
            raise

    def _lost(self, move: Move, error: RuntimeError) -> CollectiveError:
        at, steps = self.moves.index(move), self.plan.steps
        return lost(self.plan, f"step {at + 1} of {len(steps)}, '{steps[at]}',", self.processes.ranks, error)

    @cached_property
    def backward(self) -> Executable:
        """The plan of the adjoint. Raises LinearityError, DtypeError."""
        return self._like(self.plan.backward)

    def plan_gradient(self) -> None:
        """Lower what the backward pass runs. Raises LinearityError, DtypeError where there is none."""
        _ = self.backward if self.plan.src.is_linear else self.winners

    @cached_property
    def tangent(self) -> Executable:
        """What tangents take: the same, but that constants beyond the ends of the array are zeros."""
        tangent = self.plan.tangent
        return self if tangent is self.plan else self._like(tangent)

    @cached_property
    def winners(self) -> tuple[Executable, Executable, Executable, Executable]:
        """For the derivatives of a max or min, as in `xshard.winners`: result, count, cotangent, tangent."""
        plans = winner_plans(self.plan)
        result, count = self._like(plans.result), self._like(plans.count)
        return result, count, self._like(plans.cotangent), self._like(plans.tangent)

    def batched(self, n: int) -> Executable:
        """The same redistribution of a block with one more dim, whole and leading, of length `n`."""
        plan = self.plan
        # No two dims have this name: nested batches have ever more dims.
        dim = Dim(f"_batch{len(plan.shape)}")
        src, dst = (Layout((dim, *layout.dims), layout.tags) for layout in (plan.src, plan.dst))
        shape = (n, *plan.shape)
        return self._like(find_plan(src, dst, plan.mesh, shape, plan.dtype, plan.profile, scale=plan.scale))

    def _like(self, plan: Plan) -> Executable:
        return lower(plan, self.processes, self.tensor_device)


class Site(NamedTuple):
    """Where one step happens: the shardings around it, this process, where and what its tensors are."""

    before: Sharding
    after: Sharding
    processes: ProcessMesh
    tensor_device: torch.device
    dtype: str

    @property
    def device(self) -> int:
        return self.processes.device

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """This process's block before and after the step."""
        return self.before.local_shape(self.device), self.after.local_shape(self.device)

    def message(self, shape: Sequence[int], rows: Mapping[int, Runs]) -> Message:
        return message(shape, rows, self.tensor_device)

    def fill(self, dim: int, start: int, stop: int, value: float) -> Fill:
        """Rows of this process's block that hold a constant, in the dtype in which they travel."""
        dtype = getattr(torch, self.dtype)
        constant = torch.tensor(value, dtype=dtype, device=self.tensor_device)
        return Fill(dim, start, stop, constant.view(CARRIERS.get(dtype, dtype)))

    def own_part(self, *cuts: DimCut) -> dict[int, Runs]:
        """This process's rows of the dims that a step cuts, or puts together."""
        before = self.before
        return {before.dim_index(d): own_part(before, d, shards, self.device) for d, shards in cuts}

    def cut(
        self, shape: tuple[int, ...], dim: int, parts: Sequence[Runs], axes: tuple[str, ...], group: Group
    ) -> Packing:
        """A block with a message for every rank of a group: the part of `dim` at its index along `axes`."""
        mine = [parts[self.before.mesh.index(device, axes)] for device in group.devices]
        return Packing(shape, tuple(self.message(shape, {dim: rows}) for rows in mine))


@lru_cache(maxsize=4096)
def lower(plan: Plan, processes: ProcessMesh, tensor_device: torch.device) -> Executable:
    """A plan -> what this process executes; all processes of the mesh call it, since groups may be made.

    Raises DtypeError where torch has no arithmetic for the dtype of a plan that reduces or scales.
    """
    moves = []
    for step, before, after in plan.stages:
        if getattr(torch, plan.dtype) in CARRIERS and _computes(step, before):
            raise DtypeError(
                f"torch has no '{step}' of {plan.dtype}",
                hint="this dtype only moves: cast before the reduction",
            )
        rule = RULES.get(type(step))
        if rule is None:
            raise PlanError(f"torch_bridge has no rule for the step '{step}'", hint="add it to lower.RULES")
        moves.append(rule(step, Site(before, after, processes, tensor_device, plan.dtype)))
    return Executable(plan, processes, tensor_device, tuple(moves))


def _computes(step: Step, before: Sharding) -> bool:
    if isinstance(step, Exchange):
        after = step.after(before)
        negates = any(view.sign < 0 for pair in view_pairs(before, after) for view in pair)
        return step.op(before) is not None or negates
    return isinstance(step, AllReduce | ReduceScatter | Scale)


def _all_gather(step: AllGather, site: Site) -> Move:
    axes, dim = axes_of(step.shards), site.before.dim_index(step.dim)
    group, parts = site.processes.group(axes), even_parts(site.before, step.dim, step.shards)
    whole = site.cut(site.shapes[1], dim, parts, axes, group)
    return lambda block: whole.unpack(group.all_gather(block, whole.arriving))


def _slice(step: Slice, site: Site) -> Move:
    return site.message(site.shapes[0], site.own_part(*step.cuts)).copied


def _all_reduce(step: AllReduce, site: Site) -> Move:
    group = site.processes.group(step.axes)
    return lambda block: group.all_reduce(block, step.op)


def _reduce_scatter(step: ReduceScatter, site: Site) -> Move:
    axes, dim = axes_of(step.shards), site.before.dim_index(step.dim)
    group, parts = site.processes.group(axes), even_parts(site.before, step.dim, step.shards)
    whole = site.cut(site.shapes[0], dim, parts, axes, group)
    shape = (len(group.devices), *site.shapes[1])
    return lambda block: group.reduce_scatter(whole.pack(block).view(shape), step.op)


def _all_to_all(step: AllToAll, site: Site) -> Move:
    before, (have, want) = site.before, site.shapes
    group = site.processes.group(axes_of(step.src_shards))
    ends = (have, step.dst_dim, step.dst_shards), (want, step.src_dim, step.src_shards)
    sent, received = (
        site.cut(shape, before.dim_index(dim), even_parts(before, dim, shards), axes_of(shards), group)
        for shape, dim, shards in ends
    )
    return lambda block: received.unpack(group.all_to_all(sent.pack(block), received.arriving))


def _permute(step: Permute, site: Site) -> Move:
    sender = senders(site.before, site.after)
    have, want = (site.message(shape, {}) for shape in site.shapes)
    return _relay(site, [(sender.index(site.device), have)], [(sender[site.device], want)])


def _exchange(step: Exchange, site: Site) -> Move:
    ends = site.before, site.after, site.device, step.node_devices
    outgoing, incoming = messages_from(*ends), messages_to(*ends)

    def rows(box: Any, end: int) -> dict[int, Runs]:
        return {d: tuple(Run(s[end], s.length) for s in segments) for d, segments in enumerate(box)}

    return _relay(
        site,
        [(m.dst, site.message(site.shapes[0], rows(m.box, 0))) for m in outgoing],
        [(m.src, replace(site.message(site.shapes[1], rows(m.box, 1)), sign=m.sign)) for m in incoming],
        step.op(site.before),
        [site.fill(*fill) for fill in filled(site.after, site.device)],
        near=step.node_devices is not None,
    )


def _relay(
    site: Site,
    outgoing: Sequence[tuple[int, Message]],
    incoming: Sequence[tuple[int, Message]],
    op: str | None = None,
    fills: Sequence[Fill] = (),
    *,
    near: bool = False,
) -> Move:
    """Messages to and from some devices; what a device has for itself it takes directly.

    Always an all-to-all, whose group is the smallest that all movement stays in: point-to-point
    calls are missing from some backends and from torch.compile.
    """
    me = site.device
    # Near senders may differ from the receiver along any axis.
    axes = site.after.mesh.axes if near else moving(site.before, site.after)
    group = site.processes.group(axes)
    rank = group.devices.index(me)

    def packing(shape: tuple[int, ...], messages: Sequence[tuple[int, Message]]) -> Packing:
        return Packing(shape, tuple(m for _, m in messages), op)

    def by_rank(messages: Sequence[tuple[int, Message]]) -> list[tuple[int, Message]]:
        return sorted(((group.devices.index(d), m) for d, m in messages), key=lambda found: found[0])

    def sizes(messages: Sequence[tuple[int, Message]]) -> list[int]:
        totals = [0] * len(group.devices)
        for at, m in messages:
            totals[at] += math.prod(m.shape)
        return totals

    sends, takes = ([m for m in by_rank(all_) if m[0] != rank] for all_ in (outgoing, incoming))
    sent, received = packing(site.shapes[0], sends), packing(site.shapes[1], takes)
    sent_sizes, received_sizes = sizes(sends), sizes(takes)
    own = [m for at, m in by_rank(outgoing) if at == rank]
    # In the order of the ranks, so that replicas add alike; where there are none, a device's own come first.
    order = by_rank(incoming)
    if not any(a in axes for a in site.after.mesh.axes if a not in site.after.layout.axes):
        order.sort(key=lambda found: found[0] != rank)
    whole = Packing(site.shapes[1], tuple(m for _, m in order), op, tuple(fills))

    if not _communicates(site):
        return lambda block: whole.place(block, [m.read(block) for m in own])

    def exchange(block: Tensor) -> Tensor:
        return group.all_to_all(sent.pack(block), received.arriving, sent_sizes, received_sizes)

    def begin(block: Tensor) -> Callable[[], Tensor]:
        return group.begin_all_to_all(sent.pack(block), received.arriving, sent_sizes, received_sizes)

    def finish(block: Tensor, arrived: Tensor) -> Tensor:
        if not own and not fills:
            return received.unpack(arrived)
        theirs, mine = iter(received.split(arrived)), (m.read(block) for m in own)
        return whole.place(block, [next(mine if at == rank else theirs) for at, _ in order])

    return Relay(exchange, begin, finish)


def _communicates(site: Site) -> bool:
    """Whether any device of the mesh sends another anything: the same on all of them."""
    return bool(Exchange(site.after.layout).traffic(site.before).received)


def _embed(step: Embed, site: Site) -> Move:
    whole = Packing(site.shapes[1], (site.message(site.shapes[1], site.own_part((step.dim, step.shards))),))
    return lambda block: whole.place(block, [block])


def _mask(step: Mask, site: Site) -> Move:
    if site.before.mesh.index(site.device, step.axes):
        return lambda block: block.new_zeros(block.shape)
    return lambda block: block


def _retag(step: Retag, site: Site) -> Move:
    return lambda block: block


def _scale(step: Scale, site: Site) -> Move:
    numerator, denominator = step.factor.numerator, step.factor.denominator
    if denominator == 1:
        return lambda block: block * numerator
    # Divided, not multiplied by a rounded reciprocal: exact where the result is representable.
    return lambda block: block * numerator / denominator


# mypy cannot tie a rule's step to its key.
RULES: dict[type[Step], Callable[[Any, Site], Move]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    AllToAll: _all_to_all,
    Embed: _embed,
    Exchange: _exchange,
    Mask: _mask,
    Permute: _permute,
    ReduceScatter: _reduce_scatter,
    Retag: _retag,
    Scale: _scale,
    Slice: _slice,
}
