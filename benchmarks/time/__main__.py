"""Steps whose moves run beside computing, on two nodes whose links are slow for real, beside FSDP2.

    python -m benchmarks.time            # 100, 400 and 1,600 Mbit/s; needs namespaces
    python -m benchmarks.time --quick    # 400 Mbit/s, one model
    python -m benchmarks.time --only zero3 --ranks 1 --mbit 400 1600   # a part, by hand

Two nodes of one and of two ranks on this machine; batches in halves on two nodes of one. Prints each row as
it is measured, which takes hours on slow links, then tables, and writes a JSON file. A run of a part keeps
the rows of the file that it does not measure, each with its date. A row has the profile that was calibrated
on its links, with which it can be predicted again. Exit status 1 if a claim fails.
"""

import json
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import record
from benchmarks.claim import Claim, Row, between, finish, worst
from benchmarks.time import measures, predicted, turns
from benchmarks.time.measures import ALONE, FSDP2, MODELS, OURS, WAITING
from xshard import Mesh
from xshard.formatting import format_seconds
from xshard.testing.nodes import nodes

RANKS = 1, 2  # of a node
MBIT = 100, 400, 1600
SLOW_MBIT = 100  # fewer turns: the links decide, and a turn of all ways takes a minute
BALANCED = 0.5, 1.5  # seconds of moving over those of computing
PREDICTED_SHARES = 0.85, 1.15  # seconds of a prediction over the measured ones
# Widths of the models whose batch is cut, and their links. A model twice as wide computes twice as much for
# each byte that travels; so these carry as many seconds of moves with fewer seconds of the processor.
HALVES_WIDTHS = {512: (100, 200, 400, 800), 1024: (400,), 2048: (200,)}
WIDEST_EXPERTS = 512  # wider ones do not fit beside each other


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("time", __doc__, quick="400 Mbit/s, one model")
    parser.add_argument("--only", choices=("halves", "zero3"), help="one of the two tables")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="ranks of a node")
    parser.add_argument("--mbit", type=int, nargs="*", help="rates, in place of a table's own")
    options = parser.parse_args(arguments)
    all_rows = {}
    for part, measure in (("zero3", measured_zero3), ("halves", measured_halves)):
        measured = measure(options) if options.only in (None, part) else []
        all_rows[part] = with_recorded(options, part, measured)
    record.console().print(shown(all_rows["zero3"]))
    record.console().print(halves_shown(all_rows["halves"]))
    judged: list[Claim] = []
    if all_rows["zero3"]:
        judged += judge(all_rows["zero3"])
    if all_rows["halves"]:
        judged += judge_halves(all_rows["halves"])
    facts = {"load": os.getloadavg()}
    if is_part(options):
        facts["command"] = "python -m benchmarks.time, in parts: each row has its date"
    libraries = ("torch", "transformers")
    return finish(options, "The time of a step", judged, *libraries, rows=all_rows, **facts)


def dated(row: Row) -> Row:
    """The row with the time at which it was measured, printed at once."""
    row = {"date": record.now(), **row}
    print(row, flush=True)
    return row


def case_of(row: Row) -> tuple[Any, ...]:
    """What a row measures: two rows of the same case replace each other."""
    return tuple(row.get(key) for key in ("model", "kind", "hidden", "ranks", "mbit"))


def is_part(options: Namespace) -> bool:
    """Whether a run measures some cases only, and keeps the recorded rows of the others."""
    everywhere = options.only is None and not options.mbit and tuple(options.ranks) == RANKS
    return not (everywhere or options.quick)


def with_recorded(options: Namespace, part: str, measured: Sequence[Row]) -> list[Row]:
    """The measured rows; before them, if a run measures a part, the recorded rows of other cases."""
    file = options.output / f"{options.name}.json"
    if not is_part(options) or not file.exists():
        return list(measured)
    new_cases = {case_of(row) for row in measured}
    recorded = json.loads(file.read_text())[part]
    return [*(row for row in recorded if case_of(row) not in new_cases), *measured]


