"""`check_replicated=True`: checks that replicated blocks really are equal, forward and backward.

It takes one collective of the block's size per axis, and every rank of the mesh raises or none. A layout says
of which blocks; `xshard.replicas.ReplicaCheck` holds that, and judges the differences that are measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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


def redistribute_and_check(
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
    of_block, of_cotangent = checks_of(executable.plan, processes.mesh, text, name)
    input_check = comparison_of(of_block, processes)
    cotangent_check = comparison_of(of_cotangent, processes)
    return with_comparisons(partial(apply, executable), x, input_check, cotangent_check)


def with_comparisons(
    move: Callable[[Tensor], Tensor],
    block: Tensor,
    input_check: Check | None,
    cotangent_check: Check | None,
) -> Tensor:
    """Run a move; compare replicas of its block now, and of its result's gradient later.

    Args:
        move: The move, differentiable.
        block: This process's block.
        input_check: Compares the block; None if there is nothing to compare.
        cotangent_check: Compares the gradient, in the backward pass; likewise.
    """
    if input_check is not None:
        block = Redistribute.apply(_ComparedCopy(input_check, None), block)
    result = move(block)
    if cotangent_check is not None:
        result = Redistribute.apply(_ComparedCopy(None, cotangent_check), result)
    return result


def comparisons_between(
    plan: Plan, ranks: Sequence[int], text: str
) -> tuple[Comparison | None, Comparison | None]:
    """Return the comparisons for a plan between two meshes: of blocks, and of the results' cotangents.

    Args:
        plan: The plan.
        ranks: Those of both meshes: all of them call both comparisons, and learn what is found.
        text: The user's expression, for errors.
    """
    callers = mesh_of_ranks(Mesh(callers=len(ranks)), ranks)

    def comparison(check: ReplicaCheck | None, ranks: tuple[int, ...]) -> Comparison | None:
        if check is None or not check.axes:
            return None
        processes = mesh_of_ranks(check.mesh, ranks) if dist.get_rank() in ranks else None
        return Comparison(check, ranks, processes, callers)

    of_block, of_cotangent = checks_of(plan, None, text)
    input_check = comparison(of_block, plan.src_devices)
    return input_check, comparison(of_cotangent, tuple(plan.dst_devices))


@dataclass(frozen=True, eq=False)
class _ComparedCopy:
    """A linear map that copies a block, and compares it and its cotangent with their replicas.

    Attributes:
        input_check: Compares the block; None if there is nothing to compare.
        cotangent_check: Compares the cotangent, likewise.
    """

    input_check: Check | None
    cotangent_check: Check | None
    is_linear = True
    sends_gradient = True

    def __call__(self, block: Tensor) -> Tensor:
        if self.input_check is not None:
            self.input_check(block)
        if block.dtype in FOUR_BITS:  # which torch cannot clone
            return block.view(torch.uint8).clone().view(block.dtype)
        return block.clone()

    @property
    def backward(self) -> _ComparedCopy:
        return _ComparedCopy(self.cotangent_check, self.input_check)

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
        compare_all([ComparedBlock(self, block)])


class ComparedBlock(NamedTuple):
    """A block of this process, and how it is compared with its replicas."""

    comparison: Comparison
    block: Tensor


def compare_all(compared: Sequence[ComparedBlock], bucket_bytes: int | None = None) -> None:
    """Check that blocks are equal on the processes that should share them, together.

    Along each axis with replicas, the largest and the smallest value of every element over the
    processes must be equal. Raises the ReplicaError of the first block that differs, on all
    callers.

    Args:
        compared: The blocks with their comparisons; the same processes make all comparisons.
        bucket_bytes: How many bytes of blocks are compared together; None for all.
    """
    measured = _measured_differences(compared, bucket_bytes)
    # Each rank has filled its own row, and has zeros in all others: the maximum has all rows. So all
    # ranks judge the same differences, and all raise or none.
    callers = compared[0].comparison.callers
    of_all_ranks = _largest(measured, callers, callers.mesh.axes).cpu().numpy()
    for (comparison, _), differences in zip(compared, of_all_ranks, strict=True):
        check = comparison.check
        error = check.fault(differences[:, : len(check.axes)], comparison.ranks)
        if error is not None:
            raise error


def _measured_differences(compared: Sequence[ComparedBlock], bucket_bytes: int | None) -> Tensor:
    """Measure how much this process's blocks differ from their replicas: `[blocks, ranks, axes, 2]`.

    The last dim is the largest difference along an axis, and the largest value. Only the row of
    this process among the ranks is filled; all others are 0.
    """
    first = compared[0]
    max_axes = max(len(comparison.check.axes) for comparison, _ in compared)
    shape = (len(compared), len(first.comparison.ranks), max_axes, 2)
    measured = torch.zeros(shape, dtype=torch.float64, device=first.block.device)
    for block_indices in _groups_compared_together(compared, bucket_bytes):
        comparison = compared[block_indices[0]].comparison  # all of the group have its axes
        processes = comparison.processes
        if processes is None:  # a process without a block only learns what the others measure
            continue
        values = [_comparable(compared[i].block.detach()) for i in block_indices]
        for axis_index, axis in enumerate(comparison.check.axes):
            differences = _differences(values, processes, axis)
            measured[block_indices, processes.device, axis_index] = differences.to(measured)
    return measured


def _groups_compared_together(
    compared: Sequence[ComparedBlock], bucket_bytes: int | None
) -> list[list[int]]:
    """Group the indices of blocks that share a collective: of one dtype, and along the same axes."""
    keys = [
        (comparison.check.axes, comparison.processes, block.dtype, block.device)
        for comparison, block in compared
    ]
    block_bytes = [block.nbytes for _, block in compared]
    return trees.group_by_bytes(block_bytes, bucket_bytes, keys)


def _differences(values: Sequence[Tensor], processes: ProcessMesh, axis: str) -> Tensor:
    """Return by how much blocks differ between the processes along an axis: `[values, 2]`.

    The columns are the largest difference of an element, and the largest absolute value. [1, 3] on
    one process and [1, 5] on another -> (2, 5).
    """
    flat = torch.cat([x.reshape(-1) for x in values])
    smallest, largest = _smallest_and_largest(flat, processes, axis)
    # inf - inf would be NaN, though they are equal. Differences of integers may wrap around, but
    # not to 0.
    differences = (largest - smallest).masked_fill(largest == smallest, 0)
    magnitudes = torch.maximum(largest.double().abs(), smallest.double().abs())
    magnitudes = magnitudes.where(magnitudes.isfinite(), 0)
    columns = torch.stack([differences.double().abs(), magnitudes])  # [2, elements of all values]
    by_value = columns.split([x.numel() for x in values], 1)
    return torch.stack([x.amax(1) if x.numel() else x.new_zeros(2) for x in by_value])


def _smallest_and_largest(flat: Tensor, processes: ProcessMesh, axis: str) -> tuple[Tensor, Tensor]:
    """Return the element-wise minimum and maximum over the processes along an axis.

    One collective finds both, as min(x) = -max(-x). For integers ~x takes the place of -x, because
    the least integer has no negative: -(-128) overflows int8, ~(-128) is 127.
    """
    reverse = torch.neg if flat.is_floating_point() else torch.bitwise_not
    largest, reversed_smallest = _largest(torch.stack([flat, reverse(flat)]), processes, (axis,))
    return reverse(reversed_smallest), largest


def _largest(values: Tensor, processes: ProcessMesh, axes: Sequence[str]) -> Tensor:
    """Return the element-wise maximum over the processes along some axes."""
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
    # A maximum may drop NaN: it becomes infinity, which differs from all else.
    return torch.where(wide.isnan(), torch.full_like(wide, torch.inf), wide)
