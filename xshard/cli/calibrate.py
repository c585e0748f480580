"""`xshard calibrate`: a profile of the running machine, and how well it predicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text
from typer import Option

from xshard.arguments import parse_bytes
from xshard.cli.options import MeshText, counting
from xshard.cost.model import Profile
from xshard.errors import XshardError
from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh
from xshard.pictures.terminal import console, headed_table
from xshard.runtimes.backends import BACKENDS, backend_named
from xshard.runtimes.calibrate import ROUNDS, calibrate
from xshard.runtimes.fit import Sample, median_error
from xshard.runtimes.samples import SIZES

_TEXTS = ("steps", "expression")
_LEAST = 3  # sizes: a launch, a speed, and something to check them by


def calibrate_command(
    backend: Annotated[str, Option(metavar="NAME", help=f"One of {', '.join(BACKENDS)}.")],
    mesh: MeshText,
    output: Annotated[
        Path | None, Option(metavar="FILE", help="Where to write the profile.")
    ] = None,
    largest: Annotated[
        str, Option(metavar="BYTES", help="The largest block, as in 256KiB.")
    ] = "16MiB",
    rounds: Annotated[int, Option(min=1, help="Runs of every plan; the median counts.")] = ROUNDS,
    disk: Annotated[
        Path | None, Option(metavar="FOLDER", help="Also measure the disk of weights.")
    ] = None,
    every: Annotated[bool, Option("--plans", help="Print a row per plan, not per kind.")] = False,
) -> None:
    """Measure collectives on this machine, fit a profile, and print how far it predicts their times.

    Example: xshard calibrate --backend torch --mesh dp=2,cp=2 --output mine.json,
    then: xshard plan "b s/cp c -> b s c/cp" --mesh dp=2,cp=2 --shape 2,64,32 --profile mine.json
    Over several nodes: torchrun --nnodes 2 --nproc-per-node 2 ... -m xshard calibrate --mesh n=2,x=2 ...
    """
    backend_named(backend)
    if output is not None and not output.parent.is_dir():
        raise XshardError(f"no folder {str(output.parent)!r} to write {output.name!r} to")
    if disk is not None and not disk.is_dir():
        raise XshardError(f"no folder {str(disk)!r} whose disk could be measured")
    name = backend if output is None else output.stem
    with _progress() as progress:
        sizes = _sizes(largest)
        calibration = calibrate(
            backend, Mesh.parse(mesh), name, sizes, rounds, disk=disk, progress=progress
        )
    if (
        os.environ.get("RANK", "0") != "0"
    ):  # of ranks that a launcher has started, all know the same
        return
    if output is not None:
        output.write_text(calibration.profile.to_json())
    out = console()
    for title, samples in (
        ("fitted plans", calibration.fitted),
        ("held-out plans", calibration.held_out),
    ):
        out.print(Text(title, style="bold"))
        out.print((_table if every else _summary)(samples, calibration.profile))
        error = median_error(samples, calibration.profile)
        out.print(f"median absolute error: {error:.1%} of {len(samples)} {title}\n", soft_wrap=True)
    out.print(Text(f"profile {name}: {_constants(calibration.profile)}"), soft_wrap=True)
    if output is not None:
        out.print(Text(f"written to {output}"), soft_wrap=True)


def _sizes(largest: str) -> tuple[int, ...]:
    """The sizes up to the largest. Raises XshardError where they are too few."""
    most = parse_bytes(largest)
    sizes = tuple(size for size in SIZES if size <= most)
    if len(sizes) < _LEAST:
        why = f"{format_bytes(most)} is too small a largest block: sizes start at {format_bytes(SIZES[0])}"
        raise XshardError(why, hint=f"at least {format_bytes(SIZES[_LEAST - 1])}")
    return sizes


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, or else a line, with the number of plans that are done, and of all."""
    out = console(stderr=True)
    with counting("plans") as count:

        def report(done: int, total: int) -> None:
            count(completed=done, total=total)
            if not out.is_terminal and os.environ.get("RANK", "0") == "0":
                out.print(f"{done} of {total} plans measured")

        yield report


def _summary(samples: Sequence[Sample], profile: Profile) -> Table:
    """A row for all plans with the same kinds of steps."""
    table = headed_table("steps", "plans", "median error", "lowest", "highest", left=_TEXTS)
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(_steps(sample), []).append(sample)
    for steps, own in kinds.items():
        errors = [sample.error(profile) for sample in own]
        extremes = (f"{error:+.0%}" for error in (min(errors), max(errors)))
        table.add_row(Text(steps), str(len(own)), f"{median_error(own, profile):.0%}", *extremes)
    return table


def _table(samples: Sequence[Sample], profile: Profile) -> Table:
    """A row per plan."""
    table = headed_table(*_TEXTS, "local shape", "predicted", "measured", "error", left=_TEXTS)
    for sample in samples:
        plan = sample.plan
        times = (sample.predicted(profile), sample.seconds)
        texts = Text(_steps(sample)), Text(f"{plan.src} -> {plan.dst}")
        shape = "x".join(map(str, plan.source.max_local_shape))
        error = f"{sample.error(profile):+.0%}"
        table.add_row(*texts, shape, *map(format_seconds, times), error)
    return table


def _steps(sample: Sample) -> str:
    return ", ".join(step.kind for step in sample.plan.steps)


def _constants(profile: Profile) -> str:
    links = {"every axis": profile.default} if not profile.axes else dict(profile.axes)
    if profile.across is not None:
        links = {"inside nodes": profile.default, "between nodes": profile.across}
    if profile.disk is not None:
        links["disk"] = profile.disk

    def rate(per_s: float) -> str:
        return f"{per_s / 1e9:.3g} G"

    times = {
        axis: (format_seconds(link.latency_s), rate(link.bytes_per_s))
        for axis, link in links.items()
    }
    speeds = [
        f"{axis} {latency} a message and {speed}B/s" for axis, (latency, speed) in times.items()
    ]
    launches = [f"{kind} {format_seconds(s)}" for kind, s in profile.launch_s if kind != "other"]
    launches += [f"{kind} {format_seconds(s)} a round" for kind, s in profile.ring_s]
    products = ", ".join(f"{dtype} {rate(flops)}FLOP/s" for dtype, flops in profile.flops_per_s)
    speeds.append(f"copies {rate(profile.copy_bytes_per_s)}B/s")
    return f"{'; '.join(speeds)}; launches: {', '.join(launches)}; products: {products}"
