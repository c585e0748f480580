"""An array as SVG, to scale: a card for each place along other axes, a lane for a block with an overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xshard.notation.overlap import Fold
from xshard.notation.parser import TAGS
from xshard.pictures import elements as el
from xshard.pictures.elements import Shape
from xshard.pictures.grid import Picture, Strip, reading, roles_text
from xshard.pictures.rows import Lane, devices_text

MAX_CARDS = 4  # up to here they are drawn one by one
LONGEST = (160.0, 240.0)
SHORTEST = 40.0
LARGEST = 24.0  # pixels: most down and across, least, of a row
OFFSET = 16.0
LANE = 30.0
NARROWEST = 3.0  # pixels between cards, of a lane, of rows in a lane


@dataclass(frozen=True)
class Side:
    """A drawn dim and the pixels that it takes. is_shorter: than at the scale of the other dim."""

    strip: Strip
    pixels: float
    is_shorter: bool

    @property
    def unit(self) -> float:
        """Pixels of a row."""
        return self.pixels / self.strip.n_drawn

    @property
    def breaks(self) -> list[float]:
        """The places of marks: rows are missing at the end, or the dim is drawn shorter."""
        return [self.pixels / 2] * self.is_shorter + [self.pixels] * (
            self.strip.n_drawn < self.strip.length
        )

    @property
    def blocks(self) -> list[tuple[float, float]]:
        """The blocks in pixels."""
        return [(start * self.unit, stop * self.unit) for start, stop in self.strip.blocks]


def grid_drawing(drawn: Picture) -> Shape:
    """The cards of a picture to scale, lanes for overlaps beside them, and below them what the marks mean."""
    down, across = sides = _sides(drawn)
    cards = min(len(drawn.cards), MAX_CARDS)
    shapes = [
        shape for card in reversed(range(cards)) for shape in _card(drawn, card, down, across)
    ]
    shapes += [
        el.label(-6, y, side.strip.head, "end")
        for y, side in ((-6, down), (down.pixels + 14, across))
    ]
    shapes += [el.label(x, y + 4, "≈") for x in (0, across.pixels) for y in down.breaks]
    shapes += [el.label(x, y + 4, "≈") for x in across.breaks for y in (0, down.pixels)]
    for text, (start, stop) in zip(down.strip.texts, down.blocks, strict=True):
        shapes += el.label_in((-6 - len(text) * el.CHAR, start, -6, stop), text)
    for text, (start, stop) in zip(across.strip.texts, across.blocks, strict=True):
        shapes += el.label_in((start, down.pixels + 2, stop, down.pixels + 18), text)
    starts = across.pixels + (cards - 1) * OFFSET + el.GAP, down.pixels + 2 * el.LINE
    for side, start in zip(sides, starts, strict=True):
        for number, lane in enumerate(side.strip.lanes):
            shapes += _lane(lane, side, start + number * (LANE + 4), is_down=side is down)
    low = max(shape.box[3] for shape in shapes) + el.LINE
    lines = enumerate(_captions(drawn, sides))
    return el.framed(
        [*shapes, *(el.label(0, low + n * el.LINE, line, "start") for n, line in lines)]
    )


def _sides(drawn: Picture) -> tuple[Side, Side]:
    """Rows and columns at one scale, unless one of them is too short to be seen at the other's."""
    lengths = [strip.n_drawn for strip in drawn.sides]
    unit = min(LARGEST, *(most / n for most, n in zip(LONGEST, lengths, strict=True)))
    pixels = [max(n * unit, SHORTEST) for n in lengths]
    units = [size / n for size, n in zip(pixels, lengths, strict=True)]
    is_shorter = [len(drawn.strips) == 2 and units[i] < 0.99 * units[1 - i] for i in (0, 1)]
    down, across = map(Side, drawn.sides, pixels, is_shorter)
    return down, across


