"""Values as HTML for notebooks, on light and dark pages, without a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import singledispatch
from html import escape
from typing import Any

from xshard.contractions import explain as contractions
from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Layout, Mesh, Sharding
from xshard.pictures.elements import COLOURS
from xshard.pictures.grid import Picture, picture, title
from xshard.pictures.svg import mesh_svg, plan_svg, sharding_svg
from xshard.plans import table
from xshard.plans.plan import Plan
from xshard.plans.table import HEAD, Row
from xshard.step.say.suggestion import Suggestion

_FONT = "font-size:13px;font-family:ui-monospace,monospace"
_FOCUS = 'tabindex="0" role="group"'  # for boxes that scroll, by keyboard too
_TITLE = f"{_FONT};font-weight:bold;white-space:pre-wrap"
_CELL = f"{_FONT};padding:2px 10px 2px 0;text-align:{{side}};white-space:pre"


@singledispatch
def html(value: object) -> str:
    """A value -> a `<div>` that shows it."""
    raise XshardError(f"a {type(value).__name__} cannot be drawn")


@html.register
def _(value: Sharding | Picture) -> str:
    drawn = picture(value) if isinstance(value, Sharding) else value
    items = "".join(f"<li>{escape(note)}</li>" for note in drawn.notes)
    notes = f'<ul style="margin:0;padding-left:1.2em">{items}</ul>' if items else ""
    return _block(title(drawn.sharding), sharding_svg(drawn), notes)


@html.register
def _(layout: Layout) -> str:
    """On an example of a mesh and a shape, if a plain one fits."""
    lengths = [4 * 2 ** len(dim.axes) if dim.axes else 4 for dim in layout.dims]
    try:
        example = Sharding(layout, Mesh(dict.fromkeys(layout.axes, 2)), tuple(lengths))
    except XshardError:
        return _block(str(layout))
    return _block(
        f"{layout}   for example {example.shape} on {example.mesh}", sharding_svg(picture(example))
    )


@html.register
def _(mesh: Mesh) -> str:
    return _block(f"{mesh!r}, {mesh.n_devices} devices", mesh_svg(mesh))


@html.register
def _(plan: Plan) -> str:
    more = (
        _folded("alternatives", preformatted(plan.explain()))
        if plan.stages and not plan.transfer
        else ""
    )
    return _block(
        table.title(plan), plan_svg(plan), steps(table.rows(plan), table.total(plan)), more
    )


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
        _folded("alternatives", preformatted(plan.explain())),
    )


@html.register
def _(suggestion: Suggestion) -> str:
    head, *lines = str(suggestion).splitlines()
    return _block(
        head,
        _bars(
            f"seconds of a step: {format_seconds(suggestion.seconds)}",
            suggestion.parts,
            format_seconds,
        ),
        _bars("bytes of a device", suggestion.memory, format_bytes),
        preformatted("\n".join(lines)),
    )


def gradients_html(plan: ContractionPlan) -> str:
    """The moves of all gradients of a contraction, the last part first."""
    text = ""
    for number, part in reversed(list(enumerate(plan.parts, start=1))):
        of = f" of part {number}" if len(plan.parts) > 1 else ""
        for i, move in enumerate(part.backward_moves):
            text += (
                f"<h3>The gradient of {f'operand {i}' if i else 'the result'}{of}</h3>{html(move)}"
            )
    return text


def _bars(head: str, values: Mapping[str, float], text: Callable[[Any], str]) -> str:
    """Values by name as bars of one scale."""
    most = max(values.values(), default=0.0) or 1.0
    rows = list[str]()
    for name, value in values.items():
        width = f"width:{100 * value / most:.1f}%;background:{COLOURS[len(rows) % len(COLOURS)]}"
        cells = _cells("td", (name, text(value)), ("left", "right"))
        rows.append(
            f'<tr>{cells}<td style="width:100%"><div style="{width};height:14px"></div></td></tr>'
        )
    table_of = (
        f"<caption style='text-align:left'>{escape(head)}</caption><tbody>{''.join(rows)}</tbody>"
    )
    return f'<table style="border-collapse:collapse;max-width:700px">{table_of}</table>'


def steps(rows: Sequence[Row], total: str) -> str:
    """The steps of a plan as a table, and below it the costs of all together."""
    sides = ["left" if name in ("step", "layout after") else "right" for name in HEAD]
    head = _cells('th scope="col"', HEAD, sides)
    body = "".join(f"<tr>{_cells('td', row, sides)}</tr>" for row in rows)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    whole = f'<table style="border-collapse:collapse">{inside}</table>'
    return f'<div style="overflow-x:auto" {_FOCUS} aria-label="steps">{whole}</div>{preformatted(total)}'


def _cells(tag: str, texts: Iterable[str], sides: Iterable[str]) -> str:
    """A cell for each text, which begins or ends at a side."""
    every = zip(texts, (_CELL.format(side=side) for side in sides), strict=True)
    return "".join(f'<{tag} style="{style}">{escape(text)}</{tag[:2]}>' for text, style in every)


def _block(title: str, *parts: str) -> str:
    head = f'<div style="{_TITLE}">{escape(title)}</div>'
    return f'<div class="xshard" style="display:grid;gap:8px">{head}{"".join(parts)}</div>'


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def preformatted(text: str) -> str:
    """Text as it is."""
    style = "margin:4px 0;font-size:13px;overflow-x:auto;background:none"
    return f'<pre {_FOCUS} aria-label="text" style="{style}">{escape(text)}</pre>'
