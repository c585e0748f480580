"""Claims: numbers that a benchmark measures, their limits, and the table that judges them."""

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import record

Row = dict[str, Any]  # of a JSON file
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
    """The largest value, or the smallest under a lower limit."""
    ranked = sorted(values, key=lambda pair: pair[1], reverse=not at_least)
    failing = [f"{name} {v:.3g}" for name, v in ranked if (v < limit if at_least else v > limit)]
    return Claim(statement, ranked[0][1], limit, at_least, len(ranked), tuple(failing))


def between(statement: str, values: Named, lowest: float, highest: float) -> list[Claim]:
    """The largest value and the smallest one, each under its limit."""
    return [
        worst(f"{statement}: largest", values, highest),
        worst(f"{statement}: smallest", values, lowest, at_least=True),
    ]


def none_of(statement: str, breaking: Sequence[str], n_cases: int) -> Claim:
    """No case out of `n_cases` breaks something."""
    return Claim(statement, len(breaking), 0, False, n_cases, tuple(breaking))


def finish(
    options: Namespace,
    title: str,
    judged: Sequence[Claim],
    *libraries: str,
    rows: Row,
    **facts: Any,
) -> int:
    """Print every claim and the cases that break one, write the JSON file; the exit status of the run."""
    lines = []
    for claim in judged:
        limit = f"{'>=' if claim.at_least else '<='} {claim.limit:.3g}"
        word = "[green]holds[/green]" if claim.holds else "[red]fails[/red]"
        lines.append((claim.statement, str(claim.n_cases), f"{claim.measured:.3g}", limit, word))
    console = record.console()
    console.print(record.table(title, ("what", "cases", "measured", "limit", ""), lines))
    for claim in judged:
        if claim.failing:
            console.print(f"{claim.statement}: {record.named(claim.failing)}", highlight=False)
    about = record.about(options, *libraries, **facts)
    print(record.write(options, about, claims=[claim.to_dict() for claim in judged], **rows))
    return int(not all(claim.holds for claim in judged))