def _card(drawn: Picture, card: int, down: Side, across: Side) -> Iterator[Shape]:
    """The array on one card, which cards in front of it cover but for a strip above and one on the right."""
    x = card * OFFSET
    y = -card * OFFSET
    patterns = [role if role in el.STROKES else "sum" for role, _ in drawn.roles if role in TAGS]
    for i, (top, bottom) in enumerate(down.blocks):
        for j, (left, right) in enumerate(across.blocks):
            device = int(drawn.cards[card, i, j])
            box = x + left, y + top, x + right, y + bottom
            fill = el.SHARED if drawn.has_replicas else el.colour((device,))
            yield el.rectangle(
                box, fill, f"d{device}", f'data-device="{device}" data-card="{card}"'
            )
            again = "" if drawn.has_replicas else str(device // len(el.COLOURS) % 4)
            names = (name for name in (*patterns, again) if name in el.STROKES)
            yield from (el.rectangle(box, f"url(#xs-{name})") for name in names)
            above = (*box[:3], min(box[3], box[1] + OFFSET)) if i == 0 else box[:1] * 4
            beside = (
                (max(box[0], box[2] - OFFSET), *box[1:]) if right == across.pixels else box[:1] * 4
            )
            seen = sorted(
                (above, beside), key=lambda part: (part[2] - part[0]) * (part[1] - part[3])
            )
            texts = (el.label_in(part, str(device), fill) for part in (seen if card else [box]))
            yield from next(filter(None, texts), ())


def _lane(lane: Lane, side: Side, place: float, *, is_down: bool) -> Iterator[Shape]:
    """A block of an overlapping dim, beside its own rows: rows of others in the colour of their owner."""
    is_fold = isinstance(side.strip.dim.overlap, Fold)
    ahead = list(itertools.takewhile(lambda group: group.origin != "own", lane.groups))
    sizes = [max(group.rows * side.unit, NARROWEST) for group in lane.groups]
    ahead = ahead if len(ahead) < len(lane.groups) else []
    start = (lane.start + sum(group.rows for group in ahead)) * side.unit - sum(sizes[: len(ahead)])
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=start))
    for group, (first, last) in zip(lane.groups, edges, strict=True):
        box = (place, first, place + LANE, last) if is_down else (first, place, last, place + LANE)
        fill = el.colour(group.owner) if group.owner else "none"
        arrow = ("→" if is_fold else "←") if group.owner and group.origin != "own" else ""
        text = arrow + (group.text or devices_text(group.owner))
        said = f"d{devices_text(lane.devices)}: {group.rows} rows, {group.origin} {text}"
        dashes = ' stroke-dasharray="3 2"' if group.origin in ("before", "after") else ""
        yield el.rectangle(
            box, fill, said, f'data-origin="{group.origin}" data-rows="{group.rows}"{dashes}'
        )
        if arrow:
            yield el.rectangle(box, f"url(#xs-{'fold' if is_fold else 'halo'})")
        yield from el.label_in(box, text, fill) or el.label_in(
            box, f"{arrow}{devices_text(group.owner)}", fill
        )


def _captions(drawn: Picture, sides: Sequence[Side]) -> Iterator[str]:
    """The meaning of the marks of a picture, a line each."""
    if drawn.roles:
        many = f" ({MAX_CARDS} drawn)" if len(drawn.cards) > MAX_CARDS else ""
        yield f"{len(drawn.cards)} cards{many}: {roles_text(drawn)}"
    for side in sides:
        dim = side.strip.dim
        lanes = side.strip.lanes
        if side.is_shorter:
            yield f"≈: {dim.name} is drawn shorter than at the scale of the other dim"
        if lanes:
            n = drawn.sharding.mesh.size(*dim.axes)
            many = f" ({len(lanes)} of {n} drawn)" if len(lanes) < n else ""
            mark = "→: added at" if isinstance(dim.overlap, Fold) else "←: copied from"
            has_rows = any(
                group.text.strip("-")[:1] == "r" for lane in lanes for group in lane.groups
            )
            yield f"blocks of {dim.name}{many}; {mark} a device{' (r: rows)' * has_rows}"
    yield from reading(drawn)
