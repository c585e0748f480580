"""Docstrings as pages show them: their examples are code, their parameters a table.

Finds the beginning and the end of each example, and the paragraphs that explain parameters or fields. The
prose of docstrings is markdown already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

# An example with what it prints, up to the next line of prose: a blank line ends it.
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
ERRORS = re.compile(r"\n(?=Raises )")  # a sentence of its own below the parameters
HEAD = "| parameter | type | default | meaning |\n|---|---|---|---|\n"


class Examples(griffe.Extension):
    """Fences the examples of docstrings, so that brackets in them are no links; parameters make a table."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for obj in _objects(pkg):
            if not obj.docstring:
                continue
            prose, mark, rest = obj.docstring.value.partition(">>> ")
            if explained := _parameters(obj):
                parts = [
                    _shown(part, explained) for part in ERRORS.sub("\n\n", prose).split("\n\n")
                ]
                prose = "\n\n".join(parts).replace(
                    f"\n\n\n{HEAD}", "\n"
                )  # tables that touch are one
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"\n```pycon\n{found[0]}\n```\n", prose + mark + rest
            )


def _objects(obj: griffe.Object) -> Iterator[griffe.Object]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _parameters(obj: griffe.Object) -> dict[str, tuple[str, str]]:
    """The type and the default of what a docstring may explain: a function's parameters, a class's fields."""
    if isinstance(obj, griffe.Function):
        found = {}
        for parameter in obj.parameters:
            overloads = [
                each.parameters for each in obj.overloads or () if parameter.name in each.parameters
            ]
            all_of = [parameters[parameter.name] for parameters in overloads] or [parameter]
            types = dict.fromkeys(
                str(each.annotation) for each in all_of if each.annotation is not None
            )
            default = "" if parameter.default is None else str(parameter.default)
            found[parameter.name] = " | ".join(types), default
        return found
    if isinstance(obj, griffe.Class):
        fields = {
            name: member
            for name, member in obj.members.items()
            if isinstance(member, griffe.Attribute)
        }
        values = {
            name: "" if "field(" in str(field.value) else str(field.value or "")
            for name, field in fields.items()
        }
        own = {name: (str(field.annotation or ""), values[name]) for name, field in fields.items()}
        init = obj.members.get("__init__")
        return own | (_parameters(init) if isinstance(init, griffe.Function) else {})
    return {}


def _shown(paragraph: str, explained: dict[str, tuple[str, str]]) -> str:
    """A paragraph as it is, or as a table where it begins with a parameter, as in `src, dst: the layouts.`"""
    names = "|".join(map(re.escape, explained))
    parts = re.split(rf"(?:(?<=\s)|^)((?:{names})(?:, \w+)*):\s", paragraph.strip())
    if parts[0] or len(parts) == 1:
        return paragraph
    rows = zip(parts[1::2], parts[2::2], strict=True)
    return HEAD + "".join(
        f"| {_row(names.split(', '), text, explained)} |\n" for names, text in rows
    )


def _row(names: list[str], text: str, explained: dict[str, tuple[str, str]]) -> str:
    types, defaults = (
        ", ".join(
            f"`{each}`"
            for each in dict.fromkeys(explained.get(n, ("", ""))[i] for n in names)
            if each
        )
        for i in (0, 1)
    )
    cells = ", ".join(f"`{name}`" for name in names), types, defaults, " ".join(text.split())
    return " | ".join(cell.replace("|", r"\|") for cell in cells)
