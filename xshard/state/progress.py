"""`progress=`: a function that hears of bytes, or a bar on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from xshard.errors import XshardError

Progress = bool | Callable[[int, int], object] | None
LARGE_BYTES = 2**28  # a larger tree shows a bar on a terminal


@contextmanager
def reporting(
    progress: Progress, total: int, is_seen: bool, what: str = "transfer", console: Any = None
) -> Iterator[Callable[[int], object]]:
    """Yield a callback for the bytes done since its last call. progress: None shows a bar for a large
    `total`, if stderr is a terminal and rich is installed. is_seen: this process shows the bar. Raises
    XshardError for True without rich.
    """
    done = 0

    def report(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if callable(progress):
            progress(done, total)

    has_rich = find_spec("rich") is not None
    if progress is True and not has_rich:
        raise XshardError(
            "progress=True needs rich", hint="pip install 'xshard[cli]', or leave progress out"
        )
    if progress is None:
        progress = total >= LARGE_BYTES and sys.stderr.isatty() and has_rich
    if progress is not True:
        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = what, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    console = console or Console(stderr=True)
    with Bar(*columns, console=console, transient=console.is_terminal, disable=not is_seen) as bar:
        task = bar.add_task("", total=total)
        yield lambda n_bytes: bar.advance(task, n_bytes)
