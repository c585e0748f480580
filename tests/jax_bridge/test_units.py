"""Dims cut in whole units: arrays that have them, blocks inside of `shard_map`, and specs that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax
from xshard.errors import PlanError


@in_jax
def test_blocks_and_their_scales_are_multiplied_where_they_are() -> None:
    mesh = device_mesh(xs.Mesh(tp=4))
    weight = jnp.arange(32 * 8.0).reshape(32, 8)
    scale = jnp.arange(16.0).reshape(8, 2)
    x = jnp.arange(16.0).reshape(2, 8)
    placed = xj.place(
        {"weight": weight, "scale": scale}, {"weight": "(n 4)/tp (m 4)", "scale": "n/tp m"}, mesh
    )
    assert placed["weight"].sharding.spec == P("tp", None)
    text = "(n 4)/tp (m 4), n/tp m, b (m 4) -> b (n 4)/tp"

    def multiplied(weight: jax.Array) -> jax.Array:
        return xj.einsum(text, weight, placed["scale"], x, mesh=mesh)

    wide = np.asarray(scale).repeat(4, 0).repeat(4, 1)
    assert np.array_equal(multiplied(placed["weight"]), x @ (weight * wide).T)
    gradient = jax.grad(lambda weight: multiplied(weight).sum())(placed["weight"])
    assert np.array_equal(gradient, np.asarray(x.sum(0)) * wide)


@in_jax
def test_blocks_of_other_lengths_are_inside_of_shard_map() -> None:
    """6 units on 4 devices: blocks of 2, 2, 1 and 1, which a `jax.Array` cannot have."""
    mesh = device_mesh(xs.Mesh(tp=4))
    x = jnp.arange(24 * 3.0).reshape(24, 3)
    layout = "(n 4)/balanced(tp) d"
    doubled = xj.shard_map(lambda block: 2 * block, f"{layout} -> {layout}", mesh=mesh)
    assert np.array_equal(doubled(x), 2 * x)
    with pytest.raises(PlanError, match=r"a PartitionSpec cannot cut '\(n 4\)/tp'"):
        xj.specs.to_partition_spec("(n 4)/tp d")
