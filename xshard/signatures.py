"""Signatures as specifications: whether arguments fit their annotations, and the words for what does.

It knows nothing of verbs. Layouts, meshes and rules are read by parsers of their own, which mark what
is wrong with them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

MAX_LIKE = 100  # characters of a word that is compared to known ones
MAX_SHOWN = 60  # characters of a value in an error
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
    type_text = f"a {type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return type_text
    is_short = len(text) <= MAX_SHOWN and "\n" not in text
    return text if is_short else type_text


def did_you_mean(
    word: str, known_words: Collection[str], words_elsewhere: Mapping[str, str] | None = None
) -> str:
    """Return the beginning of a hint: `psum` -> "did you mean 'sum'? "; "" if no word is close.

    Args:
        word: An unknown word of a user.
        known_words: The words that may be meant.
        words_elsewhere: Words of other systems, with the words for them here.
    """
    if words_elsewhere is not None and word.lower() in words_elsewhere:
        return f"did you mean {words_elsewhere[word.lower()]!r}? "
    close_words = difflib.get_close_matches(word, known_words, 1) if len(word) <= MAX_LIKE else []
    return f"did you mean {close_words[0]!r}? " if close_words else ""


# ---- annotations

# Annotated[..., low, high]: of the values that are numbers, those from low to high.
Bytes = Annotated[int | float | str | None, 0, math.inf]  # as 2**31 or "2GiB"
Count = Annotated[int, 1, math.inf]
Length = Annotated[int, 0, math.inf]
NonNegative = Annotated[float, 0, math.inf]
Positive = Annotated[float, math.ulp(0.0), math.inf]
ZeroToOne = Annotated[float, 0, 1]

Test = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    # Also an array of one number, which a program of JAX may not know yet.
    return hasattr(value, "__float__") and not isinstance(value, bool)


_TESTS: dict[Any, Test] = {
    Any: lambda _: True,
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: lambda value: as_whole_number(value) is not None,
    float: _is_number,
    Callable: callable,
}


def test_of(annotation: Any) -> Test:
    """Return the predicate that is True for values that fit an annotation.

    `test_of(int | None)(3)` is True. Bounds are written as `Annotated[float, low, high]`.

    Args:
        annotation: A type, or what `typing` makes of types. Type variables, and protocols that
            `isinstance` cannot ask, take all values.
    """
    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if origin in _TESTS:
        return _TESTS[origin]
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin is Annotated:
        plain_annotation, low, high = arguments
        test = test_of(plain_annotation)
        return lambda value: test(value) and _is_within(low, high, value)

    tests = [test_of(argument) for argument in arguments if argument is not ...]
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(test(value) for test in tests)
    if not isinstance(origin, type):
        return _TESTS[Any]  # such as a type variable
    is_checkable = getattr(origin, "_is_runtime_protocol", False) and not arguments
    if getattr(origin, "_is_protocol", False) and not is_checkable:
        return _TESTS[Any]  # for type checkers alone
    if arguments and issubclass(origin, Mapping):
        return _test_of_mapping(*tests)
    if arguments and issubclass(origin, Collection):
        # For Sequence[str], "xy" may stand for ["x", "y"].
        excluded_types = Mapping if annotation == Sequence[str] else str | Mapping
        return lambda value: not isinstance(value, excluded_types) and _takes_items(tests, value)
    if hasattr(origin, "dtype"):  # arrays of numpy will do for those of a framework
        return lambda value: hasattr(value, "dtype")
    return lambda value: isinstance(value, origin)


def _meaning_of(annotation: Any) -> str:
    """Write an annotation for a reader, with the range of its numbers in words.

    `int | None` as it is; "int | None, 1 or more" for `Count | None`.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    plain_annotations = []
    ranges = []
    for member in members:
        if typing.get_origin(member) is Annotated:
            plain_annotation, low, high = typing.get_args(member)
            plain_annotations.append(plain_annotation)
            ranges.append(_range_in_words(low, high))
        else:
            plain_annotations.append(member)
    if not ranges:
        return inspect.formatannotation(annotation)
    texts = [
        "None" if plain_annotation is types.NoneType else inspect.formatannotation(plain_annotation)
        for plain_annotation in plain_annotations
    ]
    return f"{' | '.join(texts)}, {' or '.join(dict.fromkeys(ranges))}"


