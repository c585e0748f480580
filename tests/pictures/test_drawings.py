"""What SVG, HTML and a terminal show of layouts and plans is what the record says."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

import xshard as xs
from tests import oracle, oracle_rows
from tests.cases import CASES, Case
from tests.fuzz.chains import random_chain
from tests.pictures.test_grid import sharding
from xshard.formatting import format_bytes
from xshard.notation.overlap import Fold
from xshard.pictures.blocks import MAX_CARDS
from xshard.pictures.elements import COLOURS, SHARED
from xshard.pictures.grid import Picture, picture, title
from xshard.pictures.html import html
from xshard.pictures.rows import MAX_BLOCKS
from xshard.pictures.svg import EXPOSED_COLOUR, MAX_DEVICES, plan_svg, sharding_svg, timeline_svg
from xshard.pictures.terminal import renderable
from xshard.schedule import COMPUTING, EXPOSED, Start, Turn, prefetched
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.mismatch import EquivalenceError, Mismatch, Subject

MESH = xs.Mesh(dp=2, cp=4)
SIZES = {"b": 8, "s": 64, "d": 32, "f": 128}


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_a_plan_is_drawn_with_all_that_travels(case: Case) -> None:
    plan = case.plan()
    svg = plan_svg(plan)
    pairs = [
        (p, stage)
        for stage in plan.stages
        for p in stage.step.pair_traffic(stage.before)
        if p.elements
    ]
    lines = elements(svg, "line")
    assert [line[0].text for line in lines] == [
        f"d{p.src} to d{p.dst}: {format_bytes(p.elements * plan.itemsize)}" for p, _ in pairs
    ]
    texts = " ".join(text.text or "" for text in elements(svg, "text"))
    layouts = [
        plan.source.layout,
        *(stage.after.layout for stage in plan.stages[:-1]),
        plan.target.layout,
    ]
    assert all(
        str(drawn) in texts for drawn in (*plan.steps, *(layouts if plan.stages else layouts[:1]))
    )
    assert ElementTree.fromstring(html(plan)) is not None


def test_thicker_lines_carry_more() -> None:
    lines = elements(plan_svg(xs.plan("n/sizes(a,1,7) -> n", xs.Mesh(a=2), (8,))), "line")
    thin, thick = (
        float(line.get("stroke-width", "")) for line in sorted(lines, key=lambda x: x[0].text or "")
    )
    assert (thin, thick) == pytest.approx((0.5 + 3.5 / 7, 4.0), abs=0.06)


def boxes(svg: str) -> list[tuple[int, int, tuple[float, ...]]]:
    """The drawn blocks: device, card, and place in pixels as (x, y, width, height)."""
    every = [rect for rect in elements(svg, "rect") if rect.get("data-device")]
    places = [
        tuple(float(rect.get(name, "")) for name in ("x", "y", "width", "height")) for rect in every
    ]
    owners = [(int(rect.get("data-device", "")), int(rect.get("data-card", ""))) for rect in every]
    return [(device, card, place) for (device, card), place in zip(owners, places, strict=True)]


def frame(svg: str, card: int = 0) -> tuple[float, float, float, float]:
    """The rectangle of the array on a card."""
    places = [place for _, on, place in boxes(svg) if on == card]
    left, top = (min(place[i] for place in places) for i in (0, 1))
    return (
        left,
        top,
        max(p[0] + p[2] for p in places) - left,
        max(p[1] + p[3] for p in places) - top,
    )


def test_numbers_of_devices_are_not_covered_by_cards_in_front() -> None:
    svg = sharding_svg(picture(sharding("n d/a", "a=2,b=3", 8, 8)))
    drawn = boxes(svg)
    numbers = [text for text in elements(svg, "text") if (text.text or "").isdigit()]
    labels = {}
    for device, card, (left, top, width, height) in drawn:
        own = [text for text in numbers if text.text == str(device)]
        for text in own:
            x, y = float(text.get("x", "")), float(text.get("y", ""))
            if left <= x <= left + width and top <= y <= top + height:
                labels[device] = (card, x, y)
    assert len(labels) == 6
    for card, x, y in labels.values():
        for _, card_in_front, (left, top, width, height) in drawn:
            if card_in_front < card:
                assert not (left < x < left + width and top < y < top + height)


def random_shardings(n: int) -> Iterator[xs.Sharding]:
    """Of arrays with elements, small enough that nothing is left out."""
    for seed in itertools.count():
        chain = random_chain(seed)
        at = xs.Sharding(chain.layouts[0], chain.mesh, chain.shape)
        if 0 not in at.shape and max(at.shape, default=1) <= MAX_BLOCKS and len(at.shape) > 0:
            yield at
            if (n := n - 1) == 0:
                return


def test_drawn_blocks_are_to_scale() -> None:
    """Of 500 random layouts: each drawn row is one that the device owns, and areas are shares."""
    for at in random_shardings(500):
        drawn = picture(at)
        svg = sharding_svg(drawn)
        dims = [at.dim_index(strip.dim.name) for strip in drawn.strips]
        lengths = [1, *(at.shape[d] for d in dims)][-2:]
        rows: dict[int, list[set[int]]] = {}
        for device, card, (x, y, width, height) in boxes(svg):
            left, top, whole_width, whole_height = frame(svg, card)
            assert (whole_width, whole_height) == pytest.approx(frame(svg)[2:], abs=0.05)
            ends = (
                (y - top, height, whole_height, lengths[0]),
                (x - left, width, whole_width, lengths[1]),
            )
            start = [begin / whole * n for begin, _, whole, n in ends]
            many = [size / whole * n for _, size, whole, n in ends]
            assert [*start, *many] == pytest.approx(
                [*map(round, start), *map(round, many)], abs=0.02
            ), at
            found = rows.setdefault(device, [set(), set()])
            for one, first, n in zip(found, map(round, start), map(round, many), strict=True):
                one.update(range(first, first + n))
        for device, found in rows.items():
            for d, drawn_rows in zip(dims, found[-len(dims) :], strict=True):
                assert drawn_rows == set(
                    oracle.owned_rows(at.layout.dims[d], at.shape[d], at.mesh, device)
                ), at
        if len(drawn.cards) <= MAX_CARDS:
            assert set(rows) | set(drawn.empty) == set(range(at.mesh.n_devices)), at
        _assert_lanes(at, drawn, dims)


def _assert_lanes(at: xs.Sharding, drawn: Picture, dims: list[int]) -> None:
    """Lanes have the rows that a block holds, from the devices that own them."""
    for d, lanes in zip(dims, (strip.lanes for strip in drawn.strips), strict=True):
        dim = at.layout.dims[d]
        if isinstance(dim.overlap, Fold):  # a fold holds the rows of its overlap
            dim = replace(dim, overlap=dim.overlap.overlap)
        for lane in lanes:
            held = oracle_rows.held_rows(dim, at.shape[d], at.mesh, lane.devices[0])
            parts = [part for part in lane.groups for _ in range(part.rows)]
            assert len(parts) == len(held)
            for part, row in zip(parts, held, strict=True):
                owns = [
                    row in oracle.owned_rows(dim, at.shape[d], at.mesh, device)
                    for device in part.owner
                ]
                assert all(owns) and bool(owns) == (row is not None)
                assert (part.origin == "own") <= (part.owner == lane.devices)


def test_a_transfer_shows_the_numbers_of_its_devices() -> None:
    plan = xs.plan(
        "o/dp i -> o i/tp",
        src_mesh=xs.Mesh(dp=4),
        dst_mesh=xs.Mesh(tp=2),
        dst_devices=[4, 5],
        shape=(16, 8),
    )
    svg = plan_svg(plan)
    assert {device for device, *_ in boxes(svg)} == {0, 1, 2, 3, 4, 5}
    assert {line.get("data-dst") for line in elements(svg, "line")} == {"4", "5"}
    assert [t.text for t in elements(svg, "title") if t.text and t.text.startswith("d0 to")] == [
        "d0 to d4: 64 B",
        "d0 to d5: 64 B",
    ]


def test_a_move_shows_one_rectangle_under_its_layouts() -> None:
    moves = {"s/cp c -> s c/cp": (16, 8), "b/dp s c -> b s c/dp": (4, 8, 6)}
    for move, shape in {**moves, "n/(dp,cp) d -> n d | copy(dp,cp)": (16, 8)}.items():
        plan = xs.plan(move, MESH, shape)
        parts = plan_svg(plan).split("<g data-step")
        assert (
            len(
                {
                    frame("<svg xmlns='http://www.w3.org/2000/svg'>" + _closed(part))[2:]
                    for part in parts
                }
            )
            == 1
        )
        texts = [text.text or "" for text in elements(plan_svg(plan), "text")]
        assert [title(end) in texts for end in (plan.source, plan.target)] == [True, True]


def _closed(part: str) -> str:
    """The rectangles of a piece of SVG."""
    return (
        "".join(re.findall(r"<rect[^>]*data-device[^>]*>", part))
        .replace("/>", ">")
        .replace(">", "/>")
        + "</svg>"
    )


@pytest.mark.parametrize(("one", "other"), [
    ("n d", "n d | copy(tp)"), ("n d | copy(tp)", "n d | sum(tp)"), ("n/tp d", "n d/tp"),
    ("n/tp:halo(1,1) d", "n/tp:fold(halo(1,1)) d"), ("n/tp:halo(1,1) d", "n/tp:halo(1,1,none) d"),
    ("n/tp:halo(1,1) d", "n/tp:halo(1,1,constant(2)) d"), ("n/tp:halo(1,1) d", "n/tp:halo(1,1,periodic) d"),
    ("n/tp d", "n/tp:halo(1,1) d"), ("n | sum(tp)", "n | max(tp)"),
])  # fmt: skip
def test_different_meanings_look_different(one: str, other: str) -> None:
    """In the picture itself, without its title."""
    shapes = [(16, 8)[: text.count(" d") + 1] for text in (one, other)]
    a, b = (
        sharding_svg(picture(sharding(text, "tp=4", *shape)))
        for text, shape in zip((one, other), shapes, strict=True)
    )
    a, b = (re.sub(r"\bxs[0-9a-f]{8}-", "", svg) for svg in (a, b))  # ids are of the text, too
    assert a.partition(">")[2] != b.partition(">")[2]
    drawn = [re.sub(r"<(text|title).*?</\1>", "", svg.partition("</defs>")[2]) for svg in (a, b)]
    assert drawn[0] != drawn[1] or "max" in other or "constant" in other  # which differ in words
    if "fold" in other:  # from where rows come, and to where they go
        found = [{text.text for text in elements(svg, "text")} for svg in (a, b)]
        assert {"←1", "→1"} & found[0] == {"←1"} and {"←1", "→1"} & found[1] == {"→1"}


def test_rows_from_beyond_an_end_are_told_from_devices() -> None:
    svg = sharding_svg(picture(sharding("n/tp:halo(1,1,periodic) d", "tp=4", 16, 4)))
    texts = [text.text or "" for text in elements(svg, "text")]
    assert {"←r15", "←r0", "←1", "←2"} <= set(
        texts
    ) and "←: copied from a device (r: rows)" in texts[-1]


def looks(layout: str, mesh: str, *shape: int) -> dict[int, list[str | None]]:
    """The colours of each device's rectangles."""
    each: dict[int, list[str | None]] = {}
    device = -1
    for rect in elements(sharding_svg(picture(sharding(layout, mesh, *shape))), "rect"):
        device = int(rect.get("data-device", device))
        each.setdefault(device, []).append(rect.get("fill"))
    return each


