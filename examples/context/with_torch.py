"""The character model in torch, on a single device or its context on four processes.

    python -m context.with_torch {single,sharded} STEPS

The model is the same both times. On a single device a block is the whole array, and nothing moves.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch._dynamo  # noqa: F401  which an optimiser needs: once here, not on every rank
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from support.runs import run_in_torch
from support.text import Characters
from torch import Tensor

import torch_bridge as xt
from context import layouts, mixers_torch
from context.data import (
    HEADS,
    KV_HEADS,
    LAYERS,
    LEARNING_RATE,
    LENGTH,
    MOMENTUM,
    initial_weights,
    windows,
)
from context.mixers_torch import Context
from xshard import Mesh, reference

Weights = dict[str, Tensor]
Place = Callable[[Characters], Tensor]


def scores(weights: Weights, characters: Tensor, context: Context) -> Tensor:
    """Characters [batch, rows] -> scores of the next ones [batch, rows, characters]."""
    w = {
        name: weight
        if name.endswith("filters")
        else context.move(weight, layouts.WEIGHT, weight.shape)
        for name, weight in weights.items()
    }
    x = w["embed"][characters]
    for i, kind in enumerate(LAYERS):
        layer = {
            name.removeprefix(f"{i}."): value
            for name, value in w.items()
            if name.startswith(f"{i}.")
        }
        x = x + mixed(norm(x, layer["norm1"]), kind, layer, context) @ layer["out"]
        inner = norm(x, layer["norm2"]) @ layer["up"]
        x = x + F.gelu(inner, approximate="tanh") @ layer["down"]  # JAX's default
    return norm(x, w["norm"]) @ w["scores"]


def mixed(x: Tensor, kind: str, layer: Weights, context: Context) -> Tensor:
    inner = x @ layer["in"]
    if kind == "long_convolution":
        gate, inner = inner.chunk(2, -1)
        return F.silu(gate) * mixers_torch.long_convolution(inner, layer["filters"], context)
    heads = inner.unflatten(-1, (HEADS + 2 * KV_HEADS, -1)).split([HEADS, KV_HEADS, KV_HEADS], 2)
    q = rotated(heads[0], context.rows)
    k = rotated(heads[1], context.rows)
    v = heads[2]
    return getattr(mixers_torch, kind)(q, k, v, context).flatten(2)


def rotated(x: Tensor, rows: Tensor) -> Tensor:
    """Rotary embedding: [batch, rows, heads, width], each row turned by its place in the whole sequence."""
    half = x.shape[-1] // 2
    angles = rows[:, None, None] * 100.0 ** (-torch.arange(half) / half)
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale)


def train(steps: int, place: Place, context: Context) -> Iterator[dict[str, float]]:
    """Train from the shared start; yield each loss."""
    weights = {
        name: torch.tensor(value, requires_grad=True) for name, value in initial_weights().items()
    }
    optimiser = torch.optim.SGD(weights.values(), LEARNING_RATE, MOMENTUM)
    for window in windows(steps):
        characters, following = map(place, window)
        mine = F.cross_entropy(
            scores(weights, characters, context).flatten(0, 1), following.flatten()
        )
        loss = context.move(mine, layouts.LOSS, ())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield {"loss": loss.item()}


def single(steps: int) -> Iterator[dict[str, float]]:
    """Train on one device."""
    torch.set_num_threads(1)  # as in each of the four processes
    alone = Context(Mesh(cp=1), layouts.ZIGZAG, LENGTH, 0, lambda block, *_: block)
    return train(steps, torch.tensor, alone)


def sharded(steps: int) -> Iterator[dict[str, float]]:
    """Train on the processes of a world; every one of them calls this."""
    rank = dist.get_rank()

    def move(block: Tensor, expression: str, shape: Sequence[int]) -> Tensor:
        return xt.redistribute(block, expression, layouts.MESH, shape=shape)

    def place(array: Characters) -> Tensor:
        return torch.tensor(
            reference.scatter(array, layouts.tokens(layouts.ZIGZAG), layouts.MESH)[rank]
        )

    return train(steps, place, Context(layouts.MESH, layouts.ZIGZAG, LENGTH, rank, move))


if __name__ == "__main__":
    run_in_torch(single, sharded, layouts.MESH.n_devices)
