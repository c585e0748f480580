"""Units that several devices share, `h/spread(tp)`, inside of `shard_map` under both kinds of types."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
from tests.jax_bridge.helpers import device_mesh, in_jax
from tests.spread_cases import Spec, blocks_of, random_move, random_product
from xshard import Mesh
from xshard.errors import ShapeError


def padded(blocks: list[np.ndarray]) -> np.ndarray:
    """The blocks of all devices in one array, each as large as the largest."""
    shape = np.max([block.shape for block in blocks], axis=0, initial=0)
    stacked = np.zeros((len(blocks), *shape), np.float32)
    for i, block in enumerate(blocks):
        stacked[(i, *map(slice, block.shape))] = block
    return stacked


def unpadded(stacked: jax.Array, spec: Spec, mesh: dict[str, int]) -> list[np.ndarray]:
    rows_of_blocks = [rows for rows, _ in blocks_of(spec, mesh)]
    pairs = zip(np.asarray(stacked), rows_of_blocks, strict=True)
    return [block[tuple(slice(len(rows)) for rows in dims)] for block, dims in pairs]


@in_jax
def test_random_moves_and_contractions_are_right_with_their_gradients() -> None:
    for seed in range(4):
        move = random_move(seed, 4)

        def moved(x: jax.Array, move=move) -> jax.Array:
            return xj.redistribute(x[0], move.text, shape=move.whole.shape)[None]

        (result, pull) = jax.vjp(on_devices(moved, move.mesh), padded(move.blocks))
        [gradient] = pull(padded(move.cotangents))
        move.check(unpadded(result, move.dst, move.mesh), unpadded(gradient, move.src, move.mesh))
    for seed in range(2):
        product = random_product(seed, 4)

        def multiplied(x: jax.Array, y: jax.Array, product=product) -> jax.Array:
            return xj.einsum(product.text, x[0], y[0], sizes=product.sizes)[None]

        blocks = [padded(operand) for operand in product.blocks]
        result, pull = jax.vjp(on_devices(multiplied, product.mesh), *blocks)
        gradients = pull(padded(product.cotangents))
        product.check(
            unpadded(result, product.specs[2], product.mesh),
            *[
                unpadded(g, s, product.mesh)
                for g, s in zip(gradients, product.specs[:2], strict=True)
            ],
        )


def on_devices(function, mesh):
    everywhere = P(tuple(mesh))
    return jax.jit(
        jax.shard_map(
            function,
            mesh=device_mesh(Mesh(mesh)),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
    )


@in_jax
def test_a_shared_unit_has_types() -> None:
    """A device's unit differs along tp by its type, and its gradient is the sum over the group."""
    mesh = device_mesh(Mesh(tp=4))

    def own_unit(x: jax.Array) -> jax.Array:
        unit = xj.redistribute(x, "h d -> h/spread(tp) d | copy(tp)", shape=(2, 3))
        return (unit * (1.0 + jax.lax.axis_index("tp"))).sum()[None]

    summed = jax.shard_map(own_unit, mesh=mesh, in_specs=P(), out_specs=P("tp"))
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    assert summed(x).tolist() == [3.0, 6.0, 36.0, 48.0]
    gradient = jax.grad(lambda x: summed(x).sum())(x)
    assert gradient.tolist() == [[3.0] * 3, [7.0] * 3]


@in_jax
def test_a_global_array_has_shared_units_whole_and_no_move_takes_it_for_blocks() -> None:
    """Where units are as many as devices, or more, `spread` shards them as other arrays."""
    mesh = device_mesh(Mesh(tp=4))
    keys = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    placed = xj.place(keys, "g/spread(tp) d", mesh)
    assert placed.sharding.is_fully_replicated and np.array_equal(placed, keys)
    why = "a jax.Array cannot have units that devices share in '{}'"
    for text, run in (
        ("g/spread(tp) d -> g d/tp", lambda text: xj.reshard(placed, text, mesh)),
        ("g d -> g/spread(tp) d", lambda text: xj.reshard(placed, text, mesh)),
        ("g/spread(tp) d, g d -> g d", lambda text: xj.einsum(text, placed, keys, mesh=mesh)),
    ):
        with pytest.raises(ShapeError, match=re.escape(why.format(text))):
            run(text)
    queries = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    text = "h/spread(tp) d, e d -> h/spread(tp) e"

    def multiplied(x: jax.Array) -> jax.Array:
        return xj.einsum(text, x, keys, mesh=mesh)

    heads = xj.place(queries, "h/spread(tp) d", mesh)
    assert np.array_equal(multiplied(heads), queries @ keys.T)
    gradient = jax.grad(lambda x: multiplied(x).sum())(heads)
    assert np.array_equal(gradient, np.tile(keys.sum(0), (8, 1)))
    moved = xj.reshard(heads, "h/spread(tp) d -> h d", mesh)
    assert moved.sharding.is_fully_replicated and np.array_equal(moved, queries)
