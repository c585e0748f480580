"""Plans -> executables of this process, once per plan and mesh: one short rule per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_bridge.lower import phased
from torch_bridge.lower.collectives import CARRIERS, Collective
from torch_bridge.lower.executable import Executable, Move, Moves, place_of
from torch_bridge.lower.packed_collective import PackedCollective, packed, reduce_scattered
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.site import Site
from torch_bridge.lower.subarray import Subarray, box_rows
from torch_bridge.mesh.failures import during
from torch_bridge.mesh.process_mesh import ProcessMesh
from xshard import Plan, Sharding, steps
from xshard.caches import layout_cache
from xshard.errors import DtypeError, PlanError
from xshard.steps.base import axes_of, even_parts
from xshard.steps.exchange.messages import Message, fill_boxes, messages_from, messages_to
from xshard.steps.exchange.sources import view_pairs
from xshard.steps.exchange.traffic import moving_axes
from xshard.steps.permute import senders

Lengths = Mapping[str, int] | None  # as in `Site`


def lower(
    plan: Plan, processes: ProcessMesh, device: torch.device, lengths: Lengths = None
) -> Executable:
    """A plan -> its executable; all processes of the mesh call it. Raises DtypeError without arithmetic."""
    if lengths is None and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        return _kept(plan, processes, device)
    return _lowered(plan, processes, device, lengths or {})  # tensors made here are part of a trace


def _lowered(
    plan: Plan, processes: ProcessMesh, device: torch.device, lengths: Lengths = None
) -> Executable:
    again = functools.partial(lower, processes=processes, device=device, lengths=lengths)
    moves = list(_moves(plan, processes, device, lengths))
    return Executable(
        plan, processes, tuple(m for _, m in moves), tuple(i for i, _ in moves), again
    )


_kept = layout_cache(maxsize=4096)(_lowered)


def _moves(
    plan: Plan, processes: ProcessMesh, tensor_device: torch.device, lengths: Lengths
) -> Iterable[tuple[int, Move]]:
    """The number of the step and the move, for every move; a step takes one, or one per kind of link."""
    on_sub_axes = processes.factored(plan.split)
    views = steps.Slice | steps.Retag | steps.Mask | steps.Transpose
    last = max((i for i, step in enumerate(plan.steps) if not isinstance(step, views)), default=-1)
    for i, (step, before, after) in enumerate(plan.stages):
        if getattr(torch, plan.dtype) in CARRIERS and _computes(step, before):
            raise no_arithmetic(f"'{step}'", plan.dtype)
        if (rule := RULES.get(type(step))) is None:
            raise PlanError(
                f"torch_bridge lacks a rule for '{step}'", hint="add it to lower.rules.RULES"
            )
        context = on_sub_axes, tensor_device, plan.dtype, lengths
        is_given = all(isinstance(s, steps.Retag | steps.Mask) for s in plan.steps[:i])
        links = plan.profile.fabric(before.mesh)
        place = functools.partial(place_of, plan, i)
        site = Site(before, after, *context, i >= last, is_given, links, place)
        moves = during(place, rule, step, site)  # groups may be made
        yield from ((i, move) for move in (moves if isinstance(moves, list) else [moves]))


def no_arithmetic(what: str, dtype: str) -> DtypeError:
    """The error of a reduction of a dtype in which torch cannot compute."""
    return DtypeError(
        f"torch has no {what} of {dtype}", hint="it only moves: cast before the reduction"
    )


def _computes(step: steps.Step, before: Sharding) -> bool:
    if isinstance(step, steps.Exchange):
        views = (view for pair in view_pairs(before, step.after(before)) for view in pair)
        return step.op(before) is not None or any(view.sign < 0 for view in views)
    return isinstance(step, steps.AllReduce | steps.ReduceScatter | steps.Scale)


def _all_gather(step: steps.AllGather, site: Site) -> Moves:
    axes = axes_of(step.shards)
    dim = site.before.dim_index(step.dim)
    parts = even_parts(site.before, step.dim, step.shards)
    if (phases := site.phases(axes)).are_several:
        return phased.all_gather(phases, site, dim, parts)
    group = site.group(axes)
    sent = site.whole(0)
    received = site.cut(site.shapes[1], dim, parts, axes, group)
    return packed(Collective("all_gather", group, sent.sizes, received.sizes), sent, received)


def _slice(step: steps.Slice, site: Site) -> Move:
    part = site.subarray(site.shapes[0], site.own_part(*step.cuts))
    # The result must be a new tensor; an input of another step may be a view.
    return part.copied if site.is_last else part.read


def _all_reduce(step: steps.AllReduce, site: Site) -> Moves:
    if (phases := site.phases(step.axes)).are_several and not site.lengths:
        return phased.all_reduce(phases, site, step.op)
    sent = site.whole(0)
    received = site.whole(1)
    group = site.group(step.axes)
    return packed(
        Collective("all_reduce", group, sent.sizes, received.sizes, step.op), sent, received
    )


def _reduce_scatter(step: steps.ReduceScatter, site: Site) -> Moves:
    axes = axes_of(step.shards)
    dim = site.before.dim_index(step.dim)
    parts = even_parts(site.before, step.dim, step.shards)
    if (phases := site.phases(axes)).are_several:
        return phased.reduce_scatter(phases, site, dim, parts, step.op)
    group = site.group(axes)
    sent = site.cut(site.shapes[0], dim, parts, axes, group)
    part = site.whole(1)
    return reduce_scattered(group, sent, part, step.op, site.tensor_device)


def _all_to_all(step: steps.AllToAll, site: Site) -> Move:
    before, (have, want) = site.before, site.shapes
    group = site.group(axes_of(step.src_shards))
    sides = (have, step.dst_dim, step.dst_shards), (want, step.src_dim, step.src_shards)
    sent, received = (
        site.cut(
            shape, before.dim_index(dim), even_parts(before, dim, shards), axes_of(shards), group
        )
        for shape, dim, shards in sides
    )
    return packed(
        Collective("all_to_all", group, sent.sizes, received.sizes, is_even=True), sent, received
    )


def _permute(step: steps.Permute, site: Site) -> Move:
    me = site.device
    sender = senders(site.before, site.after)
    group = site.group(moving_axes(site.before, site.after))
    # gloo's all-to-all synchronises all ranks: it takes 1.0 to 1.5 times as long (4 and 8 ranks). But what it
    # sends from rank to rank must be in the host's memory.
    on_host = site.tensor_device.type == "cpu"
    directly = on_host and group.serves(site.tensor_device, "gloo") and not group.graph_name

    def packing(end: int, peer: int) -> Packing:
        whole = site.whole(end)
        moves = peer != me
        counts = tuple(int(moves and device == peer) for device in group.devices)
        return replace(whole, messages=whole.messages * moves, counts=counts)

    sent = packing(0, sender.index(me))
    received = packing(1, sender[me])
    kind = "permute" if directly else "all_to_all"
    collective = Collective(kind, group, sent.sizes_by_rank, received.sizes_by_rank)
    if sender[me] != me:
        return packed(collective, sent, received)
    kept = site.subarray(site.shapes[0], {}).copied
    if sender == tuple(range(len(sender))):
        return kept
    return PackedCollective(
        collective,
        sent,
        received.arriving,
        lambda block, _: kept(block),
        lambda block, _: kept(block),
    )


def _exchange(step: steps.Exchange, site: Site) -> Move:
    """Messages in one collective: some backends and torch.compile have no point-to-point calls."""
    shardings = (site.before, site.after, site.device, step.node_devices)
    op = step.op(site.before)
    fills = tuple(site.fill(*fill) for fill in fill_boxes(site.after, site.device))
    # Near senders may differ from their receiver along any axis.
    axes = (
        moving_axes(site.before, site.after) if step.node_devices is None else site.after.mesh.axes
    )
    group = site.group(axes)
    rank = group.devices.index(site.device)
    shapes = site.shapes

    def by_rank(messages: Iterable[Message], end: int) -> list[tuple[int, Subarray]]:
        """The rank at the other end of every message, and its part of the block at this end."""
        parts = []
        for m in messages:
            peer, sign = (m.src, m.sign) if end else (m.dst, 1)
            part = replace(site.subarray(shapes[end], box_rows(m.box, end)), sign=sign)
            parts.append((group.devices.index(peer), part))
        return sorted(parts, key=lambda message: message[0])

    def packing(shape: tuple[int, ...], messages: Sequence[tuple[int, Subarray]]) -> Packing:
        theirs = [(peer, m) for peer, m in messages if peer != rank]
        counts = [sum(peer == r for peer, _ in theirs) for r in range(len(group.devices))]
        return Packing(shape, tuple(m for _, m in theirs), tuple(counts), op)

    outgoing = by_rank(messages_from(*shardings), 0)
    incoming = by_rank(messages_to(*shardings), 1)
    own = [m for peer, m in outgoing if peer == rank]
    # In the order of the ranks, so that replicas and copies add in one order; own rows first where none are.
    order = [*incoming]
    layout = site.after.layout
    if set(axes) <= set(layout.axes) - set(layout.tagged("copy")):
        order.sort(key=lambda message: message[0] != rank)
    whole = Packing(shapes[1], tuple(m for _, m in order), None, op, fills)
    if not steps.Exchange(layout).traffic(site.before).received:  # of any device of the mesh
        return lambda block: whole.place(block, [m.read(block) for m in own])
    sent = packing(shapes[0], outgoing)
    received = packing(shapes[1], incoming)

    def put_together(block: Tensor, messages: Sequence[Tensor]) -> Tensor:
        theirs = iter(messages)
        mine = (m.read(block) for m in own)
        return whole.place(block, [next(mine if peer == rank else theirs) for peer, _ in order])

    def unpack(block: Tensor, arrived: Tensor) -> Tensor:
        if not own and not fills:
            return received.unpack(arrived)
        return put_together(block, received.split(arrived))

    def place(block: Tensor, parts: Sequence[Tensor]) -> Tensor:
        return put_together(block, received.split_each(parts))

    collective = Collective("all_to_all", group, sent.sizes_by_rank, received.sizes_by_rank)
    return PackedCollective(collective, sent, received.arriving, unpack, place)


def _embed(step: steps.Embed, site: Site) -> Move:
    whole = Packing(
        site.shapes[1], (site.subarray(site.shapes[1], site.own_part((step.dim, step.shards))),)
    )
    return lambda block: whole.place(block, [block])


def _mask(step: steps.Mask, site: Site) -> Move:
    if site.before.mesh.index(site.device, step.axes):
        return lambda block: block.new_zeros(block.shape)
    return lambda block: block


def _transpose(step: steps.Transpose, site: Site) -> Move:
    order = step.order(site.before)

    def turned(block: Tensor) -> Tensor:
        # The result is the caller's to write to: no view of what was given, and none to autograd.
        own = block.clone(memory_format=torch.contiguous_format) if site.is_given else block
        out = own.permute(order)
        if site.lengths is not None:
            return out
        return own.new_empty(0).set_(
            out.untyped_storage(), out.storage_offset(), out.shape, out.stride()
        )

    return turned


def _scale(step: steps.Scale, site: Site) -> Move:
    numerator = step.factor.numerator
    denominator = step.factor.denominator

    def scaled(block: Tensor) -> Tensor:
        out = torch.mul(
            block, numerator, out=torch.empty_like(block, memory_format=torch.contiguous_format)
        )
        # Division, not multiplication by a rounded reciprocal: exact where the result is representable.
        return out if denominator == 1 else out.div_(denominator)

    return scaled


# mypy cannot tie a rule's step to its key.
RULES: dict[type[steps.Step], Callable[[Any, Site], Moves]] = {
    steps.AllGather: _all_gather,
    steps.AllReduce: _all_reduce,
    steps.AllToAll: _all_to_all,
    steps.Embed: _embed,
    steps.Exchange: _exchange,
    steps.Mask: _mask,
    steps.Permute: _permute,
    steps.ReduceScatter: _reduce_scatter,
    steps.Retag: lambda step, site: lambda block: block,
    steps.Scale: _scale,
    steps.Slice: _slice,
    steps.Transpose: _transpose,
}
