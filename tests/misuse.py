"""Wrong calls, made from signatures: each argument of a verb gets values that its annotation excludes.

An annotation is read here by its text alone, apart from how the packages read it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from xshard.errors import XshardError


class Odd:
    """What no verb takes."""

    def __repr__(self) -> str:
        return "Odd()"


def odd(*_: Any, **__: Any) -> None:
    """Nothing that a verb computes with."""


WRONG: dict[str, Any] = {
    "an object": Odd(),
    "a function": odd,
    "text": "a/(",
    "a number below 0": -7,
    "a fraction": 0.25,
    "a list": [Odd()],
    "a mapping": {3: Odd()},
    "nothing": None,
}
# What types in annotations take of these; other types take none.
TAKES = {
    "": set(WRONG),
    "A": set(WRONG),  # arrays: bodies convert what they can
    "Any": set(WRONG),
    "M": set(WRONG) - {"an object", "a function"},
    "T": set(WRONG),
    "int": {"a number below 0"},
    "float": {"a number below 0", "a fraction"},
    "str": {"text"},
    "None": {"nothing"},
    "Callable": {"a function"},
    "NonNegative": {"a fraction"},
    "Positive": {"a fraction"},
    "ZeroToOne": {"a fraction"},
    "Bytes": {"nothing"},
}
# What stands behind names of the bridges.
ALIASES = {
    "ArrayLike": "Any",
    "Arrays": "Any",
    "Axes": "str",
    "Boundaries": "str | None",
    "CommDtypeLike": "None",
    "CheckpointLike": "str",
    "DTypeLike": "Any",
    "DeviceLike": "str",
    "Given": "str",
    "Group": "None",
    "HaloWidth": "int",
    "Init": "Callable | None",
    "Lengths": "None",
    "Loss": "Callable | None",
    "Manager": "None",
    "Padding": "None",
    "Parameter": "None",
    "Pattern": "str",
    "PrecisionLike": "str | None",
    "ProfileLike": "str",
    "Profiles": "str",
    "Progress": "Callable | None",
    "Reducer": "Callable",
    "Shape": "None",
    "Shown": "str",
    "Sizes": "None",
    "Values": "float | Any",
    "ConvGeneralDilatedDimensionNumbers": "None",
}


class Call(NamedTuple):
    """A right call of a verb."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    also: Mapping[
        str, str
    ] = {}  # kinds of values that an argument takes beside those of its annotation


class Calls(dict[str, Callable[[], Call]]):
    """A right call of each verb by its name, made anew for each wrong one."""

    def add(
        self, verb: str, function: Any, also: dict[str, str] | None = None, /, **arguments: Any
    ) -> None:
        """Note the right arguments of a verb, and what they take beside their annotations."""
        self[verb] = lambda: Call(function, arguments, also or {})


def taken(annotation: str) -> set[str]:
    """The kinds of values that an annotation takes: `Sequence[int] | None` takes "nothing"."""
    kinds = {"text"} if "Sequence[str]" in annotation else set[str]()  # of names with one letter
    while re.search(r"\[[^\[\]]*\]", annotation):
        annotation = re.sub(r"\[[^\[\]]*\]", "", annotation)
    parts = [part.strip().rpartition(".")[2] for part in annotation.split("|")]
    for part in parts:
        kinds |= taken(ALIASES[part]) if part in ALIASES else TAKES.get(part, set())
    return kinds


def said(call: Call, name: str, value: Any) -> str:
    """What a wrong value raises, or "taken"; "" for an error of ours that names argument or value."""
    arguments = {**call.arguments, name: value}
    positional: list[Any] = []
    named: dict[str, Any] = {}
    parameters = inspect.signature(call.function).parameters
    has_variadic = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    for parameter in parameters.values():
        if parameter.name not in arguments:
            continue
        given = arguments[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += given if parameter.name != name else [given]
        elif parameter.kind is parameter.POSITIONAL_ONLY or (
            has_variadic and parameter.kind is not parameter.KEYWORD_ONLY
        ):
            positional.append(given)
        else:
            named[parameter.name] = given
    try:
        call.function(*positional, **named)
    except XshardError as error:
        shown = [name, repr(value), type(value).__name__]
        if isinstance(value, str):
            shown.append(value)  # inside of the text that it became a part of
        return "" if any(each in str(error) for each in shown) else f"{error!r} names nothing"
    except Exception as error:
        return f"raw {error!r}"
    return "taken"


def faults(calls: Mapping[str, Callable[[], Call]]) -> list[str]:
    """A line for each wrong call that is not refused as it should be; the last one counts them all."""
    found = []
    n = 0
    for verb, make in calls.items():
        call = make()
        for parameter in inspect.signature(call.function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            wrong = WRONG.keys() - taken(str(parameter.annotation))
            wrong -= set(call.also.get(parameter.name, "").split(", "))
            for kind in sorted(wrong):
                n += 1
                result = said(make(), parameter.name, WRONG[kind])
                if result:
                    found.append(
                        f"{verb}({parameter.name}: {parameter.annotation}), {kind}: {result}"
                    )
    return [*found, f"{n} wrong calls"]


def verbs_of(rooms: Sequence[ModuleType], prefixes: Sequence[str]) -> set[str]:
    """The public functions and classes of some modules, by name: "nn.attention"."""
    names = set()
    for room, prefix in zip(rooms, prefixes, strict=True):
        for name in room.__all__:
            value = getattr(room, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not is_error:
                names.add(prefix + name)
    return names
