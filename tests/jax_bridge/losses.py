"""Losses in plain JAX, flax nnx and equinox, with the shapes of their arguments: all lengths are even."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Loss = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(*lengths: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(lengths, dtype)


def tokens(batch: int, sequence: int) -> tuple[Any, Any]:
    return shape(batch, sequence, dtype=jnp.int32), shape(batch, sequence, dtype=jnp.int32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


def transformer(
    scan: bool,
    batch: int = 4,
    sequence: int = 8,
    c: int = 16,
    n: int = 3,
    heads: int = 2,
    words: int = 32,
) -> Loss:
    """A decoder of n layers, in a scan with `jax.checkpoint` or one after another."""
    weights = {
        "q": (c, c),
        "k": (c, c),
        "v": (c, c),
        "o": (c, c),
        "up": (c, 4 * c),
        "down": (4 * c, c),
        "norm": (c,),
    }
    layer = {name: shape(*((n,) if scan else ()), *lengths) for name, lengths in weights.items()}
    parameters = {
        "embed": shape(words, c),
        "head": shape(c, words),
        "layers": layer if scan else [layer] * n,
    }

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]
        q, k, v = ((y @ p[name]).reshape(*y.shape[:2], heads, -1) for name in "qkv")
        scores = jnp.einsum("bshd,bthd->bhst", q, k)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        x = x + jnp.einsum("bhst,bthd->bshd", scores, v).reshape(x.shape) @ p["o"]
        return x + checkpoint_name(jax.nn.gelu(x @ p["up"]), "hidden") @ p["down"], None

    def loss(p: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        x = p["embed"][inputs]
        if scan:
            x, _ = jax.lax.scan(jax.checkpoint(block), x, p["layers"])
        else:
            for each in p["layers"]:
                x, _ = block(x, each)
        return cross_entropy(x @ p["head"], targets)

    return loss, (parameters, *tokens(batch, sequence))


def of_nnx(batch: int = 4, sequence: int = 8, c: int = 16, heads: int = 2, words: int = 32) -> Loss:
    """Layers of flax: attention, two norms, a network between them."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attention = nnx.MultiHeadAttention(heads, c, decode=False, rngs=rngs)
            self.norms = nnx.List([nnx.LayerNorm(c, rngs=rngs), nnx.RMSNorm(c, rngs=rngs)])
            self.up, self.down = nnx.Linear(c, 2 * c, rngs=rngs), nnx.Linear(2 * c, c, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norms[0](x))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed, self.head = nnx.Embed(words, c, rngs=rngs), nnx.Linear(c, words, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return lambda model, x, y: cross_entropy(model(x), y), (
        nnx.eval_shape(lambda: Model(nnx.Rngs(0))),
        *tokens(batch, sequence),
    )


def of_equinox(batch: int = 4, width: int = 16) -> Loss:
    """Convolutions, dropout and a network of equinox, over examples by `vmap`."""
    import equinox as eqx

    class Net(eqx.Module):
        convolutions: list[eqx.nn.Conv2d]
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array) -> None:
            a, b, c = jax.random.split(key, 3)
            self.convolutions = [
                eqx.nn.Conv2d(2, 4, 3, 2, 1, key=a),
                eqx.nn.Conv2d(4, 4, 3, 1, 1, groups=4, key=b),
            ]
            self.norm, self.mlp = eqx.nn.LayerNorm(64), eqx.nn.MLP(64, 6, width, 2, key=c)

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            for layer in self.convolutions:
                x = jax.nn.relu(layer(x))
            x = eqx.nn.MaxPool2d(2, 1, padding=((0, 1), (0, 1)))(x)
            return self.mlp(eqx.nn.Dropout(0.1)(self.norm(x.reshape(-1)), key=key))

    def loss(net: Net, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        logits = jax.vmap(net)(x, jax.random.split(key, len(x)))
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, 6), -1))

    net = eqx.filter_eval_shape(Net, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return loss, (net, shape(batch, 2, 8, 8), shape(batch, dtype=jnp.int32), key)


def recurrent() -> Loss:
    """A gated unit over time, with weight decay: parameters that all rounds of a scan use."""
    weights = {"x": (6, 16), "z": (16, 16), "n": (16, 16), "out": (16, 6)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def step(h: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            gate = jax.nn.sigmoid(now + h @ p["z"])
            h = (1 - gate) * h + gate * jnp.tanh(now + h @ p["n"])
            return h, h

        xs = (jax.nn.one_hot(x, 6) @ p["x"]).swapaxes(0, 1)
        _, hs = jax.lax.scan(step, jnp.zeros(xs.shape[1:]), xs)
        logits = jnp.cumsum(hs, 0).swapaxes(0, 1) @ p["out"]
        return cross_entropy(logits, y) + 1e-4 * sum(jnp.sum(w**2) for w in p.values())

    return loss, ({name: shape(*lengths) for name, lengths in weights.items()}, *tokens(4, 8))


def experts() -> Loss:
    """Three layers of four experts, of which two count for each row; their weights are scattered."""
    layer = {"router": shape(16, 4), "up": shape(4, 16, 32), "down": shape(4, 32, 16)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for each in p:
            weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ each["router"]), 2)
            dense = jnp.zeros((len(x), 4)).at[jnp.arange(len(x))[:, None], chosen].set(weights)
            hidden = jax.nn.silu(jnp.einsum("bc,ecf->bef", x, each["up"]))
            x = x + jnp.einsum("be,bef,efc->bc", dense, hidden, each["down"])
        return jnp.mean((x - y) ** 2)

    return loss, ([layer] * 3, shape(8, 16), shape(8, 16))


LOSSES: dict[str, Callable[[], Loss]] = {
    "transformer in a scan": lambda: transformer(True),
    "transformer": lambda: transformer(False),
    "flax nnx": of_nnx,
    "equinox": of_equinox,
    "recurrent": recurrent,
    "experts": experts,
}
