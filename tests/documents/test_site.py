"""The site builds without a warning, shows the pictures that blocks ask for, and names all that is public."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.documents.test_documents import ROOT
from xshard.rules import Rules


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))  # strict: raises for any warning
    return folder


def test_every_block_with_a_picture_is_followed_by_it(site: Path) -> None:
    n_blocks = 0
    for document in (ROOT / "docs").glob("**/*.md"):
        asked = len(re.findall(r"^```python\n# picture\n", document.read_text(), re.MULTILINE))
        page = (site / document.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        assert page.count('class="xshard"') >= asked, document
        n_blocks += asked
    assert n_blocks > 0


def test_notebooks_are_run_and_show_what_their_cells_do(site: Path) -> None:
    notebooks = sorted((ROOT / "docs/notebooks").glob("*.py"))
    assert [path.stem for path in notebooks] == ["first_steps", "halos", "model"]
    for path in notebooks:
        page = (site / "notebooks" / f"{path.stem}.html").read_text()
        n_cells = len(re.findall(r"^# %%$", path.read_text(), re.MULTILINE))
        assert page.count('<div class="highlight">') == n_cells, path
        assert page.count('class="xshard"') + page.count('<div class="shown highlight">') >= 3, path
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()
    halos = (site / "notebooks/halos.html").read_text()
    assert "right: 0 0 0 0 0 0 9 18 18 9 0 0 0 0 0 0" in halos
    assert "alone: 0 0 0 0 0 0 9 9 9 9 0 0 0 0 0 0" in halos


def test_bars_in_tables_are_bars(site: Path) -> None:
    page = (site / "notation.html").read_text()
    assert "<code>n d | sum(tp)</code>" in page


def test_every_public_name_has_a_page_with_its_docstring(site: Path) -> None:
    page = (site / "api/xshard.Rules.html").read_text()
    first = (Rules.__doc__ or "").partition("\n")[0].split("-> ")[1]
    assert first in page and "find" in page
    names = {path.stem for path in (site / "api").glob("*.html")}
    assert {
        "xshard.plan",
        "torch_bridge.redistribute",
        "jax_bridge.redistribute",
        "xshard.state.Names",
    } <= names


def test_nothing_is_fetched(site: Path) -> None:
    for page in site.glob("**/*.html"):
        found = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not found, (page, found)
