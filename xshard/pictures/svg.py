"""Pictures as SVG, to scale: the blocks of an array, and a plan; text has the colour of its page."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh, Sharding
from xshard.notation.overlap import Fold
from xshard.notation.parser import TAGS
from xshard.pictures.grid import Lane, Picture, Strip, devices_text, picture, reading, roles_text, title
from xshard.plans.plan import Plan, Stage

# Light hues that people who do not see some colours can tell apart; with black text on all of them
# (Paul Tol, "Colour schemes", 2021, scheme "light"). Device numbers say the same without colour.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
SHARED = "#DDDDDD"  # what several devices hold
MAX_DEVICES, MAX_CARDS = 64, 4  # up to here they are drawn one by one
CHAR, GAP, LINE = 7.3, 10.0, 16.0  # pixels: width of a letter, space around, height of a line
LONGEST, SHORTEST, LARGEST = (160.0, 240.0), 40.0, 24.0  # pixels: most down and across, least, of a row
OFFSET, LANE, NARROWEST = 16.0, 30.0, 3.0  # pixels between cards, of a lane, of rows in a lane
BAND = 84.0  # height of the messages of a step

# Patterns over blocks: copied rows, contributions, addends, and devices with a colour that is used already.
_STROKES = {
    "halo": ("M0 8L8 0", 1.6),
    "fold": ("M0 0L8 8M0 8L8 0", 1.2),
    "sum": ("M4 2v4M2 4h4", 1.2),
    "copy": ("M4 4h.01", 2.4),
    "1": ("M0 4h8", 1.0),
    "2": ("M4 0v8", 1.0),
    "3": ("M0 4h8M4 0v8", 1.0),
}
PATTERNS = "".join(
    f'<pattern id="xs-{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse"><path d="{path}" '
    f'stroke="#111" stroke-opacity=".4" stroke-width="{width}" stroke-linecap="round"/></pattern>'
    for name, (path, width) in _STROKES.items()
    for size in [12 if name == "sum" else 8]
)


Box = tuple[float, float, float, float]  # left, top, right, bottom


class Shape(NamedTuple):
    """Elements of SVG, and the box that they take."""

    body: str
    box: Box


@dataclass(frozen=True)
class Drawing:
    """Elements of SVG and the pixels that they take."""

    body: str
    width: float
    height: float

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> Drawing:
        """Shapes, moved so that the box of all begins at 0."""
        left, top, right, bottom = zip(*(shape.box for shape in shapes), strict=True)
        body = "".join(shape.body for shape in shapes)
        moved = f'<g transform="translate({1 - min(left):.2f} {1 - min(top):.2f})">{body}</g>'
        return cls(moved, max(right) - min(left) + 2, max(bottom) - min(top) + 2)

    def svg(self, label: str) -> str:
        """The element. label: a description for readers who do not see it."""
        size = f"0 0 {self.width:.0f} {self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{self.width:.0f}" role="img" '
            f'aria-label="{escape(label)}" style="max-width:100%;height:auto" font-size="12" '
            f'font-family="ui-monospace, monospace"><defs>{PATTERNS}</defs>{self.body}</svg>'
        )


def sharding_svg(drawn: Picture) -> str:
    """The blocks of an array, each a share of its area, on one card for each place along other axes."""
    return grid_drawing(drawn).svg(title(drawn.sharding))


def plan_svg(plan: Plan) -> str:
    """An array's blocks before and after every step; between them lines, thicker for more bytes."""
    dims = _plan_dims(plan)
    numbers, parts = plan.src_devices, [_captioned(plan.source, dims, plan.src_devices)]
    for number, (stage, cost) in enumerate(zip(plan.stages, plan.prices, strict=True), start=1):
        before, numbers = numbers, plan.dst_devices if stage.step is plan.transfer else numbers
        what = f"{stage.step}: {format_bytes(cost.received_bytes)}, {format_seconds(cost.seconds)}"
        # The last layout as the user wrote it: the stages are in normal form.
        after = plan.target if number == len(plan.stages) else stage.after
        step = [_line(f"↓ {what}"), _messages(stage, plan.itemsize, before, numbers)]
        drawn = _stacked([*step, _captioned(after, dims, numbers)])
        parts.append(replace(drawn, body=f'<g data-step="{number}">{drawn.body}</g>'))
    return _stacked(parts).svg(f"{plan.src} to {plan.dst} in {len(plan.stages)} steps")


