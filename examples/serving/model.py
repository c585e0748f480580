"""Which character comes next, of the two before: weights by name, their layouts in both programs, the loss.

A rank of the trainer keeps a quarter of every weight (FSDP) and gathers them for its part of the batch. The
server cuts the hidden layer (tensor parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
from support.text import text
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

import torch_bridge as xt
from xshard import Mesh

CHARACTERS, LETTERS = text()
WIDTH, HIDDEN, WINDOW = 16, 64, 512
SHAPES = {"letters": (LETTERS, WIDTH), "up": (HIDDEN, 2 * WIDTH), "down": (LETTERS, HIDDEN)}

TRAINER, SERVER = Mesh(fsdp=4), Mesh(tp=2)
ENDS: dict[str, Any] = {
    "rules": {
        "weights.letters": "v/fsdp c -> v c",
        "weights.up": "f/fsdp c -> f/tp c",
        "weights.down": "v/fsdp f -> v f/tp",
        "**": "...",
    },
    "src_mesh": TRAINER,
    "dst_mesh": SERVER,
    "bucket_bytes": "16KiB",
    "timeout_s": 600.0,
}
SHAPES_SENT = {f"weights.{name}": shape for name, shape in SHAPES.items()}
KILLED = 9  # the trainer's exit status then


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = {name: shape[-1] ** -0.5 for name, shape in SHAPES.items()}
    draw = {"generator": generator, "dtype": torch.float64}
    return {name: torch.randn(shape, **draw) * scale[name] for name, shape in SHAPES.items()}


def window(number: int) -> Tensor:
    """Some of the characters of Python's own help."""
    start = number * WINDOW % (len(CHARACTERS) - WINDOW)
    return torch.from_numpy(CHARACTERS[start : start + WINDOW])


def scores(weights: dict[str, Tensor], two: Tensor, hidden_axis: str | None = None) -> Tensor:
    """Two characters [n, 2] -> a score [n, letters] for each that may come next.

    hidden_axis: of the server's mesh, over which the hidden layer is cut: partial scores are added.
    """
    hidden = silu(weights["letters"][two].flatten(1) @ weights["up"].T)
    found = hidden @ weights["down"].T
    if hidden_axis is not None:
        found = xt.redistribute(found, f"n v | sum({hidden_axis}) -> n v", SERVER)
    return found


def loss(weights: dict[str, Tensor], characters: Tensor, hidden_axis: str | None = None) -> Tensor:
    """Mean over all but the first two characters, which nothing foretells."""
    two = torch.stack([characters[:-2], characters[1:-1]], 1)
    return cross_entropy(scores(weights, two, hidden_axis), characters[2:])
