"""`check_replicated=True`: checks that replicated blocks really are equal, forward and backward. It takes one
collective of the block's size per axis, and every rank of the mesh raises or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.autodiff.function import apply
from torch_bridge.lower.collectives import FOUR_BITS, Collective
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh.process_mesh import ProcessMesh, mesh_of_ranks, process_mesh
from xshard import Mesh, Plan, replicas, trees
from xshard.replicas import ReplicaCheck, checks_of


def checked(
    x: Tensor, executable: Executable, processes: ProcessMesh, text: str, name: str
) -> Tensor:
    """Run an executable on a block, comparing the replicas of `x`, and of the result's cotangent. Raises
    ReplicaError, with the user's expression `text`, on all ranks, here or backward.
    """
    checks = checks_of(executable.plan, processes.mesh, text, name)
    entering, returning = (check and comparison_of(check, processes) for check in checks)
    x = Expect.apply(x, entering, None) if entering else x
    y = apply(executable, x)
    return Expect.apply(y, None, returning) if returning else y


def comparisons_between(plan: Plan, text: str) -> tuple[Comparison | None, Comparison | None]:
    """Comparisons before and after a plan between two meshes, for all processes of the world."""
    world = process_mesh(Mesh(world=dist.get_world_size()))

    def comparison(check: ReplicaCheck | None, ranks: tuple[int, ...]) -> Comparison | None:
        if check is None or not check.axes:
            return None
        own = mesh_of_ranks(check.mesh, ranks) if dist.get_rank() in ranks else None
        return Comparison(check, ranks, own, world)

    entering, returning = checks_of(plan, None, text)
    return comparison(entering, plan.src_devices), comparison(returning, tuple(plan.dst_devices))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Call it on a block: raises ReplicaError on all `callers` if replicas differ. `ranks` have blocks;
    `processes` is their mesh, None on a process without a block.
    """

    check: ReplicaCheck
    ranks: tuple[int, ...]
    processes: ProcessMesh | None
    callers: ProcessMesh

    def __post_init__(self) -> None:
        self.callers.group(self.callers.mesh.axes)  # made now, while all processes are here
        if self.processes is not None:
            for axis in self.check.axes:
                self.processes.group((axis,))

    def __call__(self, block: Tensor) -> None:
        compare_all([(self, block)])


def compare_all(
    pairs: Sequence[tuple[Comparison, Tensor]], bucket_bytes: int | None = None
) -> None:
    """Compare blocks, all of the same callers, with few collectives; raises the first ReplicaError.
    bucket_bytes: how much of the blocks is compared together; None for all.
    """
    keys = [(one.check.axes, one.processes, x.dtype, x.device) for one, x in pairs]
    shape = len(pairs), len(pairs[0][0].ranks), max(len(axes) for axes, *_ in keys), 2
    differences = torch.zeros(shape, dtype=torch.float64, device=pairs[0][1].device)
    for group in trees.groups([x.nbytes for _, x in pairs], bucket_bytes, keys):
        axes, processes, *_ = keys[group[0]]
        if processes is None:
            continue
        values = [_comparable(pairs[k][1].detach()) for k in group]
        for i, axis in enumerate(axes):
            differences[group, processes.device, i] = _differing(values, processes, axis).to(
                differences
            )
    callers = pairs[0][0].callers
    everywhere = _largest(differences, callers, callers.mesh.axes).cpu().numpy()
    for (one, _), differs in zip(pairs, everywhere, strict=True):
        if fault := one.check.fault(differs[:, : len(one.check.axes)], one.ranks):
            raise fault


def _differing(values: Sequence[Tensor], processes: ProcessMesh, axis: str) -> Tensor:
    """`[values, 2]`: by how much this process's blocks differ from others', and how large they are."""
    flat = torch.cat([x.reshape(-1) for x in values])
    flipped = flat.neg() if flat.is_floating_point() else flat.bitwise_not()
    both = _largest(torch.stack([flat, flipped]), processes, (axis,))
    most = both[0]
    least = both[1].neg() if both.is_floating_point() else both[1].bitwise_not()
    # Equal infinities do not differ. Differences of integers may wrap around, but not to 0.
    apart = torch.where(most == least, torch.zeros_like(most), most - least).double().abs()
    size = torch.maximum(most.double().abs(), least.double().abs())
    size = torch.where(size.isfinite(), size, torch.zeros_like(size))
    parts = torch.stack([apart, size]).split([x.numel() for x in values], 1)
    return torch.stack([x.amax(1) if x.numel() else x.new_zeros(2) for x in parts])


def _largest(values: Tensor, processes: ProcessMesh, axes: Sequence[str]) -> Tensor:
    """The maximum along some axes, element by element."""
    n = (values.numel(),)
    return Collective("all_reduce", processes.group(axes), n, n, "max").run(
        values.reshape(-1), values.shape
    )


def comparison_of(check: ReplicaCheck, processes: ProcessMesh) -> Callable[[Tensor], object] | None:
    """The comparison to call on a block; None if nothing of it is replicated."""
    if replicas.WATCH is not None:
        return partial(replicas.WATCH(check), dist.get_rank())
    return Comparison(check, processes.ranks, processes, processes) if check.axes else None


def _comparable(block: Tensor) -> Tensor:
    """The block in a dtype that has a maximum; NaN, which no maximum finds, becomes infinity."""
    if block.dtype in FOUR_BITS:
        block = block.view(torch.uint8)
    if block.is_complex():
        block = torch.view_as_real(block.resolve_conj())
    if not block.is_floating_point():
        return block.to(torch.int64)
    wide = block if block.dtype == torch.float64 else block.float()
    return torch.where(wide.isnan(), torch.full_like(wide, torch.inf), wide)


class Expect(torch.autograd.Function):
    """`Expect.apply(block, entering, returning)`: a copy; they compare the block, and its cotangent."""

    @staticmethod
    def forward(block: Tensor, entering: Comparison | None, returning: Comparison | None) -> Tensor:
        if entering is not None:
            entering(block)
        if block.dtype in FOUR_BITS:
            return block.view(torch.uint8).clone().view(block.dtype)
        return block.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any, Any], output: Tensor) -> None:
        _, ctx.entering, ctx.returning = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return Expect.apply(cotangent, ctx.returning, ctx.entering), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Expect.apply(tangent, ctx.entering, ctx.returning)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], block: Tensor, entering: Any, returning: Any
    ) -> tuple[Tensor, int]:
        return Expect.apply(block.movedim(in_dims[0], 0), entering, returning), 0
