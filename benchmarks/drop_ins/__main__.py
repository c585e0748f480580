"""The drop-ins: host time, bytes and run time, beside three other ways to the same values.

    python -m benchmarks.drop_ins           # 4 gloo ranks, and host time on a fake process group
    python -m benchmarks.drop_ins --quick   # few rounds

The other ways: what each replaced system does, with raw collectives; `torch.distributed.nn.functional`;
DTensor. All run by turns on the same blocks, and must give our values and gradients. Prints a table and
writes a JSON file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.drop_ins import measures
from benchmarks.drop_ins.ways import OURS, VERBS
from benchmarks.torch_calls import largest, on_ranks
from xshard.formatting import format_bytes, format_seconds

RANKS = 4
ROUNDS = 30
HOST_ROUNDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options(__doc__, quick="few rounds").parse_args(arguments)
    rounds, host_rounds = (1, 3) if options.quick else (ROUNDS, HOST_ROUNDS)
    host = measures.host(RANKS, host_rounds)
    by_rank = on_ranks(RANKS, measures.on_a_rank, rounds)
    verbs = []
    for verb, hosts, *ranks in zip(VERBS, host, *by_rank, strict=True):
        found = largest(ranks)
        ways = [{"way": name, **found[name], **host_figures(hosts[name])} for name in verb.ways]
        verbs.append({"verb": verb.name, "system": verb.system, "block": verb.shape, "ways": ways})
    show(Console(width=max(160, Console().width)), verbs)
    command = record.command("drop_ins", options)
    about = record.about(
        command, "torch", ranks=RANKS, backend="gloo", rounds=rounds, host_rounds=host_rounds
    )
    record.write(options.output / "drop_ins.json", about, verbs=verbs)
    return 0


def host_figures(seconds: dict[str, float]) -> dict[str, float]:
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
