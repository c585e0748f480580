"""Adds to the site's documents the outputs of cells, notebooks, and a page for every public name.

It also names the files of the repository that are pages too, mends their links, describes each page in its
first sentences, and keeps source code out of the search.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jupytext
from cells import as_markdown, forget, outputs_of, stop
from mkdocs.structure.files import File, Files
from pictures import CELL, picture

log = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).parents[2]
# Files outside docs/ that are pages.
SKILL = "xshard/skills/xshard/"
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "skill/SKILL.md": f"{SKILL}SKILL.md",
    "skill/references/recipes.md": f"{SKILL}references/recipes.md",
    "skill/references/errors.md": f"{SKILL}references/errors.md",
}
API = (
    "xshard",
    "xshard.errors",
    "xshard.reference",
    "xshard.state",
    "xshard.state.files",
    "xshard.testing",
    "torch_bridge",
    "torch_bridge.dtensor",
    "torch_bridge.errors",
    "torch_bridge.live",
    "torch_bridge.nn",
    "torch_bridge.ops",
    "torch_bridge.testing",
    "jax_bridge",
    "jax_bridge.nn",
    "jax_bridge.ops",
    "jax_bridge.specs",
    "jax_bridge.torch_interop",
)
TABLE_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
# A paragraph of prose: it begins with a letter, and nothing but text follows up to a blank line.
PARAGRAPH = re.compile(r"^(?:[A-Za-z*`\[](?!\w*:::).*\n?)+", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
DESCRIPTION = 160  # characters, about what a search engine shows


def on_files(files: Files, config: Any) -> Files:
    """Add README and CONTRIBUTING, the notebooks, and a page for every public name and for each package."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text())))
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.py")):
        page = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, page, content=_cells_of(notebook)))
    for package in API:
        names = public_names(package)
        lines = [
            f"- [`{name}`]({_page(package, name)}): {_first_line(package, name)}" for name in names
        ]
        text = f"# {package}\n\n" + "\n".join(lines) + "\n"
        files.append(File.generated(config, f"api/{package}.md", content=text))
        for name in names:
            head = (
                f"title: {package}.{name}\ndescription: {description(_first_line(package, name))!r}"
            )
            content = f"---\n{head}\n---\n{_described(package, name)}\n"
            files.append(File.generated(config, f"api/{_page(package, name)}", content=content))
    return files


