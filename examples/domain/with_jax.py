"""The network in JAX, its rows on four devices: `python -m domain.with_jax STEPS`.

The same network as in with_torch.py. Inside shard_map a `Sharded` is one device's block with its sharding.
Every layer reads the sharding and returns the one of its result.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from support.jax_training import Weights, descend
from support.runs import run_in_jax

from domain import data
from jax_bridge import redistribute
from jax_bridge.nn import Sharded, conv_general_dilated, group_norm, interpolate, max_pool
from jax_bridge.specs import to_named_sharding

SHAPE = (2, 3, data.HEIGHT, data.WIDTH)


def network(weights: Weights, x: Sharded) -> Sharded:
    """Down by a stride and a pool, up by a transposed convolution and by interpolation, with skips."""
    full = activated(weights, "norm_first", conv(weights, "first", x))
    half = activated(weights, "norm_down", conv(weights, "down", full, stride=2))
    quarter = max_pool(half, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    quarter = activated(weights, "norm_middle", conv(weights, "middle", quarter))
    half = conv(weights, "merge", beside(up(weights, quarter), half))
    whole = interpolate(relu(half), (*half.sharding.shape[:2], data.HEIGHT, data.WIDTH), "linear")
    return conv(weights, "last", beside(whole, full))


def conv(weights: Weights, name: str, x: Sharded, stride: int = 1) -> Sharded:
    """Zeros beyond the first and the last row; without a stride the columns close up to a ring."""
    ring = {"w": "periodic"} if stride == 1 else None
    y = conv_general_dilated(
        x, weights[f"{name}.weight"], (stride, stride), ((1, 1), (1, 1)), boundary=ring
    )
    return shifted(weights, name, y)


def up(weights: Weights, x: Sharded) -> Sharded:
    """Twice as many rows and columns: every input is spread over a kernel, and the kernels are added."""
    kernel = jnp.flip(weights["up.weight"], (2, 3)).swapaxes(0, 1)
    y = conv_general_dilated(x, kernel, (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2))
    return shifted(weights, "up", y)


def shifted(weights: Weights, name: str, x: Sharded) -> Sharded:
    return jax.tree.map(lambda block: block + weights[f"{name}.bias"][:, None, None], x)


def activated(weights: Weights, name: str, x: Sharded) -> Sharded:
    scale = weights[f"{name}.weight"]
    bias = weights[f"{name}.bias"]
    return relu(group_norm(x, data.GROUPS, scale, bias, feature_dim=1))


def relu(x: Sharded) -> Sharded:
    return jax.tree.map(jax.nn.relu, x)


def beside(a: Sharded, b: Sharded) -> Sharded:
    """The features of both."""
    n, features, *space = a.sharding.shape
    shape = (n, features + b.sharding.shape[1], *space)
    return a.with_block(jnp.concatenate([a.block, b.block], axis=1), a.layout.dims, shape)


def mean_loss(weights: Weights, noisy: jax.Array, clean: jax.Array) -> jax.Array:
    """The mean square error: the sum of all devices' shares."""
    y = network(weights, Sharded(noisy, data.LAYOUT, shape=SHAPE))
    error = jax.tree.map(lambda a: a - clean, y).owned().block
    return redistribute(jnp.square(error).sum() / np.prod(SHAPE), "() | sum(sp) -> ()")


def train(steps: int) -> Iterator[dict[str, float]]:
    """Train from the shared start: the losses."""
    mesh = jax.make_mesh(data.MESH.sizes, data.MESH.axes)
    rows = to_named_sharding(data.LAYOUT, mesh)

    def padded(images: data.Array) -> jax.Array:
        """Blocks on devices are equally large; the rows of the padding are never read."""
        fill = -data.HEIGHT % data.MESH.n_devices
        wide = np.pad(images, ((0, 0), (0, 0), (0, fill), (0, 0)), constant_values=np.nan)
        return jax.device_put(wide, rows)

    batch = tuple(map(padded, data.photographs()))
    weights: Weights = jax.device_put(data.initial_weights(), jax.NamedSharding(mesh, jax.P()))
    return descend(mean_loss, weights, [batch] * steps, mesh, data.LEARNING_RATE, data.MOMENTUM)


if __name__ == "__main__":
    run_in_jax(train, data.MESH.n_devices)
