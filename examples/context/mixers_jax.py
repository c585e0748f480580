"""The mixers of mixers_torch.py in JAX: inside shard_map over `cp`, on blocks of some rows of a sequence.

Blocks have one shape on all devices: if heads or channels do not divide, some are padding, and zero.
"""

import jax
import jax.numpy as jnp

from context import layouts
from jax_bridge import positions, redistribute


def ulysses_attention(q: jax.Array, k: jax.Array, v: jax.Array, cut: str, length: int) -> jax.Array:
    """Causal attention; devices trade rows for heads, and back. Any number of heads, and of kv heads.

    q: [batch, rows, heads, width]; k, v: [batch, rows, kv heads, width] -> as q.
    """
    batch, _, n_heads, width = q.shape
    n_kv = k.shape[2]
    group = n_heads // k.shape[2]
    shared = layouts.heads(n_heads, n_kv, jax.lax.axis_size("cp"))
    shape = (batch, length, n_heads, width)
    kv_shape = (batch, length, n_kv, width)
    q = redistribute(q, layouts.to_heads(cut, shared.result), shape=shape)
    k, v = (redistribute(x, layouts.to_heads(cut, shared.source), shape=kv_shape) for x in (k, v))
    mine = positions(str(shared.result), shape=(n_heads,), dim=0) // group
    reads = jnp.maximum(mine - positions(str(shared.source), shape=(n_kv,), dim=0)[0], 0)
    every = jnp.arange(length)
    y = attention(q, k[:, :, reads], v[:, :, reads], every[:, None] >= every)
    return redistribute(y, layouts.from_heads(cut, shared.result), shape=shape)


def gathered_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cut: str, length: int
) -> jax.Array:
    """Causal attention; every device gathers all keys and values for the queries of its own rows.

    One program runs on all devices, so all of them look at all keys, and hide those after each row.
    Shapes as in `ulysses_attention`.
    """
    shape = (q.shape[0], length, *k.shape[2:])
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(redistribute(x, layouts.gather(cut), shape=shape), group, 2) for x in (k, v))
    return attention(q, k, v, positions(cut, shape=(length,), dim=0)[:, None] >= jnp.arange(length))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """[batch, rows, heads, width] of all three; mask: [rows of q, rows of k], which of them are seen.

    `jax.nn.dot_product_attention` does the same, but always in float32.
    """
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhe->bqhe", weights, v)


def long_convolution(x: jax.Array, filters: jax.Array, cut: str, length: int) -> jax.Array:
    """Each channel convolved with a filter as long as the sequence, by FFT; devices trade rows for channels.

    x: [batch, rows, channels]; filters: [channels, length], one value for all devices -> as x. Causal.
    """
    shape = (x.shape[0], length, x.shape[2])
    wide = redistribute(x, layouts.to_channels(cut), shape=shape)
    mine = redistribute(filters, layouts.FILTERS, shape=filters.shape)
    n = 2 * length  # so that nothing comes round from the end
    y = jnp.fft.irfft(jnp.fft.rfft(wide, n, axis=1) * jnp.fft.rfft(mine.T, n, axis=0), n, axis=1)
    return redistribute(y[:, :length], layouts.to_rows(cut), shape=shape)
