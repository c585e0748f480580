"""Calibration: plans are timed on the running machine, and a profile is fitted to the times.

Decides who is asked, in which order, and what a profile says of where it comes from. What is
measured is in `samples`, how constants are found in `fit`; each bridge has a module that reads
plans and writes seconds (`python -m torch_bridge.testing.timing`), so that no framework is imported here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

from xshard.cost.model import Profile
from xshard.formatting import format_bytes
from xshard.layout.mesh import Mesh
from xshard.plans.plan import Plan
from xshard.runtimes.calibration_plans import SIZES, fitted_plans, held_out_plans
from xshard.runtimes.fit import CalibrationError, Sample, fit, median_error
from xshard.runtimes.processes import run_worker


class Backend(NamedTuple):
    """What runs a plan: its module, what the devices are, and whether exchanges are sent in rounds."""

    module: str
    devices: str
    rounds: bool


# By the name of the package.
BACKENDS = {
    "torch": Backend("torch_bridge.testing.timing", "gloo processes", rounds=False),
    "jax": Backend("jax_bridge.testing.timing", "host devices of one process", rounds=True),
}
ROUNDS = 15  # times that every plan is measured; the median counts
_BATCH = 48  # plans that are timed by one start of a worker, about


@dataclass(frozen=True)
class Calibration:
    """A profile, the measurements that it was fitted to, and others that it was tried on."""

    profile: Profile
    fitted: tuple[Sample, ...]
    held_out: tuple[Sample, ...]

    @property
    def error(self) -> float:
        """Median absolute relative error on the measurements that the fit has not seen."""
        return median_error(self.held_out, self.profile)


def check_backend(backend: str) -> None:
    """Raise CalibrationError for a backend that does not exist or is not installed; nothing is imported."""
    if backend not in BACKENDS:
        raise CalibrationError(f"no backend {backend!r}", hint=f"backends are: {', '.join(BACKENDS)}")
    if find_spec(backend) is None:
        raise CalibrationError(f"{backend} is not installed", hint=f"pip install 'xshard[{backend}]'")


def calibrate(
    backend: str,
    mesh: Mesh,
    name: str,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    *,
    told: Callable[[int, int], None] = lambda done, total: None,
    timeout_s: float = 1800.0,
) -> Calibration:
    """Time plans on the backend and fit a profile to them.

    sizes: bytes of a device's block. rounds: times that every plan is measured. told: is called with
    how many plans are done, of how many.
    timeout_s: the longest wait for one batch of plans.
    Raises CalibrationError, MeshError (a mesh of one device), WorkerError.
    """
    check_backend(backend)
    fitted, held_out = fitted_plans(mesh, sizes), held_out_plans(mesh, sizes)
    seconds = measure(backend, (*fitted, *held_out), rounds, told=told, timeout_s=timeout_s)
    seen = tuple(map(Sample, fitted, seconds[: len(fitted)]))
    unseen = tuple(map(Sample, held_out, seconds[len(fitted) :]))
    profile = fit(seen, name, rounds=BACKENDS[backend].rounds)
    made = Calibration(profile, seen, unseen)
    return replace(made, profile=replace(profile, source=_source(backend, mesh, sizes, rounds, made)))


def measure(
    backend: str, plans: Sequence[Plan], rounds: int, *, told: Callable[[int, int], None], timeout_s: float
) -> list[float]:
    """Seconds of every plan, in batches, each with a worker of its own.

    Every batch is a mixture, so that a slow spell of the machine is not taken for a slow step.
    """
    order = random.Random(0).sample(range(len(plans)), len(plans))
    batches = max(1, round(len(plans) / _BATCH))
    seconds: dict[int, float] = {}
    for first in range(batches):
        told(len(seconds), len(plans))
        mine = order[first::batches]
        batch = [plans[i] for i in mine]
        times = run_worker(BACKENDS[backend].module, batch, str(rounds), timeout_s=timeout_s)
        seconds.update(zip(mine, times, strict=True))
    told(len(seconds), len(plans))
    return [seconds[i] for i in range(len(plans))]


def _source(backend: str, mesh: Mesh, sizes: Sequence[int], rounds: int, made: Calibration) -> str:
    """How, when and on what it was measured; not on whose machine."""
    seen, unseen = (median_error(samples, made.profile) for samples in (made.fitted, made.held_out))
    devices = f"{mesh.n_devices} {BACKENDS[backend].devices}"
    return (
        f"measured {date.today().isoformat()} by `xshard calibrate --backend {backend} --mesh {mesh}`: "
        f"{devices} on {_cores()} CPU cores, {backend} {version(backend)}. "
        f"{len(made.fitted)} plans of one step with blocks of {format_bytes(min(sizes))} to "
        f"{format_bytes(max(sizes))}, the median of {rounds} rounds each. Median absolute error of the "
        f"predicted time: {seen:.1%} on these, {unseen:.1%} on {len(made.held_out)} held-out plans"
    )


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
