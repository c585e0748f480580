"""Calibration: plans are timed on the running machine, and a profile is fitted to the times.

The plans are in `calibration_plans`, the fit is in `fit`. Each bridge times plans in its `testing.timing`, so
that no framework is imported here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from xshard.contractions.plan import ContractionPlan
from xshard.cost.machine import load_profile, node_processes
from xshard.cost.model import Profile
from xshard.formatting import format_bytes
from xshard.layout import Mesh
from xshard.plans.plan import Plan
from xshard.runtimes.backends import Backend, backend_named
from xshard.runtimes.calibration_plans import SIZES, fitted_plans, held_out_plans
from xshard.runtimes.disk import measure_disk
from xshard.runtimes.fit import Sample, fit, median_error

ROUNDS = 15  # how often every plan is measured; the median counts
PRODUCTS = ("bfloat16", "float32", "float64")  # matrix products are measured in these dtypes
ROWS = 1024  # rows of the square matrices
_BATCH = 48  # plans that are timed together, about


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


def calibrate(
    backend: str,
    mesh: Mesh,
    name: str,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    *,
    disk: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    timeout_s: float = 1800.0,
) -> Calibration:
    """Time plans on the backend and fit a profile to them.

    Called by all ranks that torchrun has started, on one node or several, it measures those; the mesh has
    as many devices. Over several nodes the profile has a link inside nodes and one between them.
    sizes: bytes of a device's block. rounds: how often every plan is measured. disk: the disk of this folder
    is measured too, by the first rank. progress: called with the numbers of plans done, and of all.
    timeout_s: the limit of one batch of plans, see `Process.ask`.
    Raises CalibrationError, NoRuntimeError, MeshError (a mesh of one device), FunctionError.
    """
    used = backend_named(backend)
    files = measure_disk(disk) if disk is not None and os.environ.get("RANK", "0") == "0" else None
    fitted, held_out = fitted_plans(mesh, sizes), held_out_plans(mesh, sizes)
    node_devices = node_processes(mesh.n_devices) if used.is_launched else None
    if node_devices == mesh.n_devices:
        node_devices = None
    if node_devices is not None:
        nodes = replace(load_profile("gloo"), node_devices=node_devices)
        held_out = held_out_plans(mesh, sizes, profile=nodes)
        fitted = tuple(replace(plan, profile=nodes) for plan in fitted)
    seconds = measure(used, (*fitted, *held_out), rounds, progress=progress, timeout_s=timeout_s)
    seen = tuple(map(Sample, fitted, seconds[: len(fitted)]))
    unseen = tuple(map(Sample, held_out, seconds[len(fitted) :]))
    rates = measure_flops(used, mesh.n_devices, rounds, timeout_s=timeout_s)
    profile = fit(seen, name, rounds=used.rounds, node_devices=node_devices)
    profile = replace(profile, flops_per_s=rates, disk=files)
    calibration = Calibration(profile, seen, unseen)
    source = _source(used, mesh, sizes, rounds, calibration)
    return replace(calibration, profile=replace(profile, source=source))


def measure_flops(
    backend: Backend, n_devices: int, rounds: int, *, timeout_s: float
) -> tuple[tuple[str, float], ...]:
    """Floating point operations per second of a device in matrix products, by dtype; all devices compute."""
    request = n_devices, ROWS, PRODUCTS, rounds
    seconds = backend.ask(n_devices, "timing.seconds_of_products", *request, timeout_s=timeout_s)
    return tuple((dtype, float(f"{2 * ROWS**3 / s:.4g}")) for dtype, s in zip(PRODUCTS, seconds, strict=True))


def measure(
    backend: Backend,
    plans: Sequence[Plan | ContractionPlan],
    rounds: int,
    *,
    progress: Callable[[int, int], None],
    timeout_s: float,
) -> list[float]:
    """Seconds of every plan, measured in batches.

    Every batch is a mixture, so that a slow spell of the machine is not taken for a slow step.
    """
    n_devices = max((plan.mesh.n_devices for plan in plans), default=1)
    order = random.Random(0).sample(range(len(plans)), len(plans))
    batches = max(1, round(len(plans) / _BATCH))
    seconds: dict[int, float] = {}
    for first in range(batches):
        progress(len(seconds), len(plans))
        mine = order[first::batches]
        batch = [plans[i] for i in mine]
        times = backend.ask(n_devices, "timing.seconds_of_plans", batch, rounds, timeout_s=timeout_s)
        seconds.update(zip(mine, times, strict=True))
    progress(len(seconds), len(plans))
    return [seconds[i] for i in range(len(plans))]


def _source(backend: Backend, mesh: Mesh, sizes: Sequence[int], rounds: int, calibration: Calibration) -> str:
    """How, when and on which hardware it was measured, without the name of the machine."""
    seen, unseen = (
        median_error(samples, calibration.profile) for samples in (calibration.fitted, calibration.held_out)
    )
    package, devices = backend.package, f"{mesh.n_devices} {backend.devices}"
    return (
        f"measured {date.today().isoformat()} by `xshard calibrate --backend {package} --mesh {mesh}`: "
        f"{devices} on {_cores()} CPU cores, {package} {version(package)}. "
        f"{len(calibration.fitted)} plans of one step with blocks of {format_bytes(min(sizes))} to "
        f"{format_bytes(max(sizes))}, the median of {rounds} rounds each. Operations: products of "
        f"{ROWS} x {ROWS} matrices on all devices at once. Median absolute error of the "
        f"predicted time: {seen:.1%} on these, {unseen:.1%} on {len(calibration.held_out)} held-out plans"
    )


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
