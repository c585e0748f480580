"""The planner's contract: right, cheap, within memory, and the same in every process."""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.cases import CASES
from tests.messages import refused
from tests.strategies import layouts, moves
from xshard import Layout
from xshard.errors import NotationError, PlanError, ProfileError, ShapeError, XshardError
from xshard.plans.alternatives import alternatives
from xshard.search.a_star import Search
from xshard.search.moves import NamedRoute
from xshard.search.solve import without_copies
from xshard.steps import Exchange

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("expression", "forward", "backward"),
    [
        ("b s/cp c -> b s c/cp", ["all_to_all s/cp -> c/cp"], ["all_to_all c/cp -> s/cp"]),
        (
            "b s/zigzag(cp) c -> b s c/cp",
            ["all_to_all s/zigzag(cp) -> c/cp"],
            ["all_to_all c/cp -> s/zigzag(cp)"],
        ),
        ("b/dp s c -> b s c", ["all_gather b/dp"], ["slice b/dp"]),
        ("b/dp s c -> b s c | copy(dp)", ["all_gather b/dp"], ["reduce_scatter sum -> b/dp"]),
        ("b s c | sum(cp) -> b/cp s c", ["reduce_scatter sum -> b/cp"], ["all_gather b/cp"]),
        ("b s c | sum(cp) -> b s c", ["all_reduce sum(cp)"], ["retag -> copy(cp)"]),
        ("b s c | sum(cp) -> b s c | copy(cp)", ["all_reduce sum(cp)"], ["all_reduce sum(cp)"]),
        ("b s c -> b s c | copy(cp)", ["retag -> copy(cp)"], ["all_reduce sum(cp)"]),
        ("b s c -> b/cp s c", ["slice b/cp"], ["all_gather b/cp"]),
        ("b s/dp/cp c -> b s/cp/dp c", ["permute"], ["permute"]),
        ("b/dp s/cp c -> b/dp s/cp c", [], []),
    ],
)
def test_the_usual_moves_are_the_usual_collectives(expression, forward, backward):
    mesh = xs.Mesh({axis: n for axis, n in (("dp", 2), ("cp", 4)) if axis in expression})
    plan = xs.plan(expression, mesh, (8, 4096, 4096), "bfloat16")
    assert [str(step) for step in plan.steps] == forward
    assert [str(step) for step in plan.backward.steps] == backward


DUMP_PLANS = """
import xshard as xs
from tests import oracle
from tests.cases import CASES
from tests.messages import refused
from tests.plans.test_public_cases import PUBLIC_CASES, move_of
from tests.two_meshes import TWO_MESHES, public
for case in CASES:
    for profile in ("h100", "bandwidth"):
        plan = case.plan(profile=profile)
        print(plan.to_json(), plan.backward.to_json() if plan.src.is_linear else "")
for case in PUBLIC_CASES[::2]:
    if len(case["mesh"]) >= 4:
        print(xs.plan(*move_of(case)).to_json())
for case in TWO_MESHES:
    for disjoint in (True, False):
        plan = xs.plan(**public(case, disjoint=disjoint))
        print(plan.to_json(), plan.transfer and plan.transfer.messages)
plan = xs.plan("n/a d -> n d/b", src_mesh=xs.Mesh(a=6), dst_mesh=xs.Mesh(b=6), shape=(12, 6), relabel=True)
print(plan.dst_devices)
"""


def test_every_process_plans_the_same():
    """Whatever its hash seed: a set's order in a planner is a deadlock in a training run."""
    another = {
        **os.environ,
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0",
    }
    options = {"cwd": ROOT, "env": another, "stdout": subprocess.PIPE, "text": True}
    there = subprocess.run([sys.executable, "-c", DUMP_PLANS], check=True, **options).stdout
    with redirect_stdout(StringIO()) as here:
        exec(DUMP_PLANS, {})
    assert len(there) > 100_000
    assert here.getvalue() == there


LIMITED = [
    ("n/a d -> n d/a", "a=4", (64, 64)),
    ("n/a/b d -> n d/b", "a=4,b=2", (64, 64)),
    ("n d | sum(a) -> n/a d", "a=4", (64, 64)),
    ("n/a d | sum(b) -> n/b d | copy(a)", "a=2,b=4", (64, 64)),
    ("x/a y/b z/c -> x/c y/a z/b", "a=2,b=4,c=2", (8, 8, 8)),
    ("n/zigzag(a) d -> n/cyclic(a) d", "a=4", (30, 8)),
    ("n d | mean(a) -> n d", "a=4", (64, 64)),
    ("n d | mean(a) -> n d | sum(a)", "a=4", (64, 64)),
    ("n d -> n d | copy(a)", "a=4", (64, 64)),
    ("n/a d -> n/a d", "a=4", (64, 64)),
]


