"""Verification: the same plans on numpy, torch and JAX, forward and backward, side by side.

Decides what a task is and how its inputs are drawn. `registry` says who runs it, `verdict` who is right. Each
bridge turns tasks into outcomes in its `testing.worker`, so that no framework is imported here.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np

from xshard import reference
from xshard.contractions.plan import ContractionPlan
from xshard.dtypes import numpy_dtype, precision
from xshard.errors import DtypeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.overlap import Fold
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.steps.base import Block


@dataclass(frozen=True)
class Task:
    """A plan and, per device, a block under its source and a cotangent block under the dual of its target.

    inputs: of a contraction the blocks of all operands, one operand after the other; gradients likewise.
    """

    plan: Plan | ContractionPlan
    inputs: tuple[Block, ...]
    cotangents: tuple[Block, ...]

    @property
    def sources(self) -> tuple[Sharding, ...]:
        """Where every operand is."""
        return sources_of(self.plan)

    @property
    def target(self) -> Sharding:
        """Where the result is to be."""
        return target_of(self.plan)

    @property
    def operands(self) -> list[tuple[Block, ...]]:
        """The blocks of every operand."""
        n = self.plan.mesh.n_devices
        return [self.inputs[i : i + n] for i in range(0, len(self.inputs), n)]

    @property
    def is_linear(self) -> bool:
        """Whether no max or min ends or stays."""
        return all(end.layout.is_linear for end in self.sources)

    @property
    def backward_bytes(self) -> int | None:
        """Bytes that the plan says the busiest device receives for the gradients; None for those of a max."""
        if isinstance(self.plan, ContractionPlan):
            return self.plan.backward_bytes_received
        return self.plan.backward.bytes_received if self.is_linear else None


@dataclass(frozen=True)
class Outcome:
    """The result of a task on one runtime: one block per device, and measurements.

    forward_bytes, backward_bytes: received by the busiest device, None if not measured.
    seconds: wall time of one forward and backward after a first one.
    """

    outputs: tuple[Block, ...]
    gradients: tuple[Block, ...]
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    seconds: float | None = None


def make_task(plan: Plan | ContractionPlan, seed: int = 0) -> Task:
    """A task with whole-number values, so that every sum is exact: contributions arbitrary, copies equal.

    Values are multiples of every mesh size, so that means are whole too. Raises DtypeError for a contraction
    of whole numbers, which has no gradients.
    """
    if isinstance(plan, ContractionPlan) and not precision(plan.dtype):
        raise DtypeError(f"no gradients of a contraction in {plan.dtype}", hint="as in --dtype float64")
    rng, sources, target = np.random.default_rng(seed), sources_of(plan), target_of(plan)
    unit = plan.mesh.n_devices if any(end.scale != 1 for end in (*sources, target)) else 1
    dual = target.layout.dual if target.layout.is_linear else target.layout
    drawn = [
        random_blocks(rng, end.layout, plan.mesh, end.shape, plan.dtype, unit)
        for end in (*sources, target.with_layout(dual))
    ]
    return Task(plan, tuple(itertools.chain(*drawn[:-1])), tuple(drawn[-1]))


def sources_of(plan: Plan | ContractionPlan) -> tuple[Sharding, ...]:
    return tuple(move.source for move in plan.moves) if isinstance(plan, ContractionPlan) else (plan.source,)


def target_of(plan: Plan | ContractionPlan) -> Sharding:
    return plan.result.target if isinstance(plan, ContractionPlan) else plan.target


def run_reference(task: Task) -> Outcome:
    """The task on numpy."""
    start = time.perf_counter()
    outputs, gradients = reference.run(task.plan, *task.operands), list[Block]()
    if isinstance(task.plan, ContractionPlan):
        gradients += itertools.chain(*reference.pullback(task.plan, task.operands, task.cotangents))
    else:
        gradients += reference.pullback(task.plan, task.inputs, task.cotangents)
    # One process holds all blocks: no bytes travel, so none are measured.
    return Outcome(tuple(outputs), tuple(gradients), seconds=time.perf_counter() - start)


def random_blocks(
    rng: np.random.Generator, layout: Layout, mesh: Mesh, shape: tuple[int, ...], dtype: str, unit: int = 1
) -> list[Block]:
    """Blocks of small multiples of `unit`: contributions are arbitrary, all copies of a row are equal."""
    copies = [dim.overlap is not None and not isinstance(dim.overlap, Fold) for dim in layout.dims]
    if any(copies):  # rows that several blocks hold are equal: drawn once, then sent to all
        dims = tuple(replace(d, overlap=None) if c else d for d, c in zip(layout.dims, copies, strict=True))
        drawn = replace(layout, dims=dims)
        plan = make_plan((drawn, layout), mesh, shape, dtype)
        return reference.run(plan, random_blocks(rng, drawn, mesh, shape, dtype, unit))
    sharding = Sharding(layout, mesh, shape)
    cut = [a for dim in sharding.layout.dims for a in dim.axes]
    partial = sharding.layout.tagged("sum", "mean", "max", "min")
    equal = [a for a in mesh.axes if a not in cut and a not in partial]
    found = numpy_dtype(dtype)
    blocks: list[Block] = []
    for device in range(mesh.n_devices):
        first = mesh.group(device, equal)[0]
        if first < device:
            blocks.append(blocks[first].copy())
        else:
            values = (
                rng.integers(0, 2, sharding.local_shape(device))
                if dtype == "bool"
                else rng.integers(0 if dtype.startswith("uint") else -4, 5, sharding.local_shape(device))
            )
            blocks.append((values * unit).astype(found))
    return blocks
