"""The drawing of the rooms in CONTRIBUTING.md shows the layers that import-linter checks."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
LAYERS = {c["containers"][0]: c["layers"] for c in CONTRACTS if c["type"] == "layers"}
PACKAGES = [name for name in LAYERS if "." not in name]  # rooms inside a room are not drawn


def drawn() -> dict[str, list[str]]:
    """The lines of each box, without what stands beside the rooms."""
    found: dict[str, list[str]] = {name: [] for name in PACKAGES}
    boxes: list[str] = []
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if line.startswith(" │"):
            cells = [re.split(" {2,}", cell.strip())[0] for cell in line.split("│")[1::2]]
            for name, cell in zip(boxes, cells, strict=True):
                found[name] += [cell.replace(" · ", " | ")] if cell else []
        elif line.startswith(" ") and (names := re.findall(r"\w+", line)):
            boxes = names
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_drawing_shows_the_layers(package):
    assert drawn()[package] == LAYERS[package]
