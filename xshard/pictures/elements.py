"""Elements of SVG with their boxes: rectangles, labels that fit, patterns, colours of devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple
from zlib import crc32

# Light hues that people who do not see some colours can tell apart; with black text on all of them
# (Paul Tol, "Colour schemes", 2021, scheme "light"). Device numbers say the same without colour.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
SHARED = "#DDDDDD"  # what several devices hold
CHAR = 7.3
GAP = 10.0
LINE = 16.0  # pixels: width of a letter, space around, height of a line

# Patterns over blocks: copied rows, contributions, addends, and devices with a colour that is used already.
STROKES = {
    "halo": ("M0 8L8 0", 1.6),
    "fold": ("M0 0L8 8M0 8L8 0", 1.2),
    "sum": ("M4 2v4M2 4h4", 1.2),
    "copy": ("M4 4h.01", 2.4),
    "1": ("M0 4h8", 1.0),
    "2": ("M4 0v8", 1.0),
    "3": ("M0 4h8M4 0v8", 1.0),
}
PATTERNS = {
    name: f'<pattern id="xs-{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">'
    f'<path d="{path}" stroke="#111" stroke-opacity=".4" stroke-width="{width}" stroke-linecap="round"/>'
    "</pattern>"
    for name, (path, width) in STROKES.items()
    for size in [12 if name == "sum" else 8]
}
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Shape(NamedTuple):
    """Elements of SVG, and the box that they take."""

    body: str
    box: Box


def colour(devices: Sequence[int]) -> str:
    """The colour of one device, or of several together."""
    return COLOURS[devices[0] % len(COLOURS)] if len(devices) == 1 else SHARED


def framed(shapes: Sequence[Shape]) -> Shape:
    """Shapes as one, moved so that its box begins at 0."""
    left, top, right, bottom = zip(*(shape.box for shape in shapes), strict=True)
    body = "".join(shape.body for shape in shapes)
    moved = f'<g transform="translate({1 - min(left):.2f} {1 - min(top):.2f})">{body}</g>'
    return Shape(moved, (0, 0, max(right) - min(left) + 2, max(bottom) - min(top) + 2))


def stacked(parts: Sequence[Shape]) -> Shape:
    """Framed shapes below each other."""
    tops = list(itertools.accumulate((part.box[3] + GAP for part in parts), initial=0.0))
    places = zip(parts, tops, strict=False)
    body = "".join(f'<g transform="translate(0 {top:.1f})">{part.body}</g>' for part, top in places)
    return Shape(body, (0, 0, max(part.box[2] for part in parts), tops[-1]))


def element(framed: Shape, label: str) -> str:
    """The `<svg>` of a framed shape. label: a description for readers who do not see it."""
    *_, width, height = framed.box
    patterns = (PATTERNS[name] for name in STROKES if f"#xs-{name})" in framed.body)
    own = f"xs{crc32(f'{label}{framed.body}'.encode()):08x}-"  # a page has no id twice
    inside = f"<defs>{''.join(patterns)}</defs>{framed.body}"
    inside = inside.replace('id="xs-', f'id="{own}').replace("(#xs-", f"(#{own}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{escape(label)}" style="max-width:100%;height:auto" font-size="12" '
        f'font-family="ui-monospace, monospace">{inside}</svg>'
    )


def line_of(text: str, *, bold: bool = False) -> Shape:
    """A line of text."""
    return framed([label(0, 14, text, "start", bold=bold)])


def rectangle(box: Box, fill: str, said: str = "", more: str = "") -> Shape:
    """A rectangle. said: its text for a pointer; more: its attributes."""
    left, top, right, bottom = box
    place = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
    ink = (
        "currentColor" if fill == "none" else "#111"
    )  # light blocks have dark borders on dark pages, too
    stroke = "" if fill.startswith("url") else f' stroke="{ink}" stroke-width=".6"'
    inside = f"<title>{escape(said)}</title>" if said else ""
    return Shape(f'<rect {place} fill="{fill}"{stroke} {more}>{inside}</rect>', box)


def label_in(box: Box, text: str, behind: str = "none") -> list[Shape]:
    """Text in the middle of a box, smaller if need be; none if it does not fit."""
    left, top, right, bottom = box
    for size in (12, 9):
        if 0 < len(text) * CHAR * size / 12 <= right - left + 1 and size - 1 <= bottom - top:
            return [
                label(
                    (left + right) / 2,
                    (top + bottom) / 2 + size / 3,
                    text,
                    behind=behind,
                    size=size,
                )
            ]
    return []


def label(
    x: float,
    y: float,
    text: str,
    anchor: str = "middle",
    *,
    bold: bool = False,
    behind: str = "none",
    size: int = 12,
) -> Shape:
    """Text at a place. behind: the colour of its block, which is drawn around it, over patterns."""
    style = ' font-weight="bold"' if bold else ""
    style += f' font-size="{size}"' if size != 12 else ""
    if behind != "none":
        style += f' stroke="{behind}" stroke-width="4" paint-order="stroke"'
    fill = "currentColor" if behind == "none" else "#111"
    width = len(text) * CHAR * size / 12
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    body = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{style}>{escape(text)}</text>'
    return Shape(body, (left, y - size, left + width, y + size / 4))
