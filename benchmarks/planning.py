"""How long planning takes: random moves and einsums on meshes of three axes, numbered cuts beside plain ones.

    python -m benchmarks.planning           # 100 of each
    python -m benchmarks.planning --quick   # 6 of each

Every plan is cold, in processor time. The sums of seconds and bytes of all plans tell whether a faster
planner plans worse. Writes a JSON file.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import xshard as xs
from benchmarks import record
from tests.fuzz.chains import random_layout
from xshard.notation.maps import empty_caches

SIZES = (2, 2, 3, 4, 4)
LENGTHS = (7, 10, 36, 48, 60, 64, 96, 100, 128, 128, 256, 256, 512, 1024, 2048, 4096)
MACHINES = ("h100", "h100", "h100:4", "a100:2", "bandwidth", "gloo", "tpu_v5e")
MATRICES = (
    ("ij", "jk", "ik"),
    ("bij", "bjk", "bik"),
    ("ij", "jkl", "ikl"),
    ("ij", "jk", "kl", "il"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("planning", __doc__, quick="6 moves and 6 einsums")
    options = parser.parse_args(arguments)
    n = 6 if options.quick else 100
    rows = {kind: [measured(kind, seed) for seed in range(n)] for kind in ("move", "einsum")}
    for kind, each in rows.items():
        cpu = sorted(row["planning_s"] for row in each)
        times = f"median {statistics.median(cpu) * 1e3:.1f} ms, worst {cpu[-1] * 1e3:.0f} ms"
        total = sum(row["cost_s"] for row in each), sum(row["bytes"] for row in each)
        print(f"{n} {kind}s: {times}; plans of {total[0]:.6g} s and {total[1]:,} bytes")
    print(record.write(options, record.about(options, quick=options.quick), **rows))
    return 0


def measured(kind: str, seed: int) -> dict[str, Any]:
    """The processor seconds of a random plan, forward and backward, and what it costs."""
    rng = random.Random(f"{kind} {seed}")
    mesh = xs.Mesh({axis: rng.choice(SIZES) for axis in "xyz"})
    arrays = rng.choice(MATRICES) if kind == "einsum" else (("ijk"[: rng.choice((1, 2, 3))],) * 2)
    lengths = {name: rng.choice(LENGTHS) for names in arrays for name in names}
    tags = rng.choice(((), (), ("sum",), ("sum", "copy")))
    layouts = [
        random_layout(rng, mesh, {d: lengths[d] for d in names}, tags, (), False)
        for names in arrays
    ]
    text = f"{', '.join(map(str, layouts[:-1]))} -> {layouts[-1]}"
    shape = [tuple(lengths[d] for d in names) for names in arrays[:-1]]
    dtype = rng.choice(("float32", "bfloat16"))
    machine = rng.choice(MACHINES)
    empty_caches()
    gc.collect()
    start = time.process_time()
    whole = shape if kind == "einsum" else shape[0]
    plan = xs.plan(text, mesh, whole, dtype, profile=machine, objective="forward+backward")
    seconds = time.process_time() - start
    backward = plan.backward_bytes_received if kind == "einsum" else plan.backward.bytes_received
    counted = {"cost_s": plan.cost, "bytes": plan.bytes_received + backward}
    return {"case": text, "mesh": repr(mesh), "profile": machine, "planning_s": seconds, **counted}


if __name__ == "__main__":
    raise SystemExit(main())
