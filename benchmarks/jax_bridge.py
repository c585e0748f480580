"""The JAX bridge beside XLA's own reshard: bytes, memory, time to compile, time to run, dispatch.

    python benchmarks/jax_bridge.py           # all public cases of at most 64 devices
    python benchmarks/jax_bridge.py --quick   # every twelfth of them, and few timings

Prints a table and writes a JSON file. What is compiled is exact; what is timed is timed by turns with
its peer. Exit status 1 when a claim of `resharding.claims` does not hold; the cases are named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

# This file has the name of the package that it measures: that is looked for first, and beside this folder.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).parent.parent))

NAME = "jax_bridge_bytes_memory_seconds"
RESULTS = Path(__file__).parent / "results"
MOST_DEVICES = 64
TIMED_DEVICES = 8
TIMED_BYTES = 16 << 20
QUICK_STRIDE = 12
SHOWN_FAILURES = 8  # cases named per claim on the terminal; the JSON has them all


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every twelfth case")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args(arguments)
    configure()
    from resharding import claims

    found = measure(QUICK_STRIDE if options.quick else 1)
    judged = claims.judge(found["compiled"], found["timed"], found["dispatch"])
    show(judged)
    about = context("python benchmarks/jax_bridge.py" + " --quick" * options.quick)
    print(write(options.output, about, [claim.to_dict() for claim in judged], found))
    return int(not all(claim.holds for claim in judged))


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
    from resharding.claims import DEFAULT, FEWEST_BYTES
    from resharding.programs import Move, addable

    cases = [c for c in load("public") if c.is_even and c.mesh.n_devices <= MOST_DEVICES][::stride]
    compiled = []
    for case in shown(cases, "compiling"):
        compiled.append(
            measures.compiled([Move(addable(case), profile) for profile in (FEWEST_BYTES, DEFAULT)])
        )
    large = [scaled(c, TIMED_BYTES) for c in cases if c.mesh.n_devices == TIMED_DEVICES]
    distinct = {(c.src, c.dst, c.mesh, c.shape, c.dtype): c for c in large if c.is_even}
    timed = [measures.timed(Move(case, DEFAULT)) for case in shown([*distinct.values()], "timing")]
    return {"compiled": compiled, "timed": timed, "dispatch": measures.dispatch()}


def context(command: str) -> dict[str, Any]:
    """When, how and with what; nothing that names the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("xshard", "numpy", "jax", "jaxlib")},
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpu_cores": os.cpu_count(),
        },
    }


def show(judged: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 120))
    table = Table(title="The JAX bridge and XLA's own reshard", title_justify="left")
    for head, justify in (("what", "left"), ("cases", "right"), ("measured", "right"), ("limit", "right")):
        table.add_column(head, justify=justify)
    table.add_column("")
    for claim in judged:
        sign = ">=" if claim.at_least else "<="
        word = "[green]holds[/green]" if claim.holds else "[red]fails[/red]"
        table.add_row(
            claim.statement, str(claim.n_cases), f"{claim.measured:.3g}", f"{sign} {claim.limit:g}", word
        )
    console.print(table)
    for claim in judged:
        if claim.failing:
            more = len(claim.failing) - SHOWN_FAILURES
            named = ", ".join(claim.failing[:SHOWN_FAILURES]) + (f" and {more} more" if more > 0 else "")
            console.print(f"{claim.statement}: {named}", highlight=False)


def write(folder: Path, about: dict[str, Any], claims: list[Any], found: dict[str, Any]) -> Path:
    """The run as a file, a case to a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.json"
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    parts.append(f'"dispatch": {json.dumps(found["dispatch"])}')
    for key, rows in (("claims", claims), ("compiled", found["compiled"]), ("timed", found["timed"])):
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    return path


def shown(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, what, console=console, disable=not sys.stderr.isatty(), transient=True)


if __name__ == "__main__":
    # XLA's threads: with fewer than devices, programs that wait for each other can wait for ever.
    os.environ.setdefault("PJRT_NPROC", str(MOST_DEVICES))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of every case that it replicates
    sys.exit(main())
