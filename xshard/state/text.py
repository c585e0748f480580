"""Names as JSON, for files and the command line: the fields of relations, and no code.

Decides how relations are written there. Knows no file.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from xshard.arguments import shown
from xshard.errors import XshardError
from xshard.state.names import Names
from xshard.state.relations import Relation

_LISTS = {"parts": str, "order": int, "rows": int}
_KINDS = {"whole": str, "dim": int, "dtype": str, "stacks": bool, "splits": bool, "optional": bool}


def names_to_json(names: Names) -> list[dict[str, Any]]:
    """Relations -> a list of their fields, without those that have their default.

    >>> from xshard.state import Names, concat
    >>> names_to_json(Names(concat(["*.gate", "*.up"], "*.gate_up", rows=(1, 1))))
    [{'parts': ('*.gate', '*.up'), 'whole': '*.gate_up', 'rows': (1, 1)}]
    """
    return [
        {f.name: value for f in fields(each) if (value := getattr(each, f.name)) != f.default}
        for each in names.relations
    ]


def names_from_json(found: Any) -> Names:
    """The inverse. Raises XshardError for whatever is none."""
    relations = []
    for each in found if isinstance(found, list) else [found]:
        if not (
            isinstance(each, dict)
            and {"parts", "whole"} <= each.keys()
            and all(map(_fits, each, each.values()))
        ):
            raise XshardError(
                f"{shown(each)} is no relation",
                hint='as {"parts": ["*.gate", "*.up"], "whole": "*.gate_up"}; the others of its fields are '
                "order, dim, rows, stacks, splits, dtype and optional, as in xshard.state.Relation",
            )
        given: dict[str, Any] = {k: tuple(v) if k in _LISTS else v for k, v in each.items()}
        relations.append(Relation(**given))
    return Names(*relations)


def _fits(key: str, value: Any) -> bool:
    """Whether a field has the type that it has to have."""
    if key in _LISTS:
        return isinstance(value, list) and value != [] and all(type(x) is _LISTS[key] for x in value)
    return type(value) is _KINDS.get(key)
