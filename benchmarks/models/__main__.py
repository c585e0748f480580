"""A Llama of Hugging Face on 4 gloo ranks: parallel by rules, by hand with `redistribute`, and by DTensor.

    python -m benchmarks.models           # 4 layers, 256 tokens
    python -m benchmarks.models --quick   # 1 layer, few rounds

All have tensor, sequence and data parallelism, 2x2. Prints a table and writes a JSON file. Exit status 1 if a
claim fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import claim, record
from benchmarks.models import measures
from benchmarks.torch_calls import Figures, largest, on_ranks
from xshard.formatting import format_bytes, format_seconds

RANKS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options(__doc__, quick="1 layer, few rounds").parse_args(arguments)
    layers, tokens, rounds = (1, 16, 5) if options.quick else (4, 256, 40)
    by_rank = on_ranks(RANKS, measures.steps, layers, tokens, rounds)
    found = {kind: largest([rank[kind] for rank in by_rank]) for kind in by_rank[0]}
    Console(width=max(120, Console().width)).print(shown(found))
    judged = claims(found)
    claim.show("Rules beside the other ways", judged)
    about = record.about(
        record.command("models", options), "torch", "transformers", ranks=RANKS, backend="gloo"
    )
    rows = [{"parameters": kind, "way": way, **f} for kind, ways in found.items() for way, f in ways.items()]
    record.write(
        options.output / "models.json", about, claims=[each.to_dict() for each in judged], steps=rows
    )
    return int(not all(each.holds for each in judged))


def claims(found: dict[str, Figures]) -> list[claim.Claim]:
    """Rules send no more than each peer, and take at most 5 % longer."""

    def ratios(figure: str) -> list[tuple[str, float]]:
        return [
            (f"{kind}, {way}", ways["rules"][figure] / peer[figure])
            for kind, ways in found.items()
            for way, peer in ways.items()
            if way != "rules"
        ]

    return [
        claim.worst("collectives, to those of the peer", ratios("collectives"), 1.0),
        claim.worst("bytes, to those of the peer", ratios("bytes"), 1.001),  # a flag per parameter travels
        claim.worst("seconds of a step, to those of the peer", ratios("step_s"), 1.05),
    ]


def shown(found: dict[str, Figures]) -> Table:
    table = Table(title="One step, forward and backward", title_justify="left")
    for head in ("parameters along dp", "way", "collectives", "received", "step"):
        table.add_column(head, justify="left" if head in ("parameters along dp", "way") else "right")
    for kind, ways in found.items():
        for way, figures in ways.items():
            sent = f"{figures['collectives']:.0f}", format_bytes(round(figures["bytes"]))
            table.add_row(kind, way, *sent, format_seconds(figures["step_s"]))
        table.add_section()
    return table


if __name__ == "__main__":
    sys.exit(main())
