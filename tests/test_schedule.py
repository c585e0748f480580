"""Schedules: what they promise about their order, their adjoint, and their simulation beside closed forms."""

from __future__ import annotations

import random

import pytest

from xshard.errors import PlanError
from xshard.schedule import (
    EXPOSED,
    Compute,
    Schedule,
    Start,
    Turn,
    Wait,
    last_started,
    prefetched,
    training_step,
)

NAMES = [f"layers.{i}" for i in range(6)]


def turns(computing: float, moving: float, n_bytes: int = 8) -> list[Turn]:
    parameters = {name: Start(f"{name} parameters", n_bytes, "nodes", moving) for name in NAMES}
    return [Turn(name, computing, parameters[name]) for name in NAMES]


def backward_of(forward: list[Turn]) -> list[Turn]:
    backward = []
    for turn in reversed(forward):
        gradients = Start(f"{turn.name} gradients", 8, "nodes", turn.parameters.seconds)
        backward.append(turn._replace(seconds=2 * turn.seconds, gradients=gradients))
    return backward


@pytest.mark.parametrize(
    ("n_bytes", "prefetch", "lasts"),
    [
        ([4, 4, 8], 0, [0, 1, 2]),
        ([4, 4, 8], 1, [1, 2, 2]),
        ([4, 4, 8], 5, [2, 2, 2]),
        ([4, 4, 8], None, [2, 2, 2]),
        ([4, 4, 8], "0 B", [0, 1, 2]),
        ([4, 4, 8], "4 B", [1, 1, 2]),
        ([4, 4, 8], "8 B", [1, 2, 2]),
        ([9, 1, 1, 9, 1], "2 B", [2, 2, 2, 4, 4]),
        ([], 1, []),
    ],
)
def test_how_much_is_started_ahead(n_bytes, prefetch, lasts) -> None:
    assert last_started(n_bytes, prefetch) == lasts


def test_bytes_ahead_never_exceed_their_limit() -> None:
    draw = random.Random(0)
    for _ in range(200):
        n_bytes = [draw.randrange(10) for _ in range(draw.randrange(1, 9))]
        limit = draw.randrange(20)
        lasts = last_started(n_bytes, f"{limit} B")
        for i, last in enumerate(lasts):
            assert sum(n_bytes[i + 1 : last + 1]) <= limit
            assert last + 1 == len(n_bytes) or sum(n_bytes[i + 1 : last + 2]) > limit
        assert lasts == sorted(lasts)


