"""A sphere's mesh, and two ways to share its nodes out."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
Rows = NDArray[np.int64]


def icosphere(refinements: int) -> tuple[Points, Rows, Rows]:
    """Points [n, 3] of an icosahedron with its triangles cut into four; senders and receivers of its edges.

    n is 10 * 4**refinements + 2. Each pair of neighbours has an edge in both directions.
    """
    golden = (1 + 5**0.5) / 2
    corners = [(0, i, j * golden) for i in (-1, 1) for j in (-1, 1)]
    points = np.array([np.roll(corner, shift) for corner in corners for shift in range(3)])
    near = np.linalg.norm(points[:, None] - points, axis=-1) < 2.1  # sides have length 2
    triples = combinations(range(12), 3)
    faces = np.array([(a, b, c) for a, b, c in triples if near[a, b] and near[b, c] and near[a, c]])
    for _ in range(refinements):
        sides, number = _sides(faces)
        (x, y, z), (a, b, c) = faces.T, len(points) + number.reshape(-1, 3).T
        points = np.concatenate([points, points[sides].mean(1)])
        corner = (x, a, c), (y, a, b), (z, b, c), (a, b, c)
        faces = np.concatenate([np.stack(three, 1) for three in corner])
        points /= np.linalg.norm(points, axis=-1, keepdims=True)
    one, other = _sides(faces)[0].T
    return points, np.concatenate([one, other]), np.concatenate([other, one])


def _sides(faces: Rows) -> tuple[Rows, Rows]:
    """Triangles xyz -> each side once, and the numbers of the sides xy, yz, zx of each triangle."""
    pairs = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]], axis=-1).reshape(-1, 2)
    return np.unique(pairs, axis=0, return_inverse=True)


def bisection(points: Points, parts: int) -> Rows:
    """The part of each point: halves across the longest direction, halves of these, ... (parts: 2, 4, 8)."""
    owner = np.zeros(len(points), np.int64)
    if parts > 1:
        longest = points[:, np.ptp(points, axis=0).round(9).argmax()]
        for i, half in enumerate(np.array_split(np.argsort(longest.round(9), kind="stable"), 2)):
            owner[half] = i * parts // 2 + bisection(points[half], parts // 2)
    return owner


def bands(points: Points, parts: int) -> Rows:
    """The part of each point: equal ranges in the order of latitudes, then of longitudes."""
    owner = np.empty(len(points), np.int64)
    longitude = np.arctan2(points[:, 1], points[:, 0]).round(9)
    for i, some in enumerate(
        np.array_split(np.lexsort((longitude, -points[:, 2].round(9))), parts)
    ):
        owner[some] = i
    return owner
