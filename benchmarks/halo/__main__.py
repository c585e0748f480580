"""Halo exchange in torch: time, bytes and messages, beside two other ways.

    python -m benchmarks.halo           # 4 gloo ranks, and host time on a fake process group
    python -m benchmarks.halo --quick   # one small array, few rounds

Every way widens the same blocks in the same rounds, and must give the same values and gradients.
Prints a table and writes a JSON file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import xshard as xs
from benchmarks import record
from benchmarks.halo import measures
from benchmarks.halo.ways import WAYS
from benchmarks.torch_calls import Figures, largest, on_ranks
from xshard.formatting import format_bytes, format_seconds

RANKS = 4
# (batch, channels, rows, columns) of a block, and its rows of halo on either side.
BLOCKS = (((1, 8, 32, 64), 1), ((1, 64, 64, 256), 1), ((1, 64, 64, 256), 3), ((2, 64, 128, 512), 1))
ROUNDS = 30
HOST_ROUNDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options(__doc__, quick="one small array, few rounds").parse_args(arguments)
    blocks = BLOCKS[:1] if options.quick else BLOCKS
    rounds, host_rounds = (3, 3) if options.quick else (ROUNDS, HOST_ROUNDS)
    host = measures.host(*blocks[0], RANKS, host_rounds)
    cases = []
    for shape, rows in record.shown(blocks, "arrays"):
        by_rank = on_ranks(RANKS, measures.end_to_end, shape, rows, rounds)
        cases.append({"block": shape, "rows": rows, "ways": largest(by_rank), **planned(shape, rows)})
    show(Console(width=max(120, Console().width)), host, cases)
    about = record.about(record.command("halo", options), "torch", ranks=RANKS, backend="gloo", host_s=host)
    record.write(options.output / "halo.json", about, cases=cases)
    return 0


def planned(shape: Sequence[int], rows: int) -> dict[str, float]:
    """Bytes that an interior device must receive; bytes and messages of the plan, forward and backward."""
    length = (shape[0], shape[1], shape[2] * RANKS, shape[3])
    text = f"b c h/sp w -> b c h/sp:halo({rows},{rows}) w"
    plan = xs.plan(text, xs.Mesh(sp=RANKS), length, "float32", profile="gloo")
    hops = [hop for stage in plan.stages for hop in stage.step.traffic(stage.before).hops]
    return {
        # Two sides; one call runs forward, the other forward and backward.
        "least_bytes": 3 * 2 * rows * shape[0] * shape[1] * shape[3] * 4,
        "planned_bytes": 2 * plan.bytes_received + plan.backward.bytes_received,
        "messages": sum(hop.messages for hop in hops),
    }


def show(console: Console, host: Figures, cases: Sequence[dict]) -> None:
    table = Table(title=f"Halo exchange, {RANKS} ranks on gloo; ratios are to xshard", title_justify="left")
    for head in ("block", "rows", "way", "forward", "", "with gradient", "", "received", "least"):
        table.add_column(head, justify="left" if head in ("block", "way") else "right")
    ours = WAYS[0].name
    for case in cases:
        block = "x".join(map(str, case["block"]))
        for name, found in case["ways"].items():
            first = name == ours
            table.add_row(
                block if first else "",
                str(case["rows"]) if first else "",
                name,
                *_times(found, case["ways"][ours]),
                format_bytes(round(found["received_bytes"])),
                format_bytes(round(case["least_bytes"])) if first else "",
            )
        table.add_section()
    for name, found in host.items():
        table.add_row("host time alone" if name == ours else "", "", name, *_times(found, host[ours]))
    console.print(table)
    console.print(f"Messages to an interior device: {cases[0]['messages']} (the least is 2).")


def _times(found: dict[str, float], reference: dict[str, float]) -> list[str]:
    """Both times, each with its ratio to a reference."""
    cells = []
    for key in ("forward_s", "both_s"):
        cells += [format_seconds(found[key]), f"{found[key] / reference[key]:.2f}"]
    return cells


if __name__ == "__main__":
    sys.exit(main())