def test_light_blocks_are_told_apart_on_dark_pages() -> None:
    cards = elements(sharding_svg(picture(sharding("n/a:halo(1,1) d", "a=2,b=2", 8, 4))), "rect")
    inks = {
        (rect.get("fill") == "none", rect.get("stroke")) for rect in cards if rect.get("stroke")
    }
    assert inks == {
        (False, "#111"),
        (True, "currentColor"),
    }


def test_every_device_has_its_own_look() -> None:
    many = looks("n/a", "a=32", 32)
    assert len({tuple(look) for look in many.values()}) == 32


def test_replicas_have_the_colour_of_the_device_in_front() -> None:
    halves = looks("n d/b", "a=2,b=2", 4, 4)
    assert halves[0] == [COLOURS[0]] and halves[1] == [COLOURS[1]]
    for copy, front in ((2, 0), (3, 1)):
        colour, hatch = halves[copy]
        assert colour == COLOURS[front] and "replica" in str(hatch)
    assert {look[0] for look in looks("n d", "a=4", 4, 4).values()} == {COLOURS[0]}
    assert looks("n | copy(a)", "a=2", 4)[1][0] == COLOURS[1]
    # Rows of a lane are on replicas of one device, or in parts on several.
    lanes = [looks(layout, "a=2,b=2", 8, 4) for layout in ("n/a:halo(1,1) d", "n/a:halo(1,1) d/b")]
    assert SHARED not in str(lanes[0]) and SHARED in str(lanes[1])
    drawn = sharding_svg(picture(sharding("n d/b", "a=2,b=2", 4, 4)))
    assert "hatched: a copy, in the colour of the device in front" in drawn


