"""An array as SVG, to scale: a card for each place along other axes, a lane for a block with an overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xshard.notation.overlap import Fold
from xshard.notation.parser import TAGS
from xshard.pictures import elements as el
from xshard.pictures.elements import Shape
from xshard.pictures.grid import Picture, Strip, reading, roles_text
from xshard.pictures.rows import Lane, RowGroup, devices_text

MAX_CARDS = 4  # up to here they are drawn one by one
# In pixels.
LONGEST = (160.0, 240.0)  # down and across
SHORTEST = 40.0  # of a side
LARGEST = 24.0  # of a row
OFFSET = 16.0  # between cards
LANE = 30.0  # breadth
NARROWEST = 3.0  # rows in a lane
TEXT_GAP = 6.0  # between a side and the text beside it


class ScaledStrip(NamedTuple):
    """A drawn dim and the pixels that it takes.

    Attributes:
        strip: The dim, with its blocks.
        pixels: Its length in the drawing.
        is_shorter: Whether it is drawn shorter than at the scale of the other dim.
    """

    strip: Strip
    pixels: float
    is_shorter: bool

    @property
    def unit(self) -> float:
        """Pixels of a row."""
        return self.pixels / self.strip.n_drawn

    @property
    def breaks(self) -> list[float]:
        """Where marks stand, in pixels: the dim is drawn shorter, or rows are missing at the end."""
        positions = []
        if self.is_shorter:
            positions.append(self.pixels / 2)
        if self.strip.n_drawn < self.strip.length:
            positions.append(self.pixels)
        return positions

    @property
    def blocks(self) -> list[tuple[float, float]]:
        """The blocks in pixels: (start, stop)."""
        return [(start * self.unit, stop * self.unit) for start, stop in self.strip.blocks]


def grid_drawing(drawn: Picture) -> Shape:
    """Draw as SVG which device holds which block of an array, to scale.

    One dim goes down, one across. If devices hold replicas or other dims are sharded, there are
    several such drawings (cards), one behind the other. Dims whose blocks overlap have a strip
    (lane) for each block beside the drawing. Sentences below say what each mesh axis does.
    """
    scaled_strips = _scaled_strips(drawn)
    down, across = scaled_strips
    n_cards = min(len(drawn.cards), MAX_CARDS)
    shapes: list[Shape] = []
    # The front card, 0, comes last: what is drawn later covers what was drawn before.
    for card in reversed(range(n_cards)):
        shapes += _card(drawn, card, down, across)
    shapes += _side_texts(down, across)
    first_edge = across.pixels + (n_cards - 1) * OFFSET + el.GAP
    shapes += _lanes(drawn, down, first_edge, is_down=True)
    shapes += _lanes(drawn, across, down.pixels + 2 * el.LINE, is_down=False)
    captions_top = max(shape.box[3] for shape in shapes) + el.LINE
    for line_index, line in enumerate(_captions(drawn, scaled_strips)):
        shapes.append(el.label(0, captions_top + line_index * el.LINE, line, "start"))
    return el.framed(shapes)


def _side_texts(down: ScaledStrip, across: ScaledStrip) -> Iterator[Shape]:
    """Draw the dims' names, signs for rows that are missing, and the rows of every block."""
    yield el.label(-TEXT_GAP, -TEXT_GAP, down.strip.head, "end")
    yield el.label(-TEXT_GAP, down.pixels + 14, across.strip.head, "end")
    # On both edges of the array.
    breaks_down = itertools.product((0, across.pixels), down.breaks)
    breaks_across = itertools.product(across.breaks, (0, down.pixels))
    for x, y in (*breaks_down, *breaks_across):
        yield el.label(x, y + 4, "≈")
    for text, (start, stop) in zip(down.strip.texts, down.blocks, strict=True):
        yield from el.label_in((-TEXT_GAP - len(text) * el.CHAR, start, -TEXT_GAP, stop), text)
    for text, (start, stop) in zip(across.strip.texts, across.blocks, strict=True):
        yield from el.label_in((start, down.pixels + 2, stop, down.pixels + 18), text)


def _scaled_strips(drawn: Picture) -> tuple[ScaledStrip, ScaledStrip]:
    """Draw rows and columns at one scale, unless one of them is too short to be seen at the other's."""
    n_rows, n_columns = (strip.n_drawn for strip in drawn.down_and_across)
    pixels_per_row = min(LARGEST, LONGEST[0] / n_rows, LONGEST[1] / n_columns)
    height = max(n_rows * pixels_per_row, SHORTEST)
    width = max(n_columns * pixels_per_row, SHORTEST)
    row_unit = height / n_rows
    column_unit = width / n_columns
    has_two_dims = len(drawn.strips) == 2
    down, across = drawn.down_and_across
    return (
        ScaledStrip(down, height, has_two_dims and row_unit < 0.99 * column_unit),
        ScaledStrip(across, width, has_two_dims and column_unit < 0.99 * row_unit),
    )


