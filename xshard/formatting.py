"""Bytes, seconds, columns and values as text and pictures for people."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


def format_bytes(n: int) -> str:
    """Write a number of bytes: 1536 -> '1.50 KiB'."""
    if n < 1024:
        return f"{n} B"
    value = float(n)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


def format_seconds(s: float) -> str:
    """Write a time: 0.00015 -> '150.0 us'."""
    if s >= 1:
        return f"{s:.2f} s"
    if s * 1e3 >= 1:
        return f"{s * 1e3:.2f} ms"
    return f"{s * 1e6:.1f} us"


def range_text(first: int, last: int) -> str:
    """Write consecutive numbers: 0 and 3 -> '0-3', 3 and 3 -> '3'."""
    return f"{first}-{last}" if first < last else str(first)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of equally many cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Pictured:
    """A value that notebooks and rich show as a picture, by modules imported when one is asked for."""

    def _repr_html_(self) -> str:
        return str(import_module("xshard.pictures.html").html(self))

    def __rich__(self) -> Any:
        return import_module("xshard.pictures.terminal").renderable(self)
