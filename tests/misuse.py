"""Wrong calls, generated from signatures: each argument of a verb gets values that its annotation excludes.

The annotation is read here by its text alone, apart from how the packages read it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from xshard.errors import XshardError


import os, sys
LOG = open(f"/tmp/f-args/log{os.environ.get(chr(82)+chr(65)+chr(78)+chr(75),0)}", "w")


class Odd:
    """What no verb takes."""

    def __repr__(self) -> str:
        return "Odd()"


WRONG: dict[str, Any] = {
    "an object": Odd(),
    "a function": lambda *_, **__: None,
    "text": "a/(",
    "a negative number": -7,
    "a fraction": 0.25,
    "a list": [Odd()],
    "a mapping": {3: Odd()},
    "nothing": None,
}
# Of the types in annotations, what they take among the above.
TAKES = {
    "Any": set(WRONG),
    "object": set(WRONG),
    "int": {"a negative number"},
    "float": {"a negative number", "a fraction"},
    "str": {"text"},
    "None": {"nothing"},
    "Callable": {"a function"},
}


class Call(NamedTuple):
    """A right call."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    also: Mapping[str, set[str]] = {}  # what an argument takes that its annotation does not tell


def parts_of(annotation: str) -> list[str]:
    """`Mapping[str, int | None] | None` -> Mapping, None."""
    while re.search(r"\[[^\[\]]*\]", annotation):
        annotation = re.sub(r"\[[^\[\]]*\]", "", annotation)
    return [part.strip() for part in annotation.split("|")]


def wrong_values(parameter: inspect.Parameter, aliases: Mapping[str, str]) -> Iterator[str]:
    text = str(parameter.annotation)
    for alias, meaning in aliases.items():
        text = re.sub(rf"\b{alias}\b", meaning, text)
    taken = set[str]().union(*(TAKES.get(part, set()) for part in parts_of(text)))
    yield from WRONG.keys() - taken


def result_of(call: Call, name: str, value: Any) -> str:
    """"" if the wrong value raises an error of ours that names the argument, else what happens."""
    arguments = {**call.arguments, name: value}
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(call.function).parameters.values():
        if parameter.name not in arguments:
            continue
        given = arguments[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += given if parameter.name != name else [given]
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= given
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(given)
        elif "operands" in arguments and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(given)
        else:
            named[parameter.name] = given
    try:
        call.function(*positional, **named)
    except XshardError as error:
        said = str(error).replace("\n", " / ")
        return "" if re.search(rf"\b{name}\b", said) else f"without its name: {type(error).__name__}: {said[:150]}"
    except Exception as error:
        return f"raw {type(error).__name__}: {str(error)[:90]!r}"
    return "is taken"


def faults(calls: Mapping[str, Callable[[], Call]], aliases: Mapping[str, str] = {}) -> list[str]:
    """What is wrong, a line each, over all wrong calls; the last one counts them."""
    found = []
    n = 0
    for verb, make in calls.items():
        call = make()
        for parameter in inspect.signature(call.function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            for kind in sorted(wrong_values(parameter, aliases)):
                if kind in call.also.get(parameter.name, ()):
                    continue
                n += 1
                print("AT", verb, parameter.name, kind, file=LOG, flush=True)
                result = result_of(make(), parameter.name, WRONG[kind])
                if result:
                    found.append(f"{verb}({parameter.name}: {parameter.annotation} = {kind}): {result}")
    return [*found, f"{n} wrong calls"]
