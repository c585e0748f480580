"""Training steps of layers in a loop, compiled for chips that this machine need not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
from jax_bridge import nn

LAYERS, ROWS, WIDTH, HIDDEN = 8, 4096, 2048, 8192
BATCH, SEQUENCE = 2, 2048
LONG, HEADS, HEAD_WIDTH = 8192, 8, 128
DTYPE = jnp.bfloat16


class Program(NamedTuple):
    """A function of blocks whose gradient is compiled.

    axis: the mesh axis, of 4 devices. specs: of the arguments; the result has the last one. shapes: likewise.
    """

    f: Callable[..., Any]
    axis: str
    specs: tuple[P, ...]
    shapes: tuple[tuple[int, ...], ...]

    def lowered(self, devices: Any) -> Any:
        """Return the lowered gradient by all arguments, for some devices."""
        mesh = Mesh(np.array(devices), (self.axis,), axis_types=(AxisType.Auto,))
        f = jax.shard_map(self.f, mesh=mesh, in_specs=self.specs, out_specs=self.specs[-1])

        def loss(*arguments: Any) -> Any:
            return jnp.square(f(*arguments).astype(jnp.float32)).sum()

        abstract = []
        for spec, shape in zip(self.specs, self.shapes, strict=True):
            sharding = NamedSharding(mesh, spec)
            abstract.append(jax.ShapeDtypeStruct(shape, DTYPE, sharding=sharding))
        numbers = tuple(range(len(abstract)))
        return jax.jit(jax.grad(loss, numbers)).lower(*abstract)


def mlp(x: Any, weights: Any) -> Any:
    """A layer: [rows, width] and ([width, hidden], [hidden, width]) -> [rows, width]."""
    up, down = weights
    return x + jax.nn.gelu(x @ up) @ down


def gather(stored: Any) -> Any:
    """Make the parameters of a layer whole; their gradients are scattered."""
    return jax.tree.map(lambda w: xj.redistribute(w, "i/dp o -> i o | copy(dp)"), stored)


def in_a_scan(ups: Any, downs: Any, x: Any, *, unroll: int = 1) -> Any:
    """ZeRO-3: each layer gathers its parameters, and again in the backward pass."""

    @jax.checkpoint
    def body(x: Any, stored: Any) -> Any:
        return mlp(x, gather(stored)), None

    return lax.scan(body, x, (ups, downs), unroll=unroll)[0]


def a_layer_ahead(ups: Any, downs: Any, x: Any) -> Any:
    """ZeRO-3: the next layer's parameters travel in the carry."""
    return scan_layers(mlp, gather, (ups, downs), x)


def tensor_parallel(ups: Any, downs: Any, x: Any, *, overlap: Any) -> Any:
    """Tensor and sequence parallel: activations are gathered before a layer, and scattered after it."""

    @jax.checkpoint
    def body(x: Any, stored: Any) -> Any:
        up, down = stored
        h = xj.einsum("b s/tp d, d f/tp -> b s f/tp", x, up, overlap=overlap)
        y = xj.einsum("b s f/tp, f/tp d -> b s/tp d", jax.nn.gelu(h), down, overlap=overlap)
        return x + y, None

    return lax.scan(body, x, (ups, downs))[0]


ring = partial(nn.attention, layout="b s/cp h k", how="ring")

_STACKED = ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH))
_ZERO_SPECS = (P(None, "dp"), P(None, "dp"), P("dp"))
_ZERO_SHAPES = (*_STACKED, (ROWS, WIDTH))
_TENSOR_SPECS = (P(None, None, "tp"), P(None, "tp"), P(None, "tp"))
_TENSOR_SHAPES = (*_STACKED, (BATCH, SEQUENCE, WIDTH))

PROGRAMS = {
    "ZeRO-3 in a scan": Program(in_a_scan, "dp", _ZERO_SPECS, _ZERO_SHAPES),
    "ZeRO-3 in a scan, unroll=4": Program(
        partial(in_a_scan, unroll=4), "dp", _ZERO_SPECS, _ZERO_SHAPES
    ),
    "ZeRO-3, a layer ahead": Program(a_layer_ahead, "dp", _ZERO_SPECS, _ZERO_SHAPES),
    "tensor parallel in a scan": Program(
        partial(tensor_parallel, overlap="never"), "tp", _TENSOR_SPECS, _TENSOR_SHAPES
    ),
    "tensor parallel in rounds": Program(
        partial(tensor_parallel, overlap="always"), "tp", _TENSOR_SPECS, _TENSOR_SHAPES
    ),
    "ring attention": Program(
        ring, "cp", (P(None, "cp"),) * 3, ((1, LONG, HEADS, HEAD_WIDTH),) * 3
    ),
}


def devices_of(target: str, gpu_target: str) -> list[Any]:
    """Return 4 devices to compile for: of a TPU topology, which libtpu knows, or GPUs by their description.

    target: "tpu_v5e", or the name of a GPU's profile. gpu_target: the text of a `GpuTargetConfigProto`.
    """
    if target.startswith("tpu"):
        topology = {"tpu_v5e": "v5e:2x2", "tpu_v5p": "v5p:2x2x1", "tpu_v6e": "v6e:2x2"}[target]
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    description = topologies.get_topology_desc(
        "", platform="cuda", topology="1x1x4", target_config=gpu_target
    )
    return list(description.devices)


# ---- a scan whose next layer's parameters travel in the carry; docs/jax.md explains it


def each_layer(
    step: Any, gather: Any, stored: Any, carry: Any, inputs: Any, *, reverse: bool
) -> Any:
    """Scan layers with their gathered parameters: step(carry, parameters, input) -> carry, output."""
    numbers = jnp.arange(len(jax.tree.leaves(stored)[0]))
    direction = -1 if reverse else 1

    def of_layer(number: Any) -> Any:
        return gather(jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, number, 0, False), stored))

    def step_ahead(carry_and_weights: Any, numbered_input: Any) -> Any:
        carry, weights = carry_and_weights
        number, x = numbered_input
        ahead = of_layer(number + direction)  # of any layer after the last one
        carry, output = step(carry, weights, x)
        return (carry, ahead), output

    first = of_layer(numbers[::direction][0])
    (carry, _), outputs = lax.scan(step_ahead, (carry, first), (numbers, inputs), reverse=reverse)
    return carry, outputs


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan_layers(layer: Any, gather: Any, stored: Any, x: Any) -> Any:
    """Run layers one after another, whose parameters are gathered a layer ahead, forward and backward."""
    return _forward(layer, gather, stored, x)[0]


def _forward(layer: Any, gather: Any, stored: Any, x: Any) -> Any:
    def step(x: Any, weights: Any, _: None) -> Any:
        return layer(x, weights), x

    y, inputs = each_layer(step, gather, stored, x, None, reverse=False)
    return y, (stored, inputs)


def _backward(layer: Any, gather: Any, kept: Any, cotangent: Any) -> Any:
    stored, inputs = kept
    one = jax.tree.map(lambda w: w[0], stored)
    _, send_back = jax.vjp(gather, one)  # linear, so that it is the same for all layers

    def step(cotangent: Any, weights: Any, x: Any) -> Any:
        _, pull = jax.vjp(layer, x, weights)
        cotangent, gradient = pull(cotangent)
        return cotangent, *send_back(gradient)

    cotangent, gradients = each_layer(step, gather, stored, cotangent, inputs, reverse=True)
    return gradients, cotangent


scan_layers.defvjp(_forward, _backward)
