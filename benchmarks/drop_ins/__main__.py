"""The drop-ins: host time, bytes and run time, beside three other ways to the same values.

    python -m benchmarks.drop_ins           # 4 gloo ranks, and host time on a fake process group
    python -m benchmarks.drop_ins --quick   # few rounds

Prints a table and writes a JSON file.
"""

import sys
from collections.abc import Iterator, Sequence

from benchmarks import record
from benchmarks.claim import Row
from benchmarks.drop_ins.ways import OURS, VERBS, host, on_a_rank
from benchmarks.torch_calls import largest, on_ranks
from xshard.formatting import format_bytes, format_seconds

RANKS = 4
ROUNDS = 30
HOST_ROUNDS = 300
# Heads, the figures under them, and how they are written.
COLUMNS = {
    "host forward": ("host_forward_s", format_seconds),
    "host both": ("host_both_s", format_seconds),
    "gloo both": ("both_s", format_seconds),
    "received forward": ("forward_bytes", lambda n: format_bytes(round(n))),
    "received both": ("both_bytes", lambda n: format_bytes(round(n))),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("drop_ins", __doc__, quick="few rounds").parse_args(arguments)
    rounds, host_rounds = (1, 3) if options.quick else (ROUNDS, HOST_ROUNDS)
    hosts = host(RANKS, host_rounds)
    by_rank = on_ranks(RANKS, on_a_rank, rounds)
    verbs = []
    for verb, host_s, *ranks in zip(VERBS, hosts, *by_rank, strict=True):
        figures = largest(ranks)
        ways = []
        for way in verb.ways:
            on_host = {f"host_{key}": value for key, value in host_s[way].items()}
            ways.append({"way": way, **figures[way], **on_host})
        verbs.append({"verb": verb.name, "system": verb.system, "block": verb.shape, "ways": ways})
    title = f"Drop-ins, {RANKS} ranks: forward alone, and with the gradient; ratios are to xshard"
    heads = ("verb", "way", *(text for head in COLUMNS for text in (head, "")))
    record.console().print(record.table(title, heads, _lines(verbs), n_left=2))
    counts = {"ranks": RANKS, "backend": "gloo", "rounds": rounds, "host_rounds": host_rounds}
    record.write(options, record.about(options, "torch", **counts), verbs=verbs)
    return 0


def _lines(verbs: Sequence[Row]) -> Iterator[Sequence[str]]:
    for verb in verbs:
        ours = next(way for way in verb["ways"] if way["way"] == OURS)
        for way in verb["ways"]:
            cells = []
            for key, form in COLUMNS.values():
                cells += [form(way[key]), f"{way[key] / ours[key]:.2f}" if ours[key] else ""]
            yield f"{verb['verb']} ({verb['system']})" if way is ours else "", way["way"], *cells
        yield ()


if __name__ == "__main__":
    sys.exit(main())
