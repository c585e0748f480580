"""Pictures as SVG: the grid of a sharding, and a plan as grids; text has the colour of the page around it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh, Sharding
from xshard.pictures.grid import Cell, Picture, cell_text, labels, picture, title
from xshard.plans.plan import Plan, Stage

# Light hues that people who do not see some colours can tell apart; with black text on all of them
# (Paul Tol, "Colour schemes", 2021, scheme "light"). Device numbers say the same without colour.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00", "#DDDDDD")
MAX_DEVICES = 64  # up to here messages are drawn one by one
ROW, CHAR, GAP = 24.0, 7.3, 10.0  # pixels: height of a row, width of a letter, space around
BAND = 84.0  # height of the messages of a step


@dataclass(frozen=True)
class Drawing:
    """Elements of SVG and the pixels that they take."""

    body: str
    width: float
    height: float

    def svg(self, label: str) -> str:
        """The element. label: a description for readers who do not see it."""
        size = f"0 0 {self.width:.0f} {self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{self.width:.0f}" role="img" '
            f'aria-label="{escape(label)}" style="max-width:100%;height:auto" font-size="12" '
            f'font-family="ui-monospace, monospace">{self.body}</svg>'
        )


def sharding_svg(drawn: Picture) -> str:
    """The blocks of an array, with the devices that hold each: stripes for overlaps, dots for addends."""
    return grid_drawing(drawn).svg(title(drawn.sharding))


def plan_svg(plan: Plan) -> str:
    """An array's blocks before and after every step; between them lines, thicker for more bytes."""
    parts = [_text(title(plan.source), bold=True), grid_drawing(_stage_picture(plan, plan.source))]
    for number, (stage, cost) in enumerate(zip(plan.stages, plan.prices, strict=True), start=1):
        what = f"{stage.step}: {format_bytes(cost.received_bytes)}, {format_seconds(cost.seconds)}"
        step = [_text(f"↓ {what}"), _messages(stage, plan.itemsize), _text(title(stage.after), bold=True)]
        drawn = _stacked([*step, grid_drawing(_stage_picture(plan, stage.after))])
        parts.append(replace(drawn, body=f'<g data-step="{number}">{drawn.body}</g>'))
    return _stacked(parts).svg(f"{plan.src} to {plan.dst} in {len(plan.stages)} steps")


