"""The house: the rooms as they are drawn are those that are checked, and none grows out of sight."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests import house

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
TABLE = json.loads(house.TABLE.read_text())
LAYERS = {c["containers"][0]: c["layers"] for c in CONTRACTS if c["type"] == "layers"}


def drawn() -> dict[str, list[str]]:
    """The lines of each box, without what stands beside the rooms."""
    found: dict[str, list[str]] = {name: [] for name in LAYERS}
    boxes: list[str] = []
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if line.startswith(" │"):
            cells = [re.split(" {2,}", cell.strip())[0] for cell in line.split("│")[1::2]]
            for name, cell in zip(boxes, cells, strict=True):
                found[name] += [cell.replace(" · ", " | ")] if cell else []
        elif line.startswith(" ") and (names := re.findall(r"\w+", line)):
            boxes = names
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_the_drawing_shows_the_layers(package):
    assert drawn()[package] == LAYERS[package]


def test_no_room_has_grown_out_of_sight():
    """Growth is written into tests/house.json, in a commit that says why: `python -m tests.house`."""
    assert house.grown(TABLE["lines"], house.rooms()) == {}


def test_no_count_of_names_and_unclear_sentences_has_grown():
    assert house.grown(TABLE["counts"], house.counts()) == {}


def test_the_counts_see_what_they_count():
    text = '"""Decides those of others, whose end.\n\nx: of it."""\n# What is it?\nraise E("it has no x")'
    tree = ast.parse(text)
    seen = {n for n, p in house.PROSE.items() for words in house.prose(text, tree) if re.search(p, words)}
    assert seen == {"those of, of which, whose", "headless what", "Decides", "parameters as fragments"}
    assert [words for words in house.messages(tree) if re.search(house.MESSAGES["is no, has no"], words)]
    assert house.public_names(ast.parse("__all__ = ['a', 'b']")) == ["a", "b"]
    assert house.grown({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 1}) == {"b": (2, 3), "c": (0, 1)}
