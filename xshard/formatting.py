"""Bytes, seconds, columns and values as text and pictures for people."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


def format_bytes(n: int) -> str:
    """1536 -> '1.50 KiB'."""
    value = float(n)
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{n} B" if unit == "B" else f"{value:.2f} {unit}"


def format_seconds(s: float) -> str:
    """0.00015 -> '150.0 us'."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if s * factor >= 1:
            return f"{s * factor:.2f} {unit}"
    return f"{s * 1e6:.1f} us"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows with equally many cells -> lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


class Pictured:
    """A value that notebooks and rich show as a picture, by modules imported when one is asked for."""

    def _repr_html_(self) -> str:
        return str(import_module("xshard.pictures.html").html(self))

    def __rich__(self) -> Any:
        return import_module("xshard.pictures.terminal").renderable(self)
