"""Windows of English text, and the first weights of every run, in numpy.

The task: the next character, from up to 512 before it.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray
from support.text import text
from support.text import windows as text_windows

Array = NDArray[np.float32]

LENGTH = 512
BATCH = 2
WIDTH = 48
HEADS = 6
KV_HEADS = 2  # six heads over four devices, in two groups
LAYERS = ("gathered_attention", "long_convolution", "ulysses_attention")
LEARNING_RATE = 0.03
MOMENTUM = 0.9

windows = partial(text_windows, batch=BATCH, length=LENGTH)


def initial_weights() -> dict[str, Array]:
    """Parameters by name, the same for every run."""
    rng, (_, n_characters) = np.random.default_rng(2), text()

    def matrix(n_in: int, n_out: int) -> Array:
        return rng.normal(0, n_in**-0.5, (n_in, n_out)).astype(np.float32)

    head = WIDTH // HEADS
    weights = {"embed": matrix(n_characters, WIDTH), "norm": np.ones(WIDTH, np.float32)}
    for i, kind in enumerate(LAYERS):
        weights |= {
            f"{i}.norm1": np.ones(WIDTH, np.float32),
            f"{i}.in": matrix(
                WIDTH, WIDTH + 2 * KV_HEADS * head if "attention" in kind else 2 * WIDTH
            ),
            f"{i}.out": matrix(WIDTH, WIDTH),
            f"{i}.norm2": np.ones(WIDTH, np.float32),
            f"{i}.up": matrix(WIDTH, 4 * WIDTH),
            f"{i}.down": matrix(4 * WIDTH, WIDTH),
        }
        if kind == "long_convolution":  # every channel forgets at a rate of its own
            rate = np.exp(-np.arange(LENGTH) / np.geomspace(2, LENGTH, WIDTH)[:, None])
            weights[f"{i}.filters"] = (rate * rng.normal(0, 0.3, rate.shape)).astype(np.float32)
    return weights | {"scores": matrix(WIDTH, n_characters)}
