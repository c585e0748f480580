"""docs/process_state.md lists all state of a process that outlives a call, and nothing else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("xshard", "torch_bridge", "jax_bridge")
PAGE = ROOT / "docs/process_state.md"

# Methods of containers that change them.
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end"}
CHANGES |= {"pop", "popitem", "popleft", "remove", "setdefault", "update"}
# Calls that leave something in another library, or in the interpreter.
REGISTERS = {"AttentionInterface.register", "AttentionMaskInterface.register", "atexit.register"}
REGISTERS |= {"cloudpickle.register_pickle_by_value", "jax.config.update", "mlir.register_lowering"}
REGISTERS |= {
    "register_constant",
    "register_optimizer_step_pre_hook",
    "sys.meta_path.insert",
    "signal.signal",
    "torch.set_num_threads",
}
READS = {"os.environ.get", "os.environ.setdefault", "os.getenv", "xshard.arguments.is_on"}
OTHERS = {"cloudpickle", "jax", "torch", "transformers"}  # libraries whose attributes are set
ATTRIBUTE = re.compile(r"_xshard_\w+")

# Variables whose names are no constants of the file that reads them.
PASSED = {
    ("xshard/arguments.py", "variable"): "an argument: the callers name it",
    (
        "xshard/runtimes/backends.py",
        "self.world",
    ): "WORLD_SIZE, which torch_bridge/testing reads too",
}


def target_nodes(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    return []


def dotted(node: ast.expr) -> str:
    """Return a name, or names with dots, as text, without indices; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


