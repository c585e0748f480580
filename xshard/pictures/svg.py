"""Layouts, plans and meshes as SVG; text has the colour of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh, Sharding
from xshard.pictures import elements as el
from xshard.pictures.blocks import grid_drawing
from xshard.pictures.elements import Shape
from xshard.pictures.grid import Picture, picture, title
from xshard.plans.plan import Plan, Stage

MAX_DEVICES = 64  # up to here they are drawn one by one
BAND = 84.0
ROW = 24.0  # pixels: height of the messages of a step, of a row of devices


def sharding_svg(drawn: Picture) -> str:
    """The blocks of an array, each a share of its area, on one card for each place along other axes."""
    return el.element(grid_drawing(drawn), title(drawn.sharding))


def plan_svg(plan: Plan) -> str:
    """An array's blocks before and after every step; between them lines, thicker for more bytes."""
    dims = _plan_dims(plan)
    numbers = plan.src_devices
    parts = [_captioned(plan.source, dims, plan.src_devices)]
    for number, (stage, cost) in enumerate(zip(plan.stages, plan.prices, strict=True), start=1):
        before = numbers
        numbers = plan.dst_devices if stage.step is plan.transfer else numbers
        what = f"{stage.step}: {format_bytes(cost.received_bytes)}, {format_seconds(cost.seconds)}"
        # The last layout as the user wrote it: the stages are in normal form.
        after = plan.target if number == len(plan.stages) else stage.after
        step = [el.line_of(f"↓ {what}"), _messages(stage, plan.itemsize, before, numbers)]
        drawn = el.stacked([*step, _captioned(after, dims, numbers)])
        parts.append(drawn._replace(body=f'<g data-step="{number}">{drawn.body}</g>'))
    return el.element(el.stacked(parts), f"{plan.src} to {plan.dst} in {len(plan.stages)} steps")


def mesh_svg(mesh: Mesh) -> str:
    """The devices of a mesh, a row for every place along all axes but the last."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = [range(mesh.n_devices)[i : i + columns] for i in range(0, mesh.n_devices, columns)][
        :MAX_DEVICES
    ]
    heads = [f"{mesh.axes[-1]}={j}" for j in range(columns)][:MAX_DEVICES] if mesh.axes else [""]
    width = max(map(len, heads)) * el.CHAR + el.GAP
    shapes = [el.label((j + 0.5) * width, -6, head) for j, head in enumerate(heads)]
    for i, row in enumerate(rows):
        start = zip(mesh.axes[:-1], mesh.coords(row[0]), strict=False)
        shapes.append(
            el.label(-6, i * ROW + 16, " ".join(f"{axis}={c}" for axis, c in start), "end")
        )
        for j, device in enumerate(row[:MAX_DEVICES]):
            box = (j * width, i * ROW, (j + 1) * width, (i + 1) * ROW)
            fill = el.colour((device,))
            shapes += [el.rectangle(box, fill), *el.label_in(box, str(device), fill)]
    return el.element(el.framed(shapes), f"devices of {mesh}")


def _messages(
    stage: Stage, itemsize: int, senders: Sequence[int], receivers: Sequence[int]
) -> Shape:
    """Senders above, receivers below, and a line for what each sends each; all devices by number."""
    pairs = stage.step.pair_traffic(stage.before)
    most = max((pair.elements for pair in pairs), default=0)
    step = 34.0
    if not most or max(len(senders), len(receivers)) > MAX_DEVICES:
        text = (
            f"{len(pairs)} messages between {len(senders)} devices" if most else "nothing travels"
        )
        return el.line_of(text)
    shapes = []
    for pair in pairs:
        src = senders[pair.src]
        dst = receivers[pair.dst]
        box = (pair.src * step + 14, 22.0, pair.dst * step + 14, BAND - 22)
        line = "".join(
            f'{name}="{n:.0f}" ' for name, n in zip(("x1", "y1", "x2", "y2"), box, strict=True)
        )
        said = f"d{src} to d{dst}: {format_bytes(pair.elements * itemsize)}"
        width = f'stroke-width="{0.5 + 3.5 * pair.elements / most:.1f}"'
        ink = f'stroke="currentColor" stroke-opacity=".55" {width}'
        body = f'<line {line}{ink} data-src="{src}" data-dst="{dst}"><title>{said}</title></line>'
        shapes.append(Shape(body, box))
    for devices, y in ((senders, 12.0), (receivers, BAND - 12)):
        for i, device in enumerate(devices):
            x = i * step + 14
            fill = el.colour((device,))
            body = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11" fill="{fill}"/>'
            shapes.append(Shape(body, (x - 11, y - 11, x + 11, y + 11)))
            shapes.append(el.label(x, y + 4, str(device), behind=fill))
    return el.framed(shapes)


def _plan_dims(plan: Plan) -> list[str]:
    """All pictures of a plan show the same dims: the two that are cut most often."""
    every = (plan.source, *(stage.after for stage in plan.stages))
    cut = Counter(dim.name for each in every for dim in each.layout.dims if dim.axes or dim.overlap)
    names = [name for name, _ in cut.most_common()]
    return [*names, *(name for name in reversed(plan.src.names) if name not in names)][:2]


def _captioned(sharding: Sharding, dims: Sequence[str], devices: Sequence[int]) -> Shape:
    """A picture below its title."""
    names = [name for name in sharding.layout.names if name in dims]
    drawn = grid_drawing(picture(sharding, names, devices))
    return el.stacked([el.line_of(title(sharding), bold=True), drawn])
