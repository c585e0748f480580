"""Verification: the same plans on numpy, torch and JAX, forward and backward, side by side.

Decides what a task is, how its inputs are drawn, and how a runtime is asked: each bridge has a
module that reads tasks and writes outcomes (`python -m torch_bridge.worker`,
`python -m jax_bridge.worker`), so that no framework is imported here.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xshard import reference
from xshard.errors import XshardError
from xshard.layout import Layout
from xshard.mesh import Mesh
from xshard.plan import Plan
from xshard.sharding import Sharding
from xshard.steps.base import Block, Blocks


@dataclass(frozen=True)
class Task:
    """A plan and, per device, an input block under `plan.src` and a cotangent block under `plan.dst.dual`."""

    plan: Plan
    inputs: tuple[Block, ...]
    cotangents: tuple[Block, ...]


@dataclass(frozen=True)
class Outcome:
    """What a runtime made of a task: one block per device, and what it measured.

    forward_bytes, backward_bytes: received by the busiest device, None where not measured.
    seconds: wall time of one forward and backward after a first one.
    """

    outputs: tuple[Block, ...]
    gradients: tuple[Block, ...]
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    seconds: float | None = None


class WorkerError(XshardError):
    """A runtime's process failed; its own message is in the text."""


def make_task(plan: Plan, seed: int = 0) -> Task:
    """A task with whole-number values, so that every sum is exact: contributions arbitrary, copies equal.

    Values are multiples of every mesh size, so that means are whole too.
    """
    rng = np.random.default_rng(seed)
    unit = plan.mesh.n_devices if plan.scale != 1 else 1
    dual = plan.dst.dual if plan.dst.is_linear else plan.dst
    return Task(
        plan,
        tuple(_random_blocks(rng, plan.src, plan, unit)),
        tuple(_random_blocks(rng, dual, plan, unit)),
    )


def run_reference(task: Task) -> Outcome:
    """The task on numpy."""
    start = time.perf_counter()
    outputs = reference.run(task.plan, task.inputs)
    gradients = reference.pullback(task.plan, task.inputs, task.cotangents)
    seconds = time.perf_counter() - start
    backward = task.plan.backward.bytes_received if task.plan.src.is_linear else None
    return Outcome(tuple(outputs), tuple(gradients), task.plan.bytes_received, backward, seconds)


def run_worker(module: str, tasks: Sequence[Task], *options: str) -> list[Outcome]:
    """The tasks on another runtime, in a process of its own. Raises WorkerError.

    module: as in `"torch_bridge.worker"`; options: passed on to it.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "tasks.pickle"), Path(folder, "outcomes.pickle")
        asked.write_bytes(pickle.dumps(list(tasks)))
        command = [sys.executable, "-m", module, str(asked), str(answered), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not answered.exists():
            raise WorkerError(f"{module} failed with status {done.returncode}", hint=done.stderr[-4000:])
        outcomes: list[Outcome] = pickle.loads(answered.read_bytes())
    return outcomes


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


def _random_blocks(rng: np.random.Generator, layout: Layout, plan: Plan, unit: int) -> list[Block]:
    sharding = Sharding(layout, plan.mesh, plan.shape)
    mesh: Mesh = plan.mesh
    cut = [a for dim in sharding.layout.dims for a in dim.axes]
    partial = sharding.layout.tagged("sum", "mean", "max", "min")
    equal = [a for a in mesh.axes if a not in cut and a not in partial]
    blocks: list[Block] = []
    for device in range(mesh.n_devices):
        first = mesh.group(device, equal)[0]
        if first < device:
            blocks.append(blocks[first].copy())
        else:
            values = (
                rng.integers(0, 2, sharding.local_shape(device))
                if plan.dtype == "bool"
                else rng.integers(0 if plan.dtype.startswith("uint") else -4, 5, sharding.local_shape(device))
            )
            blocks.append((values * unit).astype(plan.dtype))
    return blocks
