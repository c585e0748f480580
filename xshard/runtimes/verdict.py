"""Who is right: an outcome against the reference, and the reference against the definition.

Decides what agreement is: no difference at all. Knows no runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xshard import reference
from xshard.layout import Sharding
from xshard.notation.overlap import Fold
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps import Scale
from xshard.steps.base import Block, Blocks


@dataclass(frozen=True)
class Verdict:
    """Largest absolute difference of the outputs and of the gradients; None where nothing was compared."""

    forward: float
    backward: float | None

    @property
    def agrees(self) -> bool:
        return self.forward == 0 and not self.backward


def judge(outcome: Outcome, expected: Outcome) -> Verdict:
    """A runtime against the reference, block by block."""
    return Verdict(
        difference(outcome.outputs, expected.outputs), difference(outcome.gradients, expected.gradients)
    )


def audit(task: Task, outcome: Outcome) -> Verdict:
    """An outcome against the definition, without the steps of the plan.

    A redistribution leaves the global array as it is, and so does its adjoint but for the plan's
    scale. The gradient of a max depends on its winners, so nothing is compared there. A contraction is
    numpy's einsum of the global arrays, and so are its gradients but for the scales of means.
    """
    target, n = task.target, task.plan.mesh.n_devices
    arrays = [_named(x, end) for x, end in zip(task.operands, task.sources, strict=True)]
    [result] = reference.contract(arrays, target.layout.names)
    forward = _differs(outcome.outputs, target, result)
    if not task.is_linear:
        return Verdict(forward, None)
    cotangent, backward = _named(task.cotangents, target.with_layout(target.layout.dual)), 0.0
    for i, source in enumerate(task.sources):
        others = [cotangent, *(x for j, x in enumerate(arrays) if j != i)]
        [found] = reference.contract_gradient(others, source.layout.names, arrays[i][1])
        if (scale := source.scale / target.scale) != 1:
            [found] = Scale(scale).run([found], source)
        there = source.with_layout(source.layout.dual)
        backward = max(backward, _differs(outcome.gradients[i * n : (i + 1) * n], there, found))
    return Verdict(forward, backward)


def _named(blocks: Blocks, at: Sharding) -> tuple[tuple[str, ...], list[Block]]:
    """The dims of the array in some blocks, and the array."""
    return at.layout.names, [reference.gather(blocks, at.layout, at.mesh, at.shape)]


def _differs(after: Blocks, target: Sharding, value: Block) -> float:
    """Largest difference between the array in `after` and the one expected.

    Blocks are compared where the array determines them; of addends and contributions only the sum is.
    """
    dst = target.layout
    expected = reference.scatter(value, dst, target.mesh)
    if dst.tagged("sum", "mean", "max", "min") or any(isinstance(dim.overlap, Fold) for dim in dst.dims):
        sums = (reference.gather(blocks, dst, target.mesh, target.shape) for blocks in (after, expected))
        return difference([next(sums)], [next(sums)])
    return difference(after, expected)


def difference(found: Blocks, expected: Blocks) -> float:
    """Largest absolute difference over all devices; infinite where shapes or dtypes differ."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if a.size:
            gap = np.abs(a.astype(np.complex128) - b.astype(np.complex128)).max()
            worst = max(worst, float("inf") if np.isnan(gap) else float(gap))
    return worst