@pytest.mark.parametrize(("expression", "mesh", "shape"), LIMITED)
def test_memory_limits_hold_down_to_the_least_possible(expression, mesh, shape):
    def plan(limit):
        return xs.plan(expression, xs.Mesh.parse(mesh), shape, memory_limit=limit)

    with pytest.raises(PlanError, match="no plan stays within 1 B per device") as caught:
        plan(1)
    least = int(re.search(r"the least any plan needs is .* \((\d+) bytes\)", str(caught.value))[1])
    assert plan(least).peak_bytes == least
    with pytest.raises(PlanError, match=re.escape(f"({least} bytes)")):
        plan(least - 1)
    free = plan(None)
    for limit in range(free.peak_bytes, least - 1, -max(1, free.peak_bytes // 16)):
        limited = plan(limit)
        assert limited.peak_bytes <= limit and limited.cost >= free.cost
        # What fits the limit anyway is not given up for it.
        assert (limited.steps == free.steps) == (free.peak_bytes <= limit)


@given(st.data(), st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=3))
def test_never_worse_than_a_gather_before_a_slice(data, sizes):
    mesh = xs.Mesh(dict(zip("xyz", sizes, strict=False)))
    shape = (64, 128)
    src, dst = (data.draw(layouts(mesh, 2, kinds)) for kinds in (("sum",), ()))
    cuts = [shard for layout in (src, dst) for dim in layout.dims for shard in dim.shards]
    assume(not any(cut.numbers for cut in cuts))  # three rows in turn divide no power of two
    for profile in ("bandwidth", "h100"):
        plan = xs.plan((src, dst), mesh, shape, profile=profile)
        plain = next(a.plan for a in alternatives(plan) if a.name == "all-gather and slice")
        if profile == "bandwidth":
            assert plan.bytes_received <= plain.bytes_received
        # A plan may cost more in order to hold no block larger than both ends.
        ends = max(plan.source.max_local_size, plan.target.max_local_size)
        if all(stage.after.max_local_size <= ends for stage in plain.stages):
            assert plan.cost <= plain.cost * (1 + 1e-9)


def test_of_plans_that_take_as_long_the_one_that_holds_less_wins():
    """A permutation and a gather bring as many bytes as an exchange, which packs all of them."""
    plan = xs.plan("n/a/b -> n/b", xs.Mesh(a=4, b=4), (64,), profile="bandwidth")
    assert [step.kind for step in plan.steps] == ["permute", "all_gather"]
    exchange = replace(plan, steps=(Exchange(plan.dst),))
    assert (exchange.cost, exchange.bytes_received) == (plan.cost, plan.bytes_received)
    assert plan.peak_bytes < exchange.peak_bytes
    assert "it holds less" in plan.explain()


def test_to_hold_less_than_both_ends_is_no_gain():
    """A slice, a permutation of half blocks and a gather would: three steps for one."""
    plan = xs.plan("n/a -> n/b", xs.Mesh(a=2, b=2), (64,), profile="bandwidth")
    assert [step.kind for step in plan.steps] == ["permute"]


def test_idle_replicas_take_shares_of_a_reduction():
    """Two pairs hold the same addends: each pair reduces a half."""
    mesh = xs.Mesh(idle=2, a=2, b=2)
    shape = (1 << 28,)
    plan = xs.plan("n | sum(a,b) -> n", mesh, shape, profile="h100")
    alone = xs.plan("n | sum(a,b) -> n", xs.Mesh(a=2, b=2), shape, profile="h100")
    assert [str(step) for step in alone.steps] == ["all_reduce sum(a,b)"]
    assert plan.cost < alone.cost
    assert any("idle" in str(step) for step in plan.steps)
    small = xs.plan("n | sum(a,b) -> n", mesh, (1024,), profile="h100")
    assert [str(step) for step in small.steps] == ["all_reduce sum(a,b)"]


def test_several_dims_are_sliced_by_one_copy():
    mesh = xs.Mesh(x=2, y=2, z=2)
    plan = xs.plan("n d -> n/x d/y/z", mesh, (32768, 8192), "bfloat16")
    assert [str(step) for step in plan.steps] == ["slice n/x d/y/z"]
    assert plan.bytes_received == 0


def test_a_gather_over_an_axis_of_several_nodes_crosses_between_them_first():
    """16 devices on two nodes: a sixteenth of the array comes over the slow link, not a half."""
    mesh = xs.Mesh(x=16)
    plan = xs.plan("n/x -> n", mesh, (1 << 24,), profile="h100")
    (stage,) = plan.stages
    hops = stage.step.traffic(stage.before, plan.profile.link_spans(mesh)).hops
    assert [(hop.level, hop.received) for hop in hops] == [(0, 1 << 20), (1, 14 << 20)]


@given(moves(kinds=("linear",)), st.sampled_from(("bandwidth", "h100", "tpu_v5p")))
def test_the_search_counts_what_the_plan_costs(move, profile):
    """One formula, two callers: moves between numbered states, and steps between shardings."""
    mesh, shape, src, dst = move
    ends = [xs.Sharding(layout, mesh, shape) for layout in (src, dst)]
    start, goal = (without_copies(s.with_layout(s.normal_layout)) for s in ends)
    space = NamedRoute(start, goal, 4, xs.load_profile(profile))
    path = Search(space.route, None).path()
    ends = start.layout, goal.layout, mesh, shape, "float32"
    plan = xs.Plan(*ends, space.steps(path.moves), profile=space.profile)
    assert path.seconds == pytest.approx(plan.cost, rel=1e-12)
    assert path.held_elements * 4 == plan.peak_bytes


@pytest.mark.parametrize(
    "expression", ["b s/cp c -> b s c/cp", "b s c | mean(cp) -> b s c", "b/cp s c -> b s c"]
)
def test_both_passes_are_planned_together(expression):
    ask = [expression, xs.Mesh(cp=4), (8, 64, 32)]
    plan = xs.plan(*ask)
    both = xs.plan(*ask, objective="forward+backward")
    assert both.steps == plan.steps and both.backward.steps == plan.backward.steps
    assert both.cost == plan.cost + plan.backward.cost
    assert both.backward.objective == "forward"
    assert xs.Plan.from_json(both.to_json()) == both
    assert "with the backward's" in str(both) and "with the backward's" not in str(plan)


def test_both_passes_obey_the_limit_at_once():
    """Replicas become copies for nothing; the gradients of copies are added up, which takes memory."""
    ask = ["n d -> n d | copy(a)", xs.Mesh(a=4), (64, 64)]
    assert xs.plan(*ask, memory_limit=16384).peak_bytes == 16384
    with pytest.raises(PlanError) as caught:
        xs.plan(*ask, memory_limit=16384, objective="forward+backward")
    assert str(caught.value).startswith(
        "backward: no plan stays within 16.00 KiB per device\n  the least"
    )
    both = xs.plan(*ask, memory_limit=20480, objective="forward+backward")
    assert both.backward.peak_bytes == 20480


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("n/a d -> n d/a", (2, 3)),
        ("n/a d -> n d/b", (3, 1)),
        ("n/a d -> n d/a", (0, 8)),
        ("n/a -> n | copy(a)", (0,)),
    ],
)
@pytest.mark.parametrize("profile", ["bandwidth", "h100"])
def test_more_devices_than_rows(expression, shape, profile):
    """Some devices hold nothing, or all: planned like any other, and exact."""
    plan = xs.plan(expression, xs.Mesh(a=4, b=2), shape, profile=profile)
    oracle.assert_right(plan, np.random.default_rng(0))


