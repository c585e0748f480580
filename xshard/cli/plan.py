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

MAX_DRAWN = 4096  # devices: each has a line


def plan_command(  # noqa: PLR0913, PLR0917  typer makes an option of each
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
    profile: options.MachineName = "h100",
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
    arguments: dict[str, Any] = {"objective": objective}
    for name, text in (("mesh", mesh), ("src_mesh", src_mesh), ("dst_mesh", dst_mesh)):
        if text is not None:
            arguments[name] = Mesh.parse(text)
    for name, text in (("src_devices", src_devices), ("dst_devices", dst_devices)):
        if text is not None:
            arguments[name] = options.parse_devices(text)
    arguments |= options.lengths_of_arrays(expression, shape, sizes)
    plan: Plan | ContractionPlan = make_plan(
        expression,
        dtype=dtype,
        profile=profile,
        memory_limit=memory_limit,
        **arguments,
    )
    if page is not None:
        page.write_text(plan_page(plan), encoding="utf-8")
    if json:
        typer.echo(plan.to_json())
    if page is None and not json:
        _print_plans(plan, explain)


def _print_plans(plan: Plan | ContractionPlan, explain: bool) -> None:
    """Print a plan and the plans of its gradient, with why alternatives cost more."""
    plans = {"": plan} if isinstance(plan, ContractionPlan) else _with_gradient(plan)
    # All reasons first: one that cannot be had ends the command before anything is printed.
    reasons = [f"{part.explain()}\n" if explain else "" for part in plans.values()]
    out = console()
    for (name, part), reason in zip(plans.items(), reasons, strict=True):
        if name:
            out.print(Text(name, "bold"))
        out.print(part)
        if reason:
            out.print(Text(reason), soft_wrap=True)


def _with_gradient(plan: Plan) -> dict[str, Plan | ContractionPlan]:
    """Return the plan and the plans of its gradient, each below its heading."""
    plans: dict[str, Plan | ContractionPlan] = {"forward": plan}
    if plan.src.is_linear and plan.dst.is_linear:
        plans["backward"] = plan.backward
    elif plan.dst.is_linear and not plan.transfer:
        # A max or min that ends here; one that goes on has no gradient.
        winners = max_min_plans(plan)
        plans["backward, the result beside every addend"] = winners.result
        plans["backward, how many addends won"] = winners.count
        plans["backward, the cotangent beside every addend"] = winners.cotangent
    return plans


def show(
    expression: Annotated[
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
    device_mesh = Mesh.parse(mesh)
    lengths = options.lengths_of_arrays(expression, shape, sizes)
    if device_mesh.n_devices > MAX_DRAWN:
        raise MeshError(
            f"{device_mesh.n_devices} devices, a drawing has up to {MAX_DRAWN}",
            text=mesh,
            hint="a smaller mesh with the same axes shows the same",
        )
    # `lengths_of_arrays` accepts --sizes for a contraction only, and --shape for a layout only.
    is_contraction = sizes is not None
    if is_contraction:
        arrays = _shapes_in_contraction(expression, lengths["sizes"])
    else:
        arrays = [(Layout.parse(expression), lengths["shape"])]
    for array_layout, _ in arrays:  # here, so that the caret marks the text as it was typed
        check_axes(array_layout, device_mesh, expression)
    for array_layout, array_shape in arrays:
        sharding = Sharding(array_layout, device_mesh, array_shape)
        console().print(renderable(picture(sharding, options.listed(dims))))


def _shapes_in_contraction(
    expression: str, sizes: dict[str, int]
) -> list[tuple[Layout, tuple[int, ...]]]:
    """Pair the layouts of all arrays with their shapes. Raises for lengths that do not fit."""
    einsum = contraction(expression)
    shapes_of(einsum, tuple(sizes.items()), None)
    arrays = []
    for layout in (*einsum.operands, einsum.result):
        arrays.append((layout, tuple(sizes[name] for name in layout.names)))
    return arrays