def on_config(config: Any) -> Any:
    """The packages stand at the end of the navigation, each with its names; edit links need a repository."""
    config.edit_uri = "edit/main/docs/" if config.repo_url else None
    packages = [
        {
            package: [
                f"api/{package}.md",
                *({name: f"api/{_page(package, name)}"} for name in public_names(package)),
            ]
        }
        for package in API
    ]
    config.nav = [*config.nav, {"API": packages}]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show what cells show, lead links out of docs/ to pages, and describe the page."""
    page.meta.setdefault("description", description(markdown))
    if CELL.search(markdown):
        forget()
    return CELL.sub(lambda found: _shown(found, page.file), _relinked(markdown))


def _shown(found: re.Match[str], file: Any) -> str:
    """A cell with its outputs, in place of the picture of them, which has to be up to date."""
    outputs = outputs_of(found[1])
    kept = (ROOT / "docs" / file.src_uri).parent / found[2]
    if file.generated_by is None and (not kept.exists() or kept.read_text() != picture(outputs)):
        log.warning(
            "%s: %s is not what its code draws: python docs/site/pictures.py",
            file.src_uri,
            found[2],
        )
    return f"```python\n{found[1]}```\n{as_markdown(outputs)}"


def on_page_content(html: str, **_: Any) -> str:
    """In tables: bars, which this markdown leaves as `\\|` inside code, and arrows that stay on a line."""
    arrow = '<span class="arrow">-&gt;</span>'
    source = '<details class="mkdocstrings-source"'
    html = html.replace(source, f"{source} data-search-exclude")
    return TABLE_CELL.sub(lambda found: found[0].replace(r"\|", "|").replace("-&gt;", arrow), html)


def on_nav(nav: Any, config: Any, **_: Any) -> Any:
    """The pages in their order, for `llms.txt`."""
    config.extra["pages"] = nav.pages
    return nav


def on_env(env: Any, config: Any, **_: Any) -> Any:
    """Write `llms.txt`, the pages with their descriptions for assistants, when all pages have one."""
    base = config.site_url or ""
    packages = [f"api/{package}.html" for package in API]
    pages = [p for p in config.extra["pages"] if not p.url.startswith("api/") or p.url in packages]
    lines = [f"- [{page.title}]({base}{page.url}): {page.meta['description']}" for page in pages]
    text = (
        f"# {config.site_name}\n\n> {config.site_description}\n\n## Pages\n\n"
        + "\n".join(lines)
        + "\n"
    )
    Path(config.site_dir).mkdir(parents=True, exist_ok=True)
    Path(config.site_dir, "llms.txt").write_text(text)
    return env


def on_post_build(**_: Any) -> None:
    """The kernel ends with the build."""
    stop()


def on_build_error(**_: Any) -> None:
    """And with a build that fails."""
    stop()


def public_names(package: str) -> list[str]:
    """The names that a package exports, modules apart; else its own, if its parent does not export them."""
    module = importlib.import_module(package)
    around = importlib.import_module(package.partition(".")[0]).__all__
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == package
    ]
    own = [name for name in own if name not in around]
    names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def description(markdown: str) -> str:
    """The first sentences of a page as plain text, cut at a word."""
    paragraph = PARAGRAPH.search(
        re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    )
    text = re.sub(r"[*`'\"]", "", LINK.sub(r"\1", paragraph[0] if paragraph else ""))
    text = " ".join(text.split())
    return text if len(text) <= DESCRIPTION else text[:DESCRIPTION].rpartition(" ")[0] + " ..."


def _page(package: str, name: str) -> str:
    """The file of a name; a class has another one than a function that differs from it in case alone."""
    names = [each.lower() for each in public_names(package)]
    apart = "-class" if names.count(name.lower()) > 1 and name != name.lower() else ""
    return f"{package}.{name}{apart}.md"


def _first_line(package: str, name: str) -> str:
    value = getattr(importlib.import_module(package), name)
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return f"A {type(value).__name__}."
    return (value.__doc__ or "").strip().partition("\n")[0]


def _described(package: str, name: str) -> str:
    """The docstring, from where it is: some names are imported when asked for. Or the value."""
    value = getattr(importlib.import_module(package), name)
    if hasattr(value, "__qualname__"):
        return f"::: {value.__module__}.{value.__qualname__}"
    return f"# {name}\n\n```\n{value!r}\n```"


def _cells_of(notebook: Path) -> str:
    """A notebook as a document: each of its cells of code is one that shows something."""
    cells = [
        re.sub(r"\]\((\w+)\.py\)", r"](\1.md)", cell.source)
        if cell.cell_type == "markdown"
        else f"```python\n{cell.source}\n```\n\n![](images/shown/cell.svg)"
        for cell in jupytext.read(notebook).cells
    ]
    source = f"This page is the notebook [{notebook.stem}.ipynb]({notebook.stem}.ipynb)."
    return "\n\n".join((*cells, source))


def _moved(text: str) -> str:
    """Links of a file of the root as its page has them."""
    return _relinked(
        text.replace("](docs/", "](")
        .replace("](CONTRIBUTING.md", "](contributing.md")
        .replace(f"]({SKILL}", "](skill/")
    )


def _relinked(text: str) -> str:
    for source, page in (("CONTRIBUTING", "contributing"), ("README", "index")):
        text = re.sub(rf"\]\(((?:\.\./)*)\.\./{source}\.md", rf"](\1{page}.md", text)
    return re.sub(r"\]\(([\w/.]*notebooks/\w+)\.ipynb\)", r"](\1.md)", text)
