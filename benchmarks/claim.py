"""A number that a benchmark measures, its limit, and the table that judges it.

Decides how the ratios of many cases become one number; it must not know what is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record

Named = Sequence[tuple[str, float]]  # a case, and its value


@dataclass(frozen=True)
class Claim:
    """A number and its limit. failing: the cases that break it, the worst first."""

    statement: str
    measured: float
    limit: float
    at_least: bool
    n_cases: int
    failing: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def mean(statement: str, values: Named, limit: float, *, at_least: bool = False) -> Claim:
    """The geometric mean; a ratio of 0 counts as one thousandth."""
    ratios = [max(value, 1e-3) for _, value in values]
    return Claim(statement, statistics.geometric_mean(ratios), limit, at_least, len(ratios))


def worst(statement: str, values: Named, limit: float, *, at_least: bool = False) -> Claim:
    """The largest value or, where the limit is a lower one, the smallest."""
    ranked = sorted(values, key=lambda found: found[1], reverse=not at_least)
    failing = [f"{name} {v:.3g}" for name, v in ranked if (v < limit if at_least else v > limit)]
    return Claim(statement, ranked[0][1], limit, at_least, len(ranked), tuple(failing))


def none_of(statement: str, breaking: Sequence[str], n_cases: int) -> Claim:
    """No case out of `n_cases` breaks something."""
    return Claim(statement, len(breaking), 0, False, n_cases, tuple(breaking))


def show(title: str, judged: Sequence[Claim]) -> None:
    """Every claim, then the cases that break one."""
    console = Console(width=max(Console().width, 120))
    table = Table(title=title, title_justify="left")
    for head in ("what", "cases", "measured", "limit", ""):
        table.add_column(head, justify="right" if head in ("cases", "measured", "limit") else "left")
    for claim in judged:
        sign = ">=" if claim.at_least else "<="
        word = "[green]holds[/green]" if claim.holds else "[red]fails[/red]"
        measured = f"{claim.measured:.3g}", f"{sign} {claim.limit:.3g}"
        table.add_row(claim.statement, str(claim.n_cases), *measured, word)
    console.print(table)
    for claim in judged:
        if claim.failing:
            console.print(f"{claim.statement}: {record.named(claim.failing)}", highlight=False)