def test_the_same_question_gets_the_same_object_whatever_the_dtype_is_called():
    import torch

    ask = lambda dtype: xs.plan("n/a -> n", xs.Mesh(a=2), [4], dtype)  # noqa: E731
    assert (
        ask("float32") is ask("f4") is ask(np.float32) is ask(np.dtype("f4")) is ask(torch.float32)
    )
    assert [ask(name).dtype for name in ("f4", "half", "i8")] == ["float32", "float16", "int64"]


def test_a_slow_axis_is_spared():
    """The four replicas along the fast axis each fetch a quarter over the slow one, then share."""
    fast = xs.Link(0.0, 1e11)
    slow = xs.Link(0.0, 1e9)
    profile = xs.Profile("two levels", "made up", slow, axes=(("fast", fast),))
    mesh = xs.Mesh(slow=2, fast=4)
    plan = xs.plan("n/slow -> n", mesh, (4096,), profile=profile)
    assert [str(step) for step in plan.steps] == ["slice n/fast", "all_gather n/slow/fast"]
    spans = profile.link_spans(mesh)
    hops = [hop for stage in plan.stages for hop in stage.step.traffic(stage.before, spans).hops]
    assert [hop.received for hop in hops if hop.axis == "slow"] == [2048 // 4]


@pytest.mark.parametrize(
    ("expression", "options", "error", "message"),
    [
        (
            "n/a -> n",
            {"shape": (4, 4)},
            ShapeError,
            "'n/a' has 1 dims, the array has 2 in 'n/a -> n'",
        ),
        ("n/a -> n", {"shape": (-1,)}, ShapeError, "shape (-1,) has -1, not a length >= 0"),
        ("n/a -> n", {"profile": "h1000"}, ProfileError, "no profile 'h1000'"),
        (
            "n/a -> n",
            {"objective": "backward"},
            XshardError,
            "objective is 'backward', not Objective",
        ),
        ("n/a -> n", {"memory_limit": 0}, PlanError, "no plan stays within 0 B per device"),
        (
            ("n/a", "m/a"),
            {},
            NotationError,
            "dim names differ across the arrow in\n    'n/a -> m/a'",
        ),
        (("n/a", "n/q"), {}, NotationError, "unknown mesh axis 'q' in\n    'n/a -> n/q'"),
        (
            (Layout.parse("n/a"), "n | max(a)"),
            {},
            PlanError,
            "'n | max(a)' holds a max over a that",
        ),
    ],
)
def test_wrong_input(expression, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        xs.plan(expression, xs.Mesh(a=2), **{"shape": (4,), **options})


def test_a_float_is_no_length_even_where_the_plan_is_known():
    """4.0 == 4 in the keys of a cache."""
    xs.plan("n/a -> n", xs.Mesh(a=2), (4,))
    with refused(ShapeError, "shape (4.0,) has 4.0, not a length >= 0 in 'n/a -> n'"):
        xs.plan("n/a -> n", xs.Mesh(a=2), (4.0,))


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES) >= 70
