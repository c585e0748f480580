"""Suggested steps beside plans by hand and AutoParallel's, all priced alike; and the time it takes.

    python -m benchmarks.suggest             # every case in a process of its own
    python -m benchmarks.suggest --quick     # one of them
    python -m benchmarks.suggest 8B 16 8192  # one case, with the whole answer

Prints a line for each, and the claims, and writes a JSON file. AutoParallel's plan is what
meta-pytorch/autoparallel documents for Llama-3 8B and 70B on 8 x 8: tensor and sequence parallel with ZeRO-3,
for 8B with o_proj sharded by sequence.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.claim import Claim, finish, worst
from benchmarks.suggest.models import deepseek, llama, mixtral
from xshard import Mesh, Suggestion, load_profile, suggest
from xshard.step.choose.hand import HAND, options_by_hand
from xshard.step.choose.search import StepSearch
from xshard.step.price.moves import MovePrices
from xshard.step.say.suggestion import StepPlan
from xshard.step.suggest import HEADROOM, list_problems

GB72 = int(72e9 / (1 - HEADROOM))  # bytes of a device, of which 72e9 are used
CASES = [
    *((which, b, s, overlap) for which in ("8B", "70B") for b, s in ((16, 8192), (512, 8192), (32, 131072))
      for overlap in (None, 0.0)),
    *((f"8B/{layers}", 16, 8192, None) for layers in (1, 4, 32, 80)),
    ("mixtral", 1024, 4096, None),
    ("deepseek", 1024, 4096, None),
]  # fmt: skip
QUICK = CASES[:1]


def step_of(model: str, batch: int, sequence: int) -> tuple[Any, Mesh]:
    name, _, layers = model.partition("/")
    if name in ("mixtral", "deepseek"):
        return {"mixtral": mixtral, "deepseek": deepseek}[name](batch, sequence), Mesh(
            dp=8, ep=8, tp=4
        )
    return llama(name, batch, sequence, int(layers) if layers else None), Mesh(dp=8, tp=8)


def autoparallel(model: str, step: Any, mesh: Mesh, overlap: float | None) -> float | None:
    """The seconds of its documented plan with the best number of micro-batches; None if it does not fit."""
    plans: list[StepPlan] = []
    step = step.with_shares
    for problem in list_problems(
        step, MovePrices(mesh, step.dtype, load_profile("h100")), None, None, overlap
    ):
        flags = options_by_hand(problem, HAND["tensor + sequence parallel, ZeRO-3"])
        if model.startswith("8B"):
            node = problem.node_numbers["model.layers.*.self_attn.o_proj"]
            flags[node] = options_by_hand(problem, HAND["context parallel, ZeRO-3"])[node]
        search = StepSearch(problem, GB72 * (1 - HEADROOM))
        plans += [StepPlan(search, vector) for vector in search.plans_within(flags).values()]
    return min((plan.seconds() for plan in plans if plan.fits), default=None)


def run(
    model: str, batch: int, sequence: int, overlap: float | None
) -> tuple[Suggestion, dict[str, Any]]:
    import scipy.optimize  # noqa: F401  # not part of what is measured

    step, mesh = step_of(model, batch, sequence)
    start = time.process_time()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    suggested = suggest(step, mesh, memory=GB72, overlap=overlap)
    took = time.process_time() - start
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    fitting = {name: plan.seconds() for name, plan in suggested.by_hand.items() if plan.fits}
    n_rules = len(suggested.parameters) + len(suggested.inputs) + len(suggested.outputs)
    row = {
        "model": model, "batch": batch, "sequence": sequence, "overlap": overlap,
        "seconds": suggested.seconds, "gap": suggested.gap, "micro_batches": suggested.micro_batches,
        "recompute": suggested.recompute, "bytes": sum(suggested.memory.values()), "by_hand": fitting,
        "batch_parts": suggested.batch_parts, "prefetch": suggested.prefetch,
        "rules": n_rules, "planning_s": took, "planning_bytes": held * 1024,
    }  # fmt: skip
    if "B" in model:
        row["autoparallel"] = autoparallel(model, step, mesh, overlap)
    return suggested, row


def judge(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The claims that rows are enough for."""
    named = [
        (f"{r['model']} {r['batch']} x {r['sequence']} overlap {r['overlap']}", r) for r in rows
    ]
    hand = [(name, r["seconds"] / min(r["by_hand"].values())) for name, r in named if r["by_hand"]]
    peer = {
        overlap: [
            (name, r["seconds"] / r["autoparallel"])
            for name, r in named
            if (r["model"], r["batch"], r["overlap"]) == ("8B", 16, overlap)
        ]
        for overlap in (None, 0.0)
    }
    llamas = [(name, r) for name, r in named if "B" in r["model"]]
    others = [(name, r["planning_s"]) for name, r in named if "B" not in r["model"]]
    claims = [
        ("seconds / the best plan by hand's", hand, 1.0),
        ("the gap to the bound", [(name, r["gap"]) for name, r in named], 0.01),
        ("seconds / AutoParallel's, 8B at 16 x 8192, scheduled", peer[None], 0.8),
        ("seconds / AutoParallel's, 8B at 16 x 8192, no overlap", peer[0.0], 0.9),
        ("rules for a Llama", [(name, r["rules"]) for name, r in llamas], 12),
        (
            "processor seconds of planning, a Llama",
            [(name, r["planning_s"]) for name, r in llamas],
            8.0,
        ),
        ("processor seconds of planning, experts on three axes", others, 60.0),
        ("GiB beyond imports", [(name, r["planning_bytes"] / 2**30) for name, r in named], 1.0),
    ]
    return [worst(statement, values, limit) for statement, values, limit in claims if values]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("suggest", __doc__, quick="8B at 16 x 8192 alone")
    parser.add_argument(
        "case", nargs="*", help="model, batch, sequence and, optionally, the overlap"
    )
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        model, batch, sequence, *overlap = options.case
        given = [float(text) for text in overlap if text != "None"]
        suggested, row = run(model, int(batch), int(sequence), given[0] if given else None)
        print(json.dumps(row) if options.row else suggested)
        return 0
    rows = []
    for case in record.shown(QUICK if options.quick else CASES, "cases"):
        command = [sys.executable, "-m", "benchmarks.suggest", *map(str, case), "--row"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(line(rows[-1]), flush=True)
    return finish(options, "Suggested training steps", judge(rows), "scipy", rows={"cases": rows})


def line(row: dict[str, Any]) -> str:
    """A case in one line."""
    by_hand = sorted(row["by_hand"].items(), key=lambda pair: pair[1])
    best = f"{by_hand[0][1]:.3f} s ({by_hand[0][0]})" if by_hand else "none fits"
    theirs = f", AutoParallel's {row['autoparallel']:.3f} s" if row.get("autoparallel") else ""
    took = f"planned in {row['planning_s']:.1f} s, {row['planning_bytes'] / 2**20:.0f} MiB"
    return (
        f"{row['model']:9} {row['batch']:5} x {row['sequence']:6} overlap {row['overlap']}: "
        f"{row['seconds']:.3f} s, gap {row['gap']:.2%}, {row['micro_batches']} micro-batches, "
        f"{row['rules']} rules; best by hand {best}{theirs}; {took}"
    )


if __name__ == "__main__":
    sys.exit(main())
