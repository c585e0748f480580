"""The figure of the README: one move, its gradient and its bytes, drawn from the plan.

python docs/site/figure.py      writes docs/images/move.svg
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

import xshard as xs

MOVE, MESH, SHAPE = "s/zigzag(cp) c -> s c/cp", xs.Mesh(cp=4), (16, 8)
PATH = Path(__file__).parents[1] / "images" / "move.svg"
CELL = 14  # pixels of a row and of a column
STYLE = """<style>
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace; fill: #1f2328 }
  .name { font-weight: 600 } .soft { fill: #59636e } .line { stroke: #59636e; fill: none; stroke-width: 1.5 }
  .head { fill: #59636e } rect { stroke: #ffffff; stroke-width: 1.5 }
  .d0 { fill: #9ec5fe } .d1 { fill: #ffd8a8 } .d2 { fill: #b2e2b8 } .d3 { fill: #e5b8f4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .soft, .head { fill: #9198a1 } .line { stroke: #9198a1 } rect { stroke: #0d1117 }
    .d0 { fill: #1f4b8e } .d1 { fill: #8a5a1c } .d2 { fill: #22683a } .d3 { fill: #6d3a86 }
  }
</style>"""


def owners(layout: xs.Layout) -> np.ndarray:
    """The device that holds each element of the array."""
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    owner = np.full(SHAPE, -1)
    for device, block in enumerate(xs.reference.scatter(numbers, layout, MESH)):
        owner.flat[block] = device
    return owner


def array(layout: xs.Layout, left: int, top: int) -> list[str]:
    """A rectangle of the array to scale, each run of rows or columns of a device in its colour."""
    owner, lines = owners(layout), []
    by_rows = (owner == owner[:, :1]).all()
    line = owner[:, 0] if by_rows else owner[0]
    starts = [0, *(np.flatnonzero(np.diff(line)) + 1), len(line)]
    for start, stop in pairwise(starts):
        x, y, width, height = (
            (0, start, SHAPE[1], stop - start) if by_rows else (start, 0, stop - start, SHAPE[0])
        )
        x, y, width, height = left + x * CELL, top + y * CELL, width * CELL, height * CELL
        lines.append(
            f'<rect class="d{line[start]}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
        )
        middle = f'x="{x + width // 2}" y="{y + height // 2 + 4}" text-anchor="middle"'
        lines.append(f"<text {middle}>{line[start]}</text>")
    return lines


def text(x: int, y: int, words: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{words}</text>'


def arrow(start: int, stop: int, y: int) -> str:
    tip = 8 if stop > start else -8
    return (
        f'<path class="line" d="M{start} {y}H{stop - tip}"/>'
        f'<path class="head" d="M{stop} {y}l{-tip} -5v10z"/>'
    )


def figure() -> str:
    """The picture as SVG, in the colours of the reader's scheme."""
    plan = xs.plan(MOVE, MESH, SHAPE)
    assert plan.bytes_received == plan.bytes_lower_bound
    step, back = plan.steps[0].kind, plan.backward.steps[0].kind
    left, right, top = 60, 468, 56
    width, height = SHAPE[1] * CELL, SHAPE[0] * CELL
    start, stop, middle = left + width + 24, right - 24, (left + width + right) // 2
    bound = f"{plan.bytes_received} B per device, the least possible"
    parts = [
        text(left + width // 2, 24, str(plan.src), "name"),
        text(left + width // 2, 42, "each device: 4 rows", "soft"),
        text(right + width // 2, 24, str(plan.dst), "name"),
        text(right + width // 2, 42, "each device: 2 columns", "soft"),
        *array(plan.src, left, top),
        *array(plan.dst, right, top),
        text(left - 12, top + height // 2, "s", "soft"),
        text(left + width // 2, top + height + 18, "c", "soft"),
        text(right + width // 2, top + height + 18, "c", "soft"),
        text(middle, top + 62, f"forward: {step}", "name"),
        arrow(start, stop, top + 74),
        text(middle, top + 94, bound, "soft"),
        text(middle, top + 146, f"gradient: {back}", "name"),
        arrow(stop, start, top + 158),
        text(middle, top + 178, f"{plan.backward.bytes_received} B, planned too", "soft"),
    ]
    size = f'viewBox="0 0 640 {top + height + 28}" width="640" height="{top + height + 28}"'
    title = f"<title>{plan.src} becomes {plan.dst} on four devices</title>".replace("->", "to")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            title,
            STYLE,
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PATH.write_text(figure())
