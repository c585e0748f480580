"""One compiled program that reshards all arrays of a call, on one mesh.

Decides what is compiled and when: one program per call, kept for the next one like it, with its progress in
the log "xshard.reshard".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import Mesh as JaxMesh

from jax_bridge.arrays.partition_spec import to_named_sharding
from jax_bridge.mesh.axis_types import as_reduced, as_unreduced
from jax_bridge.planning import xshard_mesh
from jax_bridge.redistribution import redistribute
from xshard import Layout, Plan, Profile, ShapeError, planner
from xshard.formatting import format_bytes
from xshard.notation.parser import Shard, mark_errors
from xshard.plans.expression import Expression, sides

LOG = logging.getLogger("xshard.reshard")


class Program(NamedTuple):
    """A jitted function of all arrays, and the shardings that it expects them to have."""

    sources: tuple[NamedSharding, ...]
    run: Callable[..., tuple[jax.Array, ...]]


class _Move(NamedTuple):
    """One array's part of a program. reusable: its blocks keep their size, so that memory can be donated."""

    source: NamedSharding
    target: NamedSharding
    whole: Callable[[jax.Array], jax.Array]
    reusable: bool


@lru_cache(maxsize=4096)
def make_program(
    expressions: tuple[Expression, ...],
    mesh: JaxMesh | AbstractMesh,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype, ...],
    donate: bool,
    profile: str | Path | Profile,
) -> Program:
    """The program for one array per expression. Raises as `reshard` does."""
    moves = []
    for i, (expression, shape, dtype) in enumerate(zip(expressions, shapes, dtypes, strict=True), 1):
        text = sides(expression).text
        plan = (
            expression
            if isinstance(expression, Plan)
            else planner.plan(expression, xshard_mesh(mesh), shape, dtype.name, profile=profile)
        )
        moves.append(_move_of(plan, text, mesh))
        LOG.info(
            "array %d of %d: %s, %s%s: %d steps, %s received by the busiest device",
            *(i, len(expressions), text, dtype.name, list(shape)),
            *(len(plan.steps), format_bytes(plan.bytes_received)),
        )

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        LOG.info("tracing one program for %d arrays", len(arrays))  # a compiled program is not traced again
        return tuple(move.whole(x) for move, x in zip(moves, arrays, strict=True))

    return Program(
        tuple(move.source for move in moves),
        jax.jit(
            run,
            donate_argnums=[i for i, move in enumerate(moves) if donate and move.reusable],
            # A mesh without devices comes from the context: the jit around this one knows the devices.
            out_shardings=None if isinstance(mesh, AbstractMesh) else tuple(move.target for move in moves),
        ),
    )


def _move_of(plan: Plan, text: str, mesh: JaxMesh | AbstractMesh) -> _Move:
    for side in (plan.source, plan.target):
        if not side.is_even:
            raise ShapeError(
                f"a jax.Array has no uneven blocks: {plan.shape} does not divide under '{side.layout}'",
                text=text,
                hint="pad the array, or redistribute(..., shape=) inside shard_map, which pads blocks",
            )
    with mark_errors(text):
        source = to_named_sharding(storage_layout(plan.source.layout), mesh)
        target = to_named_sharding(storage_layout(plan.target.layout), mesh)

    def local(x: jax.Array) -> jax.Array:
        y = redistribute(x, plan)
        return as_reduced(as_unreduced(y, plan.dst.tagged("sum")), plan.dst.tagged("copy"))

    whole = jax.shard_map(local, mesh=mesh, in_specs=source.spec, out_specs=target.spec)
    return _Move(source, target, whole, plan.source.max_local_size == plan.target.max_local_size)


def storage_layout(layout: Layout) -> Layout:
    """The layout of the array in storage order: the same axes cut each dim, into contiguous blocks."""
    dims = (replace(d, shards=tuple(Shard(s.axes) for s in d.shards)) for d in layout.dims)
    return replace(layout, dims=tuple(dims))