def mesh_svg(mesh: Mesh) -> str:
    """The devices of a mesh, a row for every place along all axes but the last."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = [range(mesh.n_devices)[i : i + columns] for i in range(0, mesh.n_devices, columns)][:MAX_DEVICES]
    heads = [f"{mesh.axes[-1]}={j}" for j in range(columns)][:MAX_DEVICES] if mesh.axes else [""]
    width = max(map(len, heads)) * CHAR + GAP
    shapes = [_text((j + 0.5) * width, -6, head) for j, head in enumerate(heads)]
    for i, row in enumerate(rows):
        start = zip(mesh.axes[:-1], mesh.coords(row[0]), strict=False)
        shapes.append(_text(-6, i * LARGEST + 16, " ".join(f"{axis}={c}" for axis, c in start), "end"))
        for j, device in enumerate(row[:MAX_DEVICES]):
            box = j * width, i * LARGEST, (j + 1) * width, (i + 1) * LARGEST
            shapes += [_rectangle(box, _colour((device,))), *_inside(box, str(device), _colour((device,)))]
    return Drawing.of(shapes).svg(f"devices of {mesh}")


def grid_drawing(drawn: Picture) -> Drawing:
    """The cards of a picture to scale, lanes for overlaps beside them, and below them what the marks mean."""
    down, across = sides = _sides(drawn)
    cards = min(len(drawn.cards), MAX_CARDS)
    shapes = [shape for card in reversed(range(cards)) for shape in _card(drawn, card, down, across)]
    shapes += [_text(-6, -6, down.name, "end"), _text(-6, down.pixels + 14, across.name, "end")]
    shapes += [_text(x, y + 4, "≈") for x in (0, across.pixels) for y in down.breaks]
    shapes += [_text(x, y + 4, "≈") for x in across.breaks for y in (0, down.pixels)]
    for text, start, stop in down.ticks:
        shapes += _inside((-6 - len(text) * CHAR, start, -6, stop), text)
    for text, start, stop in across.ticks:
        shapes += _inside((start, down.pixels + 2, stop, down.pixels + 18), text)
    starts = across.pixels + (cards - 1) * OFFSET + GAP, down.pixels + 2 * LINE
    for side, start in zip(sides, starts, strict=True):
        for number, lane in enumerate(side.lanes):
            shapes += _lane(lane, side, start + number * (LANE + 4), is_down=side is down)
    low = max(shape.box[3] for shape in shapes) + LINE
    lines = enumerate(_captions(drawn, sides))
    return Drawing.of([*shapes, *(_text(0, low + n * LINE, line, "start") for n, line in lines)])


@dataclass(frozen=True)
class Side:
    """A drawn dim and the pixels that it takes; without a strip the one side of an array of fewer dims."""

    strip: Strip | None
    lanes: tuple[Lane, ...]
    pixels: float
    is_shorter: bool  # than at the scale of the other dim

    @property
    def unit(self) -> float:
        """Pixels of a row."""
        rows = self.strip.length - self.strip.hidden if self.strip else 1
        return self.pixels / max(rows, 1)

    @property
    def name(self) -> str:
        return f"{self.strip.dim.name} {self.strip.length}" if self.strip else ""

    @property
    def breaks(self) -> list[float]:
        """The places of marks: rows are missing at the end, or the dim is drawn shorter."""
        ends = [self.pixels] if self.strip and self.strip.hidden else []
        return [self.pixels / 2, *ends] if self.is_shorter else ends

    @property
    def blocks(self) -> list[tuple[float, float]]:
        """The blocks in pixels."""
        blocks = self.strip.blocks if self.strip else ((0, 1),)
        return [(start * self.unit, stop * self.unit) for start, stop in blocks]

    @property
    def ticks(self) -> list[tuple[str, float, float]]:
        """The rows of every block as text, and the block in pixels."""
        rows = [f"{a}-{b - 1}" if a < b - 1 else f"{a}" for a, b in self.strip.blocks] if self.strip else []
        return [(text, *block) for text, block in zip(rows, self.blocks, strict=False)]


def _sides(drawn: Picture) -> tuple[Side, Side]:
    """Rows and columns at one scale, unless one of them is too short to be seen at the other's."""
    strips = [None, None, *drawn.strips][-2:]
    lanes = [(), (), *drawn.lanes][-2:]
    lengths = [strip.length - strip.hidden if strip else 1 for strip in strips]
    unit = min(LARGEST, *(most / max(n, 1) for most, n in zip(LONGEST, lengths, strict=True)))
    pixels = [max(n * unit, SHORTEST) for n in lengths]
    units = [size / max(n, 1) for size, n in zip(pixels, lengths, strict=True)]
    is_shorter = [None not in strips and units[i] < 0.99 * units[1 - i] for i in (0, 1)]
    down, across = map(Side, strips, lanes, pixels, is_shorter)
    return down, across


