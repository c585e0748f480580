"""Trees of arrays that are handed over: every leaf by its rule, progress for large trees.

Decides in which order leaves are checked; `prepare`, of the caller, hands one over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import jax

from jax_bridge.trees import leaves_of
from xshard import Layout, Rules, XshardError
from xshard.errors import located
from xshard.plans.expression import Expression
from xshard.rules import Pattern

LARGE = 256 << 20  # bytes; a larger tree gets a bar on a terminal


def prepared(
    tree: Any,
    rules: Mapping[Pattern, Any],
    is_leaf: Callable[[Any], bool],
    prepare: Callable[[Any, Layout | Expression], Callable[[], Any]],
) -> tuple[list[Callable[[], Any]], Any]:
    """Prepare every leaf: the functions that hand leaves over, in order, and the tree's structure.

    Raises as `Rules.match` does, and any error of `prepare` with the leaf's name.
    """
    work = []
    for leaf in leaves_of(Rules(rules), tree, lambda _: False, is_leaf=is_leaf):
        with located(leaf.place):
            work.append(prepare(leaf.x, leaf.given))
    return work, jax.tree.structure(tree, is_leaf=is_leaf)


def done(
    work: Sequence[Callable[[], Any]], sizes: Sequence[int], what: str, progress: bool | None
) -> list[Any]:
    """Do the work, with a bar of bytes if `progress` is true, or None for a large tree on a terminal.

    Raises XshardError if a bar is asked for and rich is not installed.
    """
    wanted = progress or (progress is None and sum(sizes) >= LARGE and sys.stderr.isatty())
    if progress and not find_spec("rich"):
        raise XshardError("rich is not installed", hint="pip install 'xshard[cli]', or leave progress out")
    bar = _bar(what, sum(sizes)) if wanted and find_spec("rich") else nullcontext(lambda _: None)
    results = []
    with bar as advance:
        for run, size in zip(work, sizes, strict=True):
            results.append(run())
            advance(size)
    return results


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        bar = shown.add_task("", total=total)
        yield lambda size: shown.update(bar, advance=size)
