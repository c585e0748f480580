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
