"""`xshard bench`: the time of a redistribution on this machine, beside alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from xshard.cli.options import Dtype, ExpressionText, MeshText, ShapeOrNone, SizesOrNone, lengths_of_arrays
from xshard.contractions.explain import alternatives as places
from xshard.contractions.plan import ContractionPlan
from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh
from xshard.pictures.console import console, headed_table
from xshard.planner import plan as make_plan
from xshard.plans.explain import Alternative, alternatives
from xshard.plans.plan import Plan
from xshard.runtimes.backends import BACKENDS, Backend, backend_named
from xshard.runtimes.calibrate import ROUNDS, measure

TIMEOUT_S = 600.0


def bench(
    expression: ExpressionText,
    mesh: MeshText,
    shape: ShapeOrNone = None,
    sizes: SizesOrNone = None,
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

    Of a contraction the forward pass is measured, also in other places.

    Example: xshard bench "b s/cp c -> b s c/cp" --mesh cp=4 --shape 2,4096,256
    """
    backends = [backend_named(name) for name in dict.fromkeys(backend or BACKENDS)]
    lengths = lengths_of_arrays(expression, shape, sizes)
    made = make_plan(expression, Mesh.parse(mesh), dtype=dtype, profile=profile, **lengths)
    if isinstance(made, ContractionPlan):
        parts: dict[str, Sequence[Alternative | Way]] = {"forward": [Way(*way) for way in places(made)]}
    else:
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
        text = done.text.strip() if isinstance(done, ContractionPlan) else f"{done.src} -> {done.dst}"
        out.print(Text.assemble((f"{part}  ", "bold"), text), soft_wrap=True)
        out.print(_table(ways, seconds))


class Way(NamedTuple):
    """A contraction in one place."""

    name: str
    plan: ContractionPlan
    why_not: str = ""

    @property
    def cost(self) -> float:
        """Predicted seconds of the forward pass."""
        return self.plan.forward_cost


AnyPlan = Plan | ContractionPlan


def _measured(backend: Backend, plans: list[AnyPlan], rounds: int) -> dict[AnyPlan, float]:
    """Seconds of every plan; ways with one plan share its time."""
    distinct = list(dict.fromkeys(plans))
    times = measure(backend, distinct, rounds, progress=lambda done, total: None, timeout_s=TIMEOUT_S)
    return dict(zip(distinct, times, strict=True))


def _table(ways: Sequence[Alternative | Way], seconds: dict[str, dict[AnyPlan, float]]) -> Table:
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
            Text(way.plan.local if isinstance(way.plan, ContractionPlan) else _steps(way.plan)),
        )
    return table


def _steps(plan: Plan) -> str:
    return ", ".join(map(str, plan.steps)) or "nothing"
