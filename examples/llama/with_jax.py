"""The block trained in JAX, on the devices of this process."""

import jax
import numpy as np

import jax_bridge as xj
from jax_bridge.testing import stacked
from llama.data import LEARNING_RATE, Run, initial_weights, windows
from llama.layouts import Scheme
from llama.model_jax import Llama

Weights = dict[str, jax.Array]


def train(scheme: Scheme, steps: int) -> Run:
    """One training run. Received bytes are counted before XLA joins collectives."""
    mesh = jax.make_mesh(scheme.mesh.sizes, scheme.mesh.axes)
    n = scheme.mesh.n_devices
    stored = {name: scheme.stored(name) for name in initial_weights()}

    def local_loss(w: Weights, characters: jax.Array, following: jax.Array) -> jax.Array:
        return Llama(w, scheme).loss(characters, following)

    loss_of = xj.shard_map(local_loss, ((stored, scheme.tokens, scheme.tokens), "()"), mesh)

    def step(
        w: Weights, characters: jax.Array, following: jax.Array
    ) -> tuple[Weights, Weights, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(w, characters, following)
        return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, w, gradients), gradients, loss

    weights = xj.place(initial_weights(), stored, mesh)
    tokens = [xj.place(window, scheme.tokens, mesh) for window in windows(steps)]
    lowered = jax.jit(step).lower(weights, *tokens[0])
    program = lowered.as_text("hlo")
    compiled = lowered.compile()
    losses = []
    for characters, following in tokens:
        weights, gradients, loss = compiled(weights, characters, following)
        losses.append(float(loss))
    whole = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    return Run(
        losses,
        whole,
        len(list(stacked.collectives(program, n))),
        stacked.received_bytes(program, n),
    )
