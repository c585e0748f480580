"""Values as HTML for notebooks, on light and dark pages, without a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from xshard.pictures.svg import mesh_svg, plan_svg, sharding_svg, timeline_svg
from xshard.plans import table
from xshard.plans.plan import Plan
from xshard.plans.table import HEAD, Row
from xshard.schedule import Schedule, Timeline
from xshard.step.say.suggestion import Suggestion

_FONT = "font-size:13px;font-family:ui-monospace,monospace"
_FOCUS = 'tabindex="0" role="group"'  # for boxes that scroll: readers without a mouse reach them
_TITLE = f"{_FONT};font-weight:bold;white-space:pre-wrap"
_CELL = f"{_FONT};padding:2px 10px 2px 0;text-align:{{alignment}};white-space:pre"


@singledispatch
def html(value: object) -> str:
    """Return a `<div>` that shows a value.

    Raises:
        XshardError: Values of this type have no picture.
    """
    raise XshardError(f"a {type(value).__name__} cannot be drawn")


@html.register
def _html_of_sharding(value: Sharding | Picture) -> str:
    drawn = picture(value) if isinstance(value, Sharding) else value
    notes = ""
    if drawn.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in drawn.notes)
        notes = f'<ul style="margin:0;padding-left:1.2em">{items}</ul>'
    return _block(title(drawn.sharding), sharding_svg(drawn), notes)


@html.register
def _html_of_layout(layout: Layout) -> str:
    # A layout has no mesh and no shape: it is shown on the smallest that do something, if they fit.
    mesh = Mesh(dict.fromkeys(layout.axes, 2))
    shape = tuple(4 * 2 ** len(dim.axes) for dim in layout.dims)
    try:
        example = Sharding(layout, mesh, shape)
    except XshardError:
        return _block(str(layout))
    head = f"{layout}   for example {example.shape} on {example.mesh}"
    return _block(head, sharding_svg(picture(example)))


@html.register
def _html_of_mesh(mesh: Mesh) -> str:
    return _block(f"{mesh!r}, {mesh.n_devices} devices", mesh_svg(mesh))


@html.register
def _html_of_plan(plan: Plan) -> str:
    alternatives = ""
    if plan.stages and not plan.transfer:
        alternatives = _folded("alternatives", preformatted(plan.explain()))
    table_of_steps = steps(table.rows(plan), table.total(plan))
    return _block(table.title(plan), plan_svg(plan), table_of_steps, alternatives)


@html.register
def _html_of_timeline(timeline: Timeline) -> str:
    return _block(str(timeline).splitlines()[-1], timeline_svg(timeline))


@html.register
def _html_of_schedule(schedule: Schedule) -> str:
    head = "if each module computed, and each move travelled, for one second"
    return _block(head, timeline_svg(schedule.in_turns().timeline()))


@html.register
def _html_of_contraction(plan: ContractionPlan) -> str:
    """Show a contraction: all arrays side by side, the table of steps, and more behind clicks.

    A contraction of many operands has several parts, one or two operands each. In each part the
    operands move first, and at the end the result. Behind clicks are these moves, step by step, and
    other placements with their costs.
    """
    grids = ""
    for array in (*(move.source for move in plan.moves), plan.result.target):
        grids += _block(title(array), sharding_svg(picture(array)))
    moves = ""
    for part in plan.parts:
        for move in (*part.moves, part.result):  # `result` is the plan that moves the result
            if move.steps:
                moves += plan_svg(move)
    return _block(
        contractions.title(plan),
        f'<div style="display:flex;flex-wrap:wrap;gap:16px">{grids}</div>',
        steps(contractions.rows(plan), contractions.total(plan)),
        _folded("moves", moves) if moves else "",
        _folded("alternatives", preformatted(plan.explain())),
    )


@html.register
def _html_of_suggestion(suggestion: Suggestion) -> str:
    head, *lines = str(suggestion).splitlines()
    seconds = f"seconds of a step: {format_seconds(suggestion.seconds)}"
    return _block(
        head,
        _bars(seconds, suggestion.parts, format_seconds),
        _bars("bytes of a device", suggestion.memory, format_bytes),
        preformatted("\n".join(lines)),
    )


def gradients_html(plan: ContractionPlan) -> str:
    """Draw the moves of all gradients of a contraction, the last part first."""
    text = ""
    for part_number, part in reversed(list(enumerate(plan.parts, start=1))):
        part_text = f" of part {part_number}" if len(plan.parts) > 1 else ""
        for i, move in enumerate(part.backward_moves):
            array = f"operand {i}" if i else "the result"
            text += f"<h3>The gradient of {array}{part_text}</h3>{html(move)}"
    return text


def _bars(head: str, values: Mapping[str, float], with_unit: Callable[[Any], str]) -> str:
    """Make an HTML table with a row for each value: its name, the value as text, and a bar.

    The largest value has the longest bar.

    Args:
        head: The caption.
        values: The values by name.
        with_unit: Writes a value as text.
    """
    largest = max(values.values(), default=0.0) or 1.0
    rows = ""
    for row_index, (name, value) in enumerate(values.items()):
        cells = _cells("td", (name, with_unit(value)), ("left", "right"))
        colour = COLOURS[row_index % len(COLOURS)]
        style = f"width:{100 * value / largest:.1f}%;background:{colour};height:14px"
        rows += f'<tr>{cells}<td style="width:100%"><div style="{style}"></div></td></tr>'
    caption = f"<caption style='text-align:left'>{escape(head)}</caption>"
    sections = f"{caption}<tbody>{rows}</tbody>"
    return f'<table style="border-collapse:collapse;max-width:700px">{sections}</table>'


def steps(rows: Sequence[Row], totals: str) -> str:
    """Return the steps of a plan as a table, and below it the costs of all together."""
    alignments = ["left" if name in ("step", "layout after") else "right" for name in HEAD]
    head = _cells('th scope="col"', HEAD, alignments)
    body = "".join(f"<tr>{_cells('td', row, alignments)}</tr>" for row in rows)
    sections = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    table_html = f'<table style="border-collapse:collapse">{sections}</table>'
    scrolled = f'<div style="overflow-x:auto" {_FOCUS} aria-label="steps">{table_html}</div>'
    return f"{scrolled}{preformatted(totals)}"


def _cells(tag: str, texts: Sequence[str], alignments: Sequence[str]) -> str:
    """Return a cell for each text.

    Args:
        tag: "td", or "th" with attributes.
        texts: The texts.
        alignments: "left" or "right" for each.
    """
    tag_name = tag.split()[0]
    cells = ""
    for text, alignment in zip(texts, alignments, strict=True):
        cells += f'<{tag} style="{_CELL.format(alignment=alignment)}">{escape(text)}</{tag_name}>'
    return cells


def _block(title: str, *contents: str) -> str:
    """Return parts below a title."""
    head = f'<div style="{_TITLE}">{escape(title)}</div>'
    return f'<div class="xshard" style="display:grid;gap:8px">{head}{"".join(contents)}</div>'


def _folded(title: str, inside: str) -> str:
    """Return what a click on the title shows."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def preformatted(text: str) -> str:
    """Return text as it is, with its spaces and lines."""
    style = "margin:4px 0;font-size:13px;overflow-x:auto;background:none"
    return f'<pre {_FOCUS} aria-label="text" style="{style}">{escape(text)}</pre>'
