"""The size of the house: lines of every room, public names, and sentences and names that need two readings.

    python -m tests.house      prints the table that tests/house.json holds

A number may fall, and then the table follows. It grows only in a commit that says why.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".json")
PACKAGES = ("xshard", "torch_bridge", "jax_bridge")
PROSE = {  # in docstrings and comments
    "those of, of which, whose": r"\b(those|that) of\b|\bof which\b|\bwhose\b",
    "headless what": r"(^|[.;:(] ?)\s*[Ww]hat (is|has|are|it|they|a|an|the|each|no|one|its|this|of|to)\b",
    "Decides": r"\bDecides\b",
    "Knows no": r"\bKnows (no|nothing)\b",
    "parameters as fragments": r"\b\w+: (of|what|that|those|whose)\b",
    "conditional where": r"(^|, |; |\. )[Ww]here [a-z]",
    "alike, anew, nobody": r"\b(nobody|anybody|alike|anew|likewise)\b",
}
MESSAGES = {"is no, has no": r"\b(is|has|have|are) no \w"}
LOCAL_NAMES = ("found", "at", "ends", "given", "made")


def rooms() -> dict[str, int]:
    """Lines of each room of the packages, and of the tests, benchmarks and examples."""
    lines: Counter[str] = Counter()
    for path in sources(*PACKAGES, "tests", "benchmarks", "examples"):
        top, *inner = path.relative_to(ROOT).parts
        room = f"{top}/{inner[0].removesuffix('.py')}" if top in PACKAGES else top
        lines[room] += len(path.read_text().splitlines())
    return dict(sorted(lines.items()))


def counts() -> dict[str, int]:
    """Public names of the packages, and each pattern and name that the style avoids."""
    found: Counter[str] = Counter()
    classes: dict[str, set[Path]] = {}
    for path in sources(*PACKAGES):
        text = path.read_text()
        tree = ast.parse(text)
        found["public names"] += len(public_names(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).add(path)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in LOCAL_NAMES:
                found[f"local name {node.id}"] += 1
        for kind, patterns in (("prose", PROSE), ("message", MESSAGES)):
            for words in prose(text, tree) if kind == "prose" else messages(tree):
                for name, pattern in patterns.items():
                    found[f"{kind}: {name}"] += len(re.findall(pattern, words, re.M))
    found["class names of several files"] = sum(len(paths) > 1 for paths in classes.values())
    return dict(sorted(found.items()))


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def public_names(tree: ast.Module) -> list[object]:
    """The names of `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def docstrings(tree: ast.Module) -> dict[int, str]:
    """The docstrings of a module by the id of their syntax."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]
    return {id(node.body[0].value): ast.get_docstring(node) or "" for node in nodes}  # type: ignore[attr-defined]


def prose(text: str, tree: ast.Module) -> list[str]:
    """The docstrings and comments of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return [*docstrings(tree).values(), *comments]


def messages(tree: ast.Module) -> list[str]:
    """The text in a file that is no docstring: errors, hints, reports."""
    skipped = docstrings(tree)
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value for node in constants if isinstance(node.value, str) and id(node) not in skipped]


def grown(old: dict[str, int], new: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The entries that are larger than they were, or new: name -> (before, now)."""
    return {name: (old.get(name, 0), n) for name, n in new.items() if n > old.get(name, 0)}


if __name__ == "__main__":
    print(json.dumps({"lines": rooms(), "counts": counts()}, indent=1))
