"""`xshard plan`: the table of a plan and its backward; `xshard show`: a layout as a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer import Argument, Option

from xshard.cli import options
from xshard.cli.explore.views import plan_page
from xshard.contractions.expression import contraction
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.shapes import shapes_of
from xshard.errors import MeshError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.pictures.grid import picture
from xshard.pictures.terminal import console, renderable
from xshard.planner import plan as make_plan
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import Plan
from xshard.search.request import OBJECTIVES

MOST_DRAWN = 4096  # devices: each has a line


def plan_command(
    expression: options.ExpressionText,
    mesh: options.MeshOrNone = None,
    shape: options.ShapeOrNone = None,
    sizes: options.SizesOrNone = None,
    src_mesh: Annotated[
        str | None, Option(metavar="AXES", help="Of the left layout, not --mesh.")
    ] = None,
    dst_mesh: Annotated[str | None, Option(metavar="AXES", help="Of the right layout.")] = None,
    src_devices: Annotated[
        str | None, Option(metavar="NUMBERS", help="Of --src-mesh, as in 0-3,6.")
    ] = None,
    dst_devices: Annotated[
        str | None, Option(metavar="NUMBERS", help="Of --dst-mesh; may overlap.")
    ] = None,
    dtype: options.Dtype = "float32",
    profile: Annotated[
        str, Option(metavar="NAME|FILE", help="The machine: a profile or a file.")
    ] = "h100",
    memory_limit: Annotated[
        str | None, Option(metavar="BYTES", help="Of a device, as in 2GiB.")
    ] = None,
    objective: Annotated[
        str | None,
        Option(metavar="|".join(OBJECTIVES), help="The cost to minimize; of a contraction both."),
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Also print why alternatives cost more.")
    ] = False,
    page: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Write a page of pictures.")
    ] = None,
    json: Annotated[
        bool, Option("--json", help="Print the plan as JSON, for Plan.from_json.")
    ] = False,
) -> None:
    """Print the cheapest steps from one layout to another, or of a contraction, and the gradient's steps.

    Example: xshard plan "b s/cp c -> b s c/cp" --mesh dp=2,cp=4 --shape 2,64,32

    Example: xshard plan "b s/tp d, d f/tp -> b s f/tp" --mesh tp=4 --sizes b=8,s=64,d=32,f=128

    Example: xshard plan "o/dp i -> o/tp i" --src-mesh dp=4 --dst-mesh tp=2 --dst-devices 4-5 --shape 64,32
    """
    meshes = {"mesh": mesh, "src_mesh": src_mesh, "dst_mesh": dst_mesh}
    devices = {"src_devices": src_devices, "dst_devices": dst_devices}
    named: dict[str, Any] = {
        name: Mesh.parse(text) for name, text in meshes.items() if text is not None
    }
    named |= {
        name: options.parse_devices(text) for name, text in devices.items() if text is not None
    }
    named |= options.lengths_of_arrays(expression, shape, sizes)
    named |= {
        "dtype": dtype,
        "profile": profile,
        "memory_limit": memory_limit,
        "objective": objective,
    }
    plan: Plan | ContractionPlan = make_plan(expression, **named)
    if page is not None:
        page.write_text(plan_page(plan), encoding="utf-8")
    if json:
        typer.echo(plan.to_json())
    if json or page is not None:
        return
    out = console()
    parts = [("", plan)] if isinstance(plan, ContractionPlan) else _named_plans(plan)
    reasons = [f"{part.explain()}\n" if explain else "" for _, part in parts]
    for (name, part), why in zip(parts, reasons, strict=True):
        if name:
            out.print(Text(name, "bold"))
        out.print(part)
        if why:
            out.print(Text(why), soft_wrap=True)


def _named_plans(plan: Plan) -> list[tuple[str, Plan]]:
    """The plan and the plans of its gradient, with their names."""
    if plan.src.is_linear and plan.dst.is_linear:
        return [("forward", plan), ("backward", plan.backward)]
    if (
        plan.transfer or not plan.dst.is_linear
    ):  # a max or min that does not end here has no gradient
        return [("forward", plan)]
    winners = max_min_plans(plan)
    backward = {
        "the result beside every addend": winners.result,
        "how many addends won": winners.count,
    }
    backward["the cotangent beside every addend"] = winners.cotangent
    return [("forward", plan), *((f"backward, {name}", part) for name, part in backward.items())]


def show(
    layout: Annotated[
        str, Argument(metavar="LAYOUT", help="'s/cp c | sum(tp)', or a contraction, quoted.")
    ],
    mesh: options.MeshText,
    shape: options.ShapeOrNone = None,
    sizes: options.SizesOrNone = None,
    dims: Annotated[
        str, Option(metavar="NAMES", help="Dims to draw, one or two; else the first cut.")
    ] = "",
) -> None:
    """Draw which device of a mesh holds which block of an array, or of all arrays of a contraction.

    Example: xshard show "b s/zigzag(cp) c" --mesh cp=4 --shape 2,64,32
    """
    on = Mesh.parse(mesh)
    lengths = options.lengths_of_arrays(layout, shape, sizes)
    if on.n_devices > MOST_DRAWN:
        reason = f"{on.n_devices} devices, a drawing has up to {MOST_DRAWN}"
        raise MeshError(reason, text=mesh, hint="a smaller mesh with the same axes shows the same")
    names = tuple(filter(None, (name.strip() for name in dims.split(","))))
    if sizes is None:
        layouts = [Layout.parse(layout)]
    else:
        einsum = contraction(layout)
        layouts = [*einsum.operands, einsum.result]
        shapes_of(
            einsum, tuple(lengths["sizes"].items()), None
        )  # raises for lengths that do not fit
    for each in layouts:
        check_axes(each, on, layout)  # here, so that the caret marks the text as it was typed
    for each in layouts:
        whole = (
            lengths["shape"]
            if sizes is None
            else tuple(lengths["sizes"][name] for name in each.names)
        )
        console().print(renderable(picture(Sharding(each, on, whole), names)))
