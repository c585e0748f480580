"""What the site has beyond the documents: pictures by the code beside them, a page for every public name.

Decides which files of the repository are pages too, and where their links lead.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Files outside docs/ that are pages.
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
API = (
    "xshard",
    "xshard.state",
    "xshard.testing",
    "torch_bridge",
    "torch_bridge.nn",
    "jax_bridge",
    "jax_bridge.nn",
)
# The first line of a block of code whose values are shown below it, as a notebook does.
PICTURE = re.compile(r"^```python\n# picture\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add README and CONTRIBUTING, a page for every public name, and one for each package that lists them."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text())))
    for package in API:
        names = public_names(package)
        lines = [f"- [`{name}`]({package}.{name}.md): {_first_line(package, name)}" for name in names]
        text = f"# {package}\n\n" + "\n".join(lines) + "\n"
        files.append(File.generated(config, f"api/{package}.md", content=text))
        for name in names:
            content = f"---\ntitle: {package}.{name}\n---\n{_described(package, name)}\n"
            files.append(File.generated(config, f"api/{package}.{name}.md", content=content))
    return files


def on_config(config: Any) -> Any:
    """The packages stand at the end of the navigation, each with its names."""
    packages = [
        {
            package: [
                f"api/{package}.md",
                *({name: f"api/{package}.{name}.md"} for name in public_names(package)),
            ]
        }
        for package in API
    ]
    config.nav = [*config.nav, {"API": packages}]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the values of blocks that begin with `# picture`, and lead links out of docs/ to pages."""
    return PICTURE.sub(_with_pictures, _relinked(markdown))


def public_names(package: str) -> list[str]:
    """The names that a package exports, modules apart."""
    module = importlib.import_module(package)
    return [name for name in module.__all__ if not isinstance(getattr(module, name), type(ast))]


def _first_line(package: str, name: str) -> str:
    text = getattr(importlib.import_module(package), name).__doc__ or ""
    return text.strip().partition("\n")[0]


def _described(package: str, name: str) -> str:
    """The docstring, from where it is: some names are imported when asked for. Or the value."""
    value = getattr(importlib.import_module(package), name)
    if hasattr(value, "__qualname__"):
        return f"::: {value.__module__}.{value.__qualname__}"
    return f"# {name}\n\n```\n{value!r}\n```"


def _with_pictures(found: re.Match[str]) -> str:
    shown = "".join(f"\n{value._repr_html_()}\n" for value in values_of(found[1]))
    return f"```python\n{found[1]}```\n{shown}"


def values_of(code: str) -> list[Any]:
    """Run a block -> the values of its expressions that have a picture."""
    namespace: dict[str, Any] = {}
    values = []
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Expr):
            values.append(eval(compile(ast.Expression(statement.value), "<picture>", "eval"), namespace))
        else:
            exec(compile(ast.Module([statement], []), "<picture>", "exec"), namespace)
    return [value for value in values if hasattr(value, "_repr_html_")]


def _moved(text: str) -> str:
    """Links of a file of the root as its page has them."""
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")


def _relinked(text: str) -> str:
    return text.replace("](../CONTRIBUTING.md", "](contributing.md").replace("](../README.md", "](index.md")
