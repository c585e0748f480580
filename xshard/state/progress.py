"""Who hears how far a tree has come: a function, or whoever looks at a bar.

Decides what `progress=` means. Knows numbers of bytes, and no arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xshard.errors import XshardError

Progress = bool | Callable[[int, int], object]


@contextmanager
def reporting(
    progress: Progress, total: int, is_seen: bool, what: str = "transfer", console: Any = None
) -> Iterator[Callable[[int], object]]:
    """What is to be called with the number of bytes that have come since.

    progress: called with the bytes that have come, and all of them; True: a bar, where it is seen.
    console: of rich, where the bar vanishes. Raises XshardError, on all alike, where there is no rich for it.
    """
    done = 0

    def report(n_bytes: int) -> None:
        nonlocal done
        if callable(progress):
            done += n_bytes
            progress(done, total)

    if progress is not True:
        yield report
        return
    try:
        from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError as error:
        raise XshardError("progress=True needs rich", hint="pip install 'xshard[cli]'") from error
    columns = what, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Bar(*columns, console=console, transient=console is not None, disable=not is_seen) as bar:
        task = bar.add_task("", total=total)
        yield lambda n_bytes: bar.advance(task, n_bytes)
