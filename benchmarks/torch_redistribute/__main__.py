"""The torch bridge beside DTensor, collectives by hand and plain copies: host and run time, memory, packing.

    python benchmarks/torch_bridge.py           # public cases of 4 and 8 devices, 1 KiB to 64 MiB
    python benchmarks/torch_bridge.py --quick   # a few of them

Prints a table and writes a JSON file. What is timed is timed by turns with its peer. Exit status 1 when
a claim of `executing.claims` does not hold; what breaks it is named.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# This file has the name of the package that it measures: that is looked for first, and beside this folder.
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import claim
import record
from rich.console import Console
from rich.table import Table

from xshard.formatting import format_bytes

NAME = "torch_bridge_host_run_memory_packing"
RANKS = (4, 8)
# Bytes of the whole array, every how manieth case has that size, and in how many rounds.
SIZES = ((1 << 10, 2, 31), (1 << 16, 2, 31), (1 << 20, 3, 21), (1 << 24, 6, 11), (1 << 26, 12, 7))
QUICK = ((1 << 12, 12, 5), (1 << 20, 24, 3))
PACKED = {"cpu": (1 << 24, 1 << 26), "cuda": (1 << 26, 1 << 28, 1 << 30, 1 << 31)}
PROFILE = "gloo"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few cases, few rounds")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder for the JSON file")
    options = parser.parse_args(arguments)
    found = measure(quick=options.quick)
    import torch
    from executing import claims

    judged = claims.judge(**found)
    claim.show("The torch bridge and its peers", judged)
    Console().print(sizes(found["ends"]))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    command = "python benchmarks/torch_bridge.py" + " --quick" * options.quick
    about = record.about(command, "torch", backend="gloo", gpu=gpu)
    path = options.output / f"{NAME}.json"
    print(record.write(path, about, claims=[each.to_dict() for each in judged], **found))
    return int(not all(each.holds for each in judged))


def measure(*, quick: bool) -> dict[str, Any]:
    """The rows of everything."""
    import torch
    from executing import claims, ends, host, packs
    from planning.cases import load, scaled

    torch.set_num_threads(1)
    cases = [case for case in load("public") if case.mesh.n_devices in RANKS]
    chosen, rounds = [], []
    for nbytes, stride, turns in QUICK if quick else SIZES:
        distinct: dict[Any, Any] = {}
        for case in cases:
            large = scaled(case, nbytes)
            if large.is_even or not case.is_even:
                distinct.setdefault((large.src, large.dst, large.mesh, large.shape, large.dtype), large)
        some = [*distinct.values()][::stride]
        chosen += some
        rounds += [turns] * len(some)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "host": host.calls(100 if quick else 1000),
        "memory": host.memory(),
        "packs": packs.rates(PACKED[kind][:1] if quick else PACKED[kind], 3 if quick else 9),
        "ends": ends.end_to_end(chosen, rounds, PROFILE, claims.LEAST),
    }


def sizes(ends: Sequence[dict[str, Any]]) -> Table:
    """How many times as fast as each peer, by the size of the array; and one program as the same again."""
    table = Table(title="Times as fast as: geometric mean (worst)", title_justify="left")
    ways = sorted({way for row in ends for way in row["faster_than"]})
    for head in ("array", "cases", *ways, "by hand, as by hand again"):
        table.add_column(head, justify="right")
    for nbytes in sorted({_bucket(row["bytes"]) for row in ends}):
        rows = [row for row in ends if _bucket(row["bytes"]) == nbytes]
        by_way = [[row["faster_than"][way] for row in rows if way in row["faster_than"]] for way in ways]
        by_way.append([row["noise"] for row in rows if row["noise"] is not None])
        cells = (f"{statistics.geometric_mean(v):.2f} ({min(v):.2f})" if v else "" for v in by_way)
        table.add_row(format_bytes(nbytes), str(len(rows)), *cells)
    return table


def _bucket(nbytes: int) -> int:
    """The size that was asked for: arrays are up to twice as large."""
    return max((size for size, *_ in (*SIZES, *QUICK) if size <= nbytes), default=SIZES[0][0])


if __name__ == "__main__":
    sys.exit(main())
