"""`progress=`: a function that hears of bytes, or a bar on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

from xshard.errors import XshardError

Progress = bool | Callable[[int, int], object] | None
LARGE_BYTES = 2**28  # a larger tree takes seconds, and shows a bar on a terminal


@contextmanager
def reporting(
    progress: Progress, total_bytes: int, is_seen: bool, what: str = "transfer", console: Any = None
) -> Iterator[Callable[[int], object]]:
    """Show the progress of a long transfer while a `with` block runs: by a bar, or by a function.

    Yields a function that the block calls with the bytes done since its last call.

    Args:
        progress: A function of (bytes done, bytes in all), True for a bar, False for silence. None shows a
            bar for a large `total_bytes`, if stderr is a terminal and rich is installed.
        total_bytes: Bytes in all.
        is_seen: Whether this process is the one that shows the bar.
        what: The word beside the bar.
        console: The console of rich to draw on. Default: stderr.

    Raises:
        XshardError: `progress` is True, and rich is not installed.
    """
    has_rich = find_spec("rich") is not None
    if progress is True and not has_rich:
        raise XshardError(
            "progress=True needs rich", hint="pip install 'xshard[cli]', or leave progress out"
        )
    if progress is None:
        progress = total_bytes >= LARGE_BYTES and sys.stderr.isatty() and has_rich
    if progress is True:
        with _bar(total_bytes, is_seen, what, console) as advance:
            yield advance
        return

    done = 0

    def report(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if callable(progress):
            progress(done, total_bytes)

    yield report


@contextmanager
def _bar(
    total_bytes: int, is_seen: bool, label: str, console: Any
) -> Iterator[Callable[[int], object]]:
    """Draw a bar by rich, and yield the function that advances it by a number of bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = label, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    console = console or Console(stderr=True)
    with Bar(*columns, console=console, transient=console.is_terminal, disable=not is_seen) as bar:
        yield partial(bar.advance, bar.add_task("", total=total_bytes))