def _card(drawn: Picture, card: int, down: Side, across: Side) -> Iterator[Shape]:
    """The array on one card, which cards in front of it cover but for a strip above and one on the right."""
    x, y = card * OFFSET, -card * OFFSET
    patterns = [role if role in _STROKES else "sum" for role, _ in drawn.roles if role in TAGS]
    for i, (top, bottom) in enumerate(down.blocks):
        for j, (left, right) in enumerate(across.blocks):
            device = int(drawn.cards[card, i, j])
            box = x + left, y + top, x + right, y + bottom
            fill = SHARED if drawn.has_replicas else _colour((device,))
            yield _rectangle(box, fill, f"d{device}", f'data-device="{device}" data-card="{card}"')
            again = "" if drawn.has_replicas else str(device // len(COLOURS) % 4)
            yield from (
                _rectangle(box, f"url(#xs-{name})") for name in (*patterns, again) if name in _STROKES
            )
            above = (*box[:3], min(box[3], box[1] + OFFSET)) if i == 0 else box[:1] * 4
            beside = (max(box[0], box[2] - OFFSET), *box[1:]) if right == across.pixels else box[:1] * 4
            seen = sorted((above, beside), key=lambda part: (part[2] - part[0]) * (part[1] - part[3]))
            texts = (_inside(part, str(device), fill) for part in (seen if card else [box]))
            yield from next(filter(None, texts), ())


def _lane(lane: Lane, side: Side, place: float, *, is_down: bool) -> Iterator[Shape]:
    """A block of an overlapping dim, beside its own rows: rows of others in the colour of their owner."""
    assert side.strip is not None
    is_fold = isinstance(side.strip.dim.overlap, Fold)
    ahead = list(itertools.takewhile(lambda group: group.origin != "own", lane.groups))
    sizes = [max(group.rows * side.unit, NARROWEST) for group in lane.groups]
    ahead = ahead if len(ahead) < len(lane.groups) else []
    start = (lane.start + sum(group.rows for group in ahead)) * side.unit - sum(sizes[: len(ahead)])
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=start))
    for group, (first, last) in zip(lane.groups, edges, strict=True):
        box = (place, first, place + LANE, last) if is_down else (first, place, last, place + LANE)
        fill = _colour(group.owner) if group.owner else "none"
        text = devices_text(lane.devices)
        if group.origin != "own":
            text = group.text or devices_text(group.owner)
            text = f"{'→' if is_fold else '←'}{text}" if group.owner else text
        said = f"d{devices_text(lane.devices)}: {group.rows} rows, {group.origin} {text}"
        dashes = ' stroke-dasharray="3 2"' if group.origin in ("before", "after") else ""
        yield _rectangle(box, fill, said, f'data-origin="{group.origin}" data-rows="{group.rows}"{dashes}')
        if group.origin != "own" and group.owner:
            yield _rectangle(box, f"url(#xs-{'fold' if is_fold else 'halo'})")
        yield from _inside(box, text, fill)


def _captions(drawn: Picture, sides: Sequence[Side]) -> Iterator[str]:
    """The meaning of the marks of a picture, a line each."""
    if drawn.roles:
        many = f" ({MAX_CARDS} drawn)" if len(drawn.cards) > MAX_CARDS else ""
        yield f"{len(drawn.cards)} cards{many}: {roles_text(drawn)}"
    for side in sides:
        if side.strip and side.is_shorter:
            yield f"≈: {side.strip.dim.name} is drawn shorter than at the scale of the other dim"
        if side.strip and side.lanes:
            n = drawn.sharding.mesh.size(*side.strip.dim.axes)
            many = f" ({len(side.lanes)} of {n} drawn)" if len(side.lanes) < n else ""
            is_fold = isinstance(side.strip.dim.overlap, Fold)
            mark = "→: added there" if is_fold else "←: copied from"
            yield f"blocks of {side.strip.dim.name}{many}; {mark}"
    yield from reading(drawn)


