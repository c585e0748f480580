"""What all runs share: the digits, the batches, the initial weights, the schedule. numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

N_LAYERS = 2
N_HEADS = 4
WIDTH = 32
N_CLASSES = 10
PATCH = 2  # pixels: an 8x8 image is a sequence of 16 patches of 2x2
N_TEST = 360
BATCH = 128
# Rounding differs between runs, and training amplifies the difference: at this rate from 1e-7 to
# less than 1e-5 in 200 steps, at five times this rate to more than 0.1.
LEARNING_RATE = 0.02
MOMENTUM = 0.9

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Digits:
    """Images as sequences of patches, [n, 16, 4] with values in 0..1, and which digit each is, [n]."""

    images: Array
    labels: NDArray[np.int64]

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Digits:
        return Digits(self.images[rows], self.labels[rows])


def digits() -> tuple[Digits, Digits]:
    """The 1797 handwritten digits that ship with scikit-learn, shuffled: for training, for the test."""
    raw = load_digits()
    n = len(raw.target)
    side = 8 // PATCH
    patches = (
        raw.images.reshape(n, side, PATCH, side, PATCH).swapaxes(2, 3).reshape(n, side**2, PATCH**2)
    )
    ordered = Digits((patches / 16).astype(np.float32), raw.target.astype(np.int64))
    shuffled = ordered[np.random.default_rng(0).permutation(n)]
    return shuffled[N_TEST:], shuffled[:N_TEST]


def batches(train: Digits, steps: int) -> Iterator[Digits]:
    """The same batches in the same order for every run; each epoch drops an incomplete last batch."""
    rng = np.random.default_rng(1)
    n = len(train.labels)
    yielded = 0
    while yielded < steps:
        order = rng.permutation(n)
        for start in range(0, n - BATCH + 1, BATCH)[: steps - yielded]:
            yield train[order[start : start + BATCH]]
            yielded += 1


def initial_weights() -> dict[str, Array]:
    """Global weights by name, the same for every run."""
    rng = np.random.default_rng(2)

    def normal(*shape: int, scale: float) -> Array:
        return rng.normal(0, scale, shape).astype(np.float32)

    def matrix(n_in: int, n_out: int) -> Array:
        return normal(n_in, n_out, scale=n_in**-0.5)

    ones = np.ones(WIDTH, np.float32)
    weights = {
        "embed": matrix(PATCH**2, WIDTH),
        "positions": normal((8 // PATCH) ** 2, WIDTH, scale=0.1),
    }
    for layer in range(N_LAYERS):
        weights |= {
            f"{layer}.norm1": ones,
            f"{layer}.qkv": matrix(WIDTH, 3 * WIDTH),
            f"{layer}.out": matrix(WIDTH, WIDTH),
            f"{layer}.norm2": ones,
            f"{layer}.up": matrix(WIDTH, 4 * WIDTH),
            f"{layer}.down": matrix(4 * WIDTH, WIDTH),
        }
    return weights | {"norm": ones, "classifier": matrix(WIDTH, N_CLASSES)}
