"""Loads in JAX, eight host devices of one process: ours, orbax, and the slices of safetensors.

All ways give arrays under the same shardings. Runs in a process of its own.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import jax_bridge as xj
from benchmarks import by_turns
from benchmarks.claim import Row
from benchmarks.state import floor, weights
from xshard import Mesh
from xshard.state.files import open_checkpoint

DEVICES = 8


def resharded(folder: Path, scale: int, rounds: int, _: float) -> Row:
    """What four ranks have saved, as a server of eight devices has it."""
    mesh, trained = (
        jax.make_mesh((DEVICES,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
        for axis in ("tp", "fsdp")
    )
    stored = folder / "safetensors"
    served = weights.shardings(weights.SERVED, Mesh(tp=DEVICES), scale)
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape,
            "bfloat16",
            sharding=jax.NamedSharding(mesh, xj.specs.to_partition_spec(x.layout)),
        )
        for name, x in served.items()
    }
    load = lambda: jax.block_until_ready(xj.load(stored, weights.SERVED, mesh))  # noqa: E731
    with open_checkpoint(stored) as checkpoint:
        loaded = xj.load(checkpoint, weights.SERVED, mesh)
        read = checkpoint.bytes_read
        needed = sum(_own_bytes(x) for x in loaded.values())
    held = sum(x.data.nbytes for array in loaded.values() for x in array.addressable_shards)
    del loaded
    beyond = floor.bytes_beyond(load, held)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", xj.load(stored, weights.TRAINED, trained))
        checkpointer.wait_until_finished()
        calls: floor.Calls = {
            weights.OURS: load,
            "xshard, from orbax's files": lambda: jax.block_until_ready(
                xj.load(folder / "orbax", weights.SERVED, mesh)
            ),
            weights.ORBAX: lambda: jax.block_until_ready(
                checkpointer.restore(folder / "orbax", target)
            ),
            weights.SLICES: lambda: _slices(stored, target),
        }
        expected = load()
        for name, way in calls.items():
            loaded = way()
            assert all(
                np.array_equal(_bits(loaded[key]), _bits(x)) for key, x in expected.items()
            ), name
        del expected, loaded
        calls |= floor.calls(sorted(stored.glob("*.safetensors")), needed)
        seconds = by_turns.seconds(
            calls, rounds, warm_up=1, before=lambda: floor.memory_at_hand(needed)
        )
    counts = {"bytes_read": read, "bytes_needed": needed}
    return {"part": f"JAX, {DEVICES} devices", **counts, "bytes_beyond": beyond, "seconds": seconds}


def _slices(folder: Path, target: dict[str, Any]) -> dict[str, jax.Array]:
    """Each device's part by safetensors itself."""
    arrays = {}
    for name, stored in weights.slices(folder, "np"):
        like = target[name]
        arrays[name] = jax.make_array_from_callback(like.shape, like.sharding, stored.__getitem__)
    return jax.block_until_ready(arrays)


def _own_bytes(array: jax.Array) -> int:
    """Bytes of the parts on devices of this process, each counted once."""
    return sum({str(x.index): x.data.nbytes for x in array.addressable_shards}.values())


def _bits(array: jax.Array) -> Any:
    return np.asarray(array).view(np.uint16)
