"""The classifier in torch, on a single device or sharded over four processes.

    python -m parity.with_torch {single,sharded} STEPS

The model is the same both times. Only two functions differ: `place` gives this process its block of an array,
`move` brings a block from one layout to another. On a single device a block is the whole array.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from support.runs import run_in_torch
from torch import Tensor

import torch_bridge as xt
from parity import shardings
from parity.data import LEARNING_RATE, MOMENTUM, N_HEADS, N_LAYERS, batches, digits, initial_weights
from xshard import Layout, reference

Weights = dict[str, Tensor]
Place = Callable[[NDArray[Any], Layout | str], Tensor]
Move = Callable[[Tensor, str], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor, Move], Tensor]


def logits(weights: Weights, images: Tensor, move: Move, attend: Attention) -> Tensor:
    """Images [batch, patches, pixels] -> scores [batch, classes]."""
    w = {name: move(value, shardings.weight_expression(name)) for name, value in weights.items()}
    x = images @ w["embed"] + w["positions"]
    for layer in range(N_LAYERS):
        x = x + attend(norm(x, w[f"{layer}.norm1"]), w[f"{layer}.qkv"], w[f"{layer}.out"], move)
        x = x + feed_forward(norm(x, w[f"{layer}.norm2"]), w[f"{layer}.up"], w[f"{layer}.down"])
    pooled = move(norm(x, w["norm"]).mean(dim=1), shardings.POOL)
    return pooled @ w["classifier"]


def attention(x: Tensor, w_qkv: Tensor, w_out: Tensor, move: Move) -> Tensor:
    """Every token looks at all others, so each device trades its tokens for whole heads, and back."""
    qkv = torch.stack((x @ w_qkv).unflatten(-1, (3, N_HEADS, -1)).unbind(2))
    q, k, v = move(qkv, shardings.TOKENS_TO_HEADS).transpose(2, 3)  # [batch, heads, patches, width]
    heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return move(heads, shardings.HEADS_TO_TOKENS).flatten(2) @ w_out


def feed_forward(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.gelu(x @ w_up, approximate="tanh") @ w_down  # JAX's default


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale)


def mean_loss(
    weights: Weights, images: Tensor, labels: Tensor, move: Move, attend: Attention
) -> Tensor:
    return move(F.cross_entropy(logits(weights, images, move, attend), labels), shardings.LOSS)


def train(
    steps: int, place: Place, move: Move, attend: Attention = attention
) -> Iterator[dict[str, float]]:
    """Train on the shared batches from the shared start; yield each loss, then the accuracy."""
    train_set, test_set = digits()
    weights = {
        name: place(value, shardings.stored(name)) for name, value in initial_weights().items()
    }
    leaves = [weight.requires_grad_() for weight in weights.values()]
    momenta = [torch.zeros_like(leaf) for leaf in leaves]
    for batch in batches(train_set, steps):
        images = place(batch.images, shardings.IMAGES)
        labels = place(batch.labels, shardings.LABELS)
        loss = mean_loss(weights, images, labels, move, attend)
        gradients = torch.autograd.grad(loss, leaves)
        with torch.no_grad():  # SGD works element by element: blocks need nothing from each other
            for leaf, momentum, gradient in zip(leaves, momenta, gradients, strict=True):
                leaf -= LEARNING_RATE * momentum.mul_(MOMENTUM).add_(gradient)
        yield {"loss": loss.item()}
    with torch.no_grad():
        scores = logits(weights, place(test_set.images, shardings.IMAGES), move, attend)
        guesses = move(scores, shardings.GATHER_LOGITS).argmax(dim=1)
    yield {"accuracy": float((guesses.numpy() == test_set.labels).mean())}


def single(steps: int) -> Iterator[dict[str, float]]:
    """Train on one device."""
    torch.set_num_threads(1)  # the arrays are too small to be worth more
    return train(steps, lambda array, _: torch.tensor(array), lambda block, _: block)


def sharded(steps: int, attend: Attention = attention) -> Iterator[dict[str, float]]:
    """Train on the processes of a world; every one of them calls this."""
    rank = dist.get_rank()

    def place(array: NDArray[Any], layout: Layout | str) -> Tensor:
        return torch.tensor(reference.scatter(array, layout, shardings.MESH)[rank])

    def move(block: Tensor, expression: str) -> Tensor:
        return xt.redistribute(block, expression, shardings.MESH)

    return train(steps, place, move, attend)


if __name__ == "__main__":
    run_in_torch(single, sharded, shardings.MESH.n_devices)
