"""SGD with momentum in JAX, on devices' blocks inside `shard_map`."""

from collections.abc import Callable, Generator, Iterable

import jax
import jax.numpy as jnp

Weights = dict[str, jax.Array]


def descend(
    loss_of: Callable[..., jax.Array],
    weights: Weights,
    batches: Iterable[tuple[jax.Array, ...]],
    mesh: jax.sharding.Mesh,
    rate: float,
    momentum: float,
) -> Generator[dict[str, float], None, Weights]:
    """Yield each loss; return the weights after the last step.

    loss_of: takes a device's blocks of weights and of a batch, and returns a replicated loss.
    """

    def step(
        weights: Weights, momenta: Weights, *batch: jax.Array
    ) -> tuple[Weights, Weights, jax.Array]:
        """Element by element, so blocks need nothing from each other."""
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
        momenta = jax.tree.map(lambda m, g: momentum * m + g, momenta, gradients)
        return jax.tree.map(lambda w, m: w - rate * m, weights, momenta), momenta, loss

    # Inputs come as they were placed; outputs stay as the inputs were.
    specs = {name: weight.sharding.spec for name, weight in weights.items()}
    stepped = jax.jit(jax.shard_map(step, mesh=mesh, out_specs=(specs, specs, jax.P())))
    momenta = jax.tree.map(jnp.zeros_like, weights)
    for batch in batches:
        weights, momenta, loss = stepped(weights, momenta, *batch)
        yield {"loss": float(loss)}
    return weights
