"""Signatures as specifications: whether arguments fit their annotations, and the words for what does.

It knows nothing of verbs. Text, and types that are written as text (`Mesh`, `Layout`), are read by
parsers of their own, which mark what is wrong with them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

MOST_LIKE = 100  # characters of a word that is compared to known ones
MOST_SHOWN = 60  # characters of a value in an error
# Names of arguments in other systems, and those here.
ELSEWHERE = {
    "params": "parameters",
    "parallelize_plan": "parameters",
    "plan": "parameters",
    "device_mesh": "mesh",
}


# ---- values and names


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


def short_repr(value: object) -> str:
    """Return a value as an error shows it: as it is written where that is short, else its type."""
    kind = f"a {type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return kind
    is_short = len(text) <= MOST_SHOWN and "\n" not in text
    return text if is_short else kind


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


# ---- annotations


class Within(NamedTuple):
    """The bounds of an annotated number: `Annotated[float, Within(0, 1)]`."""

    low: float
    high: float = math.inf

    def takes(self, value: Any) -> bool:
        """Return whether a value is within the bounds, or is no number."""
        return not isinstance(value, int | float | np.number) or bool(
            self.low <= value <= self.high
        )


Bytes = Annotated[int | float | str | None, Within(0)]  # as 2**31 or "2GiB"
Count = Annotated[int, Within(1)]
Length = Annotated[int, Within(0)]
NonNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(math.ulp(0.0))]
ZeroToOne = Annotated[float, Within(0, 1)]

# Annotated[..., PARSED]: a parser reads the value, and says itself what is wrong with it.
PARSED = "parsed"

Test = Callable[[Any], bool]


def _takes_all(_: Any) -> bool:
    return True


def _is_number(value: Any) -> bool:
    # Also an array of one number, which a program of JAX may not know yet.
    return hasattr(value, "__float__") and not isinstance(value, bool)


_TESTS: dict[Any, Test] = {
    Any: _takes_all,
    object: _takes_all,
    inspect.Parameter.empty: _takes_all,
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: lambda value: as_whole_number(value) is not None,
    float: _is_number,
    Callable: callable,
}


def test_of(annotation: Any, parsed: bool) -> Test:
    """Return the test that a value has to pass to fit an annotation.

    Args:
        annotation: A type, or what `typing` makes of types. One that is unknown takes all values.
        parsed: Test also what a parser reads: text of a layout, or a layout.
    """
    origin = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
    if origin in _TESTS:
        return _TESTS[origin]
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in parts
    has_parser = hasattr(origin, "parse") or "Mesh" in getattr(origin, "__name__", "")
    if not parsed and (has_parser or PARSED in parts):
        return _takes_all
    if origin is Annotated:
        test = test_of(parts[0], parsed)
        return lambda value: test(value) and (parts[1] is PARSED or parts[1].takes(value))

    tests = [test_of(part, parsed) for part in parts if part is not ...]
    if origin in (typing.Union, types.UnionType):
        return _takes_all if _takes_all in tests else lambda value: any(t(value) for t in tests)
    if not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return _takes_all  # such as a type variable
    if issubclass(origin, Collection) and parts:
        test = partial(_takes_items, issubclass(origin, Mapping), tests)
        if annotation == Sequence[str]:  # names with one letter may be one text
            return test
        return lambda value: not isinstance(value, str) and test(value)
    if hasattr(origin, "dtype"):  # arrays of numpy will do for those of a framework
        return lambda value: isinstance(value, origin) or hasattr(value, "dtype")
    return lambda value: isinstance(value, origin)


def _takes_items(is_mapping: bool, tests: Sequence[Test], value: Any) -> bool:
    """Return whether a value is a mapping, or a sequence, whose items pass the tests of its parts."""
    if is_mapping != isinstance(value, Mapping):
        return False
    if is_mapping:
        return all(tests[0](key) and tests[1](value[key]) for key in value)
    try:
        # Reading an iterator would use it up.
        return isinstance(value, Iterator) or all(any(t(x) for t in tests) for x in value)
    except TypeError:  # it is no sequence
        return False


# ---- calls


class Wrong(NamedTuple):
    """An argument that does not fit: its name, what is wrong, and the way out."""

    name: str
    reason: str
    hint: str


class Signature:
    """The parameters of a function, and what they take.

    Args:
        function: Any function. Its annotations may be text, as under
            `from __future__ import annotations`; one that is for type checkers alone takes anything.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # Of a constructor the name of its class.
        self.name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        self.signature = inspect.signature(function)
        self.annotations: dict[str, Any] = {}
        self.tests: dict[bool, list[tuple[int, str, Test]]] = {False: [], True: []}
        names = inspect.unwrap(function).__globals__
        for place, parameter in enumerate(self.signature.parameters.values()):
            if parameter.kind is parameter.KEYWORD_ONLY:
                place = sys.maxsize
            annotation = _evaluated(parameter.annotation, names)
            self.annotations[parameter.name] = annotation
            for parsed, tests in self.tests.items():
                test = test_of(annotation, parsed)
                if test is not _takes_all and parameter.kind is not parameter.VAR_POSITIONAL:
                    tests.append((place, parameter.name, test))

    def wrong_value(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, parsed: bool = False
    ) -> Wrong | None:
        """Return the first argument that does not fit its annotation; None if all do.

        Args:
            args: Positional arguments.
            kwargs: Arguments by name.
            parsed: Look also at those that a parser reads.
        """
        # Hot: every call of a user comes here.
        for place, name, test in self.tests[parsed]:
            if place < len(args):
                value = args[place]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            if not test(value):
                written = self.signature.parameters[name].annotation
                reason = f"{name} is {short_repr(value)}, not {written}"
                # An alias in full, without modules: `Loss` is Callable[[Any], Tensor] | None.
                meaning = re.sub(
                    r"\b[\w.]+\.", "", inspect.formatannotation(self.annotations[name])
                )
                return Wrong(name, reason, f"{self.name} takes {meaning}")
        return None

    def wrong_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Wrong | None:
        """Return an argument that is missing or unknown; None if all names are right."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            known = self.annotations
            hint = f"{self.name}({', '.join(known)})"
            for word in kwargs.keys() - known:
                hint = did_you_mean(ELSEWHERE.get(word, word), known) + hint
                return Wrong(word, f"{self.name}: unexpected argument {word!r}", hint)
            # An argument is missing, or one too many: Python's own words say so well enough.
            return Wrong("", f"{self.name}: {error}", hint)
        return None


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Return an annotation that may be text as what it stands for; Any for one that is not imported."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except NameError:
        return Any
