"""The drop-ins measured: host time, bytes and time, beside three other ways to the same values.

    python benchmarks/compat.py           # 4 gloo ranks, and host time on a fake process group
    python benchmarks/compat.py --quick   # few rounds

The others: what each replaced system does, with raw collectives; `torch.distributed.nn.functional`; DTensor.
All of them run by turns on the same blocks, and must come to our values and gradients. Prints a table and
writes a JSON file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Beside this file are others with the names of packages: those are looked for first.
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import record
from by_turns import Seconds
from drop_ins import measure
from drop_ins.ways import OURS, VERBS
from rich.console import Console
from rich.table import Table

import torch_bridge as xt
from xshard.formatting import format_bytes, format_seconds

RANKS = 4
ROUNDS = 30
HOST_ROUNDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    rounds, host_rounds = (3, 10) if options.quick else (ROUNDS, HOST_ROUNDS)
    host = measure.host(RANKS, host_rounds)
    verbs = []
    for i, verb in record.shown(list(enumerate(VERBS)), "drop-ins"):
        by_rank = xt.run_ranks(
            RANKS, measure.on_a_rank, i, rounds, start_method="forkserver", timeout_s=600.0
        )
        ways = [{"way": name, **most(by_rank, name), **host_s(host[i][name])} for name in verb.ways]
        verbs.append({"verb": verb.name, "system": verb.system, "block": verb.shape, "ways": ways})
    show(Console(width=max(160, Console().width)), verbs)
    command = "python benchmarks/compat.py" + " --quick" * options.quick
    about = record.about(
        command, "torch", ranks=RANKS, backend="gloo", rounds=rounds, host_rounds=host_rounds
    )
    record.write(options.output / "compat.json", about, verbs=verbs)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder for the JSON file")
    return parser.parse_args(arguments)


def most(by_rank: Sequence[Seconds], way: str) -> dict[str, float]:
    """Of every figure that of the rank with the most: a collective is over when all are done."""
    return {key: max(rank[way][key] for rank in by_rank) for key in by_rank[0][way]}


def host_s(seconds: dict[str, float]) -> dict[str, float]:
    return {f"host_{key}": value for key, value in seconds.items()}


# Heads, the figures under them, and how they are written.
COLUMNS = (
    ("host forward", "host_forward_s", format_seconds),
    ("host both", "host_both_s", format_seconds),
    ("gloo both", "both_s", format_seconds),
    ("received forward", "forward_bytes", lambda n: format_bytes(round(n))),
    ("received both", "both_bytes", lambda n: format_bytes(round(n))),
)


def show(console: Console, verbs: Sequence[dict[str, Any]]) -> None:
    table = Table(
        title=f"Drop-ins, {RANKS} ranks: forward alone, and with the gradient; ratios are to xshard",
        title_justify="left",
    )
    for head in ("verb", "way"):
        table.add_column(head, no_wrap=True)
    for head, _, _ in COLUMNS:
        table.add_column(head, justify="right")
        table.add_column("", justify="right")
    for verb in verbs:
        ours = next(way for way in verb["ways"] if way["way"] == OURS)
        for way in verb["ways"]:
            cells = []
            for _, key, form in COLUMNS:
                cells += [form(way[key]), f"{way[key] / ours[key]:.2f}" if ours[key] else ""]
            table.add_row(f"{verb['verb']} ({verb['system']})" if way is ours else "", way["way"], *cells)
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
