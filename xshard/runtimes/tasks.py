"""Verification: the same plans on numpy, torch and JAX, forward and backward, side by side.

Decides what a task is and how its inputs are drawn. `registry` says who runs it, `verdict` who is right. Each
bridge turns tasks into outcomes in its `testing.worker`, so that no framework is imported here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from xshard import reference
from xshard.dtypes import numpy_dtype
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.overlap import Fold
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.steps.base import Block


@dataclass(frozen=True)
class Task:
    """A plan and, per device, an input block under `plan.src` and a cotangent block under `plan.dst.dual`."""

    plan: Plan
    inputs: tuple[Block, ...]
    cotangents: tuple[Block, ...]


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


def make_task(plan: Plan, seed: int = 0) -> Task:
    """A task with whole-number values, so that every sum is exact: contributions arbitrary, copies equal.

    Values are multiples of every mesh size, so that means are whole too.
    """
    rng = np.random.default_rng(seed)
    unit = plan.mesh.n_devices if plan.scale != 1 else 1
    dual = plan.dst.dual if plan.dst.is_linear else plan.dst
    inputs, cotangents = (
        tuple(random_blocks(rng, layout, plan.mesh, shape, plan.dtype, unit))
        for layout, shape in ((plan.src, plan.shape), (dual, plan.target.shape))
    )
    return Task(plan, inputs, cotangents)


def run_reference(task: Task) -> Outcome:
    """The task on numpy."""
    start = time.perf_counter()
    outputs = reference.run(task.plan, task.inputs)
    gradients = reference.pullback(task.plan, task.inputs, task.cotangents)
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
