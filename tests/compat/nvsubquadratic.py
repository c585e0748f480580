"""Worked examples of nvSubquadratic: sequence and channels change places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.compat.worked import Blocks, Worked, floats


def wide(blocks: Sequence[np.ndarray], *sizes: int) -> Blocks:
    """More spatial dims behind the sequence, of different values."""
    return floats(*(b.reshape(*b.shape, *(1,) * len(sizes)) * 100 + _steps(sizes) for b in blocks))


def _steps(sizes: Sequence[int]) -> np.ndarray:
    return np.arange(np.prod(sizes)).reshape(sizes)


def _turned(direction: str, zigzag: bool = True) -> dict[str, Callable[..., Any]]:
    return {
        "torch": lambda c, x: c.AllToAllSingleFunction.apply(x, None, direction, zigzag),
        "jax": lambda c, x, axis: c.all_to_all_single_fn(axis, direction, x, zigzag),
    }


def _there_and_back(there: bool, back: bool) -> dict[str, Callable[..., Any]]:
    def torch(c: Any, x: Any) -> Any:
        y = c.all_to_all_single_fn(None, "full_to_split", x, there)
        return c.all_to_all_single_fn(None, "split_to_full", y, with_zigzag_splitting=back)

    def jax(c: Any, x: Any, axis: str) -> Any:
        y = c.all_to_all_single_fn(axis, "full_to_split", x, there)
        return c.all_to_all_single_fn(axis, "split_to_full", y, with_zigzag_splitting=back)

    return {"torch": torch, "jax": jax}


def _sequence() -> Iterator[Worked]:
    """nvSubquadratic: the value of a row is 100 * channel + position."""
    full = floats(*(np.arange(8).reshape(1, 1, 8) + 100 * r for r in range(2)))
    weights = floats(*(np.arange(8).reshape(1, 2, 4) + 1000 * r for r in range(2)))
    channels = np.array([[[0], [100]]])
    zigzag = floats(*(channels + rows for rows in ([0, 1, 6, 7], [2, 3, 4, 5])))
    block = floats(*(channels + rows for rows in ([0, 1, 2, 3], [4, 5, 6, 7])))
    by_channel = floats([[[0, 1, 1000, 1001, 1002, 1003, 2, 3]]], [[[4, 5, 1004, 1005, 1006, 1007, 6, 7]]])
    contiguous = floats([[[0, 1, 2, 3, 1000, 1001, 1002, 1003]]], [[[4, 5, 6, 7, 1004, 1005, 1006, 1007]]])
    turn, back = _turned("full_to_split"), _turned("split_to_full")
    yield Worked(
        "full_to_split, zigzag", **turn, blocks=full, results=zigzag, cotangents=weights, gradients=by_channel
    )
    yield Worked(
        "split_to_full, zigzag", **back, blocks=zigzag, results=full, cotangents=by_channel, gradients=weights
    )
    for name, sizes in (("2-D", (2,)), ("3-D", (2, 3))):
        ends = [wide(b, *sizes) for b in (full, zigzag, weights, by_channel)]
        yield Worked(
            f"full_to_split, {name}",
            **turn,
            blocks=ends[0],
            results=ends[1],
            cotangents=ends[2],
            gradients=ends[3],
        )
        yield Worked(
            f"split_to_full, {name}",
            **back,
            blocks=ends[1],
            results=ends[0],
            cotangents=ends[3],
            gradients=ends[2],
        )
    turn, back = _turned("full_to_split", False), _turned("split_to_full", False)
    yield Worked(
        "full_to_split, contiguous",
        **turn,
        blocks=full,
        results=block,
        cotangents=weights,
        gradients=contiguous,
    )
    yield Worked(
        "split_to_full, contiguous",
        **back,
        blocks=block,
        results=full,
        cotangents=contiguous,
        gradients=weights,
    )
    # The two ways to mix flags up, which differ.
    for there, rows in ((True, [0, 1, 6, 7, 2, 3, 4, 5]), (False, [0, 1, 4, 5, 6, 7, 2, 3])):
        mixed = floats(*([[[100 * r + row for row in rows]]] for r in range(2)))
        order = np.argsort(rows)
        yield Worked(
            f"zigzag {there}, then {not there}",
            **_there_and_back(there, not there),
            blocks=full,
            results=mixed,
            cotangents=full,
            gradients=floats(*(f[..., order] for f in full)),
        )
    full = floats(*(np.arange(16).reshape(1, 1, 16) + 100 * r for r in range(4)))
    channels = np.array([[[0], [100], [200], [300]]])
    rows = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    zigzag = floats(*(channels + r for r in rows))
    turn, back = _turned("full_to_split"), _turned("split_to_full")
    yield Worked(
        "full_to_split, four ranks", **turn, blocks=full, results=zigzag, cotangents=zigzag, gradients=full
    )
    yield Worked(
        "split_to_full, four ranks", **back, blocks=zigzag, results=full, cotangents=full, gradients=zigzag
    )


# Ranks -> the chunks of each.
ZIGZAG = {1: ((0, 1),), 2: ((0, 3), (1, 2)), 3: ((0, 5), (1, 4), (2, 3)), 4: ((0, 7), (1, 6), (2, 5), (3, 4))}


def _chunks() -> Iterator[Worked]:
    for n, chunks in ZIGZAG.items():
        rows = np.arange(4 * n).reshape(2 * n, 2)
        mine = floats(*(np.concatenate([rows[first], rows[second]])[None] for first, second in chunks))
        whole = floats(*[rows.reshape(1, -1)] * n)
        places = np.zeros((n, 1, 4 * n), np.float32)
        for r, (first, second) in enumerate(chunks):
            places[r, 0, [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]] = mine[r][0]
        yield Worked(
            f"zigzag split, {n} ranks",
            lambda c, x: c.zigzag_split_across_group_ranks(x, None, seq_dim=1),
            lambda c, x, axis: c.zigzag_split_across_group_ranks(x, axis, seq_dim=1),
            whole,
            mine,
            cotangents=mine,
            gradients=floats(*places),
            whole="copies",
        )
        yield Worked(
            f"zigzag gather, {n} ranks",
            lambda c, x: c.zigzag_gather_from_group_ranks(x, None, seq_dim=1),
            lambda c, x, axis: c.zigzag_gather_from_group_ranks(x, axis, seq_dim=1),
            mine,
            whole,
            cotangents=floats(*((r + 1) * w for r, w in enumerate(whole))),
            gradients=floats(*(n * (n + 1) // 2 * m for m in mine)),
        )


def worked() -> Iterator[Worked]:
    yield from _sequence()
    yield from _chunks()
