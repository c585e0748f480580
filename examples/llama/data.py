"""English text, windows of it, and the first weights: what every run starts from, in numpy and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from support.text import text

Array = NDArray[np.float64]
Characters = NDArray[np.int64]

BATCH, TOKENS, WIDTH, HIDDEN = 8, 32, 32, 64
GROUPS, QUERIES, HEAD = 2, 2, 8  # heads of keys, queries to each, and their width
LEARNING_RATE = 0.5


class Run(NamedTuple):
    """Losses by step; gradients by weight, in the last step, whole; of a step, how much a device receives."""

    losses: list[float]
    gradients: dict[str, Array]
    collectives: int = 0
    received_bytes: int = 0


def windows(steps: int) -> Iterator[tuple[Characters, Characters]]:
    """(characters, the next of each), [batch, tokens], the same for every run."""
    rng, (characters, _) = np.random.default_rng(1), text()
    for _ in range(steps):
        starts = rng.integers(0, len(characters) - TOKENS, BATCH)
        window = characters[starts[:, None] + np.arange(TOKENS + 1)]
        yield window[:, :-1], window[:, 1:]


def initial_weights() -> dict[str, Array]:
    """Parameters by name, the same for every run."""
    rng, (_, n_characters) = np.random.default_rng(2), text()

    def normal(*shape: int, n_in: int = WIDTH) -> Array:
        return rng.normal(0, n_in**-0.5, shape)

    return {
        "embed": normal(n_characters, WIDTH),
        "norm1": np.ones(WIDTH),
        "qkv": normal(WIDTH, GROUPS, QUERIES + 2, HEAD),
        "out": normal(GROUPS, QUERIES, HEAD, WIDTH, n_in=GROUPS * QUERIES * HEAD),
        "norm2": np.ones(WIDTH),
        "up": normal(WIDTH, 2, HIDDEN),
        "down": normal(HIDDEN, WIDTH, n_in=HIDDEN),
        "norm3": np.ones(WIDTH),
        "scores": normal(WIDTH, n_characters),
    }