def measured_halves(options: Namespace) -> list[Row]:
    """A row for each kind of model, width and link, printed as it comes."""
    if options.quick:
        widths, tokens, rounds = {256: (100,)}, 64, 3
    else:
        widths, tokens, rounds = HALVES_WIDTHS, 256, 5
    rows: list[Row] = []
    for hidden, rates in widths.items():
        for mbit in options.mbit or rates:
            with nodes(2, ranks=1, rate=f"{mbit}mbit") as cluster:
                profile = predicted.profile_of(cluster, Mesh(tp=2))
                for kind in turns.KINDS:
                    if kind == "experts" and hidden > WIDEST_EXPERTS:
                        continue
                    sizes = 3, hidden, 8, tokens // 2
                    row = cluster.run_torch(turns.turns, kind, *sizes, rounds, timeout_s=1800.0)[0]
                    if kind != "experts":  # nobody writes such a plan by hand
                        row["predicted_s"] = {
                            way: predicted.sequence_parallel_s(*sizes, Mesh(tp=2), profile, n_parts)
                            for way, n_parts in ((turns.WHOLE, 1), (turns.HALVES, 2))
                        }
                    case = {"hidden": hidden, "mbit": mbit}
                    rows.append(dated({**case, **row}) | {"profile": profile.to_json()})
    return rows


def measured_zero3(options: Namespace) -> list[Row]:
    """A row for each model, number of ranks and link, printed as it comes."""
    quick = options.quick
    layers, hidden, tokens, rounds = (3, 256, 64, 3) if quick else (6, 512, 256, 5)
    rows: list[Row] = []
    for ranks in (1,) if quick else options.ranks:
        for mbit in (400,) if quick else options.mbit or MBIT:
            mesh = Mesh(dp=2 * ranks)
            with nodes(2, ranks=ranks, rate=f"{mbit}mbit") as cluster:
                profile = predicted.profile_of(cluster, mesh)
                for name in ("llama",) if quick else MODELS:
                    sizes = name, layers, hidden, tokens
                    n_turns = min(rounds, 3) if mbit <= SLOW_MBIT else rounds
                    row = cluster.run_torch(measures.zero3, *sizes, n_turns, timeout_s=1800.0)[0]
                    if name in predicted.RECORDED:
                        row["predicted_s"] = predicted.zero3_s(*sizes, mesh, profile)
                    case = {"ranks": ranks, "mbit": mbit}
                    rows.append(dated({**case, **row}) | {"profile": profile.to_json()})
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
    ratios = [
        (named(row), row["predicted_s"] / row["seconds"][OURS])
        for row in rows
        if "predicted_s" in row
    ]
    judged += between("ZeRO-3: predicted / measured seconds", ratios, *PREDICTED_SHARES)
    if balanced:
        middle = statistics.median(row["faster"] for row in balanced)
        what = "ZeRO-3: FSDP2 / ours where moving takes as long as computing: median"
        judged.append(Claim(what, middle, 1.4, True, len(balanced)))
    if others:
        judged.append(worst("ZeRO-3: FSDP2 / ours elsewhere", others, 0.98, at_least=True))
    return judged


def judge_halves(rows: Sequence[Row]) -> list[Claim]:
    judged = []
    ratios = [
        (f"{case_name(row)}, {way}", predicted_s / row["seconds"][way])
        for row in rows
        for way, predicted_s in row.get("predicted_s", {}).items()
    ]
    judged += between("halves: predicted / measured seconds", ratios, *PREDICTED_SHARES)
    cases: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["kind"], row["hidden"]), []).append(row)
    for (kind, hidden), own in sorted(cases.items()):
        # The link on which moving takes most nearly as long as computing.
        balanced = min(own, key=lambda row: abs(row["moving"] - 1))
        what = f"{kind}, {hidden} wide: in halves / whole, where moving takes as long as computing"
        judged.append(Claim(what, balanced["ratio"], 0.75, False, 1))
    return judged


def case_name(row: Row) -> str:
    return f"{row['kind']}, {row['hidden']} wide, {row['mbit']} Mbit/s"


def halves_shown(rows: Sequence[Row]) -> Table:
    ways = (turns.ALONE, turns.WHOLE, turns.HALVES)
    lines = []
    for row in rows:
        seconds = [format_seconds(row["seconds"][way]) for way in ways]
        lines.append((case_name(row), f"{row['moving']:.2f}", *seconds, f"{row['ratio']:.2f}"))
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
