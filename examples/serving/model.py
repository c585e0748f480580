"""Which character comes next, of the two before: weights, their layouts in both programs, the loss.

A rank of the trainer keeps a quarter of every weight (FSDP) and gathers them for its part of the batch. The
server cuts the hidden layer (tensor parallelism).
"""

from typing import Any

import torch
from support.text import text
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

import torch_bridge as xt
from xshard import Mesh

CHARACTERS, LETTERS = text()
WIDTH = 16
HIDDEN = 64
WINDOW = 512
SHAPES = {"letters": (LETTERS, WIDTH), "up": (HIDDEN, 2 * WIDTH), "down": (LETTERS, HIDDEN)}

TRAINER = Mesh(fsdp=4)
SERVER = Mesh(tp=2)
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
    torch.manual_seed(0)
    return {name: torch.randn(s, dtype=torch.float64) * s[-1] ** -0.5 for name, s in SHAPES.items()}


def window(number: int) -> Tensor:
    """Some of the characters of Python's own help."""
    start = number * WINDOW % (len(CHARACTERS) - WINDOW)
    return torch.from_numpy(CHARACTERS[start : start + WINDOW])


def loss(weights: dict[str, Tensor], characters: Tensor, cut: bool = False) -> Tensor:
    """Mean over all but the first two characters. cut: each rank has a part of the hidden layer."""
    two = torch.stack([characters[:-2], characters[1:-1]], 1)
    scores = silu(weights["letters"][two].flatten(1) @ weights["up"].T) @ weights["down"].T
    if cut:
        scores = xt.redistribute(scores, "n v | sum(tp) -> n v", SERVER)
    return cross_entropy(scores, characters[2:])