def test_a_device_without_rows_is_named() -> None:
    assert "empty: d1" in sharding_svg(picture(sharding("s/sizes(a,6,0,7,3)", "a=4", 16)))


def test_long_dims_are_broken_where_it_is_seen() -> None:
    svg = sharding_svg(picture(sharding("s/a c", "a=4", 8192, 16)))
    assert [text.text for text in elements(svg, "text")].count("≈") == 2
    assert "≈: s is drawn shorter" in svg
    assert [place[3] for _, _, place in boxes(svg)] == pytest.approx([frame(svg)[3] / 4] * 4)


def test_pictures_of_one_page_have_no_id_in_common() -> None:
    svgs = [sharding_svg(picture(sharding("n | sum(a)", "a=2", n))) for n in (4, 8)]
    ids = [re.findall(r'id="(.*?)"', svg) for svg in svgs]
    assert len({*ids[0], *ids[1]}) == 2 and all(
        f"url(#{own[0]})" in svg for own, svg in zip(ids, svgs, strict=True)
    )


def test_a_mesh_with_many_devices_is_summarised() -> None:
    mesh = xs.Mesh(a=2 * MAX_DEVICES)
    svg = plan_svg(xs.plan("n/a -> n", mesh, (256,)))
    assert not elements(svg, "line") and f"between {2 * MAX_DEVICES} devices" in svg
    assert len(svg) < 60_000 and len(html(xs.Mesh(a=512, b=512))) < 2_000_000


