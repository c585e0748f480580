"""`xshard plan`: the table of a plan and of its backward.

Decides how the command prints plans. Their content is decided in `xshard/plans/`.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from xshard.cli.console import console, headed_table
from xshard.cli.options import Dtype, ExpressionText, MeshText, ShapeText, parse_shape
from xshard.layout import Mesh
from xshard.planner import plan as make_plan
from xshard.plans import table
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import Plan
from xshard.search.request import FORWARD, OBJECTIVES


def plan_command(
    expression: ExpressionText,
    mesh: MeshText,
    shape: ShapeText,
    dtype: Dtype = "float32",
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The machine to price for: a shipped profile or a file.")
    ] = "h100",
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Most bytes that a device may hold, as in 1024 or 2GiB."),
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="|".join(OBJECTIVES), help="Which cost to minimize.")
    ] = FORWARD,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print the alternatives and why the plan is cheaper.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, for Plan.from_json.")] = False,
) -> None:
    """Print the cheapest steps from one layout to another, and those of the gradient.

    Example: xshard plan "b s/cp c -> b s c/cp" --mesh dp=2,cp=4 --shape 2,64,32
    """
    made = make_plan(
        *(expression, Mesh.parse(mesh), parse_shape(shape), dtype),
        profile=profile,
        memory_limit=memory_limit,
        objective=objective,
    )
    if json:
        typer.echo(made.to_json())
        return
    out = console()
    for name, part in _named_plans(made):
        out.print(Text.assemble((f"{name}  ", "bold"), table.title(part)), soft_wrap=True)
        out.print(_rich_table(part))
        out.print(Text(f"{table.total(part)}\n"), soft_wrap=True)
        if explain:
            out.print(Text(f"{part.explain()}\n"), soft_wrap=True)


def _named_plans(made: Plan) -> list[tuple[str, Plan]]:
    """The plan and the plans of its gradient, with their names."""
    if made.src.is_linear and made.dst.is_linear:
        return [("forward", made), ("backward", made.backward)]
    if not made.dst.is_linear:  # a max or min that does not end has no gradient
        return [("forward", made)]
    winners = max_min_plans(made)
    return [
        ("forward", made),
        ("backward, the result beside every addend", winners.result),
        ("backward, how many addends won", winners.count),
        ("backward, the cotangent beside every addend", winners.cotangent),
    ]


def _rich_table(made: Plan) -> Table:
    out = headed_table(*table.HEAD, left=("step", "layout after"))
    for row in table.rows(made):
        out.add_row(*row)
    return out
