"""Arrays shared between torch and JAX, and JAX called from torch: seconds, and bytes copied.

    python -m benchmarks.interop           # blocks of up to 64 MiB
    python -m benchmarks.interop --quick   # up to 1 MiB, few rounds

Prints tables and writes a JSON file. Everything is timed by turns with its peer: sharing with the bare DLPack
exchange of one block, a call with the same function under `jax.jit`. Exit status 1 if a claim fails.
"""

import os
import sys
from collections.abc import Sequence

import torch

from benchmarks import record
from benchmarks.claim import Claim, Row, finish, worst
from xshard.formatting import format_bytes

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of a block; there is one per device
WIDTHS = (64, 256, 1024)  # of the matrices of a call
FLAT = 2.0  # at most so many times as long for the largest block as for the smallest


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("interop", __doc__, quick="small blocks, few rounds").parse_args(
        arguments
    )
    os.environ.setdefault("PJRT_NPROC", "16")
    from benchmarks.interop import measures  # imports JAX, which reads its environment first
    from benchmarks.jax_devices import configure

    configure(measures.DEVICES)
    torch.set_num_threads(1)
    sizes, widths, rounds = (SIZES[:3], WIDTHS[:1], 11) if options.quick else (SIZES, WIDTHS, 101)
    handed = [measures.hand_over(size, rounds) for size in sizes]
    called = [measures.call(width, rounds) for width in widths]
    show(handed, called, measures.DEVICES)
    rows = {"handed": handed, "called": called}
    return finish(options, "Shared arrays", judge(handed), "torch", "jax", "jaxlib", rows=rows)


def judge(handed: Sequence[Row]) -> list[Claim]:
    """Every claim, in order. handed: rows from the smallest block to the largest."""
    claims = []
    for way in ("to_jax", "to_torch"):
        copied = [(format_bytes(row["block_bytes"]), row["bytes_copied"][way]) for row in handed]
        claims.append(worst(f"bytes that {way} copies", copied, 0))
        flat = [("largest block", handed[-1]["seconds"][way] / handed[0]["seconds"][way])]
        claims.append(worst(f"{way}: time of the largest block / of the smallest", flat, FLAT))
    return claims


def show(handed: Sequence[Row], called: Sequence[Row], devices: int) -> None:
    lines = []
    for row in handed:
        copied = row["bytes_copied"]["to_jax"] + row["bytes_copied"]["to_torch"]
        times = (f"{seconds * 1e6:.0f}" for seconds in row["seconds"].values())
        lines.append((format_bytes(row["block_bytes"]), *times, format_bytes(copied)))
    title = f"{devices} blocks handed over: microseconds, bytes copied"
    heads = [*handed[0]["seconds"]]
    record.console().print(record.table(title, ("block", *heads, "copied"), lines, n_left=0))
    lines = []
    for row in called:
        us = [seconds * 1e6 for seconds in row["seconds"].values()]
        lines.append(
            (str(row["width"]), *(f"{n:.0f}" for n in (*us, us[0] - us[1], us[2] - us[3])))
        )
    heads = ["width", *called[0]["seconds"], "more, forward", "more, both"]
    record.console().print(
        record.table("tanh(x @ w), square: microseconds", heads, lines, n_left=0)
    )


if __name__ == "__main__":
    sys.exit(main())
