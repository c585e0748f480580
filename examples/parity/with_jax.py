"""The classifier in JAX, sharded over four devices: `python -m parity.with_jax STEPS`.

The same model as in with_torch.py, and the same strings. The functions that shard_map runs see
the block of one device; `redistribute` brings it from one layout to another.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from support.jax_training import Weights, descend
from support.runs import run_in_jax

from jax_bridge import redistribute
from jax_bridge.specs import to_named_sharding
from parity import shardings
from parity.data import LEARNING_RATE, MOMENTUM, N_HEADS, N_LAYERS, batches, digits, initial_weights
from xshard import Layout


def logits(weights: Weights, images: jax.Array) -> jax.Array:
    """Images [batch, patches, pixels] -> scores [batch, classes]."""
    w = {
        name: redistribute(value, shardings.weight_expression(name))
        for name, value in weights.items()
    }
    x = images @ w["embed"] + w["positions"]
    for layer in range(N_LAYERS):
        x = x + attention(norm(x, w[f"{layer}.norm1"]), w[f"{layer}.qkv"], w[f"{layer}.out"])
        x = x + feed_forward(norm(x, w[f"{layer}.norm2"]), w[f"{layer}.up"], w[f"{layer}.down"])
    pooled = redistribute(norm(x, w["norm"]).mean(axis=1), shardings.POOL)
    return pooled @ w["classifier"]


def attention(x: jax.Array, w_qkv: jax.Array, w_out: jax.Array) -> jax.Array:
    """Every token looks at all others, so each device trades its tokens for whole heads, and back."""
    batch, patches, width = x.shape
    qkv = jnp.moveaxis((x @ w_qkv).reshape(batch, patches, 3, N_HEADS, width // N_HEADS), 2, 0)
    q, k, v = redistribute(qkv, shardings.TOKENS_TO_HEADS)  # [batch, patches, heads, width]
    heads = jax.nn.dot_product_attention(q, k, v)
    return redistribute(heads, shardings.HEADS_TO_TOKENS).reshape(x.shape) @ w_out


def feed_forward(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w_up) @ w_down


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale


def mean_loss(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits(weights, images))
    losses = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)
    return redistribute(losses.mean(), shardings.LOSS)


def guess(weights: Weights, images: jax.Array) -> jax.Array:
    return redistribute(logits(weights, images), shardings.GATHER_LOGITS).argmax(axis=1)


def train(steps: int) -> Iterator[dict[str, float]]:
    """Train on the shared batches from the shared start; yield each loss, then the accuracy."""
    mesh = jax.make_mesh(shardings.MESH.sizes, shardings.MESH.axes)

    def place(array: NDArray[Any], layout: Layout | str) -> jax.Array:
        return jax.device_put(array, to_named_sharding(layout, mesh))

    train_set, test_set = digits()
    weights = {
        name: place(value, shardings.stored(name)) for name, value in initial_weights().items()
    }
    placed = (
        (place(batch.images, shardings.IMAGES), place(batch.labels, shardings.LABELS))
        for batch in batches(train_set, steps)
    )
    weights = yield from descend(mean_loss, weights, placed, mesh, LEARNING_RATE, MOMENTUM)

    guesses = jax.jit(jax.shard_map(guess, mesh=mesh, out_specs=jax.P()))(
        weights, place(test_set.images, shardings.IMAGES)
    )
    yield {"accuracy": float((np.asarray(guesses) == test_set.labels).mean())}


if __name__ == "__main__":
    run_in_jax(train, shardings.MESH.n_devices)
