"""Names of modules and parameters, with dots between the names of modules around them; "" is the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from xshard import Rules
from xshard.errors import PlanError
from xshard.rules import ALL


def module_of(name: str) -> str:
    """Return the name of the module around a module or a parameter: "up.weight" -> "up", "up" -> ""."""
    return name.rpartition(".")[0]


def is_inside(name: str, path: str) -> bool:
    """Return whether a name is inside a module: "blocks.0.up" is in "blocks.0", and not in "blocks.00"."""
    return not path or name.startswith(f"{path}.")


def title_of(path: str) -> str:
    """Return the name of a module in errors."""
    return path if path else "the model"


def rules_of_objects(
    rules: Rules, objects: Mapping[str, Hashable], what: str, *, partial: bool = True
) -> dict[str, Any]:
    """Find the rule of each name, as `Rules.match` does: an object with several names has one rule.

    A rule for one of its names is for all; `**` decides only for objects without another rule.

    Args:
        rules: Patterns of names.
        objects: What has the names: modules, or places in them.
        what: The word for a name in errors.
        partial: Leave out objects without a rule.

    Raises:
        XshardError: Names of an object have different rules, or as `Rules.match`.
    """
    own = {name: rules.find(name) for name in objects if rules.pattern_for(name) not in (None, ALL)}
    deciding: dict[Hashable, str] = {}  # the first name with a rule, by object
    for name, value in own.items():
        first = deciding.setdefault(objects[name], name)
        if own[first] != value:
            reason = f"{first} and {name} are one {what}, with rules {own[first]!r} and {value!r}"
            raise PlanError(reason, hint="leave one out, or write the same for both")
    names = [name for name, x in objects.items() if name in own or x not in deciding]
    matched = rules.match(names, partial=partial, what=what)
    for name, x in objects.items():
        if x in deciding:
            matched[name] = own[deciding[x]]
    return matched
