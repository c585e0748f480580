"""Values as HTML for notebooks, on light and dark pages, without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from html import escape

from xshard.contractions import explain as contractions
from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.pictures.grid import Picture, picture, title
from xshard.pictures.svg import mesh_svg, plan_svg, sharding_svg
from xshard.plans import table
from xshard.plans.plan import Plan
from xshard.plans.table import HEAD, Row

_FONT = "font-size:13px;font-family:ui-monospace,monospace"
_FOCUS = 'tabindex="0" role="group"'  # of what may have to be scrolled, by keyboard too
_TITLE = f"{_FONT};font-weight:bold;white-space:pre-wrap"
_CELL = f"{_FONT};padding:2px 10px 2px 0;text-align:{{side}};white-space:pre"


@singledispatch
def html(value: object) -> str:
    """A value -> a `<div>` that shows it."""
    raise XshardError(f"a {type(value).__name__} cannot be drawn")


@html.register
def _(drawn: Picture) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in drawn.notes)
    notes = f'<ul style="margin:0;padding-left:1.2em">{items}</ul>' if items else ""
    return _block(title(drawn.sharding), sharding_svg(drawn), notes)


@html.register
def _(sharding: Sharding) -> str:
    return html(picture(sharding))


@html.register
def _(layout: Layout) -> str:
    """On a mesh and a shape that serve as an example, if there is a plain one."""
    lengths = [4 * 2 ** len(dim.axes) if dim.axes else 4 for dim in layout.dims]
    try:
        example = Sharding(layout, Mesh(dict.fromkeys(layout.axes, 2)), tuple(lengths))
    except XshardError:
        return _block(str(layout))
    return _block(f"{layout}   for example {example.shape} on {example.mesh}", sharding_svg(picture(example)))


@html.register
def _(mesh: Mesh) -> str:
    return _block(f"{mesh!r}, {mesh.n_devices} devices", mesh_svg(mesh))


@html.register
def _(plan: Plan) -> str:
    more = _folded("alternatives", _pre(plan.explain())) if plan.stages and not plan.transfer else ""
    return _block(table.title(plan), plan_svg(plan), steps(table.rows(plan), table.total(plan)), more)


@html.register
def _(plan: ContractionPlan) -> str:
    arrays = [move.source for move in plan.moves] + [plan.result.target]
    grids = "".join(_block(title(array), sharding_svg(picture(array))) for array in arrays)
    every = [move for part in plan.parts for move in (*part.moves, part.result)]
    moves = "".join(plan_svg(move) for move in every if move.steps)
    return _block(
        contractions.title(plan),
        f'<div style="display:flex;flex-wrap:wrap;gap:16px">{grids}</div>',
        steps(contractions.rows(plan), contractions.total(plan)),
        _folded("moves", moves) if moves else "",
        _folded("alternatives", _pre(plan.explain())),
    )


def steps(rows: Sequence[Row], total: str) -> str:
    """The steps of a plan as a table, and what they cost together."""
    sides = ["left" if name in ("step", "layout after") else "right" for name in HEAD]
    head = _cells("th", HEAD, sides)
    body = "".join(f"<tr>{_cells('td', row, sides)}</tr>" for row in rows)
    table_of = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    whole = f'<table style="border-collapse:collapse">{table_of}</table>'
    return f'<div style="overflow-x:auto" {_FOCUS} aria-label="steps">{whole}</div>{_pre(total)}'


def _cells(tag: str, texts: Iterable[str], sides: Iterable[str]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    pairs = zip(texts, sides, strict=True)
    cells = (
        f'<{tag}{scope} style="{_CELL.format(side=side)}">{escape(text)}</{tag}>' for text, side in pairs
    )
    return "".join(cells)


def _block(title: str, *parts: str) -> str:
    head = f'<div style="{_TITLE}">{escape(title)}</div>'
    return f'<div class="xshard" style="display:grid;gap:8px">{head}{"".join(parts)}</div>'


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def _pre(text: str) -> str:
    style = "margin:4px 0;font-size:13px;overflow-x:auto;background:none"
    return f'<pre {_FOCUS} aria-label="text" style="{style}">{escape(text)}</pre>'
