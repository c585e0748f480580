"""`xshard bench`: the time of a redistribution on this machine, beside alternatives."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from xshard.cli.console import console, headed_table
from xshard.cli.options import Dtype, ExpressionText, MeshText, ShapeText, parse_shape
from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh
from xshard.planner import plan as make_plan
from xshard.plans.explain import Alternative, alternatives
from xshard.plans.plan import Plan
from xshard.runtimes.backends import BACKENDS, Backend, backend_named
from xshard.runtimes.calibrate import ROUNDS, measure

TIMEOUT_S = 600.0


def bench(
    expression: ExpressionText,
    mesh: MeshText,
    shape: ShapeText,
    dtype: Dtype = "float32",
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(BACKENDS)}; may be repeated. Default: all."),
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The machine to predict for: shipped, or calibrated.")
    ] = "gloo",
    rounds: Annotated[
        int, typer.Option(min=1, help="How often every way is measured; the median counts.")
    ] = ROUNDS,
) -> None:
    """Measure a plan, its gradient and the alternatives on processes (torch) and host devices (JAX).

    Example: xshard bench "b s/cp c -> b s c/cp" --mesh cp=4 --shape 2,4096,256
    """
    backends = [backend_named(name) for name in dict.fromkeys(backend or BACKENDS)]
    made = make_plan(expression, Mesh.parse(mesh), parse_shape(shape), dtype, profile=profile)
    parts = {"forward": alternatives(made)}
    if made.src.is_linear and made.dst.is_linear:
        parts["backward"] = alternatives(made.backward)
    plans = [way.plan for ways in parts.values() for way in ways if way.plan is not None]
    with console(stderr=True).status(
        f"measuring {len(plans)} plans on {' and '.join(b.package for b in backends)}"
    ):
        seconds = {b.package: _measured(b, plans, rounds) for b in backends}
    out = console()
    for part, ways in parts.items():
        done = ways[0].plan or made
        out.print(Text.assemble((f"{part}  ", "bold"), f"{done.src} -> {done.dst}"), soft_wrap=True)
        out.print(_table(ways, seconds))


def _measured(backend: Backend, plans: list[Plan], rounds: int) -> dict[Plan, float]:
    """Seconds of every plan; ways with one plan share its time."""
    distinct = list(dict.fromkeys(plans))
    times = measure(backend, distinct, rounds, progress=lambda done, total: None, timeout_s=TIMEOUT_S)
    return dict(zip(distinct, times, strict=True))


def _table(ways: tuple[Alternative, ...], seconds: dict[str, dict[Plan, float]]) -> Table:
    """A row per way."""
    table = headed_table("", "predicted", *seconds, "received", "steps", left=("", "steps"))
    for way in ways:
        if way.plan is None:
            table.add_row(way.name, *["-"] * (len(seconds) + 2), Text(way.why_not))
            continue
        table.add_row(
            way.name,
            format_seconds(way.cost),
            *(format_seconds(times[way.plan]) for times in seconds.values()),
            format_bytes(way.plan.bytes_received),
            Text(", ".join(map(str, way.plan.steps)) or "nothing"),
        )
    return table
