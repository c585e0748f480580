# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A model, as a notebook
#
# A perceptron with its weights cut over four devices, trained with its gradients, in JAX on four host
# devices. The strings are the same in torch.

# %%
import os

os.environ["JAX_NUM_CPU_DEVICES"] = "4"  # before JAX makes its devices
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jax_bridge as xj
import xshard as xs

# %% [markdown]
# ## Where is what?
#
# The first weight is cut by columns, the second by rows, and the activations between layers by the
# sequence.

# %%
UP, DOWN = "s/tp d, d f/tp -> s f/tp", "s f/tp, f/tp d -> s/tp d"
sizes = {"s": 8, "d": 4, "f": 16}
xs.plan(UP, xs.Mesh(tp=4), sizes=sizes)

# %%
xs.plan(DOWN, xs.Mesh(tp=4), sizes=sizes)

# %% [markdown]
# An all-gather before, a reduce-scatter after. Their gradients are planned too: nothing is added by hand.

# %%
mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))


def model(x, up, down):
    h = jnp.tanh(xj.einsum(UP, x, up))
    return x + xj.einsum(DOWN, h, down)


sharded = xj.shard_map(model, "s/tp d, d f/tp, f/tp d -> s/tp d", mesh)


def whole(x, up, down):
    """The same on one device."""
    return x + jnp.tanh(x @ up) @ down


# %% [markdown]
# ## Train both

# %%
draw = np.random.default_rng(0).standard_normal
x, target, up, down = (draw(shape, np.float32) for shape in [(8, 4), (8, 4), (4, 16), (16, 4)])
start = 0.1 * up, 0.1 * down


def train(apply, weights, steps=20):
    def loss(weights):
        return ((apply(x, *weights) - target) ** 2).mean()

    def step(weights, _):
        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients), value

    return jax.jit(lambda weights: jax.lax.scan(step, weights, length=steps)[1])(weights)


one, four = (np.asarray(train(apply, start)) for apply in (whole, sharded))
assert np.allclose(one, four, rtol=1e-5) and four[-1] < four[0] / 2
print("one device:  ", *(f"{loss:.4f}" for loss in one[::5]))
print("four devices:", *(f"{loss:.4f}" for loss in four[::5]))

# %% [markdown]
# When a gradient looks wrong, `XSHARD_CHECK_REPLICATED=1` compares what should be one value, and [the
# equivalence kit](../recipes/check_port.md) compares this model with its torch twin.
