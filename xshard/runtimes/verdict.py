"""Who is right: an outcome against the reference, and the reference against the definition.

Decides what agreement is: no difference at all. Knows no runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from xshard import reference
from xshard.layout import Sharding
from xshard.notation.overlap import Fold
from xshard.runtimes.tasks import Outcome, Task
from xshard.steps import Scale
from xshard.steps.base import Blocks


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
    scale. The gradient of a max depends on its winners, so nothing is compared there.
    """
    plan = task.plan
    source, target = plan.source, plan.target
    forward = _moved(task.inputs, source, outcome.outputs, target, Fraction(1))
    if not plan.src.is_linear:
        return Verdict(forward, None)
    dual, there = (end.with_layout(end.layout.dual) for end in (target, source))
    backward = _moved(task.cotangents, dual, outcome.gradients, there, plan.scale)
    return Verdict(forward, backward)


def _moved(before: Blocks, source: Sharding, after: Blocks, target: Sharding, scale: Fraction) -> float:
    """Largest difference between the array in `after` and `scale` times the array in `before`.

    Blocks are compared where the array determines them; of addends and contributions only the sum is.
    """
    value, dst = reference.gather(before, source.layout, source.mesh, source.shape), target.layout
    if scale != 1:
        value = Scale(scale).run([value], source)[0]
    value = value.transpose([source.dim_index(name) for name in dst.names])
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
