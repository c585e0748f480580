"""The time of planned contractions on host devices, by turns with XLA's own einsum.

Timed are jitted programs that take and return the same sharded arrays: forward, and forward with all
gradients, for a cotangent under the sharding of the result. Ours is planned for these devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bridge as xj
import xshard as xs
from benchmarks import by_turns
from benchmarks.claim import Row
from benchmarks.einsum import xla
from benchmarks.einsum.cases import Case
from benchmarks.einsum.claims import BOTH, FORWARD, TIMED_DEVICES
from benchmarks.jax_devices import configure

WIDTH = 512  # of the matrices that are multiplied to measure this machine's rate


def rows(cases: Sequence[Case], rounds: int) -> list[list[Row]]:
    """The rows of every case; to be called in a new process, which gets host devices."""
    configure(TIMED_DEVICES)
    profile = here()
    return [timed(case, rounds, profile) for case in cases]


def here() -> xs.Profile:
    """The profile of host devices, with the most operations per second of one while all multiply."""
    n = len(jax.devices())
    x = jax.device_put(
        np.ones((n, WIDTH, WIDTH), np.float32),
        jax.sharding.NamedSharding(jax.make_mesh((n,), ("x",)), jax.P("x")),
    )
    square = jax.jit(lambda x: x @ x)
    seconds = by_turns.seconds({"": lambda: jax.block_until_ready(square(x))}, 9)[""]
    rate = 2 * WIDTH**3 / min(seconds)  # whatever else the machine does in some rounds
    return replace(xs.load_profile("host"), flops_per_s=(("float32", rate),))


def timed(case: Case, rounds: int, profile: xs.Profile) -> list[Row]:
    """A row per objective."""
    layouts = *case.contraction.operands, case.contraction.result
    *operands, result = [xla.sharding(case, layout) for layout in layouts]
    rng = np.random.default_rng(0)
    *blocks, cotangent = [
        jax.device_put(rng.standard_normal(case.shape(layout), np.float32), where)
        for layout, where in zip(layouts, (*operands, result), strict=True)
    ]
    rows = []
    for objective, arrays, wrap, shardings in (
        (FORWARD, blocks, lambda einsum: einsum, (tuple(operands), result)),
        (
            BOTH,
            [cotangent, *blocks],
            _with_gradients,
            ((result, *operands), (result, tuple(operands))),
        ),
    ):
        plan = case.plan(objective, None, profile)
        plain = xla.program(case)
        ours = partial(xj.einsum, plan, mesh=result.mesh)
        programs = {
            name: jax.jit(wrap(einsum), in_shardings=shardings[0], out_shardings=shardings[1])
            for name, einsum in (("ours", ours), ("xla", plain), ("xla again", plain))
        }
        _check(programs, arrays)
        calls = {
            name: lambda program=program, arrays=arrays: jax.block_until_ready(program(*arrays))
            for name, program in programs.items()
        }
        row = {"case": f"{case.name}, {objective}", "expression": case.expression}
        row |= {"sizes": dict(case.sizes), "local": plan.local}
        rows.append(row | by_turns.beside_xla(calls, rounds))
    return rows


def _with_gradients(einsum: Callable[..., Any]) -> Callable[..., Any]:
    def both(cotangent: Any, *operands: Any) -> Any:
        y, pull = jax.vjp(einsum, *operands)
        return y, pull(cotangent)

    return both


def _check(programs: dict[str, Any], arrays: list[Any]) -> None:
    """Both give the same values."""
    mine, theirs = (jax.tree.leaves(programs[name](*arrays)) for name in ("ours", "xla"))
    for a, b in zip(mine, theirs, strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4 * scale)
