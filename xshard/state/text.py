"""Names as JSON, for files and the command line: the fields of relations, and no code."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from xshard.arguments import shown
from xshard.errors import XshardError
from xshard.plans.plain import fields_from_plain, fields_to_plain
from xshard.state.names import Names
from xshard.state.relations import Relation

_DEFAULTS = {f.name: f.default for f in fields(Relation)}


def names_to_json(names: Names) -> list[dict[str, Any]]:
    """Relations -> a list of their fields, without those that have their default.

    >>> from xshard.state import Names, concat
    >>> names_to_json(Names(concat(["*.gate", "*.up"], "*.gate_up", rows=(1, 1))))
    [{'parts': ['*.gate', '*.up'], 'whole': '*.gate_up', 'rows': [1, 1]}]
    """
    relations = map(fields_to_plain, names.relations)
    return [{k: v for k, v in relation.items() if v != _DEFAULTS[k]} for relation in relations]


def names_from_json(data: Any) -> Names:
    """The inverse. Raises XshardError for data of another form."""
    return Names(*map(_relation, data if isinstance(data, list) else [data]))


def _relation(data: Any) -> Relation:
    try:
        values = fields_from_plain(Relation, data)
        if () not in values.values():
            return Relation(**values)
    except (XshardError, TypeError):  # a TypeError for a missing field
        pass
    raise XshardError(
        f"{shown(data)} is no relation",
        hint='as in {"parts": ["*.gate", "*.up"], "whole": "*.gate_up"}; its other fields are '
        "order, dim, rows, stacks, splits, dtype and optional, as in xshard.state.Relation",
    )
