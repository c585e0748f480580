"""Pictures as SVG, to scale: the blocks of an array, and a plan; text has the colour of its page."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xshard.formatting import format_bytes, format_seconds
from xshard.layout import Mesh, Sharding
from xshard.notation.overlap import Fold
from xshard.notation.parser import TAGS
from xshard.pictures.elements import (
    CHAR,
    COLOURS,
    GAP,
    LINE,
    SHARED,
    STROKES,
    Drawing,
    Shape,
    colour,
    label,
    label_in,
    line_of,
    rectangle,
    stacked,
)
from xshard.pictures.grid import Picture, Strip, picture, reading, roles_text, title
from xshard.pictures.rows import Lane, devices_text
from xshard.plans.plan import Plan, Stage

MAX_DEVICES, MAX_CARDS = 64, 4  # up to here they are drawn one by one
LONGEST, SHORTEST, LARGEST = (160.0, 240.0), 40.0, 24.0  # pixels: most down and across, least, of a row
OFFSET, LANE, NARROWEST = 16.0, 30.0, 3.0  # pixels between cards, of a lane, of rows in a lane
BAND = 84.0  # height of the messages of a step


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
        step = [line_of(f"↓ {what}"), _messages(stage, plan.itemsize, before, numbers)]
        drawn = stacked([*step, _captioned(after, dims, numbers)])
        parts.append(replace(drawn, body=f'<g data-step="{number}">{drawn.body}</g>'))
    return stacked(parts).svg(f"{plan.src} to {plan.dst} in {len(plan.stages)} steps")


def mesh_svg(mesh: Mesh) -> str:
    """The devices of a mesh, a row for every place along all axes but the last."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = [range(mesh.n_devices)[i : i + columns] for i in range(0, mesh.n_devices, columns)][:MAX_DEVICES]
    heads = [f"{mesh.axes[-1]}={j}" for j in range(columns)][:MAX_DEVICES] if mesh.axes else [""]
    width = max(map(len, heads)) * CHAR + GAP
    shapes = [label((j + 0.5) * width, -6, head) for j, head in enumerate(heads)]
    for i, row in enumerate(rows):
        start = zip(mesh.axes[:-1], mesh.coords(row[0]), strict=False)
        shapes.append(label(-6, i * LARGEST + 16, " ".join(f"{axis}={c}" for axis, c in start), "end"))
        for j, device in enumerate(row[:MAX_DEVICES]):
            box = j * width, i * LARGEST, (j + 1) * width, (i + 1) * LARGEST
            shapes += [rectangle(box, colour((device,))), *label_in(box, str(device), colour((device,)))]
    return Drawing.of(shapes).svg(f"devices of {mesh}")


