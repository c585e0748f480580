"""Steps whose moves run beside computing, on two nodes whose links are slow for real, beside FSDP2.

    python -m benchmarks.time            # 100, 400 and 1,600 Mbit/s; needs namespaces
    python -m benchmarks.time --quick    # 400 Mbit/s, one model
    python -m benchmarks.time --only zero3 --ranks 1 --mbit 400 1600   # a part, by hand

Two nodes of one and of two ranks on this machine; batches in halves on two nodes of one. Prints each row as
it is measured, which takes hours on slow links, then tables, and writes a JSON file. Exit status 1 if a
claim fails.
"""

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence

from rich.table import Table

from benchmarks import record
from benchmarks.claim import Claim, Row, finish, worst
from benchmarks.time import measures, turns
from benchmarks.time.measures import ALONE, FSDP2, MODELS, OURS, WAITING
from xshard.formatting import format_seconds
from xshard.testing.nodes import nodes

MBIT = 100, 400, 1600
BALANCED = 0.5, 1.5  # seconds of moving over those of computing
HALVES_MBIT = 100, 200, 400, 800


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("time", __doc__, quick="400 Mbit/s, one model")
    parser.add_argument("--only", choices=("halves", "zero3"), help="one of the two tables")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2), help="ranks of a node")
    parser.add_argument("--mbit", type=int, nargs="*", help="rates, in place of a table's own")
    options = parser.parse_args(arguments)
    halves = [] if options.only == "zero3" else measured_halves(options)
    rows = [] if options.only == "halves" else measured_zero3(options)
    record.console().print(shown(rows))
    record.console().print(halves_shown(halves))
    judged: list[Claim] = []
    if rows:
        judged += judge(rows)
    if halves:
        judged += judge_halves(halves)
    libraries = ("torch", "transformers")
    files = {"zero3": rows, "halves": halves}
    return finish(
        options, "The time of a step", judged, *libraries, rows=files, load=os.getloadavg()
    )


def measured_halves(options: Namespace) -> list[Row]:
    """A row for each kind of model on each link, printed as it comes."""
    quick = options.quick
    hidden, tokens, rounds = (256, 64, 3) if quick else (512, 256, 5)
    rows: list[Row] = []
    for mbit in (100,) if quick else options.mbit or HALVES_MBIT:
        with nodes(2, ranks=1, rate=f"{mbit}mbit") as cluster:
            for kind in turns.KINDS:
                work = kind, 3, hidden, 8, tokens // 2, rounds
                row = cluster.run_torch(turns.turns, *work, timeout_s=1800.0)[0]
                rows.append({"mbit": mbit, **row})
                print(rows[-1], flush=True)
    return rows


def measured_zero3(options: Namespace) -> list[Row]:
    """A row for each model, number of ranks and link, printed as it comes."""
    quick = options.quick
    layers, hidden, tokens, rounds = (3, 256, 64, 3) if quick else (6, 512, 256, 5)
    rows: list[Row] = []
    for ranks in (1,) if quick else options.ranks:
        for mbit in (400,) if quick else options.mbit or MBIT:
            with nodes(2, ranks=ranks, rate=f"{mbit}mbit") as cluster:
                for name in ("llama",) if quick else MODELS:
                    work = name, layers, hidden, tokens, rounds
                    row = cluster.run_torch(measures.zero3, *work, timeout_s=1800.0)[0]
                    rows.append({"ranks": ranks, "mbit": mbit, **row})
                    print(rows[-1], flush=True)
    return rows


def named(row: Row) -> str:
    return f"{row['model']}, {row['ranks']} a node, {row['mbit']} Mbit/s"


def share(row: Row) -> float:
    """Seconds of moving for a second of computing."""
    return row["moving_s"] / row["seconds"][ALONE]


def judge(rows: Sequence[Row]) -> list[Claim]:
    balanced = [row for row in rows if BALANCED[0] <= share(row) <= BALANCED[1]]
    others = [(named(row), row["faster"]) for row in rows if row not in balanced]
    bounds = [(named(row), row["seconds"][OURS] / row["bound_of_cores_s"]) for row in rows]
    judged = [worst("ZeRO-3: a step / the bound of its schedule", bounds, 1.15)]
    if balanced:
        middle = statistics.median(row["faster"] for row in balanced)
        what = "ZeRO-3: FSDP2 / ours where moving takes as long as computing: median"
        judged.append(Claim(what, middle, 1.4, True, len(balanced)))
    if others:
        judged.append(worst("ZeRO-3: FSDP2 / ours elsewhere", others, 0.98, at_least=True))
    return judged


def judge_halves(rows: Sequence[Row]) -> list[Claim]:
    judged = []
    for kind in turns.KINDS:
        own = [row for row in rows if row["kind"] == kind]
        # The link on which moving takes most nearly as long as computing.
        balanced = min(own, key=lambda row: abs(row["moving"] - 1))
        what = f"{kind}: in halves / whole, where moving takes as long as computing"
        judged.append(Claim(what, balanced["ratio"], 0.75, False, 1))
    return judged


def halves_shown(rows: Sequence[Row]) -> Table:
    ways = (turns.ALONE, turns.WHOLE, turns.HALVES)
    lines = []
    for row in rows:
        seconds = [format_seconds(row["seconds"][way]) for way in ways]
        name = f"{row['kind']}, {row['mbit']} Mbit/s"
        lines.append((name, f"{row['moving']:.2f}", *seconds, f"{row['ratio']:.2f}"))
    heads = ("case", "moving / computing", *ways, "halves / whole")
    return record.table("A step forward and backward, in halves", heads, lines, n_left=1)


def shown(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        seconds = [format_seconds(row["seconds"][way]) for way in (ALONE, FSDP2, WAITING, OURS)]
        bounds = [format_seconds(row[key]) for key in ("bound_s", "bound_of_cores_s")]
        figures = (f"{share(row):.2f}", *seconds, *bounds)
        lines.append((named(row), *figures, f"{row['faster']:.2f}"))
    bounds = ("bound of links", "bound of links and cores")
    heads = ("case", "moving / computing", ALONE, FSDP2, WAITING, OURS, *bounds, "FSDP2 / ours")
    return record.table("One step of ZeRO-3, forward and backward", heads, lines, n_left=1)


if __name__ == "__main__":
    sys.exit(main())
