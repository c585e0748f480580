"""The README's figure and numbers are those of the plan and of the recorded benchmarks."""

import json
import math
import re
import runpy
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def recorded(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def claim(name, statement):
    return next(c["measured"] for c in recorded(name)["claims"] if c["statement"] == statement)


def transfers():
    """DTensor's seconds over ours, for each transfer."""
    medians = [
        {way: statistics.median(seconds) for way, seconds in row["seconds"].items()}
        for row in recorded("state")["transfers"]
    ]
    return [row["DTensor"] / row["xshard"] for row in medians]


def steps():
    """The peer's seconds of a training step over ours, for each way to keep parameters."""
    rows = {
        (row["parameters"], row["way"] == "rules"): row["step_s"]
        for row in recorded("models")["steps"]
    }
    return [rows[kept, False] / rows[kept, True] for kept in ("copies", "gathered")]


def beside_fsdp2(figure):
    """FSDP2's figure over ours, in each precision: the mean and the worst."""
    ratios = [1 / row[figure] for row in recorded("models")["beside_fsdp2"]]
    return math.prod(ratios) ** (1 / len(ratios)), min(ratios)


def both(name, statement):
    """The mean of a ratio, and its worst case."""
    return claim(name, f"{statement}: geometric mean"), claim(name, f"{statement}: worst")


BOUND = (
    "received bytes of the busiest device over the lower bound, planned for bandwidth: worst case"
)
# The rows of docs/benchmarks.md in their order: what the file says for the mean, and for the worst case.
MEASURED = [
    both("torch_redistribute", "run time, DTensor / ours"),
    (claim("torch_redistribute", "DTensor's host time / ours, forward: geometric mean"), None),
    both("torch_redistribute", "run time, by hand / ours"),
    [1 / ratio for ratio in both("jax_reshard", "received bytes / XLA's")],
    both("jax_reshard", "XLA's run time / ours"),
    (claim("einsum", "forward+backward: XLA's received bytes / ours, geometric mean"), None),
    both("einsum", "XLA's run time / ours"),
    (claim("nodes", "DTensor / ours: geometric mean"), None),
    (claim("nodes", "JAX: XLA / ours: geometric mean"), None),
    (math.prod(transfers()) ** 0.5, min(transfers())),
    (claim("state", "orbax / ours"), None),
    (math.prod(steps()) ** 0.5, min(steps())),
    beside_fsdp2("step"),
    beside_fsdp2("memory"),
    (claim("planner", BOUND), None),
]


def rows(document, columns):
    lines = re.findall(r"^\| (.+) \|$", (ROOT / document).read_text(), re.M)
    cells = [re.split(r" ?(?<!\\)\| ?", line) for line in lines if "---" not in line]
    return [row for row in cells if len(row) == columns]


def test_the_benchmarks_page_shows_what_was_recorded():
    _, *table = rows("docs/benchmarks.md", 6)
    assert len(table) == len(MEASURED)
    for cells, (mean, worst) in zip(table, MEASURED, strict=True):
        assert float(cells[2]) == pytest.approx(mean, abs=0.005), cells[0]
        if worst is not None:
            assert float(cells[3]) == pytest.approx(worst, abs=0.005), cells[0]


def test_the_readme_shows_at_most_eight_of_them():
    shown = {float(cells[2]) for cells in rows("README.md", 3) if re.fullmatch(r"[\d.]+", cells[2])}
    assert 4 <= len(shown) <= 8
    assert shown <= {round(mean, 2) for mean, _ in MEASURED}


def test_the_figure_is_drawn_from_the_plan():
    figure = runpy.run_path(str(ROOT / "docs/site/figure.py"))["figure"]()
    assert (ROOT / "docs/images/move.svg").read_text() == figure
    assert "prefers-color-scheme: dark" in figure


def glossary() -> list[str]:
    return [cells[0] for cells in rows("docs/glossary.md", 2)][1:]


def test_the_glossary_is_short():
    assert len(glossary()) <= 40


def test_the_glossary_is_sorted():
    assert glossary() == sorted(glossary())


def test_links_to_the_glossary_lead_to_words():
    words = glossary()
    linked = set(re.findall(r"glossary\.md#([\w-]+)", (ROOT / "docs/start.md").read_text()))
    anchors = {re.sub(r'<a id="([\w-]+)"></a>.*', r"\1", word) for word in words}
    assert {"copy", "dual"} <= linked <= anchors
