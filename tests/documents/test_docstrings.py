"""Docstrings of public names explain each parameter, and none that the signature lacks.

griffe parses them, as it does for the site. Names are the ones that have a page there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

from tests.documents.test_documents import ROOT

PACKAGES = ("xshard", "torch_bridge", "jax_bridge")
Kind = griffe.DocstringSectionKind

# Attributes that a class sets on itself, where griffe sees no declaration.
UNDECLARED = {"xshard.step.say.suggestion.Suggestion": "bridges add rules to them"}


@pytest.fixture(scope="module")
def public() -> list[griffe.Object]:
    """The functions and classes that have a page on the site."""
    sys.path.insert(0, str(ROOT / "docs/site"))
    try:
        hooks = importlib.import_module("hooks")
    finally:
        sys.path.remove(str(ROOT / "docs/site"))
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser=griffe.Parser.google)
    for package in PACKAGES:
        loader.load(package, submodules=True)
    found: dict[str, griffe.Object] = {}
    for package in hooks.API:
        for name in hooks.public_names(package):
            value = getattr(importlib.import_module(package), name)
            if hasattr(value, "__qualname__"):
                path = f"{value.__module__}.{value.__qualname__}"
                found[path] = loader.modules_collection[path]
    return list(found.values())


def explained(described: griffe.Object, kind: Kind) -> set[str]:
    """Return the names that the sections of a kind have entries for."""
    if described.docstring is None:
        return set()
    sections = [section for section in described.docstring.parsed if section.kind is kind]
    return {entry.name.lstrip("*") for section in sections for entry in section.value}


def parameters_of(function: griffe.Function) -> set[str]:
    names = {parameter.name for parameter in function.parameters}
    return {name for name in names - {"self", "cls"} if not name.startswith("_")}


def faults_of_function(function: griffe.Function, *, is_method: bool = False) -> Iterator[str]:
    """Yield what is wrong with the entries of a function.

    A short method without any entry is right: its name and its first line say it.
    """
    entries = explained(function, Kind.parameters)
    parameters = parameters_of(function)
    for name in sorted(entries - parameters):
        yield f"{function.path}: {name} is no parameter"
    if is_method and not entries and len(parameters) < 3:
        return
    for name in sorted(parameters - entries):
        yield f"{function.path}: {name} is not explained"


def faults_of_class(described: griffe.Class) -> Iterator[str]:
    """Yield what is wrong with the entries of a class: its constructor's parameters and its fields.

    A constructor that is inherited, as by errors, is explained where it is defined.
    """
    entries = explained(described, Kind.parameters) | explained(described, Kind.attributes)
    parameters = {parameter.name for parameter in described.parameters} - {"self"}
    parameters = {name for name in parameters if not name.startswith("_")}
    attributes = {name for name, member in described.all_members.items() if member.is_attribute}
    if described.path not in UNDECLARED:
        for name in sorted(entries - parameters - attributes):
            yield f"{described.path}: it has no {name}"
    if "__init__" in described.members or "dataclass" in described.labels:
        for name in sorted(parameters - entries):
            yield f"{described.path}: {name} is not explained"
    for name, member in described.members.items():
        if member.is_function and not name.startswith("_"):
            yield from faults_of_function(member, is_method=True)


def faults_of(described: griffe.Object) -> list[str]:
    if described.is_class:
        return list(faults_of_class(described))
    return list(faults_of_function(described))


def test_every_parameter_of_a_public_name_is_explained_and_no_other(
    public: list[griffe.Object],
) -> None:
    assert len(public) > 100
    faults = []
    for described in public:
        faults += faults_of(described)
    assert not faults, "\n".join(faults)


def test_a_parameter_without_an_entry_and_an_entry_without_a_parameter_are_found(
    tmp_path: Path,
) -> None:
    lines = ["def move(x, mesh):", '    """Move x.', "", "    Args:", "        x: A block."]
    lines += ["        grid: A mesh.", '    """']
    (tmp_path / "sample.py").write_text("\n".join(lines))
    module = griffe.load("sample", search_paths=[tmp_path], docstring_parser="google")
    assert faults_of(module["move"]) == [
        "sample.move: grid is no parameter",
        "sample.move: mesh is not explained",
    ]
