"""Sums in the order of devices: equal bits by every path and batch, those of numpy and of torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax
from tests.reductions import Reduction, bits, random_reductions

move = functools.partial(xj.redistribute, addends="ranks")


def padded(blocks: list[np.ndarray], array: xs.Sharding) -> np.ndarray:
    """[devices, *block]: blocks as they are in JAX, all of the shape of the largest."""
    found = []
    for block in blocks:
        missing = np.subtract(array.max_local_shape, block.shape)
        found.append(np.pad(block, [(0, length) for length in missing]))
    return np.stack(found)


def check_paths(reduction: Reduction) -> None:
    plan = reduction.plan()
    on_mesh = functools.partial(move, shape=reduction.shape)
    spec = jax.P(reduction.mesh.axes)

    @functools.partial(jax.shard_map, in_specs=spec, out_specs=spec, check_vma=False)
    def paths(blocks: jax.Array) -> dict[str, jax.Array]:
        x = blocks[0]
        text = reduction.expression
        found = {
            "search": on_mesh(x, text),
            "direct": xj.redistribute(x, reduction.direct),
            "under vmap": jax.vmap(lambda block: on_mesh(block, text))(jnp.stack([-x, x]))[1],
        }
        part = x
        for step in reduction.gathered:
            part = xj.redistribute(part, step)
        found["scattered and gathered"] = part
        if reduction.kind == "sum":
            adjoint = reduction.adjoint
            layouts = (adjoint.src, adjoint.dst)
            copies = jnp.zeros(adjoint.source.max_local_shape, x.dtype)
            of_shape = functools.partial(move, layouts=layouts, shape=adjoint.shape)
            found["gradient of copies"] = jax.vjp(of_shape, copies)[1](x)[0]
        return {name: y[None] for name, y in found.items()}

    with jax.set_mesh(device_mesh(reduction.mesh)):
        found = jax.jit(paths)(padded(reduction.blocks, plan.source))
    for name, blocks in found.items():
        for block, wanted in zip(np.asarray(blocks), reduction.wanted, strict=True):
            rows = tuple(map(slice, wanted.shape))
            assert bits(block[rows]) == bits(wanted), (name, reduction)


@in_jax
def test_every_path_has_the_bits_of_the_sum_in_the_order_of_devices() -> None:
    for reduction in random_reductions(9, seed=1):
        if reduction.dtype != "float64":
            check_paths(reduction)


@in_jax
def test_a_mean_and_products_are_rounded_before_they_are_added() -> None:
    """XLA fuses neither the product of an own block nor a division with the sum."""
    mesh = xs.Mesh(a=3)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 40, 30)).astype(np.float32)

    @functools.partial(jax.shard_map, in_specs=jax.P("a"), out_specs=jax.P("a"), check_vma=False)
    def mean(x: jax.Array, w: jax.Array) -> jax.Array:
        return move((x * w)[0], "n d | mean(a) -> n d")[None]

    with jax.set_mesh(device_mesh(mesh)):
        found = np.asarray(jax.jit(mean)(x, w))
    shares = x * w / np.float32(3)
    wanted = shares[0] + shares[1] + shares[2]
    assert bits(found) == bits(np.stack([wanted] * 3))