every_value = pytest.mark.parametrize(
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


@every_value
def test_every_value_has_one_line(value: Any) -> None:
    assert "\n" not in repr(value) and len(repr(value)) < 200


@every_value
def test_every_value_has_a_picture_that_needs_nothing(value: Any) -> None:
    shown = value._repr_html_()
    assert ElementTree.fromstring(shown) is not None  # well-formed
    assert "<script" not in shown and not re.search(r"(?<![-\w])(?:href|src)=", shown)


@every_value
def test_a_line_of_a_value_evaluates_to_it(value: Any) -> None:
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
    assert "s 8 / c 3 0-2" in capsys.readouterr().out
    xs.show("s/cp c/dp", "dp=2,cp=4", (8, 4), dims=["c"])
    assert "s d0-3" in capsys.readouterr().out
    plan = xs.plan("b s/cp c -> b s c/cp", MESH, (2, 64, 32))
    xs.show(plan)
    assert "all_to_all s/cp -> c/cp" in capsys.readouterr().out
    for wrong in (lambda: xs.show("s/cp"), lambda: xs.show(plan, MESH)):
        with pytest.raises(xs.errors.PlanError):
            wrong()


def in_a_narrow_terminal() -> str:
    """A plan, an error and a table on 80 columns, with colours."""
    narrow = Console(width=80, force_terminal=True, color_system="standard")
    long = xs.plan(
        "b s/zigzag(cp) c/dp | sum(tp) -> b s/tp c/(cp,dp)", xs.Mesh(dp=2, cp=4, tp=2), (2, 64, 32)
    )
    failed = Mismatch(
        Subject("gradient", "w1", "torch", MESH, "numpy"),
        3,
        (0, 1),
        (0, 9),
        1.5,
        2.5,
        cause=Cause("x", "a " * 60),
    )
    with narrow.capture() as shown:
        narrow.print(long)
        narrow.print(EquivalenceError([failed, failed], 3).table())
        narrow.print(renderable(sharding("n/a", "a=10", 10)))
    return shown.get()


def test_a_terminal_of_80_columns_breaks_no_layout() -> None:
    text = in_a_narrow_terminal()
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in text
    assert {"    b s/zigzag(cp) c/dp | sum(tp)", "    b s/tp c/(cp,dp)"} <= set(lines)
    assert [line for line in lines if line.startswith("1, 2: a a a ")]


def test_a_terminal_needs_16_colours() -> None:
    text = in_a_narrow_terminal()
    styles = re.findall(r"\x1b\[(4;)?30;(\d+)m +d\d +", text)
    assert len(set(styles)) == len(styles) == 10 and max(int(back) for _, back in styles) < 108
    assert not {"44", "104"} & {back for _, back in styles}  # black on blue cannot be read


def test_show_displays_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    notebook = ModuleType("IPython")
    display = ModuleType("IPython.display")
    vars(notebook)["get_ipython"] = lambda: SimpleNamespace(kernel=None)
    vars(display).update(HTML=str, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    xs.show(MESH)
    assert shown == [html(MESH)]


def test_a_timeline_has_a_lane_for_the_device_and_one_for_each_link() -> None:
    moves = [
        Start(name, 8, link=link, seconds=1.0) for name, link in (("a", "nodes"), ("b", "fast"))
    ]
    turns = [Turn(f"module {move.name}", 2.0, move) for move in moves]
    timeline = prefetched(turns, prefetch=1).timeline()
    svg = timeline_svg(timeline)
    tops: dict[str, set[float]] = {}
    waited = 0.0
    for box, span in zip(elements(svg, "rect"), timeline.spans, strict=True):
        lane = COMPUTING if span.lane == EXPOSED else span.lane
        tops.setdefault(lane, set()).add(float(box.attrib["y"]))
        assert float(box.attrib["width"]) == pytest.approx(
            720 * (span.end_s - span.begin_s) / 5, abs=0.01
        )
        if box.attrib["fill"] == EXPOSED_COLOUR:
            waited += span.end_s - span.begin_s
    assert {lane: len(of_lane) for lane, of_lane in tops.items()} == {
        COMPUTING: 1,
        "nodes": 1,
        "fast": 1,
    }
    assert len(set.union(*tops.values())) == 3
    assert waited == timeline.exposed_s == 1.0
    assert "1.00 s exposed" in html(timeline) and svg in html(timeline)


def test_a_schedule_without_seconds_is_drawn_in_turns() -> None:
    moves = [Start(f"{name} parameters", 8) for name in "abc"]
    schedule = prefetched([Turn(move.name[0], 0.0, move) for move in moves], prefetch=1)
    svg = timeline_svg(schedule.in_turns().timeline())
    # The first module waits for its parameters; those of the others travel while the one before computes.
    fills = [box.attrib["fill"] for box in elements(svg, "rect")]
    assert len(fills) == 7 and fills.count(EXPOSED_COLOUR) == 1
    drawn = schedule._repr_html_()
    assert svg in drawn and "one second" in drawn
