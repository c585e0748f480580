"""The examples in docstrings run; of the drop-ins and of torch_interop in tests/compat."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.jax_bridge.helpers import in_jax

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "jax_bridge").rglob("*.py"))
    if ">>> " in path.read_text() and path.parent.name != "compat"
]
INTEROP = [module for module in EXAMPLES if ".torch_interop." in module]
MODULES = [module for module in EXAMPLES if module not in INTEROP]


def test_modules_of_every_room_have_examples() -> None:
    rooms = {module.split(".")[1] for module in MODULES}
    assert {"arrays", "calls", "lower", "mesh", "nn", "ops"} <= rooms


@pytest.mark.parametrize("module", MODULES)
@in_jax
def test_examples_in_docstrings(module) -> None:
    tried = doctest.testmod(importlib.import_module(module))
    assert tried.attempted and not tried.failed
