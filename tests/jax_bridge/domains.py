"""A function of a cut array, run on host devices and on one: values and gradients of both.

What every block's padding holds on the way in, and that of every cotangent, is NaN: nothing that is
compared here can have come from it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

import jax_bridge as xj
import xshard as xs
from jax_bridge import nn
from jax_bridge.testing.stacked import padded, unpadded
from tests.jax_bridge.helpers import device_mesh

Layers = Callable[..., nn.Sharded]  # (placed block, *parameters)
Results = tuple[
    NDArray, list[NDArray]
]  # global: the output; gradients of the input and each parameter


def sharded(local: Callable, mesh: xs.Mesh, **options) -> Callable:
    """A function of blocks, for arrays of blocks [device, *block]; its results are such arrays."""

    def one(*blocks: jax.Array):
        return jax.tree.map(lambda y: y[None], local(*(x[0] for x in blocks)))

    spec = PartitionSpec(mesh.axes)
    return jax.shard_map(one, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec, **options)


def on_devices(
    layers: Layers,
    x: NDArray,
    parameters: tuple[NDArray, ...],
    layout: str,
    mesh: xs.Mesh,
    *,
    mode: str = "vma",
) -> tuple[Results, xs.Sharding]:
    """The layers on blocks; their cotangent is `cotangent_of` the output. mode: vma, novma or pmap."""
    source = xs.Sharding(xs.Layout.parse(layout), mesh, x.shape)
    everywhere = PartitionSpec(mesh.axes)
    nowhere = PartitionSpec()

    def apply(block, *parameters):
        if mode != "vma":
            parameters = [xj.ops.copy_to(p, source.layout.axes) for p in parameters]
        y = layers(nn.Sharded(block, layout, shape=x.shape), *parameters)
        targets.append(y.sharding)
        return y.block

    def both(block, *parameters):
        y, pull = jax.vjp(apply, block[0], *parameters)
        cotangent = cotangent_of(targets[-1].shape, x.dtype)
        cut = padded(
            xs.reference.scatter(cotangent, str(targets[-1].layout), mesh), targets[-1], fill=np.nan
        )
        gradient, *others = pull(
            jnp.asarray(cut)[jax.lax.axis_index(mesh.axes if mode != "pmap" else axis)]
        )
        return y[None], gradient[None], tuple(others)

    targets: list[xs.Sharding] = []  # of each trace
    given = (nowhere,) * len(parameters)
    blocks = padded(xs.reference.scatter(x, layout, mesh), source, fill=np.nan)
    if mode == "pmap":
        axis = next(a for a in mesh.axes if mesh.size(a) == mesh.n_devices)
        program = jax.pmap(both, axis, in_axes=(0, *[None] * len(parameters)))
        y, gradient, others = program(blocks[:, None], *parameters)
        y = y[:, 0]
        gradient = gradient[:, 0]
        others = tuple(g[0] for g in others)
    else:
        specs = {"in_specs": (everywhere, *given), "out_specs": (everywhere, everywhere, given)}
        mapped = jax.shard_map(both, mesh=device_mesh(mesh), check_vma=mode == "vma", **specs)
        y, gradient, others = jax.jit(mapped)(blocks, *parameters)
    target = targets[-1]
    return (_whole(y, target), [_whole(gradient, source), *map(np.asarray, others)]), target


def on_one(
    function: Callable[..., jax.Array], x: NDArray, parameters: tuple[NDArray, ...]
) -> Results:
    """The same, of the global array."""

    @jax.jit
    def both(cotangent, x, *parameters):
        y, pull = jax.vjp(function, x, *parameters)
        return y, pull(cotangent)

    # As an argument: of a constant XLA would compute the gradient while it compiles.
    target = jax.eval_shape(function, x, *parameters)
    y, gradients = both(cotangent_of(target.shape, x.dtype), x, *parameters)
    return np.asarray(y), [*map(np.asarray, gradients)]


def cotangent_of(shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    return np.random.default_rng(7).integers(-4, 5, shape).astype(dtype)


def difference(found: Any, expected: Any) -> float:
    """Of trees of arrays: the largest, relative to the largest expected number of its array; NaN counts."""
    worst = [0.0]
    for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = map(np.asarray, pair)
        assert a.shape == b.shape
        worst.append(np.abs(a - b).max(initial=0) / max(1, np.abs(b).max(initial=0)))
    return float(np.max(worst))


def _whole(blocks: jax.Array, sharding: xs.Sharding) -> NDArray:
    """The global array; the padding of every block is zero."""
    blocks = np.asarray(blocks)
    own = unpadded(blocks, sharding)
    assert np.array_equal(blocks, padded(own, sharding, fill=0)), "something is left in the padding"
    return xs.reference.gather(own, str(sharding.layout), sharding.mesh, sharding.shape)
