"""`check_replicated=True`: checks that replicated blocks really are equal, forward and backward.

It takes one collective of the block's size per axis, and every rank of the mesh raises or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.autodiff.function import Redistribute, apply
from torch_bridge.lower.collectives import FOUR_BITS, Collective
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of_ranks
from xshard import Mesh, Plan, replicas, trees
from xshard.replicas import ReplicaCheck, checks_of

Check = Callable[[Tensor], object]  # raises ReplicaError for a block that differs from its replicas


def checked(
    x: Tensor, executable: Executable, processes: ProcessMesh, text: str, name: str
) -> Tensor:
    """Run a redistribution, and check that blocks which should be equal on several processes are.

    Under "b i" on dp=2, both processes have the same block x: they are compared before the move. In
    the backward pass, the gradients of the result (cotangents) are compared where they should be
    equal. Raises ReplicaError on all ranks, here or in the backward pass.

    Args:
        x: This process's block.
        executable: The redistribution, ready to run.
        processes: The mesh.
        text: The user's expression, for errors.
        name: The name of the tensor, for errors.
    """
    before, after = checks_of(executable.plan, processes.mesh, text, name)
    entering = comparison_of(before, processes)
    returning = comparison_of(after, processes)
    return with_comparisons(partial(apply, executable), x, entering, returning)


def with_comparisons(
    move: Callable[[Tensor], Tensor], block: Tensor, entering: Check | None, returning: Check | None
) -> Tensor:
    """Run a move; compare replicas of its block now, and of its result's gradient later.

    Args:
        move: The move, differentiable.
        block: This process's block.
        entering: Compares the block; None if there is nothing to compare.
        returning: Compares the gradient, in the backward pass; likewise.
    """
    if entering is not None:
        block = Redistribute.apply(_ComparedCopy(entering, None), block)
    result = move(block)
    if returning is not None:
        result = Redistribute.apply(_ComparedCopy(None, returning), result)
    return result


def comparisons_between(
    plan: Plan, ranks: Sequence[int], text: str
) -> tuple[Comparison | None, Comparison | None]:
    """Return comparisons before and after a plan between two meshes, for the ranks of both."""
    callers = mesh_of_ranks(Mesh(callers=len(ranks)), ranks)

    def comparison(check: ReplicaCheck | None, ranks: tuple[int, ...]) -> Comparison | None:
        if check is None or not check.axes:
            return None
        own_mesh = mesh_of_ranks(check.mesh, ranks) if dist.get_rank() in ranks else None
        return Comparison(check, ranks, own_mesh, callers)

    before, after = checks_of(plan, None, text)
    entering = comparison(before, plan.src_devices)
    return entering, comparison(after, tuple(plan.dst_devices))


@dataclass(frozen=True, eq=False)
class _ComparedCopy:
    """A linear map that copies a block, and compares it and its cotangent with their replicas.

    Attributes:
        entering: Compares the block; None if there is nothing to compare.
        returning: Compares the cotangent, likewise.
    """

    entering: Check | None
    returning: Check | None
    is_linear = True
    sends_gradient = True

    def __call__(self, block: Tensor) -> Tensor:
        if self.entering is not None:
            self.entering(block)
        if block.dtype in FOUR_BITS:  # which torch cannot clone
            return block.view(torch.uint8).clone().view(block.dtype)
        return block.clone()

    @property
    def backward(self) -> _ComparedCopy:
        return _ComparedCopy(self.returning, self.entering)

    @property
    def tangent(self) -> _ComparedCopy:
        return self

    def batched(self, n: int) -> _ComparedCopy:
        return self


@dataclass(frozen=True, eq=False)
class Comparison:
    """Call it on a block: raises ReplicaError on all `callers` if replicas differ.

    Attributes:
        check: What is equal by contract, and the error to raise.
        ranks: The processes with blocks.
        processes: The mesh of these; None on a process without a block.
        callers: All processes that call it.
    """

    check: ReplicaCheck
    ranks: tuple[int, ...]
    processes: ProcessMesh | None
    callers: ProcessMesh

    def __post_init__(self) -> None:
        # Groups are made now, while all processes are here: a backward pass may have others elsewhere.
        self.callers.group(self.callers.mesh.axes)
        if self.processes is not None:
            for axis in self.check.axes:
                self.processes.group((axis,))

    def __call__(self, block: Tensor) -> None:
        compare_all([(self, block)])


def compare_all(
    pairs: Sequence[tuple[Comparison, Tensor]], bucket_bytes: int | None = None
) -> None:
    """Check that blocks are equal on the processes that should share them, together.

    Along each axis with replicas, the largest and the smallest value of every element over the
    processes must be equal. Raises the ReplicaError of the first block that differs, on all
    callers.

    Args:
        pairs: Each block with its comparison; all comparisons are made by the same processes.
        bucket_bytes: How many bytes of blocks are compared together; None for all.
    """
    findings = _findings(pairs, bucket_bytes)
    # Everybody gets the findings of all, so that all raise or none: where this process has zeros,
    # others have theirs.
    callers = pairs[0][0].callers
    of_all_ranks = _largest(findings, callers, callers.mesh.axes).cpu().numpy()
    for (comparison, _), of_block in zip(pairs, of_all_ranks, strict=True):
        check = comparison.check
        fault = check.fault(of_block[:, : len(check.axes)], comparison.ranks)
        if fault is not None:
            raise fault


def _findings(pairs: Sequence[tuple[Comparison, Tensor]], bucket_bytes: int | None) -> Tensor:
    """Return how much this process's blocks differ from their replicas: `[blocks, ranks, axes, 2]`.

    The last dim is the largest difference along an axis, and the largest value. Only the row of
    this process among the ranks is filled; all others are 0.
    """
    comparisons = [comparison for comparison, _ in pairs]
    blocks = [block for _, block in pairs]
    most_axes = max(len(comparison.check.axes) for comparison in comparisons)
    shape = (len(pairs), len(comparisons[0].ranks), most_axes, 2)
    findings = torch.zeros(shape, dtype=torch.float64, device=blocks[0].device)
    # Blocks of one dtype, compared along the same axes, share a collective per axis.
    keys = [
        (comparison.check.axes, comparison.processes, block.dtype, block.device)
        for comparison, block in pairs
    ]
    for members in trees.group_by_bytes([x.nbytes for x in blocks], bucket_bytes, keys):
        first = comparisons[members[0]]
        processes = first.processes
        if processes is None:  # a process without a block only hears of the others' findings
            continue
        values = [_comparable(blocks[i].detach()) for i in members]
        for axis_number, axis in enumerate(first.check.axes):
            differences = _differences(values, processes, axis)
            findings[members, processes.device, axis_number] = differences.to(findings)
    return findings


def _differences(values: Sequence[Tensor], processes: ProcessMesh, axis: str) -> Tensor:
    """Return by how much blocks differ between the processes along an axis: `[values, 2]`.

    The columns are the largest difference of an element, and the largest absolute value. [1, 3] on
    one process and [1, 5] on another -> (2, 5).
    """
    flat = torch.cat([x.reshape(-1) for x in values])
    # One collective finds both maximum and minimum, as min(x) = -max(-x). For integers ~x takes the
    # place of -x, because the least integer has no negative: -(-128) overflows int8, ~(-128) is
    # 127.
    reverse = torch.neg if flat.is_floating_point() else torch.bitwise_not
    largest, reversed_smallest = _largest(torch.stack([flat, reverse(flat)]), processes, (axis,))
    smallest = reverse(reversed_smallest)

    # inf - inf would be NaN, though they are equal. Differences of integers may wrap around, but
    # not to 0.
    difference = (largest - smallest).masked_fill(largest == smallest, 0)
    size = torch.maximum(largest.double().abs(), smallest.double().abs())
    size = size.where(size.isfinite(), 0)
    columns = torch.stack([difference.double().abs(), size])  # [2, elements of all values]
    by_value = columns.split([x.numel() for x in values], 1)
    return torch.stack([x.amax(1) if x.numel() else x.new_zeros(2) for x in by_value])


def _largest(values: Tensor, processes: ProcessMesh, axes: Sequence[str]) -> Tensor:
    """Return the maximum along some axes, element by element."""
    sizes = (values.numel(),)
    reduce = Collective("all_reduce", processes.group(axes), sizes, sizes, "max")
    return reduce.run(values.reshape(-1), values.shape)


def comparison_of(check: ReplicaCheck | None, processes: ProcessMesh) -> Check | None:
    """Return the comparison to call on a block; None if nothing of it is replicated."""
    if check is None:  # no layout says which gradients of a max are equal
        return None
    if replicas.WATCH is not None:
        return partial(replicas.WATCH(check), dist.get_rank())
    if not check.axes:
        return None
    return Comparison(check, processes.ranks, processes.on(check.mesh), processes)


def _comparable(block: Tensor) -> Tensor:
    """Return the block in a dtype that has a maximum."""
    if block.dtype in FOUR_BITS:
        block = block.view(torch.uint8)
    if block.is_complex():
        block = torch.view_as_real(block.resolve_conj())
    if not block.is_floating_point():
        return block.to(torch.int64)
    wide = block if block.dtype == torch.float64 else block.float()
    # No maximum finds NaN: it becomes infinity, which differs from all else.
    return torch.where(wide.isnan(), torch.full_like(wide, torch.inf), wide)
