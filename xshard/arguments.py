"""Arguments and variables as users write them -> plain values: numbers, shapes, bytes, names, switches."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from xshard.errors import PlanError, ShapeError, XshardError

MOST_DIGITS = 18  # of a number in a text: more do not fit 64 bits
MOST_LIKE = 100  # characters of a word that is compared to known ones
_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def whole_number(value: Any) -> int | None:
    """`3`, `np.int64(3)`, `torch.tensor(3)` -> 3; None for a boolean and for what is no whole number."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_numbers(values: Any) -> tuple[Any, ...] | None:
    """A sequence -> a tuple with whole numbers of any kind as ints, the rest as is; None for no sequence."""
    try:
        items = None if isinstance(values, str) else tuple(values)
    except TypeError:
        return None
    if items is None or {*map(type, items)} <= {int}:
        return items
    return tuple(n if (number := whole_number(n)) is None else number for n in items)


def lengths_of(shape: Any) -> tuple[Any, ...]:
    """A shape -> a tuple, whole numbers in it as ints. Raises ShapeError unless it is a sequence."""
    lengths = whole_numbers(shape)
    if lengths is None:
        one = whole_number(shape)
        reason = f"the shape {shown(shape)} is not a sequence of lengths"
        raise ShapeError(reason, hint=f"as in shape=({8 if one is None else one},)")
    return lengths


def parse_number(text: str) -> int | None:
    """Text of a whole number >= 0 of at most 18 digits -> the number; None for other text.

    >>> parse_number("64"), parse_number("-1"), parse_number("9" * 100_000)
    (64, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def parse_bytes(text: str) -> int:
    """`"2GiB"` -> 2147483648; a number without a unit is in bytes. Raises XshardError."""
    match = re.fullmatch(r"\s*(\d{1,19}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    n = -1 if match is None or match[2] not in _UNITS else int(float(match[1]) * _UNITS[match[2]])
    if not 0 <= n < 2**63:
        raise XshardError(
            f"{shown(text)} is not a number of bytes", hint="as in 1024, 512KiB, 1.5MiB, 2GiB"
        )
    return n


def limit_of(given: Any, what: str = "memory_limit") -> int | None:
    """A limit in bytes: `2**31`, `2e9`, `"2GiB"`, or None. Raises PlanError."""
    if given is None:
        return None
    if isinstance(given, str):
        return parse_bytes(given)
    is_whole = isinstance(given, float) and given.is_integer()
    limit = int(given) if is_whole else whole_number(given)
    if limit is None:
        raise PlanError(
            f"{what} is {shown(given)}", hint='a number of bytes, as in 2**31 or "2GiB"'
        )
    return limit


def explained(**others: str) -> Callable[[_F], _F]:
    """A decorator: unknown and missing arguments raise XshardError. others: their names elsewhere -> here."""

    def decorated(function: _F) -> _F:
        signature = inspect.signature(function)
        name = function.__name__

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((word for word in kwargs if word not in signature.parameters), "")
                what = f"unexpected argument {unknown!r}" if unknown else error
                hint = did_you_mean(unknown, signature.parameters, others)
                hint += f"{name}({', '.join(signature.parameters)})"
                raise XshardError(f"{name}: {what}", hint=hint) from None
            return function(*args, **kwargs)

        return cast(_F, called)

    return decorated


def did_you_mean(word: str, known: Collection[str], others: Mapping[str, str] | None = None) -> str:
    """The known word closest to another, or its name in `others`, to begin a hint; "" if none is close."""
    close = difflib.get_close_matches(word, known, 1) if len(word) <= MOST_LIKE else ()
    meant = (others or {}).get(word.lower()) or next(iter(close), None)
    return f"did you mean {meant!r}? " if meant else ""


def shown(value: object) -> str:
    """A value as an error shows it: as it is written where that is short, else its type."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        text = "\n"
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def is_on(variable: str) -> bool:
    """True if an environment variable is set and neither empty nor "0". Callers read it once, at import."""
    return os.environ.get(variable, "0") not in ("", "0")