def _colour(devices: Sequence[int]) -> str:
    return COLOURS[devices[0] % len(COLOURS)] if len(devices) == 1 else SHARED


def _messages(stage: Stage, itemsize: int, senders: Sequence[int], receivers: Sequence[int]) -> Drawing:
    """Senders above, receivers below, and a line for what each sends each; all devices by number."""
    pairs = stage.step.pair_traffic(stage.before)
    most, step = max((pair.elements for pair in pairs), default=0), 34.0
    if not most or max(len(senders), len(receivers)) > MAX_DEVICES:
        said = f"{len(pairs)} messages between {len(senders)} devices" if most else "nothing travels"
        return _line(said)
    shapes = []
    for pair in pairs:
        src, dst = senders[pair.src], receivers[pair.dst]
        ends = (pair.src * step + 14, 22.0, pair.dst * step + 14, BAND - 22)
        line = "".join(f'{name}="{n:.0f}" ' for name, n in zip(("x1", "y1", "x2", "y2"), ends, strict=True))
        said = f"d{src} to d{dst}: {format_bytes(pair.elements * itemsize)}"
        width = f'stroke-width="{0.5 + 3.5 * pair.elements / most:.1f}"'
        ink = f'stroke="currentColor" stroke-opacity=".55" {width}'
        body = f'<line {line}{ink} data-src="{src}" data-dst="{dst}"><title>{said}</title></line>'
        shapes.append(Shape(body, ends))
    for devices, y in ((senders, 12.0), (receivers, BAND - 12)):
        for i, device in enumerate(devices):
            x, fill = i * step + 14, _colour((device,))
            body = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11" fill="{fill}"/>'
            shapes += [
                Shape(body, (x - 11, y - 11, x + 11, y + 11)),
                _text(x, y + 4, str(device), behind=fill),
            ]
    return Drawing.of(shapes)


def _plan_dims(plan: Plan) -> list[str]:
    """All pictures of a plan show the same dims: the two that are cut most often."""
    every = (plan.source, *(stage.after for stage in plan.stages))
    cut = Counter(dim.name for at in every for dim in at.layout.dims if dim.axes or dim.overlap)
    names = [name for name, _ in cut.most_common()]
    return [*names, *(name for name in reversed(plan.src.names) if name not in names)][:2]


def _captioned(sharding: Sharding, dims: Sequence[str], devices: Sequence[int]) -> Drawing:
    """A picture below its title."""
    names = [name for name in sharding.layout.names if name in dims]
    heading = _line(title(sharding), bold=True)
    return _stacked([heading, grid_drawing(picture(sharding, names, devices))])


def _stacked(parts: Sequence[Drawing]) -> Drawing:
    tops = list(itertools.accumulate((part.height + GAP for part in parts), initial=0.0))
    places = zip(parts, tops, strict=False)
    body = "".join(f'<g transform="translate(0 {top:.1f})">{part.body}</g>' for part, top in places)
    return Drawing(body, max(part.width for part in parts), tops[-1])


def _line(text: str, *, bold: bool = False) -> Drawing:
    return Drawing.of([_text(0, 14, text, "start", bold=bold)])


def _rectangle(box: Box, fill: str, said: str = "", more: str = "") -> Shape:
    """A rectangle. said: what it shows when it is pointed at; more: attributes."""
    left, top, right, bottom = box
    place = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
    stroke = "" if fill.startswith("url") else ' stroke="currentColor" stroke-width=".6"'
    inside = f"<title>{escape(said)}</title>" if said else ""
    return Shape(f'<rect {place} fill="{fill}"{stroke} {more}>{inside}</rect>', box)


def _inside(box: Box, text: str, behind: str = "none") -> list[Shape]:
    """Text in the middle of a box, smaller if need be; none if it does not fit."""
    left, top, right, bottom = box
    for size in (12, 9):
        if len(text) * CHAR * size / 12 <= right - left + 1 and size - 1 <= bottom - top:
            return [_text((left + right) / 2, (top + bottom) / 2 + size / 3, text, behind=behind, size=size)]
    return []


def _text(
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
