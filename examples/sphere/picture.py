"""The side of a sphere that is seen, with its parts in colours and the rows that one of them reads."""

from collections.abc import Sequence

import numpy as np

from sphere.mesh import Points
from sphere.network import Parts

SIZE = 200
DOT = 4.2
COLOURS = ("#5b8ff9", "#f6903d", "#5ad8a6", "#e86452", "#9270ca", "#f6bd16", "#6dc8ec", "#c2805d")


def drawn(several: Sequence[Parts]) -> str:
    """An SVG of spheres, side by side; the part in the middle of each reads the black points."""
    width = SIZE * len(several)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {SIZE}" width="{width}">'
    ]
    for i, parts in enumerate(several):
        points = turned(parts.problem.points)
        places = points[:, :2] * [1, -1] * (SIZE / 2 - 6) + [SIZE * (i + 0.5), SIZE / 2]
        seen = points[:, 2] > 0
        owner = parts.maps["cells"].owner
        middle = owner[points[:, 2].argmax()]
        near = np.isin(np.arange(len(points)), parts.maps["near"].part(middle))
        lines.append(
            f'<circle cx="{SIZE * (i + 0.5)}" cy="{SIZE / 2}" r="{SIZE / 2 - 1}" fill="#ffffff"/>'
        )
        lines += [
            dots(places[seen & ~near & (owner == part)], colour)
            for part, colour in enumerate(COLOURS)
        ]
        lines.append(dots(places[seen & near], "#000000"))
    return "\n".join([*lines, "</svg>\n"])


def turned(points: Points) -> Points:
    a, b = np.radians([35, 25])
    about_y = np.array([[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]])
    about_x = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    return points[:, [1, 2, 0]] @ about_y.T @ about_x.T


def dots(places: Points, colour: str) -> str:
    """Lines of no length with round ends."""
    path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    return f'<path d="{path}" stroke="{colour}" stroke-width="{DOT}" stroke-linecap="round"/>'
