"""The same moves in JAX, two processes of two devices: ours beside XLA's own reshard.

Imported on the nodes; in this process it must not import JAX.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from benchmarks import by_turns
from benchmarks.nodes.measures import MESH, MOVE_S, MOVES, OURS
from xshard.layout.layout import parse_expression

Row = dict[str, Any]


def reshards(bytes_per_s: float, profile: Any, rounds: int, quick: bool) -> list[Row]:
    """A row per move of a global array; sums and orders of a cut are not XLA's. In every process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils

    import jax_bridge as xj

    # XLA's permutations send before they receive: a device does not have the port to itself, as in torch.
    profile = replace(profile, across=replace(profile.across, topology="switch"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(MESH.sizes), MESH.axes)
    side, found = 64 * round((bytes_per_s * MOVE_S / 4) ** 0.5 / 64), list[Row]()
    texts = {name: text for name, text in MOVES.items() if "sum" not in text}
    for name, text in list(texts.items())[: 2 if quick else None]:
        src, dst = (
            jax.NamedSharding(mesh, xj.specs.to_partition_spec(layout)) for layout in parse_expression(text)
        )
        x = jax.jit(lambda: jnp.ones((2 * side, 2 * side)), out_shardings=src)()
        theirs = jax.jit(lambda x: x + 0, out_shardings=dst)
        ways = {
            OURS: lambda: jax.block_until_ready(xj.reshard(x, text, profile=profile)),  # noqa: B023
            "XLA": lambda: jax.block_until_ready(theirs(x)),  # noqa: B023
        }
        meet = lambda: multihost_utils.sync_global_devices("turn")  # noqa: E731
        times = by_turns.seconds(ways, rounds, warm_up=1, before=meet)
        slowest = multihost_utils.process_allgather(np.array(list(times.values()))).max(0)
        seconds = {way: statistics.median(turns) for way, turns in zip(times, slowest.tolist(), strict=True)}
        found.append({"case": name, "expression": text, "shape": (2 * side, 2 * side), "seconds": seconds})
    return found
