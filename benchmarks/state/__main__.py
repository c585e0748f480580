"""Weights from files under other layouts, and between nodes, beside the ways of torch, orbax and safetensors.

    python -m benchmarks.state           # 1 GiB in files, 130 MiB between nodes; needs namespaces
    python -m benchmarks.state --quick   # 4 MiB in files, half a MiB between nodes

Files lie in the page cache, and are removed afterwards. All ways are timed by turns, in new memory. Prints
tables and writes a JSON file. Exit status 1 if a claim fails.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.claim import Row, finish
from benchmarks.state import live, torch_loads
from benchmarks.state.claims import faster, judge
from benchmarks.torch_calls import on_ranks
from xshard.formatting import format_bytes
from xshard.runtimes.backends import BACKENDS
from xshard.runtimes.processes import Process
from xshard.testing.nodes import nodes

HANG_S = 900.0
DEVICES = 8
HEADS = ("", "way", "ms", "to ours", "over the link")


def main(arguments: Sequence[str] | None = None) -> int:
    quick = "4 MiB in files, half a MiB between nodes"
    options = record.options("state", __doc__, quick=quick).parse_args(arguments)
    scale, sent, rounds = (16, live.QUICK_SCALE, 2) if options.quick else (1, live.SCALE, 7)
    loads = _loads(scale, rounds)
    with nodes(live.NODES, ranks=live.PER_NODE, rate=live.RATE) as cluster:
        transfers = cluster.run_torch(live.rows, sent, min(rounds, 3), timeout_s=HANG_S)[0]
    for title, rows in (("Loads", loads), ("Between nodes", transfers)):
        record.console().print(record.table(title, HEADS, _lines(rows), n_left=2))
    libraries = ("torch", "jax", "orbax-checkpoint", "safetensors")
    facts = {"rate": live.RATE}
    files = {"loads": loads, "transfers": transfers}
    judged = judge(loads, transfers)
    return finish(options, "Weights", judged, *libraries, rows=files, **facts, load=os.getloadavg())


def _loads(scale: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_ranks(torch_loads.RANKS, torch_loads.save, folder, scale)
        rows = [
            _alone("torch", 1, "benchmarks.state.torch_loads.whole", folder, rounds),
            on_ranks(torch_loads.RANKS, torch_loads.resharded, folder, scale, rounds)[0],
        ]
        (folder / "torch.pt").unlink()
        return [
            *rows,
            _alone("jax", DEVICES, "benchmarks.state.jax_loads.resharded", folder, scale, rounds),
        ]


def _alone(package: str, devices: int, function: str, *arguments: Any) -> Row:
    """The row of a function in a new process, which has no memory left from others."""
    process = Process(BACKENDS[package].environment(devices))
    try:
        return process.ask(function, *arguments, timeout_s=HANG_S)
    finally:
        process.end()


def _lines(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for row in rows:
        for way, turns in row["seconds"].items():
            times = f"{1e3 * statistics.median(turns):.1f}", f"{faster(row['seconds'], way):.2f}"
            across = row.get("across_bytes", {}).get(way)
            yield (
                row.get("part") or row["case"],
                way,
                *times,
                format_bytes(across) if across else "",
            )
        yield ()


if __name__ == "__main__":
    sys.exit(main())
