"""The character model in JAX, its context on four devices: `python -m context.with_jax STEPS`.

The same model as in with_torch.py, and the same strings. The functions that shard_map runs see some rows.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from support.jax_training import Weights, descend
from support.runs import run_in_jax
from support.text import Characters

from context import layouts, mixers_jax
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
from jax_bridge import positions, redistribute

CUT = layouts.ZIGZAG


def scores(weights: Weights, characters: jax.Array) -> jax.Array:
    """Characters [batch, rows] -> scores of the next ones [batch, rows, characters]."""
    w = {
        name: weight if name.endswith("filters") else redistribute(weight, layouts.WEIGHT)
        for name, weight in weights.items()
    }
    x = w["embed"][characters]
    for i, kind in enumerate(LAYERS):
        layer = {
            name.removeprefix(f"{i}."): value
            for name, value in w.items()
            if name.startswith(f"{i}.")
        }
        x = x + mixed(norm(x, layer["norm1"]), kind, layer) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return norm(x, w["norm"]) @ w["scores"]


def mixed(x: jax.Array, kind: str, layer: Weights) -> jax.Array:
    inner = x @ layer["in"]
    if kind == "long_convolution":
        gate, inner = jnp.split(inner, 2, -1)
        return jax.nn.silu(gate) * mixers_jax.long_convolution(inner, layer["filters"], CUT, LENGTH)
    heads = inner.reshape(*x.shape[:2], HEADS + 2 * KV_HEADS, -1)
    q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], 2)
    rows = positions(CUT, shape=(LENGTH,), dim=0)
    mixer = getattr(mixers_jax, kind)
    return mixer(rotated(q, rows), rotated(k, rows), v, CUT, LENGTH).reshape(x.shape)


def rotated(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rotary embedding: [batch, rows, heads, width], each row turned by its place in the whole sequence."""
    half = x.shape[-1] // 2
    angles = rows[:, None, None] * 100.0 ** (-jnp.arange(half) / half)
    a = x[..., :half]
    b = x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1
    )


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale


def mean_loss(weights: Weights, characters: jax.Array, following: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(scores(weights, characters))
    losses = -jnp.take_along_axis(log_probabilities, following[..., None], axis=-1)
    return redistribute(losses.mean(), layouts.LOSS)


def train(steps: int) -> Iterator[dict[str, float]]:
    """Train from the shared start: the losses."""
    mesh = jax.make_mesh(layouts.MESH.sizes, layouts.MESH.axes)
    order = positions(CUT, mesh, shape=(LENGTH,), dim=0)
    cut = jax.P(None, "cp")

    def place(array: Characters) -> jax.Array:
        """Rows in the order in which the devices have them."""
        return jax.device_put(array[:, order], jax.NamedSharding(mesh, cut))

    weights: Weights = jax.device_put(initial_weights(), jax.NamedSharding(mesh, jax.P()))
    placed = (tuple(map(place, window)) for window in windows(steps))
    return descend(mean_loss, weights, placed, mesh, LEARNING_RATE, MOMENTUM)


if __name__ == "__main__":
    run_in_jax(train, layouts.MESH.n_devices)
