"""The results of `xshard selfcheck`: one table, a section per expression, a row per runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xshard.contractions import table as contractions
from xshard.contractions.plan import ContractionPlan
from xshard.formatting import format_bytes, format_seconds
from xshard.plans import table as plans
from xshard.testing.plans import Verdict, backward_bytes
from xshard.testing.question import Answer, Question

_HEAD = (
    "runtime",
    "difference\nforward",
    "\nbackward",
    "measured/planned\nforward",
    "\nbackward",
    "\ntime",
    "\nresult",
)


class Row(NamedTuple):
    """The answer of one runtime to one question, and its errors; None if it failed."""

    runtime: str
    answer: Answer | None = None
    verdict: Verdict | None = None

    @property
    def agrees(self) -> bool:
        return self.verdict is not None and self.verdict.agrees


class Section(NamedTuple):
    """The rows of one question. elsewhere: the plan's name in other systems."""

    question: Question
    elsewhere: str
    rows: list[Row]


def print_sections(sections: Sequence[Section], out: Console) -> None:
    """A heading, every section under its expression, and a summary."""
    cells = [[_cells(section.question, row) for row in section.rows] for section in sections]
    # One table to the eye: tables of equal column widths with a line of text between them.
    heads = tuple(Text(head, style="bold") for head in _HEAD)
    columns = zip(heads, *chain(*cells), strict=True)
    widths = [max(len(line) for cell in column for line in cell.plain.split("\n")) for column in columns]
    out.print(_table(widths, [heads]))
    for section, rows in zip(sections, cells, strict=True):
        elsewhere = f"   {section.elsewhere}" if section.elsewhere else ""
        out.print()
        plan = section.question.plan
        title = contractions.title(plan) if isinstance(plan, ContractionPlan) else plans.title(plan)
        out.print(Text.assemble((title, "bold cyan"), elsewhere), soft_wrap=True)
        out.print(_table(widths, rows))
    out.print()
    out.print(_summary(sections), soft_wrap=True)


def _table(widths: Sequence[int], rows: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for i, width in enumerate(widths):
        table.add_column(width=width, justify="left" if i in (0, len(widths) - 1) else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(question: Question, row: Row) -> tuple[Text, ...]:
    name = Text(row.runtime)
    if row.answer is None or row.verdict is None:
        return name, *(Text("-", style="dim") for _ in _HEAD[2:]), Text("failed", style="bold red")
    plan, seconds = question.plan, row.answer.seconds
    return (
        name,
        _difference(row.verdict.forward),
        _difference(row.verdict.backward),
        _bytes(row.answer.forward_bytes, plan.bytes_received),
        _bytes(row.answer.backward_bytes, backward_bytes(plan)),
        Text("-" if seconds is None else format_seconds(seconds)),
        Text("equal", style="green") if row.agrees else Text("DIFFERENT", style="bold red"),
    )


def _difference(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:g}", style="bold red" if value else "")


def _bytes(measured: int | None, planned: int | None) -> Text:
    """Measured/planned; marked if they differ, which is the runtime's choice and no error."""
    text = "/".join("-" if n is None else format_bytes(n) for n in (measured, planned))
    return Text(text, style="yellow" if measured is not None and measured != planned else "")


def _summary(sections: Sequence[Section]) -> Text:
    rows = [row for section in sections for row in section.rows]
    failed = sum(row.answer is None for row in rows)
    different = len(rows) - failed - sum(row.agrees for row in rows)
    taken = Counter(row.runtime for row in rows)  # not every runtime knows every mesh
    names = [name if n == len(sections) else f"{name} ({n} of them)" for name, n in taken.items()]
    what = f"{len(sections)} expression{'s' * (len(sections) > 1)} on {', '.join(names)}: "
    if not failed and not different:
        return Text.assemble(what, ("all equal", "bold green"))
    return Text.assemble(what, (f"{different} different, {failed} failed, of {len(rows)} runs", "bold red"))
