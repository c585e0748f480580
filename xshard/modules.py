"""Packages that import their names when they are first used, and packages that have a second name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class LazyNames(NamedTuple):
    """What a package defines to import its names late; Python asks it for names that are not there yet."""

    all: list[str]  # its `__all__`
    get: Callable[[str], Any]  # its `__getattr__`
    listed: Callable[[], list[str]]  # its `__dir__`


def import_later(package: str, file: str, framework: str | None = None) -> LazyNames:
    """Let a package import its names when they are first used: most programs use few of them.

    The names are read from the stub beside the package, `__init__.pyi`, which type checkers read too.
    `from torch_bridge.redistribution import redistribute` there lets `torch_bridge.redistribute` import
    that module, and `from torch_bridge import nn` lets `torch_bridge.nn` be the module itself.

    Args:
        package: The name of the package that calls this.
        file: Its `__file__`.
        framework: The framework that it needs, which is also the extra that brings it.

    Raises:
        ModuleNotFoundError: The framework is not installed.
    """
    if framework is not None and find_spec(framework) is None:
        reason = f"{framework} is not installed: pip install 'xshard[{framework}]'"
        raise ModuleNotFoundError(reason, name=framework)
    stub = _read_stub(Path(file).with_suffix(".pyi"))
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        """Import a submodule of the package, or the module that defines a name."""
        module = stub.module_of.get(name)
        if module is None:
            submodules = [each for each in stub.module_of if stub.module_of[each] == package]
            reason = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(f"{reason}; its rooms: {', '.join(submodules)}")
        if module == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(module), name)
        return namespace.setdefault(name, value)  # from now on found without this function

    def listed() -> list[str]:
        """List also what has not been imported yet, for completion in notebooks."""
        return sorted({*namespace, *stub.module_of})

    return LazyNames(stub.exported, get, listed)


class _Stub(NamedTuple):
    """What the stub of a package says: from which module each name comes, and its `__all__`."""

    module_of: dict[str, str]
    exported: list[str]


def _read_stub(path: Path) -> _Stub:
    """Read a stub that has `from module import name` statements, then `__all__ = [...]` alone."""
    module_of: dict[str, str] = {}
    exported: list[str] = []
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            names = [alias.name for alias in statement.names]
            module_of |= dict.fromkeys(names, str(statement.module))
        elif isinstance(statement, ast.Assign):  # of `__all__`: a stub assigns nothing else
            exported = ast.literal_eval(statement.value)
    return _Stub(module_of, exported)


class _Alias(MetaPathFinder, Loader):
    """Finds the modules of a package under its second name: the very same modules, no second copies."""

    def __init__(self, name: str, package: str) -> None:
        self.name = name
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{self.name}.") else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # Who imports gets what is here afterwards, not the empty module that Python has made.
        sys.modules[name] = import_module(self.package + name.removeprefix(self.name))


def add_alias(name: str, package: ModuleType) -> None:
    """Let the module that is being imported as `name` be a package, and its modules those of the package.

    `xshard.torch` is `torch_bridge`, and `xshard.torch.nn` its module `nn`.

    Args:
        name: The second name, of the module that calls this.
        package: The package.
    """
    # First, or Python would find the files again and make second modules of them.
    sys.meta_path.insert(0, _Alias(name, package.__name__))
    sys.modules[name] = package
