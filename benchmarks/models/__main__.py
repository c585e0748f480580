"""A Llama of Hugging Face on 4 gloo ranks: parallel by rules, by hand with `redistribute`, and by DTensor.

    python -m benchmarks.models           # 4 layers, 256 tokens
    python -m benchmarks.models --quick   # 1 layer, few rounds

All have tensor, sequence and data parallelism, 2x2. Prints a table and writes a JSON file. Exit status 1 if a
claim fails.
"""

import sys
from collections.abc import Sequence

from rich.table import Table

from benchmarks import record
from benchmarks.claim import Claim, finish, worst
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
    flat = [(kind, way, row) for kind, ways in by_kind.items() for way, row in ways.items()]
    rows = [{"parameters": kind, "way": way, **row} for kind, way, row in flat]
    judged = claims(by_kind)
    title = "Rules beside the other ways"
    libraries = ("torch", "transformers")
    facts = {"ranks": RANKS, "backend": "gloo"}
    return finish(options, title, judged, *libraries, rows={"steps": rows}, **facts)


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
