"""A Llama of Hugging Face on 4 gloo ranks: parallel by rules, by hand with `redistribute`, and by DTensor.

    python -m benchmarks.models           # 4 layers, 256 tokens
    python -m benchmarks.models --quick   # 1 layer, few rounds

All have tensor, sequence and data parallelism, 2x2. Then ZeRO-3 on 2 ranks beside FSDP2: in float32, in
bfloat16, with activations computed again, and with layers compiled, the seconds of a turn and the most bytes.
Prints tables, writes a JSON file. Exit status 1 if a claim fails.
"""

import os
import sys
from collections.abc import Sequence

from rich.table import Table

from benchmarks import record
from benchmarks.claim import Claim, finish, worst
from benchmarks.models.precision import FSDP2, OURS, beside_fsdp2
from benchmarks.models.ways import steps
from benchmarks.torch_calls import Figures, largest, on_ranks
from xshard.formatting import format_bytes, format_seconds

RANKS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("models", __doc__, quick="1 layer, few rounds").parse_args(arguments)
    layers, tokens, rounds = (1, 16, 5) if options.quick else (4, 256, 40)
    by_rank = on_ranks(RANKS, steps, layers, tokens, rounds)
    by_kind = {kind: largest([rank[kind] for rank in by_rank]) for kind in by_rank[0]}
    record.console().print(shown(by_kind))
    in_turns = on_ranks(2, beside_fsdp2, layers, tokens, rounds)[0]
    record.console().print(shown_beside_fsdp2(in_turns))
    flat = [(kind, way, row) for kind, ways in by_kind.items() for way, row in ways.items()]
    rows = [{"parameters": kind, "way": way, **row} for kind, way, row in flat]
    judged = [*claims(by_kind), *claims_beside_fsdp2(in_turns)]
    rows_beside_fsdp2 = [{"case": case, **row} for case, row in in_turns.items()]
    title = "Rules beside the other ways"
    libraries = ("torch", "transformers")
    facts = {"ranks": RANKS, "backend": "gloo"}
    return finish(
        options,
        title,
        judged,
        *libraries,
        rows={"steps": rows, "beside_fsdp2": rows_beside_fsdp2},
        load=os.getloadavg(),
        **facts,
    )


def claims(by_kind: dict[str, Figures]) -> list[Claim]:
    """Rules send no more than each peer, and take at most 5 % longer."""

    def ratios(figure: str) -> list[tuple[str, float]]:
        return [
            (f"{kind}, {way}", ways["rules"][figure] / peer[figure])
            for kind, ways in by_kind.items()
            for way, peer in ways.items()
            if way != "rules"
        ]

    return [
        worst("collectives, to those of the peer", ratios("collectives"), 1.0),
        worst(
            "bytes, to those of the peer", ratios("bytes"), 1.001
        ),  # a flag per parameter travels
        worst("seconds of a step, to those of the peer", ratios("step_s"), 1.05),
    ]


def claims_beside_fsdp2(in_turns: Figures) -> list[Claim]:
    """A turn takes no longer than FSDP2's, and holds less."""
    seconds = [(case, row["step"]) for case, row in in_turns.items()]
    nbytes = [(case, row["memory"]) for case, row in in_turns.items()]
    return [
        worst("ZeRO-3 beside FSDP2: time of a turn", seconds, 0.95),
        worst("ZeRO-3 beside FSDP2: most bytes", nbytes, 1.0),
    ]


def shown_beside_fsdp2(in_turns: Figures) -> Table:
    lines = []
    for case, row in in_turns.items():
        seconds = [format_seconds(row[f"{way} s"]) for way in (OURS, FSDP2)]
        nbytes = [format_bytes(round(row[f"{way} bytes"])) for way in (OURS, FSDP2)]
        lines.append((case, *seconds, f"{row['step']:.2f}", *nbytes, f"{row['memory']:.2f}"))
    heads = ("ZeRO-3", OURS, FSDP2, "ratio of a turn", "most bytes", FSDP2, "ratio")
    return record.table("One step beside FSDP2", heads, lines, n_left=1)


def shown(by_kind: dict[str, Figures]) -> Table:
    lines: list[tuple[str, ...]] = []
    for kind, ways in by_kind.items():
        for way, figures in ways.items():
            sent = f"{figures['collectives']:.0f}", format_bytes(round(figures["bytes"]))
            lines.append((kind, way, *sent, format_seconds(figures["step_s"])))
        lines.append(())
    heads = ("parameters along dp", "way", "collectives", "received", "step")
    return record.table("One step, forward and backward", heads, lines, n_left=2)


if __name__ == "__main__":
    sys.exit(main())
