"""One compiled program that reshards all arrays of a call, on one mesh.

Decides what is compiled and when: one program per call, kept for the next one like it, with its progress in
the log "xshard.reshard".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from jax_bridge.arrays.given import check_given_mesh, free_mesh
from jax_bridge.arrays.primitive import Mesh, ends, move
from jax_bridge.planning import check_given
from xshard import Plan, Profile, Sharding, planner
from xshard.errors import ShapeError, located
from xshard.formatting import format_bytes
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, sides

LOG = logging.getLogger("xshard.reshard")


class Program(NamedTuple):
    """A function of all arrays, as it is and jitted, its plans, and the shardings that it expects."""

    plans: tuple[Plan, ...]
    sources: tuple[NamedSharding, ...]
    traced: Callable[..., tuple[jax.Array, ...]]
    run: Callable[..., tuple[jax.Array, ...]]


@lru_cache(maxsize=4096)
def make_program(
    expressions: tuple[Expression, ...],
    mesh: Mesh,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype, ...],
    donate: bool,
    profile: str | Path | Profile,
    places: tuple[str, ...] = (),
) -> Program:
    """The program for one array per expression. Raises as `reshard` does, at the place of the array."""
    plans, shardings = [], []
    for i, (expression, shape, dtype) in enumerate(zip(expressions, shapes, dtypes, strict=True), 1):
        text = sides(expression).text
        with located(places[i - 1] if places else ""):
            plan = _plan_for_whole(expression, text, mesh, shape, dtype.name, profile)
            plans.append(plan)
            shardings.append(_ends(plan, text, mesh))
        LOG.info(
            "array %d of %d: %s, %s%s: %d steps, %s received by the busiest device",
            *(i, len(expressions), text, dtype.name, list(shape)),
            *(len(plan.steps), format_bytes(plan.bytes_received)),
        )

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        LOG.info("tracing one program for %d arrays", len(arrays))  # a compiled program is not traced again
        return tuple(move(x, plan, mesh) for plan, x in zip(plans, arrays, strict=True))

    sources, targets = zip(*shardings, strict=True)
    # Blocks that keep their size can use the memory of those that are donated.
    reusable = [p.source.max_local_size == p.target.max_local_size for p in plans]
    jitted = jax.jit(
        run,
        donate_argnums=[i for i, same in enumerate(reusable) if donate and same],
        # A mesh without devices comes from the context: the jit around this one knows the devices.
        out_shardings=None if isinstance(mesh, AbstractMesh) else targets,
    )
    return Program(tuple(plans), sources, run, jitted)


def _plan_for_whole(
    expression: Expression,
    text: str,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    profile: str | Path | Profile,
) -> Plan:
    """The plan for a global array: a new one, or the given one after a check. Raises as `reshard` does."""
    src, dst, _ = sides(expression)
    here = free_mesh(mesh, (*src.axes, *dst.axes), text)
    if not isinstance(expression, Plan):
        return planner.plan(expression, here, shape, dtype, profile=profile)
    with mark_errors(text):
        check_given(expression, "the array", shape, dtype)
        check_given_mesh(expression.axes, expression.mesh, here)
    return expression


def _ends(plan: Plan, text: str, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    check_even((plan.source, plan.target), text)
    with mark_errors(text):
        return ends(plan, mesh)


def check_even(arrays: Sequence[Sharding], text: str) -> None:
    """Raise ShapeError unless all devices have blocks of one size."""
    for side in arrays:
        if not side.is_even:
            raise ShapeError(
                f"a jax.Array has no uneven blocks: {side.shape} does not divide under '{side.layout}'",
                text=text,
                hint="pad the array, or redistribute(..., shape=) inside shard_map, which pads blocks",
            )
