"""Elements of SVG with their boxes: rectangles, labels that fit, patterns, colours of devices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple
from zlib import crc32

# Light hues that people who do not see some colours can tell apart; with black text on all of them
# (Paul Tol, "Colour schemes", 2021, scheme "light"). Device numbers say the same without colour.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
SHARED = "#DDDDDD"  # rows whose parts are on several devices
# In pixels.
CHAR = 7.3  # width of a letter
GAP = 10.0  # between pictures
LINE = 16.0  # height of a line of text
BORDER = 1  # around a picture, for strokes on its edge
FONT_SIZES = (12, 9)  # of labels in blocks: the first one that fits
FONT_SIZE = FONT_SIZES[0]

# Patterns over blocks: copied rows, contributions, addends, copies of a block in front, and devices with a
# colour that is used already.
STROKES = {
    "halo": ("M0 8L8 0", 1.6),
    "fold": ("M0 0L8 8M0 8L8 0", 1.2),
    "sum": ("M4 2v4M2 4h4", 1.2),
    "copy": ("M4 4h.01", 2.4),
    "replica": ("M0 0L8 8", 1.2),
    "1": ("M0 4h8", 1.0),
    "2": ("M4 0v8", 1.0),
    "3": ("M0 4h8M4 0v8", 1.0),
}


def _pattern(name: str) -> str:
    """Return the definition of a pattern, which blocks refer to by its id."""
    path, width = STROKES[name]
    size = 12 if name == "sum" else 8
    stroke = f'stroke="#111" stroke-opacity=".4" stroke-width="{width}" stroke-linecap="round"'
    return (
        f'<pattern id="xs-{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" {stroke}/>'
        "</pattern>"
    )


Box = tuple[float, float, float, float]  # left, top, right, bottom


class Shape(NamedTuple):
    """Elements of SVG, and the box that they take."""

    body: str
    box: Box


def colour(devices: Sequence[int]) -> str:
    """Return the colour of one device, or of several together."""
    return COLOURS[devices[0] % len(COLOURS)] if len(devices) == 1 else SHARED


def framed(shapes: Sequence[Shape]) -> Shape:
    """Put shapes into one, moved so that its box begins at 0."""
    left = min(shape.box[0] for shape in shapes)
    top = min(shape.box[1] for shape in shapes)
    right = max(shape.box[2] for shape in shapes)
    bottom = max(shape.box[3] for shape in shapes)
    body = "".join(shape.body for shape in shapes)
    moved = f'<g transform="translate({BORDER - left:.2f} {BORDER - top:.2f})">{body}</g>'
    return Shape(moved, (0, 0, right - left + 2 * BORDER, bottom - top + 2 * BORDER))


def stacked(shapes: Sequence[Shape]) -> Shape:
    """Put framed shapes below each other."""
    body = ""
    top = 0.0
    for shape in shapes:
        body += f'<g transform="translate(0 {top:.1f})">{shape.body}</g>'
        top += shape.box[3] + GAP
    return Shape(body, (0, 0, max(shape.box[2] for shape in shapes), top))


def element(framed: Shape, label: str) -> str:
    """Wrap a drawing as a complete `<svg>` element, with the fill patterns that it uses.

    Args:
        framed: The drawing, whose box begins at 0, 0.
        label: A description for readers who do not see it.
    """
    *_, width, height = framed.box
    patterns = [_pattern(name) for name in STROKES if f"#xs-{name})" in framed.body]
    content = f"<defs>{''.join(patterns)}</defs>{framed.body}"
    # Ids are made of the content: a page has no id twice, and equal pictures have equal text.
    prefix = f"xs{crc32(f'{label}{framed.body}'.encode()):08x}-"
    content = content.replace('id="xs-', f'id="{prefix}').replace("(#xs-", f"(#{prefix}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{escape(label)}" style="max-width:100%;height:auto" font-size="12" '
        f'font-family="ui-monospace, monospace">{content}</svg>'
    )


def line_of(text: str, *, bold: bool = False) -> Shape:
    """Draw a line of text."""
    return framed([label(0, 14, text, "start", bold=bold)])


def rectangle(box: Box, fill: str, tooltip: str = "", attributes: str = "") -> Shape:
    """Make an SVG rectangle.

    Args:
        box: Its left, top, right and bottom edge, in pixels.
        fill: A colour, "none", or a pattern such as "url(#xs-halo)".
        tooltip: The text that appears while the mouse points at it. "": none.
        attributes: Further attributes, as text.
    """
    left, top, right, bottom = box
    position = (
        f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
    )
    stroke = ""
    if not fill.startswith("url"):  # a pattern lies over a rectangle that has its border already
        # Light blocks have dark borders on dark pages, too.
        ink = "currentColor" if fill == "none" else "#111"
        stroke = f' stroke="{ink}" stroke-width=".6"'
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return Shape(f'<rect {position} fill="{fill}"{stroke} {attributes}>{title}</rect>', box)


def label_in(box: Box, text: str, behind: str = "none") -> list[Shape]:
    """Draw text in the middle of a box, smaller if need be; nothing if it does not fit."""
    left, top, right, bottom = box
    x = (left + right) / 2
    middle = (top + bottom) / 2
    for size in FONT_SIZES:
        fits_width = 0 < _text_width(text, size) <= right - left + 1
        fits_height = size - 1 <= bottom - top
        if fits_width and fits_height:
            return [label(x, middle + size / 3, text, behind=behind, size=size)]
    return []


def _text_width(text: str, size: int) -> float:
    return len(text) * CHAR * size / FONT_SIZE


def label(
    x: float,
    y: float,
    text: str,
    anchor: str = "middle",
    *,
    bold: bool = False,
    behind: str = "none",
    size: int = FONT_SIZE,
) -> Shape:
    """Make an SVG text at a place, with an estimate of the box that it fills.

    Args:
        x: Where the text begins, has its middle or ends, by `anchor`, in pixels.
        y: Its base line, in pixels.
        text: The text.
        anchor: "start", "middle" or "end".
        bold: Whether it is bold.
        behind: The colour of the block below, drawn as an outline of the letters, so that they can
            be read over a pattern. "none": no outline.
        size: The size of the font, in pixels.
    """
    style = ' font-weight="bold"' if bold else ""
    if size != FONT_SIZE:
        style += f' font-size="{size}"'
    if behind != "none":
        style += f' stroke="{behind}" stroke-width="4" paint-order="stroke"'
    fill = "currentColor" if behind == "none" else "#111"
    width = _text_width(text, size)
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    body = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{style}>{escape(text)}</text>'
    return Shape(body, (left, y - size, left + width, y + size / 4))
