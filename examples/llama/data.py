"""Windows of English text, and the first weights of every run, in numpy and float64."""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from support.text import text
from support.text import windows as text_windows

Array = NDArray[np.float64]

BATCH = 8
TOKENS = 32
WIDTH = 32
HIDDEN = 64
GROUPS = 2
QUERIES = 2
HEAD = 8  # heads of keys, queries to each, and their width
LEARNING_RATE = 0.5

windows = partial(text_windows, batch=BATCH, length=TOKENS)


class Run(NamedTuple):
    """Losses by step; gradients by weight, in the last step, whole; of a step, how much a device receives."""

    losses: list[float]
    gradients: dict[str, Array]
    collectives: int = 0
    received_bytes: int = 0


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