class File:
    """The state that one file writes or reads, as rows (name, file) for each section of the page."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text())
        self.nodes = list(ast.walk(tree))
        self.values: dict[str, ast.expr | None] = {}  # names of the module -> what they are first
        self.imported: dict[str, str] = {}  # names -> where they come from
        self.classes: set[str] = set()
        for statement in tree.body:
            for target in target_nodes(statement):
                if isinstance(target, ast.Name):
                    self.values[target.id] = getattr(statement, "value", None)
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name.partition(".")[0]] = alias.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.ClassDef):
                self.classes.add(node.name)

    def functions(self) -> Iterator[ast.AST]:
        """Yield the nodes of all functions of the file."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef):
                yield from ast.walk(node)  # of functions inside again, which adds no row

    def is_module_level(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.values

    def is_of_class(self, node: ast.expr) -> bool:
        """Return whether an expression is an attribute of a class of this file, as in `Rows.n`."""
        return isinstance(node, ast.Attribute) and dotted(node.value) in self.classes

    def changes_variable(self, function: ast.expr) -> bool:
        """Return whether a call changes a container of the module, as in `MADE.update`."""
        if not isinstance(function, ast.Attribute) or function.attr not in CHANGES:
            return False
        return self.is_module_level(function.value)

    def variables(self) -> Iterator[str]:
        """Yield names of the module, or `Class.name`, that functions write; and context variables."""
        for name, value in self.values.items():
            if isinstance(value, ast.Call) and dotted(value.func).endswith("ContextVar"):
                yield name
        for node in self.functions():
            if isinstance(node, ast.Global):
                yield from node.names
            if isinstance(node, ast.Call) and self.changes_variable(node.func):
                yield dotted(node.func).rpartition(".")[0]
            for target in target_nodes(node):
                owner = (
                    target.value if isinstance(target, ast.Subscript | ast.Attribute) else target
                )
                if isinstance(target, ast.Subscript) and self.is_module_level(owner):
                    yield dotted(owner)
                if isinstance(target, ast.Subscript) and self.is_of_class(owner):
                    yield dotted(owner)
                if self.is_of_class(target):
                    yield dotted(target)

    def environment(self) -> Iterator[str]:
        """Yield the variables of the environment that the file reads or writes."""
        for node in self.nodes:
            key: ast.expr | None = None
            if isinstance(node, ast.Call) and self.reads_environment(node.func):
                key = node.args[0]
            elif isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ":
                key = node.slice
            elif isinstance(node, ast.Compare) and dotted(node.comparators[0]) == "os.environ":
                key = node.left
            elif isinstance(node, ast.AugAssign) and dotted(node.target) == "os.environ":
                assert isinstance(node.value, ast.Dict)
                for each in node.value.keys:
                    assert isinstance(each, ast.Constant)
                    yield str(each.value)
            if key is not None and (self.name, dotted(key)) not in PASSED:
                yield from self.constants(key)

    def reads_environment(self, function: ast.expr) -> bool:
        """Return whether a function takes the name of a variable of the environment."""
        name = dotted(function)
        first, _, rest = name.partition(".")
        full_name = f"{self.imported.get(first, first)}.{rest}".rstrip(".")
        return full_name in READS

    def constants(self, key: ast.expr) -> list[str]:
        """Return the texts that an expression stands for: a constant, or a name of the module."""
        if isinstance(key, ast.Constant):
            return [str(key.value)]
        name = dotted(key)
        for node in self.nodes:  # the variable of a loop over a tuple
            if isinstance(node, ast.For) and dotted(node.target) == name:
                name = dotted(node.iter)
        value = self.values.get(name)
        assert value is not None, f"{self.name}: which variable is {dotted(key)}?"
        texts = ast.literal_eval(value)
        return [texts] if isinstance(texts, str) else list(texts)

    def patches(self) -> Iterator[str]:
        """Yield what the file changes in other libraries or in the interpreter."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                function = dotted(node.func)
                if function in REGISTERS:
                    yield function
                if function == "setattr" and self.is_foreign(node.args[0]):
                    yield f"{dotted(node.args[0])}.{self.constants(node.args[1])[0]}"
            for target in target_nodes(node):
                if isinstance(target, ast.Attribute | ast.Subscript) and self.is_foreign(
                    target.value
                ):
                    yield dotted(target.value if isinstance(target, ast.Subscript) else target)
                if isinstance(target, ast.Attribute) and target.attr == "__class__":
                    yield dotted(target)

    def is_foreign(self, owner: ast.expr) -> bool:
        """Return whether an object comes from another library, by the import of its first name."""
        imported = self.imported.get(dotted(owner).partition(".")[0], "")
        return imported.partition(".")[0] in OTHERS

    def attributes(self) -> Iterator[str]:
        """Yield the attributes that the file sets on objects of others."""
        for node in self.nodes:
            if isinstance(node, ast.Constant) and ATTRIBUTE.fullmatch(str(node.value)):
                yield str(node.value)
            if isinstance(node, ast.Attribute) and ATTRIBUTE.fullmatch(node.attr):
                yield node.attr


SECTIONS = {
    "Variables": File.variables,
    "The environment": File.environment,
    "Other libraries": File.patches,
    "Attributes": File.attributes,
}


@functools.cache
def files_of(root: Path) -> list[File]:
    return [File(path, root) for package in PACKAGES for path in (root / package).rglob("*.py")]


def found_in_code(section: str, root: Path = ROOT) -> set[tuple[str, str]]:
    """Return the rows (name, file) that a section of the page has to have."""
    rows = set()
    for file in files_of(root):
        rows |= {(name, file.name) for name in SECTIONS[section](file)}
    return rows


def listed(section: str) -> set[tuple[str, str]]:
    """Return the rows (name, file) of a section of the page: the first two cells of its tables."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = set()
    for line in text.splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")]
        if line.startswith("| `"):
            rows |= {(name, file) for name in cells[0] for file in cells[1]}
    return rows


def test_the_page_lists_all_state_of_a_process() -> None:
    for section in SECTIONS:
        found = found_in_code(section)
        rows = listed(section)
        assert found, section
        assert found - rows == set(), f"{section}: not on the page"
        assert rows - found == set(), f"{section}: on the page, and not in the code"


def test_state_that_is_on_no_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "xshard").mkdir()
    for package in PACKAGES:
        (tmp_path / package).mkdir(exist_ok=True)
    code = """
import os
from contextvars import ContextVar
import torch
ASKED = ContextVar("asked")
MADE = {}
NAMES = ("ONE", "TWO")
class Rows:
    n = 0
    def __init__(self, x):
        Rows.n += 1
        MADE[x] = 1
        global LAST
        LAST = x
        for name in NAMES:
            os.environ.get(name)
        torch.nn.functional.relu = None
        setattr(x, "_xshard_rows", 1)
"""
    (tmp_path / "xshard/sample.py").write_text(code)
    names = {
        section: {name for name, _ in found_in_code(section, tmp_path)} for section in SECTIONS
    }
    assert names == {
        "Variables": {"ASKED", "MADE", "LAST", "Rows.n"},
        "The environment": {"ONE", "TWO"},
        "Other libraries": {"torch.nn.functional.relu"},
        "Attributes": {"_xshard_rows"},
    }
