"""The port to JAX, on one device's blocks, for `shard_map`."""

import jax
import jax.numpy as jnp

import jax_bridge as xj
from port.shardings import GATHER, SCATTER, TO_COPIES

Weights = dict[str, jax.Array]


def block(weights: Weights, x: jax.Array) -> jax.Array:
    """Weights and tokens [batch, tokens, width] -> tokens of the same shape."""
    w = {name: xj.redistribute(value, TO_COPIES[name]) for name, value in weights.items()}
    x = attend(w, x)
    tokens = xj.redistribute(norm(x, w["norm2"]), GATHER)
    hidden = jax.nn.gelu(tokens @ w["up"] + w["up_bias"])
    return x + xj.redistribute(hidden @ w["down"], SCATTER) + w["down_bias"]


def attend(w: Weights, x: jax.Array) -> jax.Array:
    """The first half: attention and its residual."""
    tokens = xj.redistribute(norm(x, w["norm1"]), GATHER)
    return x + xj.redistribute(attention(tokens, w["qkv"], w["out"]), SCATTER)


def attention(x: jax.Array, w_qkv: jax.Array, w_out: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bsd,dche->cbshe", x, w_qkv)
    heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("bshe,hed->bsd", heads, w_out)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale


def update(weights: Weights, gradients: Weights) -> Weights:
    """One step of SGD with weight decay, as torch's."""
    return jax.tree.map(lambda w, g: w - 0.1 * (g + 0.01 * w), weights, gradients)
