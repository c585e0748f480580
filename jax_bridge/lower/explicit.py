"""Blocks that JAX cuts further, over axes that are Explicit inside a `shard_map` over other axes.

Decides that such a block is moved part by part, with all axes manual: collectives of JAX have no rules for
the Explicit ones. Knows no steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax
from jax.sharding import PartitionSpec

from jax_bridge.versions import cuts_of
from xshard import Plan
from xshard.errors import ShapeError


def explicit_axes(x: jax.Array) -> frozenset[str]:
    """The Explicit axes over which JAX cuts the block besides."""
    return frozenset(axis for axes in _cuts(x) for axis in axes)


def part_by_part(run: Callable[[Plan, jax.Array], jax.Array], plan: Plan, x: jax.Array) -> jax.Array:
    """A block under `plan.src` -> the block under `plan.dst`, by `run` on each of its parts.

    Raises ShapeError if the plan cuts a dim that Explicit axes cut.
    """
    sizes = jax.typeof(x).sharding.mesh.shape
    lengths = []
    target = plan.target.layout
    for axes, length, dim in zip(_cuts(x), plan.shape, plan.source.layout.dims, strict=True):
        if axes and (dim.shards or target.dim(dim.name).shards):
            raise ShapeError(
                f"dim {dim.name!r} of the block is cut over the Explicit axis {axes[0]!r} besides",
                text=f"{plan.src} -> {plan.dst}",
                hint="make that axis manual as well, and name it in the expression",
            )
        lengths.append(length // math.prod(sizes[axis] for axis in axes))
    within, spec = replace(plan, shape=tuple(lengths)), jax.typeof(x).sharding.spec
    entries = [cuts_of(spec)[plan.source.dim_index(name)] for name in target.names]
    after = PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)
    move = jax.shard_map(
        lambda part: run(within, part), in_specs=spec, out_specs=after, axis_names=explicit_axes(x)
    )
    return move(x)


def _cuts(x: jax.Array) -> list[tuple[str, ...]]:
    return [
        (entry,) if isinstance(entry, str) else entry or () for entry in cuts_of(jax.typeof(x).sharding.spec)
    ]
