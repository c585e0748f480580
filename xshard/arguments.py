"""Arguments and variables as users write them -> plain values: numbers, shapes, bytes, names, switches."""

from __future__ import annotations

import os
import re
from typing import Any

from xshard.errors import PlanError, ShapeError, XshardError, located
from xshard.signatures import as_whole_number, short_repr

MAX_DIGITS = 18  # of a number in a text: more do not fit 64 bits
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"\s*(?P<number>\d{1,19}(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


# ---- numbers


def whole_numbers(values: Any) -> tuple[Any, ...] | None:
    """Return a sequence as a tuple, with plain ints for numpy's and torch's whole numbers.

    [np.int64(3), 4, "a"] -> (3, 4, "a"): other items stay as they are. None for what is no
    sequence, and for text.
    """
    if isinstance(values, str):
        return None
    try:
        items = tuple(values)
    except TypeError:
        return None
    if set(map(type, items)) <= {int}:
        return items  # the usual case, quickly: every call of a user comes here
    converted: list[Any] = []
    for item in items:
        whole = as_whole_number(item)
        converted.append(item if whole is None else whole)
    return tuple(converted)


def lengths_of(shape: Any) -> tuple[Any, ...]:
    """Return a shape as a tuple, whole numbers of any kind in it as ints.

    Raises:
        ShapeError: It is not a sequence.
    """
    lengths = whole_numbers(shape)
    if lengths is None:
        length = as_whole_number(shape)
        example = 8 if length is None else length
        raise ShapeError(
            f"the shape {short_repr(shape)} is not a sequence of lengths",
            hint=f"as in shape=({example},)",
        )
    return lengths


def parse_number(text: str) -> int | None:
    """Parse a whole number >= 0 of at most 18 digits; None for other text.

    Examples:
        >>> parse_number("64"), parse_number("-1"), parse_number("9" * 100_000)
        (64, None, None)
    """
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        return None
    return int(text)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: `"2GiB"` -> 2147483648; a number without a unit is in bytes.

    Raises:
        XshardError: It is no number, has an unknown unit, or does not fit 64 bits.
    """
    match = _BYTES.fullmatch(text)
    if match is not None and match["unit"] in _UNITS:
        n_bytes = int(float(match["number"]) * _UNITS[match["unit"]])
        if n_bytes < 2**63:
            return n_bytes
    raise XshardError(
        f"{short_repr(text)} is not a number of bytes", hint="as in 1024, 512KiB, 1.5MiB, 2GiB"
    )


def limit_of(limit_like: Any, argument: str = "memory_limit") -> int | None:
    """Return a limit in bytes: `2**31`, `2e9`, `"2GiB"` or None -> an int, or None.

    Raises:
        PlanError: It is none of these. `argument` is its name in the error.
    """
    if limit_like is None:
        return None
    if isinstance(limit_like, str):
        with located(argument):
            return parse_bytes(limit_like)
    if isinstance(limit_like, float) and limit_like.is_integer():
        return int(limit_like)
    limit = as_whole_number(limit_like)
    if limit is None:
        raise PlanError(
            f"{argument} is {short_repr(limit_like)}",
            hint='a number of bytes, as in 2**31 or "2GiB"',
        )
    return limit


# ---- variables of the environment


def is_on(variable: str) -> bool:
    """Return whether an environment variable is set and neither empty nor "0".

    Callers read it once, at import.
    """
    return os.environ.get(variable, "0") not in ("", "0")
