"""Plans -> executables of this process, once per plan and mesh: one short rule per step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_bridge.lower import phased
from torch_bridge.lower.collectives import CARRIERS, Collective
from torch_bridge.lower.exchange import exchange
from torch_bridge.lower.executable import Executable, Move, Moves, place_of
from torch_bridge.lower.packed_collective import PackedCollective, reduce_scattered
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.step_context import Lengths, StepContext
from torch_bridge.lower.subarray import AFTER, BEFORE, without_base
from torch_bridge.mesh.failures import with_place_in_errors
from torch_bridge.mesh.process_mesh import Group, ProcessMesh
from torch_bridge.versions.modes import is_faking
from xshard import Plan, Sharding, steps
from xshard.caches import layout_cache
from xshard.errors import DtypeError, PlanError
from xshard.steps.base import axes_of
from xshard.steps.exchange.sources import view_pairs
from xshard.steps.exchange.traffic import moving_axes
from xshard.steps.permute import sender_of_each_device

# Steps that only look at the block, and make no new tensor.
_VIEWS = (steps.Slice, steps.Retag, steps.Mask, steps.Transpose)
# Steps that return the tensor that they get.
_SAME_TENSOR = (steps.Retag, steps.Mask)


def lower(
    plan: Plan, processes: ProcessMesh, device: torch.device, lengths: Lengths | None = None
) -> Executable:
    """Return the executable of a plan; all processes of the mesh call it.

    Args:
        plan: The plan.
        processes: The processes of its mesh.
        device: The device of blocks.
        lengths: Symbols of a compiler for the lengths of dims that no step cuts; None if none records.

    Raises:
        DtypeError: A reduction of a dtype without arithmetic.
    """
    if lengths is None and not is_faking():
        return _lower_once(plan, processes, device)
    # Tensors made here are part of a trace: nothing of it is kept.
    return _lower_steps(plan, processes, device, {} if lengths is None else lengths)


def _lower_steps(
    plan: Plan, processes: ProcessMesh, device: torch.device, lengths: Lengths | None = None
) -> Executable:
    """Lower all steps of a plan, in order, as all ranks do."""
    moves: list[Move] = []
    step_of_move: list[int] = []
    for step_index in range(len(plan.steps)):
        context = _context(plan, step_index, processes, device, lengths)
        step_moves = _moves_of_step(plan, step_index, context)
        moves.extend(step_moves)
        step_of_move.extend([step_index] * len(step_moves))
    # For the plans of derivatives: on the same processes, under the same compiler.
    lower_like = functools.partial(lower, processes=processes, device=device, lengths=lengths)
    return Executable(
        plan=plan,
        processes=processes,
        moves=tuple(moves),
        steps=tuple(step_of_move),
        lower=lower_like,
    )


_lower_once = layout_cache(maxsize=4096)(_lower_steps)


def _moves_of_step(plan: Plan, step_index: int, context: StepContext) -> list[Move]:
    """Turn step `step_index` of a plan into functions that run it on this process's block.

    Most steps give one function, from the block before the step to the one after it. A collective
    over slow and fast links gives several, one per kind of link, to be called in order. Raises
    DtypeError for arithmetic that the dtype lacks, PlanError for a step without a rule.
    """
    step = plan.steps[step_index]
    if getattr(torch, plan.dtype) in CARRIERS and _computes(step, context.before):
        raise no_arithmetic(f"'{step}'", plan.dtype)
    rule = RULES.get(type(step))
    if rule is None:
        hint = "add it to lower.rules.RULES"
        raise PlanError(f"torch_bridge lacks a rule for '{step}'", hint=hint)
    # A rule may make process groups, which can fail.
    moves = with_place_in_errors(context.place, rule, step, context)
    return moves if isinstance(moves, list) else [moves]


def _context(
    plan: Plan,
    step_index: int,
    processes: ProcessMesh,
    tensor_device: torch.device,
    lengths: Lengths | None,
) -> StepContext:
    """Collect all that the rule of step `step_index` needs to know; `lengths` as in `lower`."""
    _, before, after = plan.stages[step_index]
    earlier = plan.steps[:step_index]
    later = plan.steps[step_index + 1 :]
    # The caller's own tensor reaches this step if all earlier ones return their input itself.
    may_be_callers_tensor = all(isinstance(step, _SAME_TENSOR) for step in earlier)
    return StepContext(
        before=before,
        after=after,
        processes=processes.on(plan.steps_mesh),
        tensor_device=tensor_device,
        dtype=plan.dtype,
        lengths=lengths,
        is_last=all(isinstance(step, _VIEWS) for step in later),
        may_be_callers_tensor=may_be_callers_tensor,
        fabric=plan.profile.fabric(before.mesh),
        # A function that returns "step 1 of 2, ...": the text is needed for errors only.
        place=functools.partial(place_of, plan, step_index),
    )


def no_arithmetic(operation: str, dtype: str) -> DtypeError:
    """Return the error of a reduction of a dtype in which torch cannot compute."""
    return DtypeError(
        f"torch has no {operation} of {dtype}", hint="it only moves: cast before the reduction"
    )


def _computes(step: steps.Step, before: Sharding) -> bool:
    """Return whether a step adds, scales or negates values."""
    if not isinstance(step, steps.Exchange):
        return isinstance(step, steps.AllReduce | steps.ReduceScatter | steps.Scale)
    if step.op(before) is not None:
        return True
    views = itertools.chain.from_iterable(view_pairs(before, step.after(before)))
    return any(view.sign < 0 for view in views)


def _all_gather(step: steps.AllGather, context: StepContext) -> Moves:
    """Send the whole block; put what arrives together along the dim."""
    axes = axes_of(step.shards)
    phases = context.phases(axes)
    if phases.has_several_speeds:
        return phased.all_gather(phases, context, step.dim, step.shards)
    group = context.group(axes)
    sent = context.whole_block(BEFORE)
    received = context.parts_of_devices(AFTER, step.dim, step.shards, group.devices)
    return PackedCollective(
        Collective("all_gather", group, sent.sizes, received.sizes), sent, received
    )


def _slice(step: steps.Slice, context: StepContext) -> Move:
    subarray = context.subarray(context.shapes.before, context.rows_of_own_part(*step.cuts))
    # The result must be a new tensor; an input of another step may be a view.
    return subarray.copy_of if context.is_last else subarray.read


def _all_reduce(step: steps.AllReduce, context: StepContext) -> Moves:
    """Send the whole block; receive the sum, max or min of all blocks."""
    # Pieces of a block with symbols for lengths have no sizes yet.
    phases = context.phases(step.axes)
    if phases.has_several_speeds and not context.lengths:
        return phased.all_reduce(phases, context, step.op)
    sent = context.whole_block(BEFORE)
    received = context.whole_block(AFTER)
    group = context.group(step.axes)
    collective = Collective("all_reduce", group, sent.sizes, received.sizes, step.op)
    return PackedCollective(collective, sent, received)


def _reduce_scatter(step: steps.ReduceScatter, context: StepContext) -> Moves:
    """Send each rank its part of the dim; receive the reduction of this process's part."""
    axes = axes_of(step.shards)
    phases = context.phases(axes)
    if phases.has_several_speeds:
        return phased.reduce_scatter(phases, context, step.dim, step.shards, step.op)
    group = context.group(axes)
    sent = context.parts_of_devices(BEFORE, step.dim, step.shards, group.devices)
    received = context.whole_block(AFTER)
    return reduce_scattered(group, sent, received, step.op, context.tensor_device)