def grid_drawing(drawn: Picture) -> Drawing:
    """The cards of a picture to scale, lanes for overlaps beside them, and below them what the marks mean."""
    down, across = sides = _sides(drawn)
    cards = min(len(drawn.cards), MAX_CARDS)
    shapes = [shape for card in reversed(range(cards)) for shape in _card(drawn, card, down, across)]
    shapes += [label(-6, -6, down.name, "end"), label(-6, down.pixels + 14, across.name, "end")]
    shapes += [label(x, y + 4, "≈") for x in (0, across.pixels) for y in down.breaks]
    shapes += [label(x, y + 4, "≈") for x in across.breaks for y in (0, down.pixels)]
    for text, start, stop in down.ticks:
        shapes += label_in((-6 - len(text) * CHAR, start, -6, stop), text)
    for text, start, stop in across.ticks:
        shapes += label_in((start, down.pixels + 2, stop, down.pixels + 18), text)
    starts = across.pixels + (cards - 1) * OFFSET + GAP, down.pixels + 2 * LINE
    for side, start in zip(sides, starts, strict=True):
        for number, lane in enumerate(side.lanes):
            shapes += _lane(lane, side, start + number * (LANE + 4), is_down=side is down)
    low = max(shape.box[3] for shape in shapes) + LINE
    lines = enumerate(_captions(drawn, sides))
    return Drawing.of([*shapes, *(label(0, low + n * LINE, line, "start") for n, line in lines)])


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
        end = [self.pixels] if self.strip and self.strip.hidden else []
        return [self.pixels / 2, *end] if self.is_shorter else end

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
    patterns = [role if role in STROKES else "sum" for role, _ in drawn.roles if role in TAGS]
    for i, (top, bottom) in enumerate(down.blocks):
        for j, (left, right) in enumerate(across.blocks):
            device = int(drawn.cards[card, i, j])
            box = x + left, y + top, x + right, y + bottom
            fill = SHARED if drawn.has_replicas else colour((device,))
            yield rectangle(box, fill, f"d{device}", f'data-device="{device}" data-card="{card}"')
            again = "" if drawn.has_replicas else str(device // len(COLOURS) % 4)
            yield from (rectangle(box, f"url(#xs-{name})") for name in (*patterns, again) if name in STROKES)
            above = (*box[:3], min(box[3], box[1] + OFFSET)) if i == 0 else box[:1] * 4
            beside = (max(box[0], box[2] - OFFSET), *box[1:]) if right == across.pixels else box[:1] * 4
            seen = sorted((above, beside), key=lambda part: (part[2] - part[0]) * (part[1] - part[3]))
            texts = (label_in(part, str(device), fill) for part in (seen if card else [box]))
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
        fill = colour(group.owner) if group.owner else "none"
        text = devices_text(lane.devices)
        if group.origin != "own":
            text = group.text or devices_text(group.owner)
            text = f"{'→' if is_fold else '←'}{text}" if group.owner else text
        said = f"d{devices_text(lane.devices)}: {group.rows} rows, {group.origin} {text}"
        dashes = ' stroke-dasharray="3 2"' if group.origin in ("before", "after") else ""
        yield rectangle(box, fill, said, f'data-origin="{group.origin}" data-rows="{group.rows}"{dashes}')
        if group.origin != "own" and group.owner:
            yield rectangle(box, f"url(#xs-{'fold' if is_fold else 'halo'})")
        yield from label_in(box, text, fill)


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


def _messages(stage: Stage, itemsize: int, senders: Sequence[int], receivers: Sequence[int]) -> Drawing:
    """Senders above, receivers below, and a line for what each sends each; all devices by number."""
    pairs = stage.step.pair_traffic(stage.before)
    most, step = max((pair.elements for pair in pairs), default=0), 34.0
    if not most or max(len(senders), len(receivers)) > MAX_DEVICES:
        said = f"{len(pairs)} messages between {len(senders)} devices" if most else "nothing travels"
        return line_of(said)
    shapes = []
    for pair in pairs:
        src, dst = senders[pair.src], receivers[pair.dst]
        box = (pair.src * step + 14, 22.0, pair.dst * step + 14, BAND - 22)
        line = "".join(f'{name}="{n:.0f}" ' for name, n in zip(("x1", "y1", "x2", "y2"), box, strict=True))
        said = f"d{src} to d{dst}: {format_bytes(pair.elements * itemsize)}"
        width = f'stroke-width="{0.5 + 3.5 * pair.elements / most:.1f}"'
        ink = f'stroke="currentColor" stroke-opacity=".55" {width}'
        body = f'<line {line}{ink} data-src="{src}" data-dst="{dst}"><title>{said}</title></line>'
        shapes.append(Shape(body, box))
    for devices, y in ((senders, 12.0), (receivers, BAND - 12)):
        for i, device in enumerate(devices):
            x, fill = i * step + 14, colour((device,))
            body = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11" fill="{fill}"/>'
            shapes += [
                Shape(body, (x - 11, y - 11, x + 11, y + 11)),
                label(x, y + 4, str(device), behind=fill),
            ]
    return Drawing.of(shapes)


def _plan_dims(plan: Plan) -> list[str]:
    """All pictures of a plan show the same dims: the two that are cut most often."""
    every = (plan.source, *(stage.after for stage in plan.stages))
    cut = Counter(dim.name for each in every for dim in each.layout.dims if dim.axes or dim.overlap)
    names = [name for name, _ in cut.most_common()]
    return [*names, *(name for name in reversed(plan.src.names) if name not in names)][:2]


def _captioned(sharding: Sharding, dims: Sequence[str], devices: Sequence[int]) -> Drawing:
    """A picture below its title."""
    names = [name for name in sharding.layout.names if name in dims]
    heading = line_of(title(sharding), bold=True)
    return stacked([heading, grid_drawing(picture(sharding, names, devices))])
