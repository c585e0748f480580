"""What inductor's passes make of compiled steps: which collectives travel beside products, which are fused.

    python -m benchmarks.inductor          # a minute of processor time; wants no GPU

Compiles the forward and the backward graph of two steps as on GPUs, once for each choice of passes, and reads
the order in which they start collectives, wait and multiply. Prints rows, and writes a JSON file. Nothing is
timed, and nothing runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import record

_REORDER = {
    "reorder_for_compute_comm_overlap": True,
    # What `torch._inductor.config` recommends.
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
_BUCKETS = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
CHOICES: dict[str, dict[str, Any]] = {
    "none": {},
    "reordering": _REORDER,
    "buckets": _BUCKETS,
    "overlap scheduling": {
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        # There is no GPU to time products on.
        "aten_distributed_optimizations.compute_estimator": "analytical",
    },
    "micro-pipelined products": {"_micro_pipeline_tp": True},
}
LETTERS = {
    "all_gather_into_tensor": "G",
    "all_gather_into_tensor_out": "G",
    "reduce_scatter_tensor": "S",
    "fused_all_gather_matmul": "F",
    "fused_matmul_reduce_scatter": "F",
    "wait": "w",
    "product": ".",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("inductor", __doc__, quick="without passes")
    parser.add_argument("--layers", type=int, default=1, help="how many the model has")
    parser.add_argument("--only", default="", help="the name of one program")
    options = parser.parse_args(arguments)

    from benchmarks.inductor import graphs, programs

    choices = {"none": CHOICES["none"]} if options.quick else CHOICES
    rows: list[dict[str, Any]] = []
    for name, program in programs.PROGRAMS.items():
        if options.only in ("", name):
            with programs.lonely_world():
                found = graphs.schedules(*program(options.layers), choices=choices)
            rows += [row_of(name, *key, events) for key, events in found.items()]
    print(*table(rows), sep="\n")
    print(record.write(options, record.about(options, "torch"), rows=rows))
    return 0


def row_of(program: str, passes: str, direction: str, events: Sequence[Any]) -> dict[str, Any]:
    """Describe the schedule of a graph: its collectives, and how many have products beside them."""
    order = "".join(LETTERS.get(event.kind, f"({event.kind})") for event in events)
    kinds = Counter(order)
    under_way: dict[str, int] = {}  # by buffer: products since the start
    beside = 0
    most = 0
    for event in events:
        if event.kind == "wait":
            beside += under_way.pop(event.buffer, 0) > 0
        elif event.kind == "product":
            under_way = {buffer: n + 1 for buffer, n in under_way.items()}
        elif event.buffer:
            under_way[event.buffer] = 0
            most = max(most, len(under_way))
    return {
        "program": program,
        "passes": passes,
        "graph": direction,
        "gathers": kinds["G"],
        "reduce-scatters": kinds["S"],
        "fused": kinds["F"],
        "beside products": beside,
        "most under way": most,
        "order": order,
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table in docs/torch.md: a line for each program and choice of passes."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        numbers = [row["gathers"] + row["reduce-scatters"]]
        numbers += [row[key] for key in ("beside products", "most under way", "fused")]
        cells.setdefault((row["program"], row["passes"]), []).append(", ".join(map(str, numbers)))
    lines = ["| program | passes | forward | backward |", "|---|---|---|---|"]
    for key, numbers_of_graphs in cells.items():
        lines.append(f"| {' | '.join([*key, *numbers_of_graphs])} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
