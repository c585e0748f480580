"""`mypy` and `pyright`, which `make lint` runs, have to name each of the mistakes; here they are counted."""

import re
from pathlib import Path

LINES = (Path(__file__).parent / "mistakes.py").read_text().splitlines()


def test_both_checkers_are_asked_for_each_of_the_mistakes() -> None:
    mistakes = [line for line in LINES if re.match(r" {4}[^\s\"]", line)]
    assert len(mistakes) == 34
    for line in mistakes:
        assert re.search(r"  # type: ignore\[[\w-]+\]  # pyright: ignore\[[\w, ]+\]$", line), line