@pytest.mark.parametrize(("computing", "moving"), [(3.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
def test_a_forward_pass_takes_as_long_as_its_closed_form(computing, moving) -> None:
    n = len(NAMES)
    one_by_one = prefetched(turns(computing, moving), 0).timeline()
    assert one_by_one.seconds == pytest.approx(n * (computing + moving))
    assert one_by_one.exposed_s == pytest.approx(n * moving)
    # The first gather is exposed; then the longer of the two hides the other.
    beside = prefetched(turns(computing, moving), 1).timeline()
    assert beside.seconds == pytest.approx(moving + (n - 1) * max(computing, moving) + computing)


def test_what_travels_beside_a_module_has_arrived_at_the_end_of_its_turn() -> None:
    parameters = [Start(f"{name} parameters", 8, seconds=1.0) for name in "ab"]
    beside = [Start("a activations", 0, seconds=3.0), Start("b activations", 0, seconds=0.5)]
    turns_beside = [
        Turn(name, 2.0, parameters=gather, beside=activations)
        for name, gather, activations in zip("ab", parameters, beside, strict=True)
    ]
    schedule = prefetched(turns_beside, 1)
    # While a computes for 2 s, the links carry b's parameters and a's activations for 4 s.
    assert schedule.timeline().seconds == pytest.approx(1 + (1 + 3) + 2)
    assert [step.name for step in schedule.steps if isinstance(step, Compute)] == ["a", "b"]
    assert schedule.steps[-1] == Wait("b activations")
    assert prefetched(turns_beside, 0).timeline().seconds == pytest.approx(1 + 3 + 1 + 2)


def test_a_step_exposes_its_first_gathers_and_its_last_scatter() -> None:
    forward = turns(3.0, 1.0)
    seconds = [
        training_step(forward, backward_of(forward), prefetch).timeline() for prefetch in (0, 1)
    ]
    assert seconds[0].exposed_s == pytest.approx(3 * len(NAMES))
    assert seconds[1].exposed_s == pytest.approx(3)
    waits = [span.name for span in seconds[1].spans if span.lane == EXPOSED]
    assert waits == ["layers.0 parameters", "layers.5 parameters", "layers.0 gradients"]


def test_the_adjoint_of_the_adjoint_is_the_schedule() -> None:
    schedule = prefetched(turns(1.0, 2.0), 2)
    adjoint = schedule.backward
    assert adjoint.backward == schedule and adjoint != schedule
    assert adjoint.bytes_on_way == schedule.bytes_on_way == 3 * 8
    assert [step.name for step in adjoint.steps if isinstance(step, Compute)] == NAMES[::-1]
    assert prefetched(turns(1.0, 2.0), 0).backward.steps[:2] == (
        Compute("layers.5", 1.0),
        Start("layers.5 parameters", 8, "nodes", 2.0),
    )


def test_levels_of_links_carry_at_the_same_time() -> None:
    both = [Start("x", 1, "inside", 2.0), Start("y", 1, "nodes", 2.0), Compute("f", 1.0)]
    waits = [Wait("x"), Wait("y")]
    assert Schedule((*both, *waits)).timeline().seconds == 2.0
    one = [Start("x", 1, "nodes", 2.0), Start("y", 1, "nodes", 2.0), Compute("f", 1.0)]
    assert Schedule((*one, *waits)).timeline().seconds == 4.0


def test_it_prints_a_line_for_every_module() -> None:
    forward = [turns(3.0, 1.0)[0], Turn("head", 1.0)]
    backward = [Turn("head, backward", 2.0), backward_of(forward[:1])[0]]
    assert str(training_step(forward, backward, 1)).splitlines() == [
        "computes          starts before            awaits before",
        "layers.0          layers.0 parameters 8 B  layers.0 parameters",
        "head",
        "head, backward    layers.0 parameters 8 B",
        "layers.0                                   layers.0 parameters",
        "(end)             layers.0 gradients 8 B   layers.0 gradients",
        "at most 8 B on the way",
    ]


def test_lines_that_differ_in_a_number_are_one() -> None:
    forward = turns(3.0, 1.0)
    lines = str(training_step(forward, backward_of(forward), 1)).splitlines()
    assert lines[2].split("  ") == [
        *("layers.*", "x 4", "layers.* parameters 8 B"),
        *[""] * 12,
        " layers.* parameters",
    ]
    assert len(lines) == 10


def test_it_is_drawn_in_two_lanes() -> None:
    schedule = prefetched([turns(3.0, 1.0)[0]], 0)
    computing, nodes, total = str(schedule.timeline()).splitlines()
    assert computing == "computing  " + 18 * "!" + 54 * "#"
    assert nodes == "nodes      " + 18 * "="
    assert total == "4.00 s, of which 1.00 s exposed"


def test_it_is_written_and_read() -> None:
    schedule = training_step(turns(3.0, 1.0), backward_of(turns(3.0, 1.0)), "20 B")
    assert Schedule.from_json(schedule.to_json()) == schedule
    for text in ("", "[1]", '[{"kind": "end"}]', '[{"kind": "wait"}]', "{}1"):
        with pytest.raises(PlanError, match="this is no schedule"):
            Schedule.from_json(text)


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        ([Wait("x")], "x is not on the way"),
        ([Start("x", 1)], "x is never awaited"),
        ([Start("x", 1), Start("x", 1), Wait("x")], "x is on the way already"),
    ],
)
def test_what_no_device_can_do_is_refused(steps, what) -> None:
    with pytest.raises(PlanError, match=what):
        Schedule(tuple(steps))
