"""Calibration: plans are timed on the running machine, and a profile is fitted to the times (`fit`)."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xshard.cost.machine import load_profile, node_processes
from xshard.cost.model import Profile
from xshard.formatting import format_bytes
from xshard.layout import Mesh
from xshard.plans.plan import Plan
from xshard.runtimes.backends import Backend, backend_named
from xshard.runtimes.disk import measure_disk
from xshard.runtimes.fit import Sample, fit, median_error, rounded
from xshard.runtimes.samples import SIZES, fitted_plans, held_out_plans
from xshard.steps import AllGather, ReduceScatter

ROUNDS = 15  # how often every plan is measured; the median counts
PRODUCTS = ("bfloat16", "float32", "float64")  # matrix products are measured in these dtypes
ROWS = 1024  # rows of the square matrices
# Of the matrices that are multiplied beside moves: a product takes as long as a small layer.
ROWS_OF_LAYERS = 512
# The host's time for an operation of a model, over that of one in small layers, which find all in caches:
# three models of transformers on a CPU, forward and backward.
SMALL_CALLS_IN_CALL = 2
_BATCH_PLANS = 48  # plans that are timed together, about

Progress = Callable[[int, int], None]  # called with the numbers of plans done, and of all


@dataclass(frozen=True)
class Calibration:
    """A profile, the measurements it was fitted to, and others to test it."""

    profile: Profile
    fitted: tuple[Sample, ...]
    held_out: tuple[Sample, ...]

    @property
    def error(self) -> float:
        """Median absolute relative error on the measurements that the fit has not seen."""
        return median_error(self.held_out, self.profile)


def _say_nothing(n_done: int, n_plans: int) -> None:
    """Report no progress."""


def calibrate(
    backend: str,
    mesh: Mesh,
    name: str,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    *,
    disk: str | Path | None = None,
    progress: Progress = _say_nothing,
    timeout_s: float = 1800.0,
) -> Calibration:
    """Measure how fast this machine moves data, and fit a cost profile for the planner to that.

    Plans of one step each are timed, and the profile's constants (latency and bandwidth of links,
    overheads) are fitted to their times. Further plans are timed only to see how well it predicts.
    Products and, for torch, calls of small layers and moves beside products are timed for `suggest`.

    Called by all ranks that torchrun has started, it measures those; the mesh has as many devices.
    Over several nodes the profile has a link inside nodes and one between them.

    Args:
        backend: "torch" or "jax".
        mesh: The mesh, of several devices.
        name: The name of the profile.
        sizes: Bytes of a device's block.
        rounds: How often every plan is measured.
        disk: A folder, whose disk is measured too, by the first rank. None: no disk.
        progress: Called with the numbers of plans done, and of all.
        timeout_s: The limit of one batch of plans, see `Process.ask`.

    Raises:
        CalibrationError: No profile can be fitted to the measurements.
        NoRuntimeError: The backend is not installed.
        MeshError: The mesh has one device.
        FunctionError: The measurement failed.
    """
    runtime = backend_named(backend)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    disk_link = measure_disk(disk) if disk is not None and is_first_rank else None
    node_devices = _devices_of_a_node(runtime, mesh)
    fitted, held_out = _plans_to_time(mesh, sizes, node_devices)
    plans = fitted + held_out
    seconds = measure(runtime, plans, rounds, progress=progress, timeout_s=timeout_s)
    samples = tuple(map(Sample, plans, seconds))
    fitted_samples = samples[: len(fitted)]
    held_out_samples = samples[len(fitted) :]
    constants = fit(fitted_samples, name, rounds=runtime.rounds, node_devices=node_devices)
    step_slowdown, eager_overlap = _measure_beside_computing(runtime, fitted, rounds, timeout_s)
    profile = replace(
        constants,
        flops_per_s=_flops_per_s(runtime, mesh, rounds, timeout_s),
        layer_efficiency=1.0,  # a rate that was measured: layers of 256 rows reach it, too
        disk=disk_link,
        call_s=_call_s(runtime, mesh, rounds, timeout_s),
        eager_overlap=eager_overlap,
        step_slowdown=step_slowdown,
    )
    calibration = Calibration(profile, fitted_samples, held_out_samples)
    profile = replace(profile, source=_source(runtime, mesh, sizes, rounds, calibration))
    return replace(calibration, profile=profile)


def _flops_per_s(
    runtime: Backend, mesh: Mesh, rounds: int, timeout_s: float
) -> tuple[tuple[str, float], ...]:
    """Measure the operations per second of one device in matrix products, by dtype."""
    products_s = _seconds_of_products(
        runtime, mesh, rows=ROWS, dtypes=PRODUCTS, rounds=rounds, timeout_s=timeout_s
    )
    # A multiplication and an addition for each element of each sum.
    rates = [rounded(2 * ROWS**3 / product_s) for product_s in products_s]
    return tuple(zip(PRODUCTS, rates, strict=True))


def _call_s(runtime: Backend, mesh: Mesh, rounds: int, timeout_s: float) -> float:
    """Measure the seconds of the host for an operation of a model, by layers that compute next to nothing."""
    # Eager torch calls every operation of a step; JAX compiles it.
    if runtime.rounds:
        return 0.0
    n = mesh.n_devices
    small_call_s = runtime.ask(n, "worker.seconds_of_small_calls", n, rounds, timeout_s=timeout_s)
    return rounded(SMALL_CALLS_IN_CALL * small_call_s)


def _measure_beside_computing(
    runtime: Backend, plans: Sequence[Plan], rounds: int, timeout_s: float
) -> tuple[float, float]:
    """Measure what computing does to moves: `step_slowdown` and `eager_overlap` of a profile.

    The moves are those of a step of ZeRO-3: gathers of parameters and sums of gradients, over each
    axis and over all of them, of the largest blocks.
    """
    if runtime.rounds:
        return 1.0, 1.0  # not measured: JAX compiles a step, and XLA schedules its moves
    moves: list[Plan] = []
    for plan in plans:
        [step] = plan.steps
        if isinstance(step, (AllGather, ReduceScatter)) and step.dim == plan.src.dims[0].name:
            moves.append(plan)  # of rows; of columns they take about as long
    most_elements = max(math.prod(plan.shape) for plan in moves)
    largest = [plan for plan in moves if math.prod(plan.shape) == most_elements]
    n_devices = largest[0].mesh.n_devices
    function = "worker.moves_beside_products"
    slowdown, overlap = runtime.ask(
        n_devices, function, largest, ROWS_OF_LAYERS, rounds, timeout_s=timeout_s
    )
    return rounded(slowdown), rounded(overlap)


def _plans_to_time(
    mesh: Mesh, sizes: Sequence[int], node_devices: int | None
) -> tuple[tuple[Plan, ...], tuple[Plan, ...]]:
    """Return the plans to fit a profile to, and those to test it with."""
    fitted = fitted_plans(mesh, sizes)
    if node_devices is None:
        return fitted, held_out_plans(mesh, sizes)
    # Plans for nodes run in phases; the profile's constants do not matter yet.
    profile = replace(load_profile("gloo"), node_devices=node_devices)
    for_nodes = tuple(replace(plan, profile=profile) for plan in fitted)
    return for_nodes, held_out_plans(mesh, sizes, profile=profile)


def _devices_of_a_node(backend: Backend, mesh: Mesh) -> int | None:
    """Return how many ranks of a launcher run on each node; None if all run on one."""
    if not backend.is_launched:
        return None
    n_processes = node_processes(mesh.n_devices)
    return None if n_processes == mesh.n_devices else n_processes


def _seconds_of_products(
    backend: Backend,
    mesh: Mesh,
    rows: int,
    dtypes: Sequence[str],
    rounds: int,
    timeout_s: float,
) -> Sequence[float]:
    """Measure the seconds of a product of square matrices in each dtype.

    All devices multiply at once, since on one host they share its cores.
    """
    n = mesh.n_devices
    function = "worker.seconds_of_products"
    seconds: Sequence[float] = backend.ask(
        n, function, n, rows, dtypes, rounds, timeout_s=timeout_s
    )
    return seconds


def measure(
    backend: Backend, plans: Sequence[Any], rounds: int, *, progress: Progress, timeout_s: float
) -> list[float]:
    """Time every plan on a backend.

    Plans are measured in batches in random order: if the machine is slow for a while, plans of all
    kinds are affected, and no kind of step looks slower than it is.

    Args:
        backend: torch or JAX, whose processes run the plans.
        plans: The plans.
        rounds: How often each is measured; the median counts.
        progress: Called with the numbers of plans done, and of all.
        timeout_s: The limit of a batch.

    Returns:
        The seconds of each plan, in the order of `plans`.
    """
    n_devices = max((plan.mesh.n_devices for plan in plans), default=1)
    n_plans = len(plans)
    order = random.Random(0).sample(range(n_plans), n_plans)
    n_batches = max(1, round(n_plans / _BATCH_PLANS))
    seconds: dict[int, float] = {}  # by index in `plans`
    for batch in range(n_batches):
        progress(len(seconds), n_plans)
        indices = order[batch::n_batches]
        batch_plans = [plans[i] for i in indices]
        batch_s = backend.ask(
            n_devices, "worker.seconds_of_plans", batch_plans, rounds, timeout_s=timeout_s
        )
        seconds.update(zip(indices, batch_s, strict=True))
    progress(n_plans, n_plans)
    return [seconds[i] for i in range(n_plans)]


def _source(
    backend: Backend, mesh: Mesh, sizes: Sequence[int], rounds: int, calibration: Calibration
) -> str:
    """Write a paragraph for a profile on how, when and on which hardware it was measured.

    It has the date, the command, devices, cores, versions, sizes, and the error of the predicted
    times. The name of the machine is left out, since profiles are shared.
    """
    fitted_error = median_error(calibration.fitted, calibration.profile)
    package = backend.package
    devices = f"{mesh.n_devices} {backend.devices}"
    cores_of = getattr(os, "sched_getaffinity", None)  # the cores that this process may use
    n_cores = len(cores_of(0)) if cores_of else os.cpu_count() or 1
    return (
        f"measured {date.today().isoformat()} by `xshard calibrate --backend {package} --mesh {mesh}`: "
        f"{devices} on {n_cores} CPU cores, {package} {version(package)}. "
        f"{len(calibration.fitted)} plans of one step with blocks of {format_bytes(min(sizes))} to "
        f"{format_bytes(max(sizes))}, the median of {rounds} rounds each. Operations: products of "
        f"{ROWS} x {ROWS} matrices on all devices at once. Median absolute error of the predicted time: "
        f"{fitted_error:.1%} on these, {calibration.error:.1%} on {len(calibration.held_out)} held-out plans"
    )