def _range_in_words(low: float, high: float) -> str:
    """Write the numbers from low to high: "1 or more", "from 0 to 1", "above 0"."""
    if high < math.inf:
        return f"from {low} to {high}"
    return "above 0" if low == math.ulp(0.0) else f"{low} or more"


def _test_of_mapping(takes_key: Test, takes_value: Test) -> Test:
    """Return the predicate of mappings whose keys and values pass these tests."""

    def test(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(takes_key(key) and takes_value(item) for key, item in value.items())

    return test


def _is_within(low: float, high: float, value: Any) -> bool:
    """Return whether a value is from low to high, or is no number."""
    return not isinstance(value, int | float | np.number) or bool(low <= value <= high)


def _takes_items(tests: Sequence[Test], value: Any) -> bool:
    """Return whether a value is a sequence, each of whose items passes one of the tests."""
    try:
        # Reading an iterator would use it up.
        return isinstance(value, Iterator) or all(
            any(test(item) for test in tests) for item in value
        )
    except TypeError:  # it is no sequence
        return False


# ---- calls


class Wrong(NamedTuple):
    """A wrong argument: its name, what is wrong, and the way out."""

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
        parameters = self.signature.parameters
        names = inspect.unwrap(function).__globals__
        self.annotations = {
            name: _evaluate(parameter.annotation, names) for name, parameter in parameters.items()
        }
        self.tests = {name: test_of(annotation) for name, annotation in self.annotations.items()}
        self.positional = inspect.getfullargspec(inspect.unwrap(function)).args
        self.parsed = {
            name
            for name, parameter in parameters.items()
            if re.search("Layout|Mesh|Rules", str(parameter.annotation))
        }

    def wrong(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_failed: bool = False
    ) -> Wrong | None:
        """Return the first argument that does not fit its annotation; None if all do.

        Args:
            args: Positional arguments.
            kwargs: Arguments by name.
            has_failed: The call has raised: look also at arguments that a parser reads, and at names.
        """
        values_by_name = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        for name, value in values_by_name.items():
            if name not in self.tests or (name in self.parsed and not has_failed):
                continue
            if not self.tests[name](value):
                written = self.signature.parameters[name].annotation
                # An alias in full: `Loss` is Callable[[Any], Tensor] | None.
                meaning = _meaning_of(self.annotations[name])
                reason = f"{name} is {short_repr(value)}, not {written}"
                hint = f"{self.name} takes {meaning}"
                if isinstance(value, str):
                    choices = typing.get_args(self.annotations[name])
                    hint = did_you_mean(value, [x for x in choices if isinstance(x, str)]) + hint
                return Wrong(name, reason, hint)
        return self._wrong_name(args, kwargs) if has_failed else None

    def _wrong_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Wrong | None:
        """Return an argument that is missing or unknown; None if all names are right."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = f"{self.name}({', '.join(self.annotations)})"
            for word in kwargs.keys() - self.annotations:
                hint = did_you_mean(ELSEWHERE.get(word, word), self.annotations) + hint
                return Wrong(word, f"{self.name}: unexpected argument {word!r}", hint)
            # An argument is missing, or one too many: Python's own words say so well enough.
            return Wrong("", f"{self.name}: {error}", hint)
        return None


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
    """Return an annotation that may be text as what it stands for; Any for one that is not imported."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        value = eval(annotation, names)
    except NameError:
        return Any
    bound = getattr(value, "__bound__", None)
    return value if bound is None else bound  # of a type variable what it stands for
