"""The JAX bridge beside XLA's own reshard: bytes, memory, time to compile, time to run, dispatch.

    python benchmarks/jax_bridge.py           # all public cases of at most 64 devices
    python benchmarks/jax_bridge.py --quick   # every twelfth of them, and few timings

Prints a table and writes a JSON file. What is compiled is exact. What is timed is timed by turns with its
peer, every case in processes of its own of which the middle one counts: the same program of XLA's takes
20 ms in one and 32 in another, by what the allocator was left with. Exit status 1 when a claim of
`resharding.claims` does not hold; the cases are named.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

# This file has the name of the package that it measures: that is looked for first, and beside this folder.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).parent.parent))

import claim
import record

if TYPE_CHECKING:
    from planning.cases import Case

NAME = "jax_bridge_bytes_memory_seconds"
MOST_DEVICES = 64
TIMED_DEVICES = 8
TIMED = ((16 << 20, 15), (128 << 20, 7))  # bytes of the arrays that are timed, and in how many rounds
PROCESSES = 3
QUICK_STRIDE = 12


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every twelfth case")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder for the JSON file")
    options = parser.parse_args(arguments)
    configure()
    from resharding import claims

    found = measure(QUICK_STRIDE if options.quick else 1)
    judged = claims.judge(found["compiled"], found["timed"], found["dispatch"])
    claim.show("The JAX bridge and XLA's own reshard", judged)
    command = "python benchmarks/jax_bridge.py" + " --quick" * options.quick
    about = record.about(command, "jax", "jaxlib", dispatch=found.pop("dispatch"))
    path = options.output / f"{NAME}.json"
    print(record.write(path, about, claims=[each.to_dict() for each in judged], **found))
    return int(not all(each.holds for each in judged))


def configure() -> None:
    """Host devices, before JAX makes any."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MOST_DEVICES)
    jax.config.update("jax_enable_x64", True)  # some cases are of float64


def measure(stride: int) -> dict[str, Any]:
    """The rows of every case that JAX has: even, on at most 64 devices."""
    from planning.cases import load, scaled
    from resharding import measures
    from resharding.claims import LEAST
    from resharding.measures import DEFAULT, FEWEST_BYTES
    from resharding.programs import Move, addable

    from xshard.formatting import format_bytes

    cases = [c for c in load("public") if c.is_even and c.mesh.n_devices <= MOST_DEVICES][::stride]
    compiled = []
    for case in record.shown(cases, "compiling"):
        compiled.append(
            measures.compiled([Move(addable(case), profile) for profile in (FEWEST_BYTES, DEFAULT)])
        )
    timed = []
    for size, rounds in TIMED:
        large = [scaled(c, size) for c in cases if c.mesh.n_devices == TIMED_DEVICES]
        distinct = {(c.src, c.dst, c.mesh, c.shape, c.dtype): c for c in large if c.is_even}
        for case in record.shown([*distinct.values()], f"timing at {format_bytes(size)}"):
            row = timed_alone(case, rounds, PROCESSES)
            # One program timed twice differs by as much: in doubt the middle one of more counts.
            timed.append(row if row["faster"] >= LEAST else timed_alone(case, rounds, 3 * PROCESSES))
    return {"compiled": compiled, "timed": timed, "dispatch": measures.dispatch()}


def timed_alone(case: Case, rounds: int, processes: int) -> dict[str, Any]:
    """A case's times, taken in new processes, of which the middle one counts."""
    rows = []
    for _ in range(processes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=configure) as process:
            rows.append(process.submit(timed_here, case, rounds).result())
    return sorted(rows, key=itemgetter("faster"))[processes // 2]


def timed_here(case: Case, rounds: int) -> dict[str, Any]:
    """A case's times."""
    from resharding import measures
    from resharding.programs import Move

    return measures.timed(Move(case, measures.HOST), rounds)


if __name__ == "__main__":
    # XLA's threads: with fewer than devices, programs that wait for each other can wait for ever.
    os.environ.setdefault("PJRT_NPROC", str(MOST_DEVICES))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    sys.exit(main())
