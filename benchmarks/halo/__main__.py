"""Halo exchange in torch: time, bytes and messages, beside two other ways.

    python -m benchmarks.halo           # 4 gloo ranks, and host time on a fake process group
    python -m benchmarks.halo --quick   # one small array, few rounds

Every way widens the same blocks in the same rounds, and must give the same values and gradients.
Prints a table and writes a JSON file.
"""

import sys
from collections.abc import Iterator, Sequence

import xshard as xs
from benchmarks import record
from benchmarks.claim import Row
from benchmarks.halo.ways import OURS, end_to_end, host
from benchmarks.torch_calls import Figures, largest, on_ranks
from xshard.formatting import format_bytes, format_seconds

RANKS = 4
# (batch, channels, rows, columns) of a block, and its rows of halo on either side.
BLOCKS = (((1, 8, 32, 64), 1), ((1, 64, 64, 256), 1), ((1, 64, 64, 256), 3), ((2, 64, 128, 512), 1))
ROUNDS = 30
HOST_ROUNDS = 300
HEADS = ("block", "way", "rows", "forward", "", "with gradient", "", "received", "least")


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("halo", __doc__, quick="one small array, few rounds").parse_args(
        arguments
    )
    blocks = BLOCKS[:1] if options.quick else BLOCKS
    rounds, host_rounds = (3, 3) if options.quick else (ROUNDS, HOST_ROUNDS)
    host_s = host(*blocks[0], RANKS, host_rounds)
    cases = []
    for shape, rows in record.shown(blocks, "arrays"):
        ways = largest(on_ranks(RANKS, end_to_end, shape, rows, rounds))
        cases.append({"block": shape, "rows": rows, "ways": ways, **planned(shape, rows)})
    console = record.console()
    title = f"Halo exchange, {RANKS} ranks on gloo; ratios are to xshard"
    console.print(record.table(title, HEADS, _lines(host_s, cases), n_left=2))
    console.print(f"Messages to an interior device: {cases[0]['messages']} (the least is 2).")
    about = record.about(options, "torch", ranks=RANKS, backend="gloo", host_s=host_s)
    record.write(options, about, cases=cases)
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


def _lines(host_s: Figures, cases: Sequence[Row]) -> Iterator[Sequence[str]]:
    for case in cases:
        ways = case["ways"]
        block = "x".join(map(str, case["block"]))
        for way, figures in ways.items():
            size = ""
            rows = ""
            least = ""
            if way == OURS:
                size = block
                rows = str(case["rows"])
                least = format_bytes(round(case["least_bytes"]))
            received = format_bytes(round(figures["received_bytes"]))
            yield size, way, rows, *_times(figures, ways[OURS]), received, least
        yield ()
    for way, figures in host_s.items():
        yield (
            "host time alone" if way == OURS else "",
            way,
            "",
            *_times(figures, host_s[OURS]),
            "",
            "",
        )


def _times(figures: dict[str, float], reference: dict[str, float]) -> Iterator[str]:
    """Both times, each with its ratio to a reference."""
    for key in ("forward_s", "both_s"):
        yield from (format_seconds(figures[key]), f"{figures[key] / reference[key]:.2f}")


if __name__ == "__main__":
    sys.exit(main())
