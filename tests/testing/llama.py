"""The block of a Llama, sharded: one text for torch and JAX, layouts for both, and mistakes planted in JAX.

RMSNorm, rotary positions, grouped-query causal attention, SwiGLU; tensor and sequence parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_bridge as xj
import torch_bridge as xt
from tests.testing.programs import normal

WIDTH, GROUPS, QUERIES, HEAD, TOKENS = 6, 2, 2, 4, 4
WEIGHTS = {
    "norm1": 1 + 0.1 * normal(WIDTH, seed=1),
    "qkv": normal(WIDTH, GROUPS, QUERIES + 2, HEAD, seed=2) / 2,
    "out": normal(GROUPS, QUERIES, HEAD, WIDTH, seed=3) / 3,
    "norm2": 1 + 0.1 * normal(WIDTH, seed=4),
    "up": normal(WIDTH, 2, WIDTH, seed=5) / 2,
    "down": normal(WIDTH, WIDTH, seed=6) / 2,
}
X = normal(2, TOKENS, WIDTH, seed=7)
STORED = {"norm*": "d", "qkv": "d g/tp h k", "out": "g/tp r k d", "up": "d n f/tp", "down": "f/tp d"}
LAYOUTS = (
    [
        {"norm1": "d", "qkv": "d g/tp h k", "out": "g/tp r k d", "norm2": "d"}
        | {"up": "d n f/tp", "down": "f/tp d"},
        "b/dp s/tp d",
    ],
    {"y": "b/dp s/tp d", "loss": "()"},
)


class Ops(NamedTuple):
    """What differs between the frameworks, and `positions`, in which a mistake may be."""

    einsum: Callable[..., Any]
    redistribute: Callable[..., Any]
    softmax: Callable[..., Any]
    silu: Callable[..., Any]
    cat: Callable[..., Any]
    array: Callable[..., Any]
    positions: Callable[[int], np.ndarray] = np.arange
    loss: str = "() | mean(dp,tp) -> ()"


def block(ops: Ops, w: Mapping[str, Any], x: Any) -> dict[str, Any]:
    """[batch, tokens, width] -> the same, and the mean of its squares."""
    heads = ops.einsum("b/dp s/tp d, d g/tp h k -> b/dp s g/tp h k", normed(ops, w["norm1"], x), w["qkv"])
    q, k = (rotated(ops, part) for part in (heads[..., :-2, :], heads[..., -2, :]))
    match = ops.einsum("b/dp s g/tp r k, b/dp t g/tp k -> b/dp g/tp r s t", q, k) / HEAD**0.5
    later = ops.array(np.triu(np.full((TOKENS, TOKENS), -1e9, np.float32), 1))
    seen = ops.softmax(match + later, -1)
    mixed = ops.einsum("b/dp g/tp r s t, b/dp t g/tp k -> b/dp s g/tp r k", seen, heads[..., -1, :])
    x = x + ops.einsum("b/dp s g/tp r k, g/tp r k d -> b/dp s/tp d", mixed, w["out"])
    gate_value = ops.einsum("b/dp s/tp d, d n f/tp -> n b/dp s f/tp", normed(ops, w["norm2"], x), w["up"])
    hidden = ops.silu(gate_value[0]) * gate_value[1]
    y = x + ops.einsum("b/dp s f/tp, f/tp d -> b/dp s/tp d", hidden, w["down"])
    return {"y": y, "loss": ops.redistribute((y * y).mean(), ops.loss)}


def normed(ops: Ops, scale: Any, x: Any) -> Any:
    small = ((x * x).mean(-1, keepdims=True) + 1e-5) ** -0.5
    return ops.einsum("b/dp s/tp d, d -> b/dp s/tp d", x * small, scale)


def rotated(ops: Ops, x: Any) -> Any:
    """Turned by its place: [batch, tokens, ..., width]."""
    angles = np.outer(ops.positions(TOKENS), 10.0 ** -np.arange(HEAD // 2)).astype(np.float32)
    angles = angles.reshape(TOKENS, *[1] * (x.ndim - 3), HEAD // 2)
    a, b, cos, sin = (
        x[..., : HEAD // 2],
        x[..., HEAD // 2 :],
        ops.array(np.cos(angles)),
        ops.array(np.sin(angles)),
    )
    return ops.cat([a * cos - b * sin, a * sin + b * cos], -1)


IN_JAX = Ops(xj.einsum, xj.redistribute, jax.nn.softmax, jax.nn.silu, jnp.concatenate, jnp.asarray)


def block_torch(w, x, mesh):
    def on(function):
        return lambda *args: function(*args, mesh=mesh)

    silu = torch.nn.functional.silu
    ops = Ops(on(xt.einsum), on(xt.redistribute), torch.softmax, silu, torch.cat, torch.as_tensor)
    return block(ops, w, x)


def block_jax(w, x):
    return block(IN_JAX, w, x)


def block_whole(w, x):
    """On whole arrays."""

    def einsum(expression: str, *operands: jax.Array) -> jax.Array:
        plain = expression.replace("/dp", "").replace("/tp", "").replace(" -> ", "->").split("->")
        terms = [term.replace(" ", "") for term in plain[0].split(",")]
        return jnp.einsum(f"{','.join(terms)}->{plain[1].replace(' ', '')}", *operands)

    return block(IN_JAX._replace(einsum=einsum, redistribute=lambda x, _: x), w, x)


def local_positions(w, x):
    """Tokens counted from the beginning of each device's part."""
    return block(IN_JAX._replace(positions=lambda n: np.arange(n) % (n // 2)), w, x)


def detached(w, x):
    return block(IN_JAX, {**w, "up": jax.lax.stop_gradient(w["up"])}, x)


def loss_not_divided(w, x):
    return block(IN_JAX._replace(loss="() | sum(dp,tp) -> ()"), w, x)
