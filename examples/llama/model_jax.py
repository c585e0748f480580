"""One block in JAX, on a device's blocks in `shard_map`, from characters to a loss."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jax_bridge as xj
from llama.layouts import Scheme


class Llama(NamedTuple):
    """A model, its weights where the scheme stores them."""

    weights: dict[str, jax.Array]
    scheme: Scheme

    def loss(self, characters: jax.Array, following: jax.Array) -> jax.Array:
        """Characters and those to be predicted [batch, tokens] -> the mean cross-entropy."""
        x = xj.redistribute(self.weights["embed"], self.scheme.expressions["embed"])[characters]
        x = x + self.attention(self.norm("norm1", x))
        x = x + self.feed_forward(self.norm("norm2", x))
        log_probabilities = jax.nn.log_softmax(self.layer("scores", self.norm("norm3", x)))
        losses = -jnp.take_along_axis(log_probabilities, following[..., None], axis=-1)
        return xj.redistribute(losses.mean(), self.scheme.expressions["loss"])

    def attention(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, width], causal."""
        heads = self.layer("qkv", x)  # [batch, tokens, group, queries + key + value, width]
        turned = rotated(heads[..., :-1, :])
        v = heads[..., -1, :]
        q = turned[..., :-1, :]
        k = turned[..., -1, :]
        match = self.einsum("match", q, k) * k.shape[-1] ** -0.5
        seen = jnp.tri(match.shape[-1], dtype=bool)
        return self.layer("out", self.einsum("mix", jax.nn.softmax(match, where=seen), v))

    def feed_forward(self, x: jax.Array) -> jax.Array:
        gate, value = self.layer("up", x)
        return self.layer("down", jax.nn.silu(gate) * value)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return self.layer(name, x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5))

    def layer(self, name: str, x: jax.Array) -> jax.Array:
        return self.einsum(name, x, self.weights[name])

    def einsum(self, name: str, *operands: jax.Array) -> jax.Array:
        contracted = partial(xj.einsum, self.scheme.expressions[name])
        again = self.scheme.save == "given"
        return (jax.checkpoint(contracted) if again else contracted)(*operands)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding: [batch, tokens, ..., width], every token turned by its place."""
    a, b = jnp.split(x, 2, -1)
    angles = jnp.outer(jnp.arange(x.shape[1]), 100.0 ** (-jnp.arange(a.shape[-1]) / a.shape[-1]))
    cos, sin = (turn(angles)[:, None, None] for turn in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