def _all_to_all(step: steps.AllToAll, context: StepContext) -> Move:
    """Unshard one dim and shard another, by one all-to-all: "n/a d" -> "n d/a".

    On a=4: a block [n/4, d] is cut along d into 4 messages [n/4, d/4], one for each rank. The 4
    that arrive are put together along n: [n, d/4].
    """
    # Both sets of axes reach the same processes: the shards move from one dim to another.
    group = context.group(axes_of(step.src_shards))
    # Each rank is sent its part of the dim that will be sharded, and sends its part of the other.
    sent = context.parts_of_devices(BEFORE, step.dst_dim, step.dst_shards, group.devices)
    received = context.parts_of_devices(AFTER, step.src_dim, step.src_shards, group.devices)
    collective = Collective("all_to_all", group, sent.sizes, received.sizes, is_even=True)
    return PackedCollective(collective, sent, received)


def _permute(step: steps.Permute, context: StepContext) -> Move:
    """Let blocks change places: each process sends its whole block to one, and receives one.

    "n/(a,b) -> n/(b,a)" on a=2, b=2: devices 1 and 2 exchange their blocks, devices 0 and 3 keep
    theirs.
    """
    senders = sender_of_each_device(context.before, context.after)  # [devices]
    if senders == tuple(range(len(senders))):  # no device moves: no collective
        return context.subarray(context.shapes.before, {}).copy_of
    group = context.group(moving_axes(context.before, context.after))
    # gloo's all-to-all synchronises all ranks: it takes 1.0 to 1.5 times as long (4 and 8 ranks).
    # But what it sends from rank to rank must be in the host's memory.
    on_host = context.tensor_device.type == "cpu"
    is_direct = on_host and group.serves(context.tensor_device, "gloo") and not group.graph_name
    collective_name = "permute" if is_direct else "all_to_all"

    # A process that keeps its block sends it to itself: others exchange theirs, so that it calls the
    # collective too.
    receiver = senders.index(context.device)
    sent = _whole_block_with(receiver, BEFORE, context, group)
    received = _whole_block_with(senders[context.device], AFTER, context, group)
    collective = Collective(collective_name, group, sent.sizes_by_rank, received.sizes_by_rank)
    return PackedCollective(collective, sent, received)


