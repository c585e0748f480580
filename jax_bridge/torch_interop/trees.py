"""Trees of arrays: the name and layout of every leaf, progress for large trees.

Decides the layout of a leaf; `prepare`, of the caller, hands it over.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import jax

from xshard import Layout, XshardError
from xshard.plans.expression import Expression

Rules = Mapping[str | re.Pattern[str], Layout | Expression]

LARGE = 256 << 20  # bytes; a larger tree gets a bar on a terminal
NAMED = 8  # most leaves without a rule that an error names


def prepared(
    tree: Any,
    rules: Rules,
    is_leaf: Callable[[Any], bool],
    prepare: Callable[[Any, Layout | Expression], Callable[[], Any]],
) -> tuple[list[Callable[[], Any]], Any]:
    """Prepare every leaf: the functions that hand leaves over, in order, and the tree's structure.

    Raises XshardError with the leaves that no rule names, and any error of `prepare` with the leaf's name.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    found = [rule_for(name, rules) for name in names]
    missing = [name for name, layout in zip(names, found, strict=True) if layout is None]
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise XshardError(
            f"no rule for {len(missing)} of {len(names)} leaves: {', '.join(missing[:NAMED])}{more}",
            hint=f"the rules are for: {', '.join(map(_text, rules))}; '*' is for all others, "
            "and the layout '...' for leaves that are whole everywhere",
        )
    work = []
    for name, (_, leaf), layout in zip(names, leaves, found, strict=True):
        assert layout is not None
        try:
            work.append(prepare(leaf, layout))
        except XshardError as error:
            error.add_note(f"in leaf '{name}'")
            raise
    return work, structure


def rule_for(name: str, rules: Rules) -> Layout | Expression | None:
    """The layout of the first rule that matches the whole name: a shell pattern or a compiled expression.

    >>> rule_for("layers.0.up.weight", {"*.up.weight": "o/tp i", "*": "..."})
    'o/tp i'
    """
    for pattern, layout in rules.items():
        if pattern.fullmatch(name) if isinstance(pattern, re.Pattern) else fnmatchcase(name, pattern):
            return layout
    return None


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


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern
