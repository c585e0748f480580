"""One compiled program for all arrays of a `reshard` call, cached for the next call like it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jax_bridge.arrays.primitive import move
from jax_bridge.arrays.stored import ArrayMesh, StoredArray, check_even
from jax_bridge.calls import check_plan
from xshard import Plan, Profile, planner
from xshard.errors import located
from xshard.formatting import format_bytes
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, sides

LOG = logging.getLogger("xshard.reshard")


class Program(NamedTuple):
    """A function of all arrays, as it is and jitted, its plans, and the arrays that it expects."""

    plans: tuple[Plan, ...]
    sources: tuple[StoredArray, ...]
    traced: Callable[..., Sequence[jax.Array]]
    run: Callable[..., Sequence[jax.Array]]


@lru_cache(maxsize=4096)
def make_program(
    expressions: tuple[Expression, ...],
    mesh: ArrayMesh,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype, ...],
    donate: bool,
    profile: str | Path | Profile,
    paths: tuple[str, ...] = (),
) -> Program:
    """The program for one array per expression.

    paths: names of the arrays, for errors. Raises as `reshard` does.
    """
    plans: list[Plan] = []
    sources: list[StoredArray] = []
    targets: list[StoredArray] = []
    paths = paths or ("",) * len(expressions)
    for i, (expression, shape, dtype, path) in enumerate(
        zip(expressions, shapes, dtypes, paths, strict=True), 1
    ):
        src, dst, text = sides(expression)
        with located(path):
            if isinstance(expression, Plan):
                plan = expression
                with mark_errors(text):
                    check_plan(plan, "the array", shape, dtype.name)
                    mesh.free(plan.axes, text, plan.mesh)
            else:
                free = mesh.free((*src.axes, *dst.axes), text)
                plan = planner.plan(expression, free, shape, dtype.name, profile=profile)
            check_even(plan.source, text)
            targets.append(StoredArray.of(plan.target, mesh, text, path))
            sources.append(StoredArray.of(plan.source, mesh, text, path))
        plans.append(plan)
        LOG.info(
            "array %d of %d: %s, %s%s: %d steps, %s received by the busiest device",
            *(i, len(expressions), text, dtype.name, list(shape)),
            *(len(plan.steps), format_bytes(plan.bytes_received)),
        )

    def run(*arrays: jax.Array) -> Sequence[jax.Array]:
        LOG.info("tracing one program for %d arrays", len(arrays))  # a compiled program is not traced again
        return [move(x, plan, mesh.here) for plan, x in zip(plans, arrays, strict=True)]

    # Blocks that keep their size can use the memory of donated ones.
    reusable = [plan.source.max_local_size == plan.target.max_local_size for plan in plans]
    jitted = jax.jit(
        run,
        donate_argnums=[i for i, same in enumerate(reusable) if donate and same],
        # A mesh without devices comes from the context: the jit around this one knows the devices.
        out_shardings=None if isinstance(mesh.here, AbstractMesh) else [x.sharding for x in targets],
    )
    return Program(tuple(plans), tuple(sources), run, jitted)
