"""A plan checks itself, prints, hashes and survives JSON."""

import json
import pickle
import re
import sys
from contextlib import contextmanager
from copy import deepcopy
from fractions import Fraction

import numpy as np
import pytest

import xshard as xs
from tests.cases import CASES
from tests.messages import refused
from xshard.caches import empty_layout_caches
from xshard.errors import PlanError
from xshard.layout.layout import parse_expression
from xshard.notation.parser import Shard
from xshard.pictures.grid import picture
from xshard.pictures.html import html
from xshard.steps import AllGather, AllReduce, Exchange, ReduceScatter, Retag, Scale, Slice

MESH = xs.Mesh(a=2, b=2)
ROWS = (8, 4)
A = (Shard(("a",)),)
HALF = Fraction(1, 2)
GATHER = AllGather("n", A)
SUM = AllReduce(("a",))


def plan_of(expression, *steps, scale=1):
    return xs.Plan(*parse_expression(expression), MESH, ROWS, "float32", steps, Fraction(scale))


@pytest.mark.parametrize(
    ("expression", "steps", "message"),
    [
        ("n/a d -> n d", [], "lead from 'n/a d' to 'n/a d', not to 'n d'"),
        (
            "n/a d -> n d",
            [AllGather("n", A, ("a",))],
            "lead from 'n/a d' to 'n d | copy(a)', not to 'n d'",
        ),
        (
            "n/a d -> n/b d",
            [GATHER, Slice((("n", A),))],
            "lead from 'n/a d' to 'n/a d', not to 'n/b d'",
        ),
        (
            "n d | sum(a) -> n/zigzag(a) d",
            [ReduceScatter("n", A)],
            "lead from 'n d | sum(a)' to 'n/a d', not to 'n/zigzag(a) d'",
        ),
        ("n d | mean(a) -> n d", [SUM], "scale by 1, the plan says 1/2"),
        ("n d | mean(a) -> n d", [SUM, Scale(HALF / 2)], "scale by 1/4, the plan says 1/2"),
    ],
)
def test_a_wrong_plan_cannot_be_built(expression, steps, message):
    with refused(PlanError, f"the steps {message}"):
        plan_of(expression, *steps, scale=HALF if "mean" in expression else 1)


def test_a_plan_written_by_hand():
    """Two steps, checked, priced and run like any other plan."""
    plan = plan_of("n/a d -> n d/a", GATHER, Slice((("d", A),)))
    assert [str(stage.after.layout) for stage in plan.stages] == ["n d", "n d/a"]
    assert (plan.bytes_received, plan.bytes_lower_bound) == (4 * 4 * 4, 4 * 2 * 4)
    x = np.arange(32.0).reshape(ROWS)
    result = xs.reference.run(plan, xs.reference.scatter(x, plan.src, MESH))
    assert [block.tolist() for block in result[1:3]] == [x[:, :2].tolist(), x[:, 2:].tolist()]
    gather, cut = plan.prices
    assert (gather.received_bytes, cut.received_bytes) == (64, 0)
    # Input and output, and nothing to pack along the leading dim; then whole and half.
    assert (gather.peak_bytes, cut.peak_bytes, plan.peak_bytes) == (64 + 128, 128 + 64, 192)
    assert plan.cost == gather.seconds + cut.seconds > 0
    retag = plan_of("n d -> n d | copy(a)", Retag(copies=("a",)))
    assert (retag.bytes_received, retag.cost) == (0, 0)


def test_a_plan_of_nothing_holds_its_ends():
    plan = xs.plan("n/a d -> n/block(a) d", MESH, ROWS)
    assert (plan.steps, plan.cost, plan.bytes_received, plan.bytes_lower_bound) == ((), 0, 0, 0)
    assert plan.peak_bytes == 4 * 4 * 4
    text = str(xs.plan("n/a d -> n/block(a) d", MESH, ROWS, profile="bandwidth"))
    assert text.splitlines()[-1] == (
        "nothing to do: the layouts mean the same; "
        "received 0 B (the bound is 0 B), 0.0 us, peak 64 B, priced for bandwidth"
    )


def test_equal_plans_are_equal_values():
    make = lambda **options: xs.plan("n/a d -> n d/a", xs.Mesh(a=2), ROWS, **options)  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())
    assert make() != make(dtype="float64")
    assert make(profile="bandwidth") != make(profile="h100")
    assert len({make(), make(), make(dtype="float64")}) == 2
    _ = make().prices  # what is cached must not get in the way
    assert pickle.loads(pickle.dumps(make())) == make()


TABLE = """\
b s/zigzag(cp) c | mean(dp) -> b s c/balanced(cp)   bfloat16[2, 62, 32] on dp=2,cp=4

step                        layout after                 local shape  received  time    peak
                            b s/zigzag(cp) c | mean(dp)  <=2x16x32
scale 1/2                   b s/zigzag(cp) c | sum(dp)   <=2x16x32    0 B       0.0 us  4.00 KiB
reduce_scatter sum -> b/dp  b/dp s/zigzag(cp) c          <=1x16x32    1.00 KiB  1.0 us  3.00 KiB
exchange                    b s c/balanced(cp)           2x62x8       1.72 KiB  1.8 us  6.81 KiB

received 2.72 KiB (1.40x the bound of 1.94 KiB), 2.8 us, peak 6.81 KiB, priced for bandwidth"""


