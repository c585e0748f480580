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
MOST_SHOWN = 60  # characters of a value in an error
_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"\s*(?P<number>\d{1,19}(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


# ---- numbers


def as_whole_number(value: Any) -> int | None:
    """Return a whole number of any kind as an int: `np.int64(3)`, `torch.tensor(3)` -> 3.

    None for a boolean, and for what is no whole number.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


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
    numbers: list[Any] = []
    for item in items:
        number = as_whole_number(item)
        numbers.append(item if number is None else number)
    return tuple(numbers)


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
    if not text.isdecimal() or len(text) > MOST_DIGITS:
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


def limit_of(given: Any, what: str = "memory_limit") -> int | None:
    """Return a limit in bytes: `2**31`, `2e9`, `"2GiB"` or None -> an int, or None.

    Raises:
        PlanError: It is none of these. what: the name of the argument.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return parse_bytes(given)
    if isinstance(given, float) and given.is_integer():
        return int(given)
    limit = as_whole_number(given)
    if limit is None:
        raise PlanError(
            f"{what} is {short_repr(given)}", hint='a number of bytes, as in 2**31 or "2GiB"'
        )
    return limit


# ---- names


def explained(**others: str) -> Callable[[_F], _F]:
    """Make a decorator under which wrong names of arguments raise XshardError with a suggestion.

    A call with `device_mesh=` then raises: unexpected argument 'device_mesh', did you mean 'mesh'?
    Without it, it would be Python's TypeError.

    others: names of arguments in other systems, with their names here: {"device_mesh": "mesh"}.
    """

    def decorated(function: _F) -> _F:
        """Wrap a function so that wrong names of arguments raise XshardError before it is called.

        `others`, of the function around this one, has names in other systems, which the hint translates.
        """
        signature = inspect.signature(function)
        parameters = signature.parameters
        name = function.__name__

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                hint = f"{name}({', '.join(parameters)})"
                for word in kwargs:
                    if word not in parameters:
                        raise XshardError(
                            f"{name}: unexpected argument {word!r}",
                            hint=did_you_mean(word, parameters, others) + hint,
                        ) from None
                # An argument is missing, or one too many: Python's own words say so well enough.
                raise XshardError(f"{name}: {error}", hint=hint) from None
            return function(*args, **kwargs)

        return cast(_F, called)

    return decorated


def did_you_mean(word: str, known: Collection[str], others: Mapping[str, str] | None = None) -> str:
    """Return the beginning of a hint: `psum` -> "did you mean 'sum'? "; "" if no word is close.

    Args:
        word: An unknown word of a user.
        known: The words that may be meant.
        others: Words of other systems, with the words for them here.
    """
    if others is not None and word.lower() in others:
        return f"did you mean {others[word.lower()]!r}? "
    close = difflib.get_close_matches(word, known, 1) if len(word) <= MOST_LIKE else []
    return f"did you mean {close[0]!r}? " if close else ""


def short_repr(value: object) -> str:
    """Return a value as an error shows it: as it is written where that is short, else its type."""
    kind = f"a {type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return kind
    is_short = len(text) <= MOST_SHOWN and "\n" not in text
    return text if is_short else kind


# ---- variables of the environment


def is_on(variable: str) -> bool:
    """Return whether an environment variable is set and neither empty nor "0".

    Callers read it once, at import.
    """
    return os.environ.get(variable, "0") not in ("", "0")
