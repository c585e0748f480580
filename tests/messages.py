"""What errors say, word for word; in tables the wrong part of the user's text stands in « »."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(error: type[Exception], message: str) -> Iterator[None]:
    """What is inside raises the error with the whole message."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == message


def said(marked: str, reason: str, hint: str = "") -> str:
    """The message of an error about a text; without a mark the text stands behind the reason."""
    lines = [f"{reason} in '{marked}'"]
    if "«" in marked:
        before, wrong, after = re.split("[«»]", marked)
        caret = " " * (5 + len(before)) + "^" * max(1, len(wrong))
        lines = [f"{reason} in", f"    '{before}{wrong}{after}'", caret]
    return "\n".join([*lines, *([f"  {hint}"] if hint else [])])


def rows(table: str) -> list[object]:
    """Lines `text   reason   hint`, folded or without a hint -> parameters: each text, its whole message."""
    found = [
        re.split(r"\n {4}| {3}", row, maxsplit=2) for row in re.split(r"\n(?! )", table.strip("\n"))
    ]
    texts = [re.sub("[«»]", "", marked) for marked, *_ in found]
    return [pytest.param(text, said(*row), id=text) for text, row in zip(texts, found, strict=True)]
