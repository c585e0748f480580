"""The options, the facts and the files that all benchmarks have.

Decides the form of the JSON files in `results/`; it must not know what a benchmark measures.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

RESULTS = Path(__file__).parent / "results"
SHOWN_FAILURES = 8  # cases named per claim on the terminal; the JSON names them all

Item = TypeVar("Item")


def options(doc: str | None, *, quick: str) -> ArgumentParser:
    """A parser with the options of every benchmark. doc: of its module; quick: what `--quick` measures."""
    parser = ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    return parser


def command(name: str, chosen: Namespace) -> str:
    """The command of a run, without its output folder, which would name the machine."""
    return f"python -m benchmarks.{name}" + " --quick" * chosen.quick


def about(command: str, *libraries: str, **more: Any) -> dict[str, Any]:
    """When, how and with what a run was made; nothing that names the machine.

    libraries: installed packages whose versions matter, beside xshard and numpy.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        **more,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("xshard", "numpy", *libraries)},
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpu_cores": os.cpu_count(),
        },
    }


def write(path: Path, facts: Mapping[str, Any], **rows: Sequence[Any]) -> Path:
    """Write a run as JSON: every fact, and every row of every list, on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    for key, entries in rows.items():
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, entries)) + "\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    return path


def shown(items: Sequence[Item], what: str) -> Iterable[Item]:
    """The items, with a progress bar on a terminal."""
    return track(items, what, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def named(failing: Sequence[str]) -> str:
    """The first cases that break a claim, and how many more there are."""
    more = len(failing) - SHOWN_FAILURES
    return ", ".join(failing[:SHOWN_FAILURES]) + (f" and {more} more" if more > 0 else "")
