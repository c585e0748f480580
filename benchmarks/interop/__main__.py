"""Handing arrays between torch and JAX, and calling JAX inside torch: seconds, and bytes copied.

    python benchmarks/interop.py           # blocks up to 256 MiB
    python benchmarks/interop.py --quick   # up to 1 MiB, few rounds

Prints tables, writes results/interop.json. Everything is timed by turns with its peer: a hand-over with the
bare DLPack exchange of one block, a call with the same function under `jax.jit`. Bytes
copied are counted by where the blocks begin before and after. Exit status 1 where a hand-over that promises
none has copied a byte, or takes longer for more bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import claim
import record

from xshard.formatting import format_bytes

DEVICES = 4
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of a block, of which there are four
QUICK_SIZES = SIZES[:3]
WIDTHS = (64, 256, 1024)  # of the matrices of a call
COPIED_ROUNDS = 11
FLAT = 2.0  # the longest hand-over takes at most so many times the shortest

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small blocks, few rounds")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder for the JSON file")
    options = parser.parse_args(arguments)
    configure()
    rounds = 11 if options.quick else 101
    sizes = QUICK_SIZES if options.quick else SIZES
    handed = [hand_over(size, rounds) for size in sizes]
    called = [call(width, rounds) for width in (WIDTHS[:1] if options.quick else WIDTHS)]
    show(handed, called)
    judged = judge(handed)
    claim.show("Shared arrays", judged)
    command = "python benchmarks/interop.py" + " --quick" * options.quick
    about = record.about(command, "torch", "jax", "jaxlib")
    claims = [each.to_dict() for each in judged]
    print(record.write(options.output / "interop.json", about, claims=claims, handed=handed, called=called))
    return int(not all(each.holds for each in judged))


def configure() -> None:
    """Host devices, before JAX makes any."""
    os.environ.setdefault("PJRT_NPROC", "16")
    import jax
    import torch

    torch.set_num_threads(1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def hand_over(size: int, rounds: int) -> Row:
    """Four blocks of a size, there and back: seconds shared and copied, and bytes that were copied."""
    import jax
    import torch

    from jax_bridge.torch_interop import to_jax, to_torch

    mesh = jax.make_mesh((DEVICES,), ("dp",))
    blocks = [torch.ones(size // 4) for _ in range(DEVICES)]
    array = to_jax(blocks, "n/dp", mesh)
    seconds = timed(
        {
            "to_jax": lambda: to_jax(blocks, "n/dp", mesh, copy=False),
            "to_torch": lambda: to_torch(array, "n/dp", copy=False),
            "jax.dlpack.from_dlpack, one block": lambda: jax.dlpack.from_dlpack(blocks[0]),
            "torch.from_dlpack, one block": lambda: torch.from_dlpack(array.addressable_shards[0].data),
        },
        rounds,
    )
    # Afterwards: memory that comes and goes would slow down whatever takes its turn beside it.
    seconds |= timed(
        {
            "to_jax, copied": lambda: to_jax(blocks, "n/dp", mesh, copy=True),
            "to_torch, copied": lambda: to_torch(array, "n/dp", copy=True),
        },
        COPIED_ROUNDS,
    )
    given = [block.data_ptr() for block in blocks]
    shared, copied = (to_jax(blocks, "n/dp", mesh, copy=copy) for copy in (None, True))
    back = [block.data_ptr() for block in to_torch(shared, "n/dp")]
    bytes_copied = {
        "to_jax": size * moved(given, pointers(shared)),
        "to_jax, copied": size * moved(given, pointers(copied)),
        "to_torch": size * moved(pointers(shared), back),
    }
    return {"block_bytes": size, "seconds": seconds, "bytes_copied": bytes_copied}


def pointers(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def moved(before: Sequence[int], after: Sequence[int]) -> int:
    """Blocks that begin elsewhere than before."""
    return sum(a != b for a, b in zip(before, after, strict=True))


def call(width: int, rounds: int) -> Row:
    """tanh(x @ w) of square matrices: seconds of a call from torch, and of the same under jit."""
    import jax
    import jax.numpy as jnp
    import torch

    from jax_bridge.torch_interop import from_jax

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    mesh = jax.make_mesh((1,), ("dp",))
    f = from_jax(layer, "...", "...", mesh)
    x, w = torch.randn(width, width), torch.randn(width, width) / width
    leaf, cotangent = w.clone().requires_grad_(), torch.ones(width, width)
    whole = jax.NamedSharding(mesh, jax.P())
    a, b, c = (jax.device_put(v.numpy(), whole) for v in (x, w, cotangent))
    plain = jax.jit(layer)
    forward = jax.jit(lambda x, w: jax.vjp(lambda w: layer(x, w), w))
    pull = jax.jit(lambda pull, c: pull(c))

    def both() -> Any:
        y, pullback = forward(a, b)
        jax.block_until_ready(y)
        return jax.block_until_ready(pull(pullback, c))

    def both_in_torch() -> Any:
        return torch.autograd.grad(f(x, leaf), leaf, cotangent)

    seconds = timed(
        {
            "forward, from torch": lambda: f(x, w),
            "forward, jit": lambda: jax.block_until_ready(plain(a, b)),
            "forward and backward, from torch": both_in_torch,
            "forward and backward, jit": both,
        },
        rounds,
    )
    return {"width": width, "seconds": seconds}


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of every call; all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for function in calls.values():
        function()
    for _ in range(rounds):
        for name, function in calls.items():
            start = time.perf_counter()
            kept = function()
            seconds[name].append(time.perf_counter() - start)
            del kept
    return {name: statistics.median(found) for name, found in seconds.items()}


def judge(handed: Sequence[Row]) -> list[claim.Claim]:
    found = []
    for way in ("to_jax", "to_torch"):
        copied = [(format_bytes(row["block_bytes"]), row["bytes_copied"][way]) for row in handed]
        found.append(claim.worst(f"bytes that {way} copies", copied, 0))
        seconds = [row["seconds"][way] for row in handed]
        flat = [("largest block", seconds[-1] / seconds[0])]
        found.append(claim.worst(f"{way}: time of the largest block / of the smallest", flat, FLAT))
    return found


def show(handed: Sequence[Row], called: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 130))
    ways = [*handed[0]["seconds"]]
    table = Table(title=f"{DEVICES} blocks handed over: microseconds, bytes copied", title_justify="left")
    for head in ("block", *ways, "copied"):
        table.add_column(head, justify="right")
    for row in handed:
        copied = row["bytes_copied"]["to_jax"] + row["bytes_copied"]["to_torch"]
        times = [f"{row['seconds'][way] * 1e6:.0f}" for way in ways]
        table.add_row(format_bytes(row["block_bytes"]), *times, format_bytes(copied))
    console.print(table)
    table = Table(title="tanh(x @ w), square: microseconds", title_justify="left")
    for head in ("width", *called[0]["seconds"], "more, forward", "more, both"):
        table.add_column(head, justify="right")
    for row in called:
        found = [*row["seconds"].values()]
        times = [f"{seconds * 1e6:.0f}" for seconds in found]
        more = [f"{(a - b) * 1e6:.0f}" for a, b in (found[:2], found[2:])]
        table.add_row(str(row["width"]), *times, *more)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
