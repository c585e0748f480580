"""The claims about the JAX bridge beside XLA's own reshard, judged on measured rows.

Bytes and memory come from one plan: the plan for the fewest bytes or, if that holds more memory than XLA's
program, the same under a memory limit. XLA:CPU makes an all-reduce and a slice of what elsewhere is a
reduce-scatter: half of these bytes count.
"""

import math
from collections.abc import Callable, Sequence

from benchmarks.claim import Claim, Row, mean, none_of, worst
from xshard.formatting import format_bytes

# The profiles planned for: received bytes and memory are compared in a plan for the fewest bytes, run time in
# a plan for this machine, everything else in the plan that users get.
FEWEST_BYTES = "bandwidth"
DEFAULT = "h100"
HOST = "host"
MAX_DEVICES = 64
LEAST = 0.9  # our program is at least so many times as fast as XLA's
# Of temporary memory: tables of indices, and the 64 bytes that XLA rounds every buffer up to.
SLACK_BYTES = 4096
UNPLANNED = "cases whose collectives or bytes are not the plan's"
MORE_MEMORY = "with these bytes, cases with more temporary memory than XLA's"
OVER_LIMIT = "planned for H100s and asked for no more memory than XLA's, cases with more"


def within(profile: str) -> str:
    """The name of a plan for a profile that may hold no more than XLA's program."""
    return f"{profile}, holding no more than XLA"


def holds_more(ours: Row, xla: Row) -> bool:
    """Whether our program takes more temporary memory than XLA's."""
    return ours["temporary_bytes"] > xla["temporary_bytes"] + SLACK_BYTES


def judge(compiled: Sequence[Row], timed: Sequence[Row], dispatch: Row) -> tuple[Claim, ...]:
    """Every claim, in order."""
    moving = [row for row in compiled if _xla_bytes(row)]
    silent = [
        row for row in compiled if not _xla_bytes(row) and _within_memory(row)["received_bytes"]
    ]
    n = len(compiled)
    larger = [row for row in compiled if holds_more(row["ours"][DEFAULT], row["xla"])]
    compile_s = [
        (r["case"], r["ours"][DEFAULT]["compile_s"] / r["xla"]["compile_s"]) for r in compiled
    ]
    faster = [(f"{row['case']} of {format_bytes(row['bytes'])}", row["faster"]) for row in timed]
    return (
        none_of(UNPLANNED, _breaking(compiled, _is_not_as_planned), n),
        mean("received bytes / XLA's: geometric mean", _bytes_ratios(moving), 0.60),
        worst("received bytes / XLA's: worst", _bytes_ratios([*moving, *silent]), 1.00),
        none_of(
            MORE_MEMORY,
            _breaking(compiled, lambda row: holds_more(_within_memory(row), row["xla"])),
            n,
        ),
        none_of(
            OVER_LIMIT,
            _breaking(larger, lambda row: holds_more(row["ours"][within(DEFAULT)], row["xla"])),
            len(larger),
        ),
        mean("seconds to compile / XLA's: geometric mean", compile_s, 1.5),
        mean("XLA's run time / ours: geometric mean", faster, 1.5, at_least=True),
        worst("XLA's run time / ours: worst", faster, LEAST, at_least=True),
        Claim("host time of a cached reshard / of a cached jit", dispatch["ratio"], 1.5, False, 1),
    )


def _xla_bytes(row: Row) -> float:
    xla = row["xla"]
    scattered = (
        row["ended_sums"] > 1
        and row["source_elements"] == row["target_elements"] * row["ended_sums"]
    )
    return xla["received_bytes"] - (xla["reduced_bytes"] / 2 if scattered else 0)


def _within_memory(row: Row) -> Row:
    """Our program for the fewest bytes; under a memory limit if it would hold more than XLA's."""
    asked = row["ours"].get(within(FEWEST_BYTES))
    return row["ours"][FEWEST_BYTES] if asked is None else asked


def _bytes_ratios(rows: Sequence[Row]) -> list[tuple[str, float]]:
    pairs = [(row["case"], _within_memory(row)["received_bytes"], _xla_bytes(row)) for row in rows]
    return [(case, ours / theirs if theirs else math.inf) for case, ours, theirs in pairs]


def _is_not_as_planned(row: Row) -> bool:
    return any(
        (ours["received_bytes"], ours["counts"]) != (ours["plan_bytes"], ours["plan_counts"])
        for ours in row["ours"].values()
    )


def _breaking(rows: Sequence[Row], breaks: Callable[[Row], bool]) -> list[str]:
    return [row["case"] for row in rows if breaks(row)]