def _card(drawn: Picture, card: int, down: ScaledStrip, across: ScaledStrip) -> Iterator[Shape]:
    """Yield the blocks of one card: a rectangle with the device's number for each block.

    Where devices hold replicas, or other dims are sharded, several devices have one place in the
    drawing. So it is a stack of cards, each with one of them. Card 1 is moved up and to the right of
    card 0, which covers it but for its first rows and last columns: numbers are written there.

    Args:
        drawn: The picture, with the device of each block.
        card: The number of the card; 0 is in front.
        down: The blocks of the dim that goes down, in pixels.
        across: The blocks of the other dim.
    """
    x = card * OFFSET
    y = -card * OFFSET
    for row_index, (top, bottom) in enumerate(down.blocks):
        for column_index, (left, right) in enumerate(across.blocks):
            device = int(drawn.cards[card, row_index, column_index])
            box = (x + left, y + top, x + right, y + bottom)
            fill = el.colour(drawn.first_holders_of([device]))
            data = f'data-device="{device}" data-card="{card}"'
            yield el.rectangle(box, fill, f"d{device}", data)
            for name in _block_patterns(drawn, device):
                yield el.rectangle(box, f"url(#xs-{name})")
            label_boxes = [box]  # where the number may be written, the best first
            if card:  # cards in front cover a part of this block
                is_last = right == across.pixels
                label_boxes = _visible_parts(
                    box, is_first_row=row_index == 0, is_last_column=is_last
                )
            # `label_in` returns no shapes for a box that is too small.
            for label_box in label_boxes:
                label = el.label_in(label_box, str(device), fill)
                if label:
                    yield from label
                    break


