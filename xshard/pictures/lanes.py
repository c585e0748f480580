"""Schedules as SVG: a lane for what a device computes, one for each level of links, and in red where it waits."""

from __future__ import annotations

from xshard.formatting import format_seconds
from xshard.pictures import elements as el
from xshard.schedule import COMPUTING, EXPOSED, Schedule

WIDTH = 720.0  # of all lanes, in pixels
LANE = 28.0
WAITING = "#EE6677"


def schedule_svg(schedule: Schedule) -> str:
    """Draw when a device computes, when it waits, and what travels meanwhile, by simulation."""
    timeline = schedule.timeline()
    lanes = [COMPUTING]
    lanes += sorted({span.lane for span in timeline.spans} - {COMPUTING, EXPOSED})
    shapes = [el.label(-6, i * LANE + 16, lane, "end") for i, lane in enumerate(lanes)]
    for span in timeline.spans:
        if span.end_s == span.begin_s:
            continue
        is_exposed = span.lane == EXPOSED
        row = 0 if is_exposed else lanes.index(span.lane)
        left = WIDTH * span.begin_s / timeline.seconds
        right = WIDTH * span.end_s / timeline.seconds
        box = (left, row * LANE, right, row * LANE + LANE - 6)
        fill = WAITING if is_exposed else el.COLOURS[row % len(el.COLOURS)]
        said = f"{span.name}: {format_seconds(span.end_s - span.begin_s)}"
        shapes.append(el.rectangle(box, fill, said))
        shapes += el.label_in(box, span.name, behind=fill)
    return el.element(el.framed(shapes), f"a step of {format_seconds(timeline.seconds)}")
