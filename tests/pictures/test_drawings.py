"""What SVG, HTML and a terminal show of layouts and plans is what the record says."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import xshard as xs
from tests.cases import CASES, Case
from tests.pictures.test_grid import sharding
from xshard.formatting import format_bytes
from xshard.pictures.grid import cell_text, picture
from xshard.pictures.html import html
from xshard.pictures.svg import MAX_DEVICES, plan_svg, sharding_svg

MESH = xs.Mesh(dp=2, cp=4)
SIZES = {"b": 8, "s": 64, "d": 32, "f": 128}


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_a_plan_is_drawn_with_all_that_travels(case: Case) -> None:
    plan = case.plan()
    svg = plan_svg(plan)
    pairs = [(p, stage) for stage in plan.stages for p in stage.step.pair_traffic(stage.before) if p.elements]
    lines = elements(svg, "line")
    assert [line[0].text for line in lines] == [
        f"d{p.src} to d{p.dst}: {format_bytes(p.elements * plan.itemsize)}" for p, _ in pairs
    ]
    texts = " ".join(text.text or "" for text in elements(svg, "text"))
    assert all(str(stage.step) in texts and str(stage.after.layout) in texts for stage in plan.stages)
    assert ElementTree.fromstring(html(plan)) is not None


def test_thicker_lines_carry_more() -> None:
    lines = elements(plan_svg(xs.plan("n/sizes(a,1,7) -> n", xs.Mesh(a=2), (8,))), "line")
    thin, thick = (
        float(line.get("stroke-width", "")) for line in sorted(lines, key=lambda x: x[0].text or "")
    )
    assert (thin, thick) == pytest.approx((0.5 + 3.5 / 7, 4.0), abs=0.06)


def test_a_grid_names_the_devices_of_every_block_and_marks_overlaps_and_addends() -> None:
    halo = sharding("b/dp s/cp:halo(1,1)", str(MESH), 4, 32)
    cells = [cell for row in picture(halo).cells for cell in row]
    shown = {text.text for text in elements(sharding_svg(picture(halo)), "text")}
    assert {cell_text(cell) for cell in cells} <= shown
    marks = [path.get("class") for path in elements(sharding_svg(picture(halo)), "path")]
    assert marks == ["halo"] * sum(bool(cell.guests) for cell in cells) != []
    addends = elements(sharding_svg(picture(sharding("n | sum(cp)", str(MESH), 8))), "path")
    assert [path.get("class") for path in addends] == ["addend"]
    # One colour for one device, in every picture.
    colours = [
        dict(re.findall(r'stroke="(#\w+)"[^>]*>(d\d)<', sharding_svg(picture(at))))
        for at in (sharding("n/zigzag(cp)", "cp=4", 8), sharding("n/cp", "cp=4", 8))
    ]
    assert colours[0] == colours[1] and len(colours[0]) == 4


def test_a_mesh_with_many_devices_is_summarised() -> None:
    mesh = xs.Mesh(a=2 * MAX_DEVICES)
    svg = plan_svg(xs.plan("n/a -> n", mesh, (256,)))
    assert not elements(svg, "line") and f"between {2 * MAX_DEVICES} devices" in svg
    assert len(svg) < 60_000 and len(html(xs.Mesh(a=512, b=512))) < 2_000_000


@pytest.mark.parametrize(
    "value",
    [
        xs.Layout("b/dp s/zigzag(cp):halo(1,1) c | sum(tp)"),
        xs.Layout("n/sizes(a,1,7)"),
        MESH,
        xs.Mesh(),
        sharding("b/dp s/cp", str(MESH), 4, 32),
        sharding("()", str(MESH)),
        xs.plan("n d | max(dp) -> n d", MESH, (4, 4)),
        xs.plan("n/a -> n/b", src_mesh=xs.Mesh(a=2), dst_mesh=xs.Mesh(b=4), shape=(8,)),
        xs.plan("b s/tp d, d f/tp -> b s f/tp", xs.Mesh(tp=4), sizes=SIZES),
    ],
    ids=repr,
)
def test_every_value_has_one_line_and_a_picture(value: Any) -> None:
    assert "\n" not in repr(value) and len(repr(value)) < 200
    shown = value._repr_html_()
    assert ElementTree.fromstring(shown) is not None  # well-formed
    assert "<script" not in shown and not re.search(r"(?<![-\w])(?:href|src)=", shown)  # and needs nothing
    names = {name: getattr(xs, name) for name in ("Layout", "Mesh", "Sharding")}
    if type(value).__name__ in names:
        assert eval(repr(value), names) == value


def test_names_of_users_are_text() -> None:
    with pytest.raises(xs.errors.NotationError):
        xs.Layout("<script>")
    plan = xs.plan("a_b/dp -> a_b", MESH, (8,))
    assert "-&gt;" in html(plan) and "<script" not in html(plan)


def test_show_prints_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # a narrow terminal folds the table
    xs.show("s/zigzag(cp) c", xs.Mesh(cp=2), (8, 3))
    assert "s 8 0-1  2-3  4-5  6-7" in capsys.readouterr().out
    xs.show("s/cp c/dp", "dp=2,cp=4", (8, 4), dims=["c"])
    assert "c 4 0-1" in capsys.readouterr().out
    plan = xs.plan("b s/cp c -> b s c/cp", MESH, (2, 64, 32))
    xs.show(plan)
    assert "all_to_all s/cp -> c/cp" in capsys.readouterr().out
    for wrong in (lambda: xs.show("s/cp"), lambda: xs.show(plan, MESH)):
        with pytest.raises(xs.errors.PlanError):
            wrong()


def test_show_displays_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    notebook, display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(notebook)["get_ipython"] = lambda: SimpleNamespace(kernel=None)
    vars(display).update(HTML=str, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    xs.show(MESH)
    assert shown == [html(MESH)]