def _block_patterns(drawn: Picture, device: int) -> Iterator[str]:
    """Name the patterns over a block: what its values are, whether its colour is used, and a copy's."""
    for role, _ in drawn.roles:
        if role in TAGS:
            yield role if role in el.STROKES else "sum"
    coloured_as = drawn.first_holder[device]
    # There are fewer colours than devices: with patterns "1" to "3" there are four times as many.
    pattern = str(coloured_as // len(el.COLOURS) % 4)
    if pattern in el.STROKES:
        yield pattern
    if coloured_as != device:
        yield "replica"


def _visible_parts(box: el.Box, *, is_first_row: bool, is_last_column: bool) -> list[el.Box]:
    """Return the parts of a block that cards in front leave free, the larger one first."""
    left, top, right, bottom = box
    empty_box = (left, left, left, left)
    above = (left, top, right, min(bottom, top + OFFSET)) if is_first_row else empty_box
    beside = (max(left, right - OFFSET), top, right, bottom) if is_last_column else empty_box
    return sorted((above, beside), key=_area, reverse=True)


def _area(box: el.Box) -> float:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def _lanes(
    drawn: Picture, scaled_strip: ScaledStrip, first_edge: float, *, is_down: bool
) -> Iterator[Shape]:
    """Draw the lanes of a dim side by side."""
    for lane_index, lane in enumerate(scaled_strip.strip.lanes):
        edge = first_edge + lane_index * (LANE + 4)
        yield from _lane(drawn, lane, scaled_strip, edge, is_down=is_down)


def _lane(
    drawn: Picture, lane: Lane, scaled_strip: ScaledStrip, edge: float, *, is_down: bool
) -> Iterator[Shape]:
    """Yield a strip that shows which rows one block holds, where blocks overlap (halos).

    A block of rows 4-7 with a halo of 1 has the groups 3, 4-7 and 8: each group is a rectangle with
    the colour of the device that owns its rows. Rows outside of the array have a dashed border.

    Args:
        drawn: The picture.
        lane: The block's groups of rows, and the devices that hold it.
        scaled_strip: The dim, with its scale in pixels per row.
        edge: Where the strip stands, in pixels: its left edge if the dim goes down, else its top.
        is_down: Whether the dim goes down, and not across.
    """
    group_pixels = [max(group.rows * scaled_strip.unit, NARROWEST) for group in lane.groups]
    edges = itertools.pairwise(
        itertools.accumulate(group_pixels, initial=_lane_top(lane, scaled_strip, group_pixels))
    )
    # A halo receives rows from their owner; a fold adds its rows to the owner's.
    is_fold = isinstance(scaled_strip.strip.dim.overlap, Fold)
    arrow = "→" if is_fold else "←"
    pattern = "fold" if is_fold else "halo"
    for group, (group_start, group_stop) in zip(lane.groups, edges, strict=True):
        box = (group_start, edge, group_stop, edge + LANE)
        if is_down:
            box = (edge, group_start, edge + LANE, group_stop)
        fill = el.colour(drawn.first_holders_of(group.owner)) if group.owner else "none"
        holder = f"d{devices_text(lane.devices)}"
        yield from _row_group(group, box, fill, holder, arrow, pattern)


def _row_group(
    group: RowGroup, box: el.Box, fill: str, holder: str, arrow: str, pattern: str
) -> Iterator[Shape]:
    """Yield a rectangle for rows that one device owns, with its number, within another one's block.

    A group of rows in the block of device 0 that device 1 owns has the colour of device 1, a pattern
    over it, and the label "←1": device 0 receives these rows.

    Args:
        group: The rows. `origin` is "own", "near" (of a neighbour), or "before" or "after" the array.
        box: Their place.
        fill: The colour of their owner, "none" without one.
        holder: The devices that hold the block, as text.
        arrow: Says which way rows of another owner move: "←" to the holder, "→" to the owner.
        pattern: The name of the pattern over rows of another owner.
    """
    is_of_another = bool(group.owner) and group.origin != "own"
    if not is_of_another:
        arrow = ""
    owner = devices_text(group.owner)
    text = f"{arrow}{group.text or owner}"
    attributes = f'data-origin="{group.origin}" data-rows="{group.rows}"'
    if group.origin in ("before", "after"):
        attributes += ' stroke-dasharray="3 2"'  # outside the array
    yield el.rectangle(box, fill, f"{holder}: {group.rows} rows, {group.origin} {text}", attributes)
    if is_of_another:
        yield el.rectangle(box, f"url(#xs-{pattern})")
    label = el.label_in(box, text, fill)
    # `label_in` returns no shapes if the text is too long for the box: the owner alone is shorter.
    yield from label if label else el.label_in(box, f"{arrow}{owner}", fill)


def _lane_top(lane: Lane, scaled_strip: ScaledStrip, group_pixels: Sequence[float]) -> float:
    """Return where a lane begins, so that its own rows are beside the same rows of the array."""
    n_ahead = 0
    rows_ahead = 0
    for group in lane.groups:
        if group.origin == "own":
            break
        n_ahead += 1
        rows_ahead += group.rows
    if n_ahead == len(lane.groups):  # no own rows
        return lane.start * scaled_strip.unit
    return (lane.start + rows_ahead) * scaled_strip.unit - sum(group_pixels[:n_ahead])


def _captions(drawn: Picture, scaled_strips: Sequence[ScaledStrip]) -> Iterator[str]:
    """Say what the marks of a picture mean, a line each."""
    if drawn.roles:
        n_cards = len(drawn.cards)
        drawn_text = f" ({MAX_CARDS} drawn)" if n_cards > MAX_CARDS else ""
        yield f"{n_cards} cards{drawn_text}: {roles_text(drawn)}"
    if len(set(drawn.first_holder.values())) < len(drawn.first_holder):
        yield "hatched: a copy, in the colour of the device in front"
    for scaled_strip in scaled_strips:
        if scaled_strip.is_shorter:
            yield f"≈: {scaled_strip.strip.dim.name} is drawn shorter than at the scale of the other dim"
        if scaled_strip.strip.lanes:
            yield _caption_of_lanes(drawn, scaled_strip.strip)
    yield from reading(drawn)


def _caption_of_lanes(drawn: Picture, strip: Strip) -> str:
    """Say what the arrows in lanes mean, and the letter r."""
    dim = strip.dim
    n_blocks = drawn.sharding.mesh.size(*dim.axes)
    n_lanes = len(strip.lanes)
    drawn_text = f" ({n_lanes} of {n_blocks} drawn)" if n_lanes < n_blocks else ""
    arrow_text = "→: added at" if isinstance(dim.overlap, Fold) else "←: copied from"
    letter_text = ""
    for lane in strip.lanes:
        if any(group.text.strip("-").startswith("r") for group in lane.groups):
            letter_text = " (r: rows)"
    return f"blocks of {dim.name}{drawn_text}; {arrow_text} a device{letter_text}"
