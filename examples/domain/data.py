"""Photographs, noise and the first weights of every run, in numpy.

The task: a photograph is to come out of a noisy copy of itself. `DOMAIN_COLUMNS=160` in the
environment takes the first 160 columns of the photographs, for a quicker run.
"""

import os

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_sample_images

from xshard import Mesh

Array = NDArray[np.float32]

MESH = Mesh(sp=4)
LAYOUT = "n c h/sp w"  # rows over the devices; columns, which close up to a ring, are whole
HEIGHT = 427
WIDTH = int(os.environ.get("DOMAIN_COLUMNS", "640"))
WIDTHS = (8, 16)  # features at full and at half resolution
GROUPS = 4
LEARNING_RATE = 0.02
MOMENTUM = 0.9

# Kernels by the name of their layer: (features out, in, rows, columns); transposed: (in, out, ...).
KERNELS = {
    "first": (WIDTHS[0], 3, 3, 3),
    "down": (WIDTHS[1], WIDTHS[0], 3, 3),
    "middle": (WIDTHS[1], WIDTHS[1], 3, 3),
    "up": (WIDTHS[1], WIDTHS[1], 4, 4),
    "merge": (WIDTHS[0], 2 * WIDTHS[1], 3, 3),
    "last": (3, 2 * WIDTHS[0], 3, 3),
}
NORMS = {"norm_first": WIDTHS[0], "norm_down": WIDTHS[1], "norm_middle": WIDTHS[1]}


def photographs() -> tuple[Array, Array]:
    """(noisy, clean), both [images, colours, rows, columns]: two real photographs."""
    clean = (
        np.stack(load_sample_images().images).transpose(0, 3, 1, 2)[..., :WIDTH].astype(np.float32)
        / 255
    )
    noise = np.random.default_rng(0).normal(0, 0.2, clean.shape).astype(np.float32)
    return clean + noise, clean


def initial_weights() -> dict[str, Array]:
    """Parameters by name, the same for every run."""
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in KERNELS.items():
        scale = np.sqrt(2 / np.prod(shape[1:]))
        weights[f"{name}.weight"] = rng.normal(0, scale, shape).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(shape[1 if name == "up" else 0], np.float32)
    for name, features in NORMS.items():
        weights[f"{name}.weight"] = np.ones(features, np.float32)
        weights[f"{name}.bias"] = np.zeros(features, np.float32)
    return weights
