"""Verification: the same plans on numpy, torch and JAX, forward and backward, side by side.

Decides what a task is, how its inputs are drawn, and how a runtime is asked (`runtimes` says who,
`verdict` who is right): each bridge has a module that reads tasks and writes outcomes
(`python -m torch_bridge.worker`, `python -m jax_bridge.worker`), so that no framework is
imported here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from xshard import reference
from xshard.errors import DtypeError, XshardError
from xshard.layout import Layout
from xshard.mesh import Mesh
from xshard.overlap import Fold
from xshard.plan import Plan
from xshard.planner import plan as make_plan
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
    inputs, cotangents = (
        tuple(random_blocks(rng, layout, plan.mesh, plan.shape, plan.dtype, unit))
        for layout in (plan.src, dual)
    )
    return Task(plan, inputs, cotangents)


def run_reference(task: Task) -> Outcome:
    """The task on numpy."""
    start = time.perf_counter()
    outputs = reference.run(task.plan, task.inputs)
    gradients = reference.pullback(task.plan, task.inputs, task.cotangents)
    # One process holds all blocks: no bytes travel, so none are measured.
    return Outcome(tuple(outputs), tuple(gradients), seconds=time.perf_counter() - start)


def run_worker(
    module: str, tasks: Sequence[Task | Plan], *options: str, timeout_s: float | None = None
) -> list[Any]:
    """What another runtime answers to every task, in a process of its own. Raises WorkerError.

    module: as in `"torch_bridge.worker"`, which answers a `Task` with an `Outcome`; `torch_bridge.timing`
    answers a plan with seconds. options: passed on to it. timeout_s: None waits forever.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "tasks.pickle"), Path(folder, "outcomes.pickle")
        asked.write_bytes(pickle.dumps(list(tasks)))
        command = [sys.executable, "-m", module, str(asked), str(answered), *options]
        status, said = _run_group(command, timeout_s)
        name, hint = " ".join((module, *options)), said[-4000:].strip() or None
        if status is None:
            raise WorkerError(f"{name} did not finish within {timeout_s:g} s", hint=hint)
        if status or not answered.exists():
            raise WorkerError(f"{name} failed with status {status}", hint=hint)
        outcomes: list[Any] = pickle.loads(answered.read_bytes())
    if len(outcomes) != len(tasks):
        raise WorkerError(f"{name} answered {len(outcomes)} of {len(tasks)} tasks")
    return outcomes


def _run_group(command: Sequence[str], timeout_s: float | None) -> tuple[int | None, str]:
    """Exit status (None where time ran out) and standard error of a command.

    However it ends, the processes that the command forked end with it: ranks that wait for each
    other in a collective would stay for ever.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        status: int | None = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return status, said.read()


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


def random_blocks(
    rng: np.random.Generator, layout: Layout, mesh: Mesh, shape: tuple[int, ...], dtype: str, unit: int = 1
) -> list[Block]:
    """Blocks of small multiples of `unit`: contributions arbitrary, copies and rows held twice equal."""
    copies = [dim.overlap is not None and not isinstance(dim.overlap, Fold) for dim in layout.dims]
    if any(copies):  # rows that several blocks hold are equal: drawn once, then spread
        dims = tuple(replace(d, overlap=None) if c else d for d, c in zip(layout.dims, copies, strict=True))
        drawn = replace(layout, dims=dims)
        spread = make_plan((drawn, layout), mesh, shape, dtype)
        return reference.run(spread, random_blocks(rng, drawn, mesh, shape, dtype, unit))
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


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of numpy blocks; those that numpy lacks come from ml_dtypes. Raises DtypeError."""
    with contextlib.suppress(ImportError):
        import_module("ml_dtypes")  # makes its names known to numpy
    try:
        return np.dtype(name)
    except TypeError:
        raise DtypeError(
            f"numpy has no {name} without ml_dtypes", hint="pip install 'xshard[jax]' brings it"
        ) from None
