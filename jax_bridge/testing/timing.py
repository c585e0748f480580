"""The JAX side of `xshard calibrate`: seconds of plans on host devices, forward only.

A plan is timed as programs use it: inside one compiled program, which calls it in a loop, so that the launch
of the program itself hardly counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.testing.stacked import DeviceProgram
from jax_bridge.testing.worker import apply
from xshard import ContractionPlan, Layout, Plan, Sharding
from xshard.dtypes import numpy_dtype
from xshard.testing.plans import sources_of, target_of

TARGET_S = 0.02  # seconds of a program, about; the number of calls follows from it
MOST_CALLS = 100


def seconds_of_plans(plans: Sequence[Plan | ContractionPlan], rounds: int, _timeout_s: float) -> list[float]:
    """The median time of every plan over some rounds."""
    timers = [Timer(plan) for plan in plans]
    # All are measured once before any is measured again: a slow spell of the machine falls on all.
    by_round = [[timer.seconds() for timer in timers] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*by_round, strict=True)]


def seconds_of_products(
    n_devices: int, rows: int, dtypes: Sequence[str], rounds: int, _timeout_s: float
) -> list[float]:
    """The median time per dtype of a product of square matrices, on all devices at once."""
    mesh, medians = jax.make_mesh((n_devices,), ("all",)), []
    multiply = jax.jit(jax.shard_map(jnp.matmul, mesh=mesh, in_specs=jax.P("all"), out_specs=jax.P("all")))
    with jax.enable_x64(True):
        for dtype in dtypes:
            x = jax.device_put(
                jnp.ones((n_devices, rows, rows), dtype), jax.NamedSharding(mesh, jax.P("all"))
            )
            times = []
            for _ in range(1 + rounds):
                start = time.perf_counter()
                jax.block_until_ready(multiply(x, x))
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times[1:]))  # the first compiles
    return medians


class Timer:
    """A plan in a compiled loop, warmed up, and how often the loop goes round."""

    def __init__(self, plan: Plan | ContractionPlan) -> None:
        counter = Sharding(Layout(()), plan.mesh, ())
        sources, dtype, n = sources_of(plan), numpy_dtype(plan.dtype), plan.mesh.n_devices
        inputs = [([np.ones(s.max_local_shape, dtype)] * n, s) for s in sources]
        calls = [np.ones((), np.int32)] * n, counter
        self.program = DeviceProgram(
            lambda calls, *blocks: [_loop(plan, calls, *blocks)],
            plan.mesh,
            [calls, *inputs],
            [target_of(plan)],
            "novma",
        )
        self.calls = 3
        self.seconds()
        self.calls = int(min(MOST_CALLS, max(1.0, TARGET_S / self.seconds())))

    def seconds(self) -> float:
        """Seconds per call; a program ends when its busiest device does."""
        self.program.arrays[0] = jnp.full_like(self.program.arrays[0], self.calls)
        start = time.perf_counter()
        self.program()
        return (time.perf_counter() - start) / self.calls


def _loop(plan: Plan | ContractionPlan, calls: jax.Array, *operands: jax.Array) -> jax.Array:
    """The plan on one device's blocks, `calls` times, each waiting for the one before."""

    def again(_: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        blocks, _ = state
        y = apply(plan, *blocks)
        # The whole result is kept: if one element is all that is read, XLA computes that element alone.
        return tuple(x.at[(0,) * x.ndim].set(y[(0,) * y.ndim]) for x in blocks), y

    result = jnp.zeros(target_of(plan).max_local_shape, operands[0].dtype)
    return lax.fori_loop(0, calls, again, (operands, result))[1]
