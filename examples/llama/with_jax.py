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
    """One training run. What is received is counted before XLA joins collectives."""
    mesh, n = jax.make_mesh(scheme.mesh.sizes, scheme.mesh.axes), scheme.mesh.n_devices

    def place(array: ArrayLike, layout: str) -> jax.Array:
        return jax.device_put(array, to_named_sharding(layout, mesh))

    def step(w: Weights, characters: jax.Array, following: jax.Array) -> tuple[Weights, Weights, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda w: Llama(w, scheme).loss(characters, following))(w)
        return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, w, gradients), gradients, loss

    weights = {name: place(value, scheme.stored(name)) for name, value in initial_weights().items()}
    specs = {name: weight.sharding.spec for name, weight in weights.items()}
    on_devices = jax.jit(jax.shard_map(step, mesh=mesh, out_specs=(specs, specs, jax.P())))
    tokens = [[place(array, scheme.tokens) for array in window] for window in windows(steps)]
    lowered = on_devices.lower(weights, *tokens[0])
    program, compiled, losses = lowered.as_text("hlo"), lowered.compile(), []
    for characters, following in tokens:
        weights, gradients, loss = compiled(weights, characters, following)
        losses.append(float(loss))
    whole = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    return Run(losses, whole, len(list(hlo.collectives(program, n))), hlo.received_bytes(program, n))
