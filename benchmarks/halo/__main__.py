"""Halo exchange in torch, measured: time, bytes and messages, beside two other ways.

    python benchmarks/halo.py           # 4 gloo ranks, and host time on a fake process group
    python benchmarks/halo.py --quick   # one small array, few rounds

Every way widens the same blocks in the same rounds, and must come to the same values and gradients.
Prints a table and writes a JSON file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Beside this file are others with the names of packages: those are looked for first.
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import record
from halos import measure
from halos.ways import WAYS
from rich.console import Console
from rich.table import Table

import torch_bridge as xt
import xshard as xs
from xshard.formatting import format_bytes, format_seconds

RANKS = 4
# (batch, channels, rows, columns) of a block, and the rows of halo at either side.
BLOCKS = (((1, 8, 32, 64), 1), ((1, 64, 64, 256), 1), ((1, 64, 64, 256), 3), ((2, 64, 128, 512), 1))
# Blocks and kernels of convolutions that compute while halos travel.
CONVOLUTIONS = (((1, 8, 32, 64), 3), ((1, 8, 256, 1024), 3), ((1, 16, 128, 2048), 7), ((1, 2, 64, 8192), 9))
ROUNDS = 30
HOST_ROUNDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    blocks, convolutions = (some[:1] if options.quick else some for some in (BLOCKS, CONVOLUTIONS))
    rounds = (3, 10) if options.quick else (ROUNDS, HOST_ROUNDS)
    host = measure.host(blocks[0][0], blocks[0][1], RANKS, rounds[1])
    cases = []
    for shape, rows in record.shown(blocks, "arrays"):
        by_rank = on_ranks(measure.end_to_end, shape, rows, rounds[0])
        cases.append({"block": shape, "rows": rows, "ways": slowest(by_rank), **least(shape, rows)})
    overlap = []
    for shape, kernel in record.shown(convolutions, "convolutions"):
        found = on_ranks(measure.convolutions, shape, kernel, rounds[0] // 3)
        overlap.append({"block": shape, "kernel": kernel, "ways": slowest(found)})
    show(Console(width=max(120, Console().width)), host, cases, overlap)
    command = "python benchmarks/halo.py" + " --quick" * options.quick
    about = record.about(command, "torch", ranks=RANKS, backend="gloo", host_s=host)
    record.write(options.output / "halo.json", about, cases=cases, overlap=overlap)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small array, few rounds")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder for the JSON file")
    return parser.parse_args(arguments)


def on_ranks(measured: Callable[..., measure.Seconds], *arguments: object) -> list[measure.Seconds]:
    """What every rank of a gloo world measures; no forks of this process, whose autograd has threads."""
    return xt.run_ranks(RANKS, measured, *arguments, start_method="forkserver", timeout_s=900.0)


def slowest(by_rank: Sequence[measure.Seconds]) -> measure.Seconds:
    """Of every figure that of the rank with the most: an exchange is over when all are done."""
    first = by_rank[0]
    return {name: {key: max(rank[name][key] for rank in by_rank) for key in first[name]} for name in first}


def least(shape: Sequence[int], rows: int) -> dict[str, float]:
    """What an interior device cannot do without, and what the plan says of it, forward and backward."""
    length = (shape[0], shape[1], shape[2] * RANKS, shape[3])
    text = f"b c h/sp w -> b c h/sp:halo({rows},{rows}) w"
    plan = xs.plan(text, xs.Mesh(sp=RANKS), length, "float32", profile="gloo")
    hops = [hop for stage in plan.stages for hop in stage.step.traffic(stage.before).hops]
    return {
        # Two sides, forward for the forward call, and forward and backward for the other.
        "least_bytes": 3 * 2 * rows * shape[0] * shape[1] * shape[3] * 4,
        "planned_bytes": 2 * plan.bytes_received + plan.backward.bytes_received,
        "messages": sum(hop.messages for hop in hops),
    }


def show(console: Console, host: measure.Seconds, cases: Sequence[dict], overlap: Sequence[dict]) -> None:
    table = Table(title=f"Halo exchange, {RANKS} ranks on gloo; ratios are to xshard", title_justify="left")
    for head in ("block", "rows", "way", "forward", "", "with gradient", "", "received", "least"):
        table.add_column(head, justify="left" if head in ("block", "way") else "right")
    ours = WAYS[0].name
    for case in cases:
        for name, found in case["ways"].items():
            mine = case["ways"][ours]
            table.add_row(
                "x".join(map(str, case["block"])) if name == ours else "",
                str(case["rows"]) if name == ours else "",
                name,
                format_seconds(found["forward_s"]),
                f"{found['forward_s'] / mine['forward_s']:.2f}",
                format_seconds(found["both_s"]),
                f"{found['both_s'] / mine['both_s']:.2f}",
                format_bytes(round(found["received_bytes"])),
                format_bytes(round(case["least_bytes"])) if name == ours else "",
            )
        table.add_section()
    for name, found in host.items():
        table.add_row(
            "host time alone" if name == ours else "",
            "",
            name,
            format_seconds(found["forward_s"]),
            f"{found['forward_s'] / host[ours]['forward_s']:.2f}",
            format_seconds(found["both_s"]),
            f"{found['both_s'] / host[ours]['both_s']:.2f}",
        )
    console.print(table)
    second = Table(title="Convolutions with halos; ratios are to the one that waits", title_justify="left")
    for head in ("block", "kernel", "", "forward", "", "with gradient", ""):
        second.add_column(head, justify="right")
    for case in overlap:
        waiting = case["ways"]["waiting"]
        for name, found in case["ways"].items():
            ratios = (f"{found[key] / waiting[key]:.2f}" for key in ("forward_s", "both_s"))
            second.add_row(
                "x".join(map(str, case["block"])) if found is waiting else "",
                str(case["kernel"]) if found is waiting else "",
                name,
                format_seconds(found["forward_s"]),
                next(ratios),
                format_seconds(found["both_s"]),
                next(ratios),
            )
        second.add_section()
    console.print(second)
    console.print(f"Messages to an interior device: {cases[0]['messages']} (the least is 2).")


if __name__ == "__main__":
    sys.exit(main())