def _whole_block_with(peer: int, end: int, context: StepContext, group: Group) -> Packing:
    """Return the block BEFORE or AFTER the step as one message to, or from, a device of the group."""
    counts = tuple(1 if device == peer else 0 for device in group.devices)
    return replace(context.whole_block(end), counts=counts)


def _embed(step: steps.Embed, context: StepContext) -> Move:
    """Put the block into zeros of the whole dim: an addend of a sum."""
    rows = context.rows_of_own_part((step.dim, step.shards))
    subarray = context.subarray(context.shapes.after, rows)
    larger_block = Packing(context.shapes.after, (subarray,))

    def embed(block: Tensor) -> Tensor:
        """Put the block among zeros."""
        return larger_block.place(block, [block])

    return embed


def _mask(step: steps.Mask, context: StepContext) -> Move:
    # The sum has the value once: on the first device along the axes.
    is_first = context.before.mesh.index(context.device, step.axes) == 0
    return _unchanged if is_first else _zeros


def _retag(step: steps.Retag, context: StepContext) -> Move:
    return _unchanged


def _unchanged(block: Tensor) -> Tensor:
    return block


def _zeros(block: Tensor) -> Tensor:
    return block.new_zeros(block.shape)


def _transpose(step: steps.Transpose, context: StepContext) -> Move:
    """Permute the dims of the block: [a, b, c] -> [c, a, b]. Nothing is sent.

    The caller may write to the result. So it shares no memory with the caller's block (which is the
    input if no earlier step has made a new tensor), and is no view for autograd.
    """
    order = step.order(context.before)

    def transpose(block: Tensor) -> Tensor:
        if context.may_be_callers_tensor:
            block = block.clone(memory_format=torch.contiguous_format)
        view = block.permute(order)
        if context.lengths is not None:  # compilers cannot record `set_`
            return view
        return without_base(view)

    return transpose


def _scale(step: steps.Scale, context: StepContext) -> Move:
    """Multiply by a fraction, as a mean does with a sum."""
    numerator = step.factor.numerator
    denominator = step.factor.denominator

    def scale(block: Tensor) -> Tensor:
        out = torch.empty_like(block, memory_format=torch.contiguous_format)
        torch.mul(block, numerator, out=out)
        # Division, not multiplication by a rounded reciprocal: exact where the result is representable.
        return out if denominator == 1 else out.div_(denominator)

    return scale


# mypy cannot tie a rule's step to its key.
RULES: dict[type[steps.Step], Callable[[Any, StepContext], Moves]] = {
    steps.AllGather: _all_gather,
    steps.AllReduce: _all_reduce,
    steps.AllToAll: _all_to_all,
    steps.Embed: _embed,
    steps.Exchange: exchange,
    steps.Mask: _mask,
    steps.Permute: _permute,
    steps.ReduceScatter: _reduce_scatter,
    steps.Retag: _retag,
    steps.Scale: _scale,
    steps.Slice: _slice,
    steps.Transpose: _transpose,
}
