"""The block trained in JAX, on the devices of this process."""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import ArrayLike

from jax_bridge import to_named_sharding
from jax_bridge.testing import hlo
from llama.data import LEARNING_RATE, Run, initial_weights, windows
from llama.layouts import Scheme
from llama.model_jax import Llama

Weights = dict[str, jax.Array]


def train(scheme: Scheme, steps: int) -> Run:
    """One training run."""
    mesh, n = jax.make_mesh(scheme.mesh.sizes, scheme.mesh.axes), scheme.mesh.n_devices

    def place(array: ArrayLike, layout: str) -> jax.Array:
        return jax.device_put(array, to_named_sharding(layout, mesh))

    def step(weights: Weights, characters: jax.Array, following: jax.Array) -> tuple[Weights, Weights, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda w: Llama(w, scheme).loss(characters, following))(weights)
        return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, gradients), gradients, loss

    weights = {name: place(value, scheme.stored(name)) for name, value in initial_weights().items()}
    specs = {name: weight.sharding.spec for name, weight in weights.items()}
    outputs = (specs, specs, jax.P())
    compiled, losses = None, []
    for window in windows(steps):
        tokens = [place(array, scheme.tokens) for array in window]
        if compiled is None:
            compiled = jax.jit(jax.shard_map(step, mesh=mesh, out_specs=outputs)).lower(weights, *tokens).compile()
        weights, gradients, loss = compiled(weights, *tokens)
        losses.append(float(loss))
    text = compiled.as_text()
    blocks = {name: np.asarray(value) for name, value in gradients.items()}
    return Run(losses, blocks, len(list(hlo.collectives(text, n))), hlo.received_bytes(text, n))
