"""Calibration: plans are timed on the running machine, and a profile is fitted to the times (`fit`)."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xshard.cost.machine import load_profile, node_processes
from xshard.cost.model import Link, Profile, ProfileLike
from xshard.errors import MeshError
from xshard.formatting import format_bytes
from xshard.layout import Layout, Mesh
from xshard.notation.parser import Dim, Shard
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.runtimes.backends import Backend, backend_named
from xshard.runtimes.fit import CalibrationError, Sample, fit, median_error
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)

SIZES = tuple(4**i * 1024 for i in range(8))  # bytes of the larger block: 1 KiB .. 16 MiB
HELD_OUT = 20
DTYPE = "float32"
ITEMSIZE = 4
_DRAWS = 20  # per held-out plan, before plans of several steps are given up
_ROWS_CUT = 16  # per device, of a dim that is cut


def fitted_plans(mesh: Mesh, sizes: Sequence[int] = SIZES) -> tuple[Plan, ...]:
    """Plans of one step each: every kind of step, over each axis and over all axes, in every size, about the
    bytes of the larger of a device's two blocks. Raises MeshError for a mesh of one device.
    """
    axes = _long_axes(mesh)
    groups = [(a,) for a in axes] + ([axes] if len(axes) > 1 else [])
    sent = [*(step for group in groups for step in _steps(group)), *_turns(mesh, axes)]
    # A small copy is all overhead, and the model of a local step has none.
    large = [size for size in sizes if size >= max(sizes) / 16]
    copies = [
        _plan(mesh, step, size) for group in groups for step in _copies(group) for size in large
    ]
    return (*(_plan(mesh, step, size) for step in sent for size in sizes), *copies)


def held_out_plans(
    mesh: Mesh,
    sizes: Sequence[int] = SIZES,
    count: int = HELD_OUT,
    seed: int = 0,
    profile: Any = "h100",
) -> tuple[Plan, ...]:
    """Random plans that communicate, as the planner makes them for a profile; equal seeds draw equal plans.
    At least every third has several steps, if the mesh has such plans. Raises MeshError for one device.
    """
    axes = _long_axes(mesh)
    rng = random.Random(seed)
    plans = list[Plan]()
    singles = 0
    draws = 0
    while len(plans) < count:
        plan = _random_plan(mesh, axes, sizes, rng, profile)
        single = len(plan.steps) == 1
        # One axis may have too few plans of several steps: then any plan counts.
        full = single and singles >= count - count // 3 and draws < _DRAWS * count
        draws += 1
        if plan.bytes_received and plan not in plans and not full:
            plans.append(plan)
            singles += single
    return tuple(plans)


def _random_plan(
    mesh: Mesh, axes: Sequence[str], sizes: Sequence[int], rng: random.Random, profile: ProfileLike
) -> Plan:
    src, dst = _random_sides(axes, rng)
    size = min(sizes) * (max(sizes) / min(sizes)) ** rng.random()
    elements = size / ITEMSIZE * min(mesh.size(*layout.cut_axes) for layout in (src, dst))
    rows = [mesh.n_devices * rng.choice((1, 2, 4, 6)) for _ in range(2)]
    columns = mesh.n_devices * max(1, round(elements / (rows[0] * rows[1] * mesh.n_devices)))
    return make_plan((src, dst), mesh, (*rows, columns), DTYPE, profile=profile)


def _long_axes(mesh: Mesh) -> tuple[str, ...]:
    if not mesh.long_axes:
        raise MeshError(
            f"nothing to measure on {mesh!r}: it has one device", hint="as in --mesh dp=2,cp=2"
        )
    return mesh.long_axes


def _layout(
    first: Sequence[str] = (), second: Sequence[str] = (), sums: Sequence[str] = ()
) -> Layout:
    """A layout of two dims, each cut by axes, and a sum over others."""
    dims = tuple(
        Dim(name, tuple(Shard((a,)) for a in cut)) for name, cut in (("n", first), ("d", second))
    )
    return Layout(dims, (("sum", tuple(sums)),) if sums else ())


def _steps(group: tuple[str, ...]) -> Iterator[tuple[Layout, Layout, Step]]:
    """Every kind of step over a group of axes, with the layouts before and after it."""
    cut = tuple(Shard((a,)) for a in group)
    whole = _layout()
    rows = _layout(group)
    columns = _layout((), group)
    partial = _layout(sums=group)
    yield rows, whole, AllGather("n", cut)
    yield columns, whole, AllGather("d", cut)
    yield partial, whole, AllReduce(group)
    yield partial, rows, ReduceScatter("n", cut)
    yield partial, columns, ReduceScatter("d", cut)
    yield rows, columns, AllToAll("n", cut, "d", cut)
    yield rows, columns, Exchange(columns)
    yield columns, whole, Exchange(whole)


def _copies(group: tuple[str, ...]) -> Iterator[tuple[Layout, Layout, Step]]:
    """Steps that only copy."""
    cut = tuple(Shard((a,)) for a in group)
    yield _layout(), _layout((), group), Slice((("d", cut),))
    yield _layout((), group), _layout(sums=group), Embed("d", cut)


def _turns(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[tuple[Layout, Layout, Step]]:
    """Permutations of devices: all axes change roles, and pairs of axes of one size."""
    pairs = [
        ((a,), (b,)) for a, b in itertools.permutations(axes, 2) if mesh.size(a) == mesh.size(b)
    ]
    for before, after in [(axes, axes[::-1])] * (len(axes) > 1) + pairs:
        yield _layout(before), _layout(after), Permute(_layout(after))


def _plan(mesh: Mesh, sample: tuple[Layout, Layout, Step], size: int) -> Plan:
    """The plan of one step; the larger of a device's two blocks has about `size` bytes."""
    src, dst, step = sample
    elements = size // ITEMSIZE * min(mesh.size(*layout.cut_axes) for layout in (src, dst))
    rows = mesh.n_devices * (_ROWS_CUT if elements > _ROWS_CUT * mesh.n_devices**2 else 1)
    columns = mesh.n_devices * max(1, elements // (rows * mesh.n_devices))
    return Plan(src, dst, mesh, (rows, columns), DTYPE, (step,))


def _random_sides(axes: Sequence[str], rng: random.Random) -> tuple[Layout, Layout]:
    """Two layouts of three dims: every axis cuts a dim, holds replicas or, before the plan, addends."""
    sides = []
    for roles in ("abc-+", "abc-"):
        role = {a: rng.choice(roles) for a in rng.sample(axes, len(axes))}
        cuts = {name: [a for a in role if role[a] == name] for name in "abc"}
        dims = tuple(Dim(name, tuple(Shard((a,)) for a in cut)) for name, cut in cuts.items())
        sums = tuple(a for a in role if role[a] == "+")
        sides.append(Layout(dims, (("sum", sums),) if sums else ()))
    return sides[0], sides[1]


DISK_BYTES = 2**28  # bytes of the file
_PIECE = 2**22
_LATENCY_BYTES = 2**12  # bytes of a read, and of one that is all latency
_DISK_ROUNDS = 5


def measure_disk(folder: str | Path, size: int = DISK_BYTES) -> Link:
    """The seconds of a small read in a folder, and the bytes per second of large ones, as a link. Raises
    CalibrationError if it cannot be written, or if the system does not forget what it read.
    """
    if not hasattr(os, "posix_fadvise"):  # of macOS, for one
        hint = "measure on Linux, or write a disk into the profile"
        raise CalibrationError("this system keeps what was read of files in memory", hint=hint)
    try:
        with (
            tempfile.TemporaryFile(dir=folder, buffering=0) as file,
            ThreadPoolExecutor() as threads,
        ):
            pieces = range(0, size, _PIECE)
            for _ in pieces:
                file.write(os.urandom(_PIECE))
            os.fsync(file.fileno())
            small = [_seconds(map, file.fileno(), [start], _LATENCY_BYTES) for start in pieces]
            large = [
                _seconds(threads.map, file.fileno(), pieces, _PIECE) for _ in range(_DISK_ROUNDS)
            ]
    except OSError as error:
        hint = "a folder that can be written to"
        raise CalibrationError(f"{folder}: {error.strerror}", hint=hint) from error
    latency_s = statistics.median(small)
    rate = size / statistics.median(large)
    return Link(float(f"{latency_s:.4g}"), float(f"{rate:.4g}"))


def _seconds(
    on_each: Callable[..., Iterable[int]], file: int, starts: Sequence[int], n_bytes: int
) -> float:
    """Seconds to read so many bytes at each of these places, with nothing in memory."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    sum(on_each(lambda start: len(os.pread(file, n_bytes, start)), starts))
    return time.perf_counter() - begin


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

    Called by all ranks that torchrun has started, it measures those; the mesh has as many devices.
    Over several nodes the profile has a link inside nodes and one between them.
    sizes: bytes of a device's block. rounds: how often every plan is measured. disk: the disk of this folder
    is measured too, by the first rank. progress: called with the numbers of plans done, and of all.
    timeout_s: the limit of one batch of plans, see `Process.ask`.
    Raises CalibrationError, NoRuntimeError, MeshError (a mesh of one device), FunctionError.
    """
    used = backend_named(backend)
    files = measure_disk(disk) if disk is not None and os.environ.get("RANK", "0") == "0" else None
    fitted = fitted_plans(mesh, sizes)
    profile = load_profile("h100")
    node_devices = node_processes(mesh.n_devices) if used.is_launched else None
    if (node_devices := None if node_devices == mesh.n_devices else node_devices) is not None:
        profile = replace(load_profile("gloo"), node_devices=node_devices)
        fitted = tuple(replace(plan, profile=profile) for plan in fitted)
    held_out = held_out_plans(mesh, sizes, profile=profile)
    seconds = measure(used, (*fitted, *held_out), rounds, progress=progress, timeout_s=timeout_s)
    seen = tuple(map(Sample, fitted, seconds[: len(fitted)]))
    unseen = tuple(map(Sample, held_out, seconds[len(fitted) :]))
    request = mesh.n_devices, ROWS, PRODUCTS, rounds
    products = used.ask(mesh.n_devices, "worker.seconds_of_products", *request, timeout_s=timeout_s)
    rates = (
        (dtype, float(f"{2 * ROWS**3 / s:.4g}"))
        for dtype, s in zip(PRODUCTS, products, strict=True)
    )
    profile = fit(seen, name, rounds=used.rounds, node_devices=node_devices)
    profile = replace(profile, flops_per_s=tuple(rates), disk=files)
    calibration = Calibration(profile, seen, unseen)
    source = _source(used, mesh, sizes, rounds, calibration)
    return replace(calibration, profile=replace(profile, source=source))


Count = Callable[[int, int], None]  # called with the numbers of plans done, and of all


def measure(
    backend: Backend, plans: Sequence[Any], rounds: int, *, progress: Count, timeout_s: float
) -> list[float]:
    """Seconds of every plan, in mixed batches: a slow spell of the machine is not taken for a slow step."""
    n_devices = max((plan.mesh.n_devices for plan in plans), default=1)
    order = random.Random(0).sample(range(len(plans)), len(plans))
    batches = max(1, round(len(plans) / _BATCH))
    seconds: dict[int, float] = {}
    for first in range(batches):
        progress(len(seconds), len(plans))
        mine = order[first::batches]
        batch = [plans[i] for i in mine]
        times = backend.ask(
            n_devices, "worker.seconds_of_plans", batch, rounds, timeout_s=timeout_s
        )
        seconds.update(zip(mine, times, strict=True))
    progress(len(seconds), len(plans))
    return [seconds[i] for i in range(len(plans))]


def _source(
    backend: Backend, mesh: Mesh, sizes: Sequence[int], rounds: int, calibration: Calibration
) -> str:
    """How, when and on which hardware it was measured, without the name of the machine."""
    seen = median_error(calibration.fitted, calibration.profile)
    package = backend.package
    devices = f"{mesh.n_devices} {backend.devices}"
    allowed = getattr(os, "sched_getaffinity", None)  # the cores that this process may use
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return (
        f"measured {date.today().isoformat()} by `xshard calibrate --backend {package} --mesh {mesh}`: "
        f"{devices} on {cores} CPU cores, {package} {version(package)}. "
        f"{len(calibration.fitted)} plans of one step with blocks of {format_bytes(min(sizes))} to "
        f"{format_bytes(max(sizes))}, the median of {rounds} rounds each. Operations: products of "
        f"{ROWS} x {ROWS} matrices on all devices at once. Median absolute error of the predicted time: "
        f"{seen:.1%} on these, {calibration.error:.1%} on {len(calibration.held_out)} held-out plans"
    )