def test_it_prints_as_a_table():
    """Columns are aligned, the ends are spelt as the user spelt them, uneven blocks show the largest."""
    ends = parse_expression("b s/zigzag(cp) c | mean(dp) -> b s c/balanced(cp)")
    steps = (
        Scale(HALF),
        ReduceScatter("b", (Shard(("dp",)),)),
        Exchange(xs.Layout.parse("b s c/cp")),
    )
    array = xs.Mesh(dp=2, cp=4), (2, 62, 32), "bfloat16"
    assert str(xs.Plan(*ends, *array, steps, HALF, xs.load_profile("bandwidth"))) == TABLE


def test_every_case_survives_json():
    for case in CASES:
        plan = case.plan()
        assert xs.Plan.from_json(plan.to_json()) == plan


def test_a_backward_plan_leads_from_dual_to_dual():
    for plan in (case.plan() for case in CASES):
        if plan.src.is_linear:
            back = plan.backward
            assert (back.src, back.dst, back.scale) == (plan.dst.dual, plan.src.dual, plan.scale), (
                plan
            )
            assert back.profile == plan.profile


@pytest.mark.parametrize(
    ("expression", "scale"),
    [
        ("n d | mean(a) -> n d", Fraction(1, 2)),
        ("n d | mean(a,b) -> n/a d", Fraction(1, 4)),
        ("n d | mean(a) sum(b) -> n d | copy(a)", Fraction(1, 2)),
        ("n d -> n d | mean(a,b)", Fraction(4)),
        ("n d | mean(a) -> n d | mean(b)", Fraction(1)),
        ("n d | mean(a) -> n d | mean(a)", Fraction(1)),
        ("n d | sum(a) -> n d", Fraction(1)),
    ],
)
def test_scale(expression, scale):
    plan = xs.plan(expression, MESH, ROWS)
    assert plan.scale == plan.backward.scale == scale
    assert [s.factor for s in plan.steps if isinstance(s, Scale)] == ([scale] if scale != 1 else [])


GOOD = json.loads(xs.plan("n d | mean(a) copy(b) -> n/a/b d", MESH, ROWS).to_json())
# Its first step, a reduce-scatter of 8 x 4 float32 to 4 x 4, holds most: 192 bytes.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("{", "this is no plan: JSONDecodeError"),
        ("[]", "this is no plan: TypeError"),
        ("{}", "this is no plan: KeyError: 'profile'"),
        ({"src": "n/c d"}, "this is no plan: unknown mesh axis 'c'"),
        ({"src": "n/a"}, "this is no plan: 'n/a' has 1 dims, the array has 2"),
        ({"dst": "n/b d"}, "the steps lead from"),
        ({"mesh": {"a": 2}}, "this is no plan: unknown mesh axis 'b'"),
        ({"mesh": {"b": 2, "a": 1}}, "no sum(a) to reduce in"),
        ({"mesh": {"a": 2, "b": "2"}}, "this is no plan: axes: axis 'b' has size '2'"),
        ({"shape": [8, -4]}, "this is no plan: shape (8, -4) has -4"),
        ({"shape": [9, 4]}, "unevenly"),
        ({"shape": None}, "this is no plan: TypeError"),
        ({"dtype": "float33"}, "this is no plan: unknown dtype 'float33'"),
        ({"profile": "h1000"}, "this is no plan: no profile 'h1000'"),
        ({"scale": "1"}, "the steps scale by 1/2, the plan says 1"),
        ({"scale": "half"}, "'half' is not a fraction"),
        ({"scale": "1/0"}, "this is no plan: ZeroDivisionError"),
        ({"steps": []}, "the steps lead from"),
        ({"steps": GOOD["steps"][1:]}, "to 'n/b d | sum(a)', not to 'n/a/b d'"),
        ({"steps": [{"step": "teleport"}]}, "no step 'teleport'"),
        ({"steps": [{"step": ["slice"]}]}, "this is no plan"),
        ({"steps": [{"step": "slice"}]}, "this is no plan: TypeError"),
        ({"steps": [{"step": "slice", "cuts": "n/b"}]}, "'n/b' is not a list"),
        (
            {"steps": [{"step": "slice", "cuts": [["n", ["b"]]], "x": 1}]},
            "does not have the fields ['x']",
        ),
        ({"steps": [{"step": "slice", "cuts": [["n", ["b c | sum(a)"]]]}]}, "does not shard a dim"),
        ({"steps": [{"step": "exchange", "to": "n d", "node_devices": 0}]}, "0 devices in a node"),
        ({"steps": 7}, "this is no plan: TypeError"),
        ({"after": GOOD["after"][:-1]}, "the plan says its steps lead to"),
        ({"memory_limit": 191}, "the steps hold 192 bytes, the limit is 191"),
        ({"memory_limit": "255"}, "'255' is not a whole number"),
    ],
)
def test_malformed_json(changes, message):
    text = changes if isinstance(changes, str) else json.dumps(GOOD | changes)
    with pytest.raises(PlanError, match=re.escape(message)):
        xs.Plan.from_json(text)


