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
from xshard.cost.model import Link, Profile
from xshard.errors import XshardError
from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh
from xshard.pictures.terminal import console, headed_table
from xshard.runtimes.backends import BACKENDS, backend_named
from xshard.runtimes.calibrate import ROUNDS, calibrate
from xshard.runtimes.fit import Sample, median_error
from xshard.runtimes.samples import SIZES

_TEXTS = ("steps", "expression")  # columns that are no numbers
_MIN_SIZES = 3  # sizes: a launch, a speed, and something to check them by


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
    per_plan: Annotated[
        bool, Option("--plans", help="Print a row per plan, not per kind.")
    ] = False,
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
        calibration = calibrate(
            backend,
            Mesh.parse(mesh),
            name,
            _sizes(largest),
            rounds,
            disk=disk,
            progress=progress,
        )
    if os.environ.get("RANK", "0") != "0":  # all ranks of a launcher know the same: one prints
        return
    if output is not None:
        output.write_text(calibration.profile.to_json())
    _print_samples("fitted plans", calibration.fitted, calibration.profile, per_plan)
    _print_samples("held-out plans", calibration.held_out, calibration.profile, per_plan)
    out = console()
    out.print(Text(f"profile {name}: {_constants(calibration.profile)}"), soft_wrap=True)
    if output is not None:
        out.print(Text(f"written to {output}"), soft_wrap=True)


def _print_samples(title: str, samples: Sequence[Sample], profile: Profile, per_plan: bool) -> None:
    """Print how well a profile predicts the times of some plans, a row for each or for each kind."""
    out = console()
    out.print(Text(title, style="bold"))
    out.print(_table(samples, profile) if per_plan else _summary(samples, profile))
    out.print(
        f"median absolute error: {median_error(samples, profile):.1%} of {len(samples)} {title}\n",
        soft_wrap=True,
    )


def _sizes(largest: str) -> tuple[int, ...]:
    """Return the sizes up to the largest. Raises XshardError where they are too few."""
    largest_bytes = parse_bytes(largest)
    sizes = tuple(size for size in SIZES if size <= largest_bytes)
    if len(sizes) < _MIN_SIZES:
        why = f"{format_bytes(largest_bytes)} is too small a largest block: "
        why += f"sizes start at {format_bytes(SIZES[0])}"
        raise XshardError(why, hint=f"at least {format_bytes(SIZES[_MIN_SIZES - 1])}")
    return sizes


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show how many plans are done, and of all: a bar on a terminal, or else a line for each batch."""
    out = console(stderr=True)
    with counting("plans") as count:

        def report(done: int, total: int) -> None:
            count(done, total)
            if not out.is_terminal and os.environ.get("RANK", "0") == "0":
                out.print(f"{done} of {total} plans measured")

        yield report


def _summary(samples: Sequence[Sample], profile: Profile) -> Table:
    """Make a table of how well a profile predicts measured times, a row for each kind of plan.

    A row has the kinds of steps, the number of such plans, and the median, lowest and highest error
    of the predicted time, such as 5%, -10% and +20%.
    """
    table = headed_table("steps", "plans", "median error", "lowest", "highest", left_aligned=_TEXTS)
    by_steps: dict[str, list[Sample]] = {}
    for sample in samples:
        by_steps.setdefault(_steps(sample), []).append(sample)
    for steps, same_steps in by_steps.items():
        errors = [sample.error(profile) for sample in same_steps]
        table.add_row(
            Text(steps),
            str(len(same_steps)),
            f"{median_error(same_steps, profile):.0%}",
            f"{min(errors):+.0%}",
            f"{max(errors):+.0%}",
        )
    return table


def _table(samples: Sequence[Sample], profile: Profile) -> Table:
    """Return a table with a row per plan."""
    table = headed_table(
        *_TEXTS, "local shape", "predicted", "measured", "error", left_aligned=_TEXTS
    )
    for sample in samples:
        plan = sample.plan
        table.add_row(
            Text(_steps(sample)),
            Text(f"{plan.src} -> {plan.dst}"),
            "x".join(map(str, plan.source.max_local_shape)),
            format_seconds(sample.predicted(profile)),
            format_seconds(sample.seconds),
            f"{sample.error(profile):+.0%}",
        )
    return table


def _steps(sample: Sample) -> str:
    return ", ".join(step.kind for step in sample.plan.steps)


def _constants(profile: Profile) -> str:
    """Write the constants of a profile as text: links, copies, launches, products, and those of steps."""
    speeds = []
    for name, link in _links(profile).items():
        speeds.append(
            f"{name} {format_seconds(link.latency_s)} a message and {_rate(link.bytes_per_s)}B/s"
        )
    speeds.append(f"copies {_rate(profile.copy_bytes_per_s)}B/s")
    launches = [f"{kind} {format_seconds(s)}" for kind, s in profile.launch_s if kind != "other"]
    launches += [f"{kind} {format_seconds(s)} a round" for kind, s in profile.ring_s]
    products = [f"{dtype} {_rate(flops)}FLOP/s" for dtype, flops in profile.flops_per_s]
    kinds = [f"launches: {', '.join(launches)}", f"products: {', '.join(products)}"]
    if profile.calls_each_operation:  # measured for these only
        kinds.append(
            f"steps: {format_seconds(profile.call_s)} an operation, moves between layers take "
            f"{profile.step_slowdown:.3g} times as long, {profile.eager_overlap:.0%} of those started ahead "
            "is hidden"
        )
    return "; ".join([*speeds, *kinds])


def _links(profile: Profile) -> dict[str, Link]:
    """Return the links of a profile by what they lead to."""
    if profile.across is not None:
        links = {"inside nodes": profile.default, "between nodes": profile.across}
    elif profile.axes:
        links = dict(profile.axes)
    else:
        links = {"every axis": profile.default}
    if profile.disk is not None:
        links["disk"] = profile.disk
    return links


def _rate(per_s: float) -> str:
    return f"{per_s / 1e9:.3g} G"