def mesh_svg(mesh: Mesh) -> str:
    """The devices of a mesh, a row for every place along all axes but the last."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = [range(mesh.n_devices)[i : i + columns] for i in range(0, mesh.n_devices, columns)][:MAX_DEVICES]
    starts = (zip(mesh.axes[:-1], mesh.coords(row[0]), strict=False) for row in rows)
    sides = [" ".join(f"{a}={c}" for a, c in start) for start in starts]
    heads = [f"{mesh.axes[-1]}={j}" for j in range(columns)] if mesh.axes else [""]
    cells = [[Cell((device,)) for device in row[:MAX_DEVICES]] for row in rows]
    return _table(("", heads[:MAX_DEVICES], sides), cells, adds=False).svg(f"devices of {mesh}")


def grid_drawing(drawn: Picture) -> Drawing:
    """The grid of a picture, with the rows of each block beside it."""
    return _table(labels(drawn), drawn.cells, adds=bool(drawn.sharding.layout.tagged("sum", "mean")))


def _table(names: tuple[str, list[str], list[str]], cells: Sequence[Sequence[Cell]], adds: bool) -> Drawing:
    """Blocks in colours. names: the corner, the heads of columns, and of rows."""
    corner, heads, sides = names
    texts = [[cell_text(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) * CHAR + GAP for column in zip(heads, *texts, strict=True)]
    left = max(map(len, (corner, *sides))) * CHAR + GAP
    lefts = [left + x for x in itertools.accumulate(widths, initial=0.0)]
    body = [_label(0, ROW - 8, corner, "start", bold=True)]
    body += [_label(x + w / 2, ROW - 8, head) for x, w, head in zip(lefts, widths, heads, strict=False)]
    for i, (side, row) in enumerate(zip(sides, cells, strict=True), start=1):
        body.append(_label(left - 6, i * ROW + 16, side, "end"))
        for x, width, cell, text in zip(lefts, widths, row, texts[i - 1], strict=False):
            box = f'x="{x:.1f}" y="{i * ROW:.1f}" width="{width:.1f}" height="{ROW:.1f}"'
            # Each set of owners by its first device, so that all pictures of a plan agree.
            fill = _colour(cell.owners[0]) if cell.owners else "none"
            body.append(f'<rect {box} fill="{fill}" stroke="currentColor" stroke-width=".6"/>')
            body += [_stripes(x, i * ROW, width)] if cell.guests else []
            body += [_dots(x, i * ROW, width)] if adds and cell.owners else []
            body.append(_label(x + width / 2, i * ROW + 16, text, behind=fill))
    return Drawing("".join(body), lefts[-1] + 2, (len(cells) + 1) * ROW + 2)


def _colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]


def _stripes(x: float, y: float, width: float) -> str:
    """Diagonals over a block, from edge to edge."""
    lines = ""
    for t in range(6, int(width + ROW), 8):
        lines += f"M{x + min(t, width):.1f} {y + max(0.0, t - width):.1f}"
        lines += f"L{x + max(0.0, t - ROW):.1f} {y + min(ROW, t):.1f}"
    return f'<path class="halo" d="{lines}" stroke="#111" stroke-opacity=".3" stroke-width="2"/>'


def _dots(x: float, y: float, width: float) -> str:
    """Dots over a block."""
    places = itertools.product(range(4, int(width), 7), range(4, int(ROW), 7))
    dots = "".join(f"M{x + across:.1f} {y + down:.1f}h.01" for across, down in places)
    style = 'stroke="#111" stroke-opacity=".5" stroke-width="2.2" stroke-linecap="round"'
    return f'<path class="addend" d="{dots}" {style}/>'


def _messages(stage: Stage, itemsize: int) -> Drawing:
    """Senders above, receivers below, and a line for what each sends each."""
    pairs = stage.step.pair_traffic(stage.before)
    above, below = stage.before.mesh.n_devices, stage.after.mesh.n_devices
    most, step = max((pair.elements for pair in pairs), default=0), 34.0
    if not most or max(above, below) > MAX_DEVICES:
        return _text(f"{len(pairs)} messages between {above} devices" if most else "nothing travels")
    body = []
    for src, dst, elements in pairs:
        line = f'x1="{src * step + 14:.0f}" y1="22" x2="{dst * step + 14:.0f}" y2="{BAND - 22:.0f}"'
        said = f"d{src} to d{dst}: {format_bytes(elements * itemsize)}"
        ink = f'stroke="currentColor" stroke-opacity=".55" stroke-width="{0.5 + 3.5 * elements / most:.1f}"'
        body.append(f'<line {line} {ink} data-src="{src}" data-dst="{dst}"><title>{said}</title></line>')
    for count, y in ((above, 12.0), (below, BAND - 12)):
        for device in range(count):
            x = device * step + 14
            body.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11" fill="{_colour(device)}"/>')
            body.append(_label(x, y + 4, str(device), behind=_colour(device)))
    return Drawing("".join(body), max(above, below) * step, BAND)


def _stage_picture(plan: Plan, sharding: Sharding) -> Picture:
    """All pictures of a plan show the same dims, if no more than two are ever cut."""
    every = (plan.source, *(stage.after for stage in plan.stages))
    cut = dict.fromkeys(dim.name for stage in every for dim in stage.layout.dims if dim.axes or dim.overlap)
    names = [name for name in sharding.layout.names if name in cut]
    return picture(sharding, names if len(names) <= 2 else ())


def _stacked(parts: Sequence[Drawing]) -> Drawing:
    tops = list(itertools.accumulate((part.height + GAP for part in parts), initial=0.0))
    places = zip(parts, tops, strict=False)
    body = "".join(f'<g transform="translate(0 {top:.1f})">{part.body}</g>' for part, top in places)
    return Drawing(body, max(part.width for part in parts), tops[-1])


def _text(text: str, *, bold: bool = False) -> Drawing:
    return Drawing(_label(0, 14, text, "start", bold=bold), len(text) * CHAR, 16)


def _label(
    x: float, y: float, text: str, anchor: str = "middle", *, bold: bool = False, behind: str = "none"
) -> str:
    """Text at a place. behind: the colour of its block, which is drawn around it, over stripes and dots."""
    style = ' font-weight="bold"' if bold else ""
    if behind != "none":
        style += f' stroke="{behind}" stroke-width="4" paint-order="stroke"'
    fill = "currentColor" if behind == "none" else "#111"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{style}>{escape(text)}</text>'
