"""Who hears how far the transfer of a tree is: a function, or whoever looks at a bar.

Decides what `progress=` means in both bridges. Knows the bytes of a plan, and no arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from xshard.errors import XshardError
from xshard.state.tree_plan import ArrayPlan, TreePlan

Progress = bool | Callable[[int, int], object]


@contextmanager
def reporting(
    progress: Progress, plan: TreePlan, is_first: bool
) -> Iterator[Callable[[Sequence[ArrayPlan]], None]]:
    """What is to be called with every bucket that has gone.

    progress: called with the bytes that have arrived anywhere, and all bytes; True: a bar.
    Raises XshardError, on all alike, where there is no rich for it.
    """
    done, total = 0, plan.bytes_moved if progress else 0

    def report(bucket: Sequence[ArrayPlan]) -> None:
        nonlocal done
        if callable(progress):
            done += sum(array.traffic.total() for array in bucket)
            progress(done, total)

    if progress is not True:
        yield report
        return
    try:
        from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError as error:
        raise XshardError("progress=True needs rich", hint="pip install 'xshard[cli]'") from error
    columns = "transfer", BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Bar(*columns, disable=not is_first) as bar:
        task = bar.add_task("", total=total)
        yield lambda bucket: bar.advance(task, sum(array.traffic.total() for array in bucket))
