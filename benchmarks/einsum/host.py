"""Host time of a contraction in torch beyond its moves and `torch.einsum`, called one by one.

    python -m benchmarks.einsum.host            # a fake group of four ranks: nothing is sent
    python -m benchmarks.einsum.host --quick    # few rounds

Each round calls both forms many times, by turns, on one thread of torch. Blocks are small, so that products
take next to nothing. It prints a table and writes a JSON file. Exit status 1 if a claim fails.
"""

import os
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
from benchmarks import by_turns, record
from benchmarks.claim import Claim, Row, finish, worst
from benchmarks.torch_redistribute.host import nobody

CALLS = 1000
ROUNDS = 15
MOST_US = 15.0
GATHER = "b s/a d -> b s d | copy(a)"
SCATTER = "b s d | sum(a) -> b s/a d"

Call = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("einsum.host", __doc__, quick="few rounds").parse_args(arguments)
    torch.set_num_threads(1)
    with nobody() as mesh:
        rows = [
            _row(name, *forms, 3 if options.quick else ROUNDS)
            for name, forms in _forms(mesh).items()
        ]
    title = "Host time of contractions"
    keys = ("by_hand_s", "ours_s", "beyond_s")
    lines = [(row["case"], *(f"{1e6 * row[key]:.1f}" for key in keys)) for row in rows]
    heads = ("contraction", "by hand, us", "xt.einsum, us", "beyond, us")
    record.console().print(record.table(title, heads, lines))
    return finish(
        options, title, [judge(rows)], "torch", rows={"cases": rows}, load=os.getloadavg()
    )


def judge(rows: Sequence[Row]) -> Claim:
    """The median over rounds of each round's difference."""
    beyond = [(row["case"], 1e6 * row["beyond_s"]) for row in rows]
    return worst(
        "host us of a cached call beyond its moves and torch.einsum: worst", beyond, MOST_US
    )


def _forms(mesh: DeviceMesh) -> dict[str, tuple[Call, Call]]:
    """For every scheme the planned contraction, and the same by its parts."""
    rows = torch.ones(1, 1, 8)
    part = torch.ones(1, 4, 4)
    whole = torch.ones(1, 4, 8)
    up = torch.ones(8, 4)
    down = torch.ones(4, 8)
    return {
        "column": (
            lambda: xt.einsum("b s d | copy(a), d f/a -> b s f/a", whole, up, mesh=mesh),
            lambda: torch.einsum("bsd,df->bsf", whole, up),
        ),
        "column, sequence cut": (
            lambda: xt.einsum("b s/a d, d f/a -> b s f/a", rows, up, mesh=mesh),
            lambda: torch.einsum("bsd,df->bsf", xt.redistribute(rows, GATHER, mesh), up),
        ),
        "row, sequence cut": (
            lambda: xt.einsum("b s f/a, f/a d -> b s/a d", part, down, mesh=mesh),
            lambda: xt.redistribute(torch.einsum("bsf,fd->bsd", part, down), SCATTER, mesh),
        ),
    }


def _row(name: str, ours: Call, by_hand: Call, rounds: int) -> Row:
    seconds = by_turns.seconds({"ours": _many(ours), "by hand": _many(by_hand)}, rounds)
    seconds["beyond"] = [a - b for a, b in zip(seconds["ours"], seconds["by hand"], strict=True)]
    medians = (statistics.median(seconds[form]) / CALLS for form in ("ours", "by hand", "beyond"))
    return {**dict(zip(("ours_s", "by_hand_s", "beyond_s"), medians, strict=True)), "case": name}


def _many(call: Call) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(CALLS):
            call()

    return calls


if __name__ == "__main__":
    sys.exit(main())
