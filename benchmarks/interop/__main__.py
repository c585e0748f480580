"""Arrays shared between torch and JAX, and JAX called from torch: seconds, and bytes copied.

    python -m benchmarks.interop           # blocks of up to 64 MiB
    python -m benchmarks.interop --quick   # up to 1 MiB, few rounds

Prints tables and writes a JSON file. Everything is timed by turns with its peer: sharing with the bare DLPack
exchange of one block, a call with the same function under `jax.jit`. Exit status 1 if a claim of
`interop.claims` fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import claim, record
from benchmarks.interop.claims import Row, judge
from xshard.formatting import format_bytes

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of a block; there is one per device
WIDTHS = (64, 256, 1024)  # of the matrices of a call


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options(__doc__, quick="small blocks, few rounds").parse_args(arguments)
    os.environ.setdefault("PJRT_NPROC", "16")
    from benchmarks.interop import measures  # imports JAX, which reads its environment first

    measures.configure()
    sizes, widths, rounds = (SIZES[:3], WIDTHS[:1], 11) if options.quick else (SIZES, WIDTHS, 101)
    handed = [measures.hand_over(size, rounds) for size in sizes]
    called = [measures.call(width, rounds) for width in widths]
    show(handed, called, measures.DEVICES)
    judged = judge(handed)
    claim.show("Shared arrays", judged)
    about = record.about(record.command("interop", options), "torch", "jax", "jaxlib")
    claims = [each.to_dict() for each in judged]
    print(record.write(options.output / "interop.json", about, claims=claims, handed=handed, called=called))
    return int(not all(each.holds for each in judged))


def show(handed: Sequence[Row], called: Sequence[Row], devices: int) -> None:
    console = Console(width=max(Console().width, 130))
    ways = [*handed[0]["seconds"]]
    table = Table(title=f"{devices} blocks handed over: microseconds, bytes copied", title_justify="left")
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
