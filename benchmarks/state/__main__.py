"""Weights from files under other layouts, and between nodes, beside the ways of torch, orbax and safetensors.

    python -m benchmarks.state           # 1 GiB in files, 130 MiB between nodes; needs namespaces
    python -m benchmarks.state --quick   # 4 MiB in files, half a MiB between nodes

Files lie in the page cache, and are removed afterwards. All ways are timed by turns, in new memory. Prints
tables and writes a JSON file. Exit status 1 if a claim fails.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import claim, record
from benchmarks.state import live, torch_loads
from benchmarks.state.claims import faster, judge
from benchmarks.torch_calls import on_ranks
from xshard.formatting import format_bytes
from xshard.runtimes.backends import BACKENDS
from xshard.runtimes.processes import Process
from xshard.testing.nodes import nodes

HANG_S = 900.0
DEVICES = 8

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options(__doc__, quick="4 MiB in files, half a MiB between nodes").parse_args(arguments)
    scale, sent, rounds = (16, live.QUICK_SCALE, 2) if options.quick else (1, live.SCALE, 7)
    loads, transfers = _loads(scale, rounds), _transfers(sent, min(rounds, 3))
    judged = judge(loads, transfers)
    claim.show("Weights", judged)
    for title, rows in (("Loads", loads), ("Between nodes", transfers)):
        Console().print(_shown(title, rows))
    libraries = "torch", "jax", "orbax-checkpoint", "safetensors"
    about = record.about(record.command("state", options), *libraries, rate=live.RATE, load=os.getloadavg())
    found = {"claims": [each.to_dict() for each in judged], "loads": loads, "transfers": transfers}
    print(record.write(options.output / "state.json", about, **found))
    return int(not all(each.holds for each in judged))


def _loads(scale: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_ranks(torch_loads.RANKS, torch_loads.save, folder, scale)
        found = [
            _alone("torch", 1, "benchmarks.state.torch_loads.whole", folder, rounds),
            on_ranks(torch_loads.RANKS, torch_loads.resharded, folder, scale, rounds)[0],
        ]
        (folder / "torch.pt").unlink()
        return [*found, _alone("jax", DEVICES, "benchmarks.state.jax_loads.resharded", folder, scale, rounds)]


def _alone(package: str, devices: int, function: str, *given: Any) -> Row:
    """In a process of its own, where no memory is left from others."""
    process = Process(BACKENDS[package].environment(devices))
    try:
        row: Row = process.ask(function, *given, timeout_s=HANG_S)
        return row
    finally:
        process.end()


def _transfers(scale: int, rounds: int) -> list[Row]:
    with nodes(live.NODES, ranks=live.PER_NODE, rate=live.RATE) as cluster:
        rows: list[Row] = cluster.run_torch(live.rows, scale, rounds, timeout_s=HANG_S)[0]
        return rows


def _shown(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in ("", "way", "ms", "to ours", "over the link"):
        table.add_column(head, justify="left" if head in ("", "way") else "right")
    for row in rows:
        for way, turns in row["seconds"].items():
            times = f"{1e3 * statistics.median(turns):.1f}", f"{faster(row['seconds'], way):.2f}"
            across = row.get("across_bytes", {}).get(way)
            table.add_row(row.get("part") or row["case"], way, *times, format_bytes(across) if across else "")
        table.add_section()
    return table


if __name__ == "__main__":
    sys.exit(main())
