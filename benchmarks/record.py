"""The options, the tables, the facts and the JSON files of all benchmarks."""

import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
SHOWN_FAILURES = 8  # cases named per claim on the terminal; the JSON names them all
LEAST_WIDTH = 160  # columns of a table, even on a narrower terminal


def options(name: str, doc: str | None, *, quick: str) -> ArgumentParser:
    """A parser with the options of every benchmark.

    name: its module, under `benchmarks`; doc: its docstring; quick: explains `--quick`.
    """
    parser = ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.set_defaults(name=name)
    return parser


def now() -> str:
    """The time in UTC, as in `2026-01-31T12:00:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def about(options: Namespace, *libraries: str, command: str = "", **more: Any) -> dict[str, Any]:
    """The date, the command, the versions and the machine of a run; nothing names the machine.

    libraries: packages to give versions of, beside xshard and numpy.
    """
    flags = [f" --{flag}" for flag in ("quick", "live") if getattr(options, flag, False)]
    versions = {name: metadata.version(name) for name in ("xshard", "numpy", *libraries)}
    machine = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu_cores": os.cpu_count(),
    }
    return {
        "date": now(),
        "command": command or f"python -m benchmarks.{options.name}" + "".join(flags),
        **more,
        "versions": {"python": platform.python_version(), **versions},
        "machine": machine,
    }


def write(options: Namespace, facts: Mapping[str, Any], **rows: Sequence[Any]) -> Path:
    """Write a run as JSON: every fact, and every row of every list, on a line of its own."""
    path: Path = options.output / f"{options.name.replace('.', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    for key, entries in rows.items():
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, entries)) + "\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    return path


def console() -> Console:
    return Console(width=max(Console().width, LEAST_WIDTH))


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], n_left: int = 1
) -> Table:
    """A table of text, its first `n_left` columns aligned left; an empty row is a line across."""
    drawn = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="left" if i < n_left else "right")
    for row in rows:
        if row:
            drawn.add_row(*row)
        else:
            drawn.add_section()
    return drawn


def shown(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a progress bar on a terminal."""
    return track(
        items, what, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    )


def named(failing: Sequence[str]) -> str:
    """The first cases that break a claim, and how many more there are."""
    more = len(failing) - SHOWN_FAILURES
    return ", ".join(failing[:SHOWN_FAILURES]) + (f" and {more} more" if more > 0 else "")
