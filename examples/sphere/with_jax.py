"""The network in JAX, on the devices of this process; blocks are padded with zeros to the largest."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_bridge as xj
from jax_bridge.testing import stacked
from sphere.network import HALO, NODES, Array, Parts, Run, network


def run(parts: Parts) -> Run:
    """One step, forward and backward, on a device per part."""
    shape = parts.problem.arrays.nodes.shape
    n = parts.mesh.n_devices
    mesh = jax.make_mesh((n,), ("gp",), devices=jax.devices()[:n])

    def together(blocks: Sequence[Array], fill: int = 0) -> jax.Array:
        """A block for each device -> one array."""
        most = max(map(len, blocks))
        width = [(0, 0)] * (blocks[0].ndim - 1)
        rows = [
            np.pad(block, [(0, most - len(block)), *width], constant_values=fill)
            for block in blocks
        ]
        return jax.device_put(np.concatenate(rows), jax.NamedSharding(mesh, P("gp")))

    def apart(array: jax.Array, owners: str) -> list[Array]:
        """The reverse."""
        blocks = np.split(np.asarray(array), n)
        sizes = parts.maps[owners].sizes
        return [block[:size] for block, size in zip(blocks, sizes, strict=True)]

    def read(nodes: jax.Array) -> jax.Array:
        return xj.redistribute(nodes, f"{NODES} -> {HALO}", shape=shape, maps=parts.maps)

    def loss(
        weights: Any, nodes: jax.Array, edges: jax.Array, expected: jax.Array, *graph: jax.Array
    ) -> Any:
        """Padded nodes stay zero, since these MLPs make zeros of zeros; padded edges have no receiver."""
        output = network(
            weights,
            nodes,
            edges,
            *graph,
            read=read,
            take=lambda x, rows: x.at[rows].get(mode="clip"),
            add=lambda x, rows, y: jnp.zeros_like(x).at[rows].add(y, mode="drop"),
            join=partial(jnp.concatenate, axis=-1),
            silu=jax.nn.silu,
        )
        return jax.lax.psum(jnp.square(output - expected).sum() / np.prod(shape), "gp"), output

    nodes, expected, edges = map(together, zip(*parts.blocks(), strict=True))
    _, sender, receiver = zip(*parts.local, strict=True)
    graph = together(sender), together(receiver, fill=len(nodes))
    mapped = jax.shard_map(
        loss, mesh=mesh, in_specs=(P(), *[P("gp")] * 5), out_specs=(P(), P("gp"))
    )
    step = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1, 2), has_aux=True))
    (_, output), (weights, *pulled) = step(parts.problem.weights, nodes, edges, expected, *graph)
    halo = (
        jax.jit(jax.shard_map(read, mesh=mesh, in_specs=P("gp"), out_specs=P("gp")))
        .lower(nodes)
        .compile()
    )
    return parts.joined(
        apart(output, "cells"),
        apart(pulled[0], "cells"),
        apart(pulled[1], "edges"),
        {name: np.asarray(gradient) for name, gradient in weights.items()},
        stacked.received_bytes(halo.as_text(), n),
    )
