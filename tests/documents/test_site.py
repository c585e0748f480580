"""The site builds without a warning, shows the pictures that blocks ask for, and names all that is public."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jupytext
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from benchmarks import plots
from tests.documents.test_documents import ROOT
from xshard.rules import Rules

URL = "https://xshard.example/"
REPOSITORY = "https://code.example/xshard/"
PACKAGES = ("xshard", "torch_bridge", "jax_bridge")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(folder), site_url=URL, repo_url=REPOSITORY
    )
    build(config)  # strict: raises for any warning, and a picture that is out of date is one
    return folder


def test_every_cell_of_a_page_is_followed_by_what_it_shows(site: Path) -> None:
    n_cells = 0
    for document in (ROOT / "docs").glob("**/*.md"):
        cells = len(
            re.findall(r"^!\[.*\]\(.*images/shown/.*\)$", document.read_text(), re.MULTILINE)
        )
        page = (site / document.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        assert page.count('class="xshard"') >= cells and "images/shown" not in page, document
        n_cells += cells
    assert n_cells > 30


def test_notebooks_show_what_their_cells_do(site: Path) -> None:
    notebooks = sorted((ROOT / "docs/notebooks").glob("*.py"))
    assert [path.stem for path in notebooks] == ["first_steps", "halos", "model"]
    for path in notebooks:
        page = (site / "notebooks" / f"{path.stem}.html").read_text()
        n_cells = len(re.findall(r"^# %%$", path.read_text(), re.MULTILINE))
        assert page.count('<div class="language-python highlight">') == n_cells, path
        assert page.count('class="xshard"') + page.count(' shown highlight">') >= 3, path
        book = json.loads(path.with_suffix(".ipynb").read_text())  # python docs/site/notebooks.py
        sources = [re.sub(r"\.py\)", ".ipynb)", cell.source) for cell in jupytext.read(path).cells]
        assert ["".join(cell["source"]) for cell in book["cells"]] == sources, path
        assert sum(bool(cell.get("outputs")) for cell in book["cells"]) >= 3, path
    halos = (site / "notebooks/halos.html").read_text()
    assert "right: 0 0 0 0 0 0 9 18 18 9 0 0 0 0 0 0" in halos
    assert "alone: 0 0 0 0 0 0 9 9 9 9 0 0 0 0 0 0" in halos


def test_long_lines_of_code_wrap_so_that_comments_are_seen(site: Path) -> None:
    """By a style for blocks of a language: their class comes from the highlighter."""
    wraps = re.search(
        r":is\(\.(language-\w+).*white-space: pre-wrap", (site / "site/site.css").read_text()
    )
    assert wraps and f'<div class="{wraps[1]} highlight">' in (site / "start.html").read_text()


def test_colours_follow_the_system_until_the_reader_chooses(site: Path) -> None:
    schemes = re.findall(r'data-md-color-media="(.*?)"', (site / "start.html").read_text())
    assert schemes[0] == "(prefers-color-scheme)" and len(set(schemes)) == 3


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


def test_the_page_of_a_class_lists_its_members(site: Path) -> None:
    identifiers = set(re.findall(r'id="(.*?)"', (site / "api/xshard.Plan-class.html").read_text()))
    assert {"xshard.plans.plan.Plan.steps", "xshard.plans.plan.Plan.explain"} <= identifiers
    assert (site / "api/xshard.reference.scatter.html").exists() and (
        site / "api/xshard.errors.html"
    ).exists()


def test_no_two_pages_differ_in_case_alone(site: Path) -> None:
    names = [str(path.relative_to(site)).lower() for path in site.glob("**/*")]
    assert len(names) == len(set(names))


def test_no_page_shows_the_docstring_of_a_type_of_python(site: Path) -> None:
    words = [(of.__doc__ or "").strip().splitlines()[0] for of in (tuple, dict, str)]
    for page in (site / "api").glob("*.html"):
        assert not any(each in page.read_text() for each in words), page


def test_parameters_are_a_table_with_types(site: Path) -> None:
    page = (site / "api/torch_bridge.redistribute.html").read_text()
    rows = re.findall(r'<tr class="doc-section-item">(.*?)</tr>', page, re.DOTALL)
    cells = [" ".join(re.sub(r"<.*?>", " ", row).split()) for row in rows]
    row = next(row for row in cells if row.startswith("bucket_bytes "))
    assert row.startswith("bucket_bytes Bytes About how many bytes")
    assert row.endswith(" None")  # the default
    assert "DesyncError" in page[page.index("Raises:") :]


def test_examples_of_docstrings_are_code(site: Path) -> None:
    page = (site / "api/xshard.Mesh.html").read_text()
    assert '<div class="language-pycon highlight">' in page
    for path in (site / "api").glob("*.html"):
        prose = re.sub(r"<code>.*?</code>|<pre>.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        assert "&gt;&gt;&gt; " not in prose and "Args:" not in prose, path


def test_the_search_finds_symptoms_without_sources(site: Path) -> None:
    pages = json.loads((site / "search/search_index.json").read_text())["docs"]
    texts = [page["text"] + page["title"] for page in pages]
    assert not [text for text in texts if "object.__setattr__(" in text or "@lru_cache" in text]
    assert [text for text in texts if "OOM" in text]


def test_pages_say_what_they_are_about(site: Path) -> None:
    page = (site / "recipes/gather.html").read_text()
    assert f'<link rel="canonical" href="{URL}recipes/gather.html">' in page
    assert (
        f'href="{REPOSITORY}edit/main/docs/recipes/gather.md"' in page and "images/logo.svg" in page
    )
    assert (
        '<meta name="description" content="Every device has some rows and needs all of them.'
        in page
    )
    listed = (site / "llms.txt").read_text()
    assert f"]({URL}recipes/gather.html): Every device has some rows" in listed
    assert f"]({URL}api/torch_bridge.html)" in listed


def test_the_documents_read_as_well_where_no_site_is_built() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")):
        text = path.read_text()
        left = re.findall(
            r"^(?:/// .*|# (?:picture|torchrun: .*|devices: .*))$", text, re.MULTILINE
        )
        assert not left, (
            f"{path}: {left}: headings for tabs, the command that runs a block, docs/site/pictures.py"
        )
        for link in re.findall(r"!\[.*?\]\(([^)]+)\)", text):
            assert (path.parent / link).exists(), (path, link)


def test_plots_show_the_recorded_runs() -> None:
    for plot in plots.SHOWN:  # python -m benchmarks.plots
        assert plots.source(plot) in (plots.FOLDER / f"{plot}.svg").read_text(), plot


def test_every_error_is_explained_on_its_page_as_in_the_skill() -> None:
    sources = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {
        name
        for text in sources
        for name in re.findall(r"^class ([A-Z]\w+(?:Error|Warning))\(", text, re.MULTILINE)
    }
    names.remove("XshardError")
    assert names == set(
        re.findall(r"^### (\w+)$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    )
    skill = ROOT / "xshard/skills/xshard"
    assert names == set(
        re.findall(r"^\| `(\w+)`", (skill / "references/errors.md").read_text(), re.MULTILINE)
    )
    assert len((skill / "SKILL.md").read_text().splitlines()) <= 60
    recipes = (skill / "references/recipes.md").read_text()
    assert len(re.findall(r"^## \d+\. ", recipes, re.MULTILINE)) == 10


def test_the_menu_says_what_you_do_before_what_was_decided(site: Path) -> None:
    menu = " ".join(re.sub(r"<.*?>", " ", (site / "start.html").read_text()).split())
    done = menu.index("Do I want to ...")
    decided = menu.index("Measured and decided Why xshard")
    assert done < menu.index("Train in a pipeline") < decided < menu.index("Decisions The house")


def test_the_skill_is_a_page_that_the_readme_links(site: Path) -> None:
    assert 'href="skill/SKILL.html"' in (site / "index.html").read_text()
    page = (site / "skill/SKILL.html").read_text()
    assert 'href="references/recipes.html"' in page and "<h2" in page


def test_nothing_is_fetched(site: Path) -> None:
    for page in site.glob("**/*.html"):
        found = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text()
        )
        assert all(link.startswith(URL) for link in found), (page, found)
