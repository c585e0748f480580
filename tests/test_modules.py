"""The bridges import their names when they are first used, and are `xshard.torch` and `xshard.jax`, too."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.modules import ALIASES

ROOT = Path(__file__).parents[1]
SAME = """
import sys, {alias} as alias
import {package} as package, {alias}.{room}, {alias}.nn.attention
from {alias}.nn import attention
assert alias is package is sys.modules["{alias}"], alias
assert "{framework}" in sys.modules  # the rooms have loaded it
for name, module in list(sys.modules.items()):
    if name.startswith("{alias}."):
        assert module is sys.modules["{package}" + name.removeprefix("{alias}")], name
        assert module.__spec__.name == module.__name__, name
    if name.startswith("{package}."):
        assert module.__name__ == name, name
assert attention is package.nn.attention
from {alias} import *
assert redistribute is package.redistribute
try:
    import {alias}.nothing
except ModuleNotFoundError as error:
    assert str(error) == "No module named '{package}.nothing'", error
"""


@pytest.mark.parametrize(
    ("alias", "room"), [("xshard.torch", "compat.credit"), ("xshard.jax", "specs")]
)
def test_an_alias_is_the_bridge_and_its_modules_are_the_very_same(alias: str, room: str) -> None:
    package = ALIASES[alias]
    framework = alias.removeprefix("xshard.")
    code = SAME.format(alias=alias, package=package, room=room, framework=framework)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ALIASES.values())
def test_a_stub_imports_each_name_from_where_it_is(package: str) -> None:
    stub = ast.parse((ROOT / package / "__init__.pyi").read_text())
    module = import_module(package)
    found = set()
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                value = getattr(module, alias.name)
                room = f"{package}.{alias.name}"
                source = import_module(str(statement.module))
                assert value is getattr(source, alias.name)
                if statement.module == package:
                    assert value is import_module(room)
                else:  # a module of this name would take its place when it is imported
                    assert alias.name not in {path.stem for path in (ROOT / package).iterdir()}
                found.add(alias.name)
    assert set(module.__all__) <= found <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'; its"):
        _ = module.nothing


@pytest.mark.parametrize(("alias", "package"), ALIASES.items())
def test_type_checkers_find_each_room_under_both_names(alias: str, package: str) -> None:
    """A stub under the second name says `from torch_bridge.nn import *`."""
    folder = ROOT / alias.replace(".", "/")
    rooms = {
        path.relative_to(folder).with_suffix("").as_posix().removesuffix("/__init__")
        for path in folder.rglob("*.pyi")
    } - {"__init__"}
    stub = (ROOT / package / "__init__.pyi").read_text()
    named = {
        name.name
        for each in ast.parse(stub).body
        if isinstance(each, ast.ImportFrom) and each.module == package
        for name in each.names
    }
    systems = {f"compat/{name}" for name in import_module(f"{package}.compat").__all__}
    assert rooms == named | systems
    for room in rooms:
        [path] = [p for p in (folder / f"{room}.pyi", folder / room / "__init__.pyi") if p.exists()]
        assert path.read_text() == f"from {package}.{room.replace('/', '.')} import *\n"