def leaves(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, (*path, key))


@pytest.mark.parametrize("junk", [None, True, -1, 2.5, "", "?", [], [[]], {}], ids=repr)
def test_junk_anywhere_in_the_json(junk):
    """A text with anything replaced raises PlanError, or is another plan that is right."""
    for path in leaves(GOOD):
        place = data = {"": deepcopy(GOOD)}
        *way, last = ("", *path)
        for key in way:
            place = place[key]
        place[last] = junk
        try:
            plan = xs.Plan.from_json(json.dumps(data[""]))
        except PlanError:
            continue
        assert xs.Plan.from_json(plan.to_json()) == plan, path


def test_a_plan_read_back_keeps_its_memory_limit():
    plan = xs.plan("n/a d -> n d/a", MESH, ROWS, memory_limit=1000)
    assert xs.Plan.from_json(plan.to_json()) == plan
    assert xs.Plan.from_json(plan.to_json()).backward.memory_limit == 1000


def test_a_plan_read_back_keeps_its_profile():
    plan = xs.plan("n/a d -> n d/a", MESH, ROWS, profile="bandwidth")
    assert xs.Plan.from_json(plan.to_json()).cost == plan.cost
    assert xs.Plan.from_json(plan.to_json(), profile="h100") == xs.plan(
        "n/a d -> n d/a", MESH, ROWS
    )


@pytest.mark.parametrize(
    ("expression", "devices", "shape"),
    [
        ("a/cyclic(x,2) b -> a/x b", 4, (8, 9)),
        ("a/balanced(x) -> a/zigzag(x)", 4, (4,)),
        ("a/zigzag(x,0,1,0) -> a/x", 4, (1,)),
        ("a/intervals(x,[0,1,3,4],[1,3]) b:halo(1,1) -> a/zigzag(x) b:halo(1,1)", 2, (4, 2)),
    ],
)
def test_nothing_is_sent_between_layouts_that_mean_the_same(expression, devices, shape):
    plan = xs.plan(expression, xs.Mesh(x=devices), shape)
    assert (plan.steps, plan.bytes_received, plan.bytes_lower_bound, plan.backward.steps) == (
        (),
        0,
        0,
        (),
    )
    assert xs.plan(
        expression.replace("->", "| sum(y) ->"), xs.Mesh(x=devices, y=2), shape
    ).steps == (AllReduce(("y",)),)


@contextmanager
def calls_at_most(most):
    """Fail at once if this package makes more than `most` calls, of Python's functions and of C's.

    Nothing is cached before, so that the number of calls is the same on any machine and after any
    other test. Counting stops the code as well: a loop over 2**58 rows would never end.
    """
    n_calls = 0

    def count(frame, event, argument):
        nonlocal n_calls
        is_ours = frame.f_globals.get("__name__", "").startswith("xshard")
        if is_ours and event in ("call", "c_call"):
            n_calls += 1
            assert n_calls <= most, f"more than {most} calls, in {frame.f_code.co_qualname}"

    empty_layout_caches()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


# `most_calls` is a quarter above what it takes: more for more devices, but no more for more rows.
@pytest.mark.parametrize(
    ("expression", "mesh", "shape", "received", "most_calls"),
    [
        ("n/zigzag(x) -> n/x", {"x": 1024}, 10_007, 40, 610_000),
        ("n/zigzag(x) -> n/zigzag(y)", {"x": 32, "y": 32}, 10_007, 1256, 340_000),
        ("n/balanced(x):halo(1,1) -> n/zigzag(x):halo(2,2)", {"x": 256}, 10_007, 192, 1_175_000),
        ("n/x -> n/x:halo(3,3)", {"x": 8}, 2**40, 24, 21_500),
        ("n/x -> n/x:window(k=3,s=2,p=1)", {"x": 8}, 2**58, 4, 21_500),
        ("n/x -> n/cyclic(x)", {"x": 8}, 2**58, 2**57 // 8 * 7, 16_500),
        ("n/cyclic(x)/cyclic(y) -> n/x/y", {"x": 2, "y": 2}, 2**58, 2**58 // 4 * 3, 16_500),
        ("n/x:fold(halo(3,3,periodic)) -> n/x", {"x": 8}, 2**58, 24, 21_500),
    ],
)
def test_planning_takes_few_calls_at_any_size(expression, mesh, shape, received, most_calls):
    with calls_at_most(most_calls):
        plan = xs.plan(expression, xs.Mesh(mesh), (shape,))
        assert plan.bytes_received == plan.bytes_lower_bound == received
        assert plan.backward.bytes_received >= received
        for printed in (plan, plan.backward):
            assert str(printed)
        for end in (plan.source, plan.target):
            assert html(picture(end))
