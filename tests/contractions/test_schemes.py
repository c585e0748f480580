"""The plans of the schemes that have names, their explanations, and errors."""

from __future__ import annotations

import json
import re

import pytest

import xshard as xs
from tests.messages import refused, rows

LENGTHS = {
    "b": 8,
    "s": 2048,
    "t": 2048,
    "d": 1024,
    "f": 4096,
    "e": 8,
    "c": 1024,
    "h": 16,
    "k": 64,
    "r": 16,
}


def planned(expression: str, mesh: xs.Mesh, **options) -> xs.ContractionPlan:
    sizes = {n: LENGTHS[n] for n in re.findall(r"\b[a-z]\b", expression)}
    return xs.plan(expression, mesh, sizes=sizes, **options)


# What is asked and what is contracted; below, the steps of all moves forward, and a word of the explanation.
SCHEMES = """
b s d, d f/tp -> b s f/tp   b s d | copy(tp), d f/tp -> b s f/tp
    retag -> copy(tp)   column parallel (Megatron)
b s f/tp, f/tp d -> b s d   b s f/tp, f/tp d -> b s d | sum(tp)
    all_reduce sum(tp)   row parallel (Megatron), the result reduced
b s/tp d, d f/tp -> b s f/tp   b s d | copy(tp), d f/tp -> b s f/tp
    all_gather s/tp   the activations gathered (sequence parallel)
b s f/tp, f/tp d -> b s/tp d   b s f/tp, f/tp d -> b s d | sum(tp)
    reduce_scatter sum -> s/tp   the result reduce-scattered
b/tp s d, d f -> b/tp s f   b/tp s d, d f | copy(tp) -> b/tp s f
    retag -> copy(tp)   data parallel
b/tp s d, d/tp f -> b/tp s f   b/tp s d, d f | copy(tp) -> b/tp s f
    all_gather d/tp   data parallel, the weight gathered (ZeRO-3)
e c/tp d, e/tp d f -> e/tp c f   e/tp c d, e/tp d f -> e/tp c f
    all_to_all c/tp -> e/tp   some after a move (Ulysses, dispatch)
b s/tp h k, b t/tp h k -> b h/tp s t   b s h/tp k, b t h/tp k -> b h/tp s t
    all_to_all s/tp -> h/tp; all_to_all t/tp -> h/tp   every operand has it (experts, heads)
r k, k h -> r h   r k, k h -> r h
    nothing   idle: replicas repeat the work
b s/tp d, d r, r f/tp -> b s f/tp   b s/tp d, d r | copy(tp) -> b s/tp r; r f/tp, b s r | copy(tp) -> b s f/tp
    retag -> copy(tp); all_gather s/tp   data parallel
"""


@pytest.mark.parametrize("scheme", re.split(r"\n(?! )", SCHEMES.strip()))
def test_named_schemes_are_found(scheme):
    expression, local, moves, words = re.split(r"\n {4}| {3}", scheme)
    plan = planned(expression, xs.Mesh(tp=8))
    steps = [
        step for part in plan.parts for move in (*part.moves, part.result) for step in move.steps
    ]
    assert (plan.local, "; ".join(map(str, steps)) or "nothing") == (local, moves)
    assert words in plan.explain()
    assert xs.ContractionPlan.from_json(plan.to_json()) == plan
    for row in ("contract", f"{plan.dtype} ", "backward: received"):
        assert row in str(plan)


def test_other_places_cost_more():
    plan = planned("b s/tp d, d f/tp -> b s f/tp", xs.Mesh(tp=8))
    (_, first), *others = xs.contractions.explain.alternatives(plan)
    assert first is plan
    assert len(others) == 2 and all(other.cost > plan.cost for _, other in others)


def test_of_places_that_take_about_as_long_the_one_with_the_fewest_moves_wins() -> None:
    """Three moves save a hundredth of the seconds; where bytes alone count, they are taken."""
    expression = "b s f/tp, f/tp d -> b s d"
    options = {"dtype": "float32", "objective": "forward"}
    plan, bytes_alone = (
        planned(expression, xs.Mesh(tp=8), profile=profile, **options)
        for profile in ("gloo", "bandwidth")
    )
    assert plan.local == "b s f/tp, f/tp d -> b s d | sum(tp)"
    assert bytes_alone.bytes_received < plan.bytes_received


def test_limits():
    expression = "b s f/tp, f/tp d -> b s/tp d"
    mesh = xs.Mesh(tp=8)
    plan = planned(expression, mesh)
    smaller = planned(expression, mesh, memory_limit=plan.peak_bytes - 1)
    assert smaller.peak_bytes < plan.peak_bytes and smaller.cost >= plan.cost
    with pytest.raises(xs.errors.PlanError, match="the least of those weighed is"):
        planned(expression, mesh, memory_limit=1000)
    with pytest.raises(xs.errors.PlanError, match="every way takes more than 1000 operations"):
        planned(expression, mesh, flops_limit=1000)


@pytest.mark.parametrize(
    ("expression", "ring"),
    [
        ("b s/tp d, d f/tp -> b s f/tp", (0, "s", "tp")),
        ("b/tp s d, d/tp f -> b/tp s f", (1, "d", "tp")),
        ("b s f/tp, f/tp d -> b s/tp d", (None, "s", "tp")),
        ("b s d, d f/tp -> b s f/tp", None),
    ],
)
def test_a_gather_or_a_reduce_scatter_may_run_in_rounds(expression, ring):
    mesh = xs.Mesh(tp=8)
    plain = planned(expression, mesh)
    always = planned(expression, mesh, overlap="always")
    [part] = always.parts
    assert (part.ring and (part.ring.operand, part.ring.dim, part.ring.axis)) == ring
    assert always.bytes_received == plain.bytes_received
    if ring is not None:
        assert [step.kind for step in part.ring.rotation.steps] == ["permute"]
        rounds = part.ring.rotation.bytes_received * (part.ring.rounds - 1)
        assert rounds == plain.bytes_received
        assert f"in 8 rounds along {ring[2]}" in str(always)
        assert xs.ContractionPlan.from_json(always.to_json()) == always
        # Where operations take no time there is nothing to hide a message behind.
        assert planned(expression, mesh, overlap="auto", profile="bandwidth").parts[0].ring is None
        wrong = json.loads(always.to_json())
        wrong["parts"][0]["ring"][1] = "nothing"
        with pytest.raises(xs.errors.PlanError, match="can be a ring"):
            xs.ContractionPlan.from_json(json.dumps(wrong))


SIZES = {"b": 8, "d": 4, "f": 4}
GIVEN = [
    {},
    {"sizes": {"b": 8, "d": 4}},
    {"sizes": SIZES | {"q": 1}},
    {"shape": [[8, 4]]},
    {"shape": 8},
]
GIVEN += [
    {"shape": [[8, 4], [6, 4]]},
    {"shape": [[8, 4], [4]]},
    {"sizes": SIZES},
    {"shape": [[12], [8]]},
]
GIVEN += [
    {"shape": [[12], [4]]},
    {"sizes": {"b": 3, "d": 4}},
    {"sizes": {"b": 8, "d": 4}},
    {"shape": [[1, 3, 3], [1, 1]]},
]
REFUSED = """
b d, d f -> b f   no shapes   sizes={"b": 8, ...}, or shape=[(8, ...), ...] with one shape per operand
b d, d «f» -> b f   sizes has no length for dim 'f'   sizes has: b=8, d=4
b d, d f -> b f   sizes has dim 'q'   dims are: b, d, f
b d, d f -> b f   1 arrays for 2 operands   one array or shape per operand
b d, d f -> b f   1 arrays for 2 operands   one array or shape per operand
b d, «d» f -> b f   dim 'd' is 6 long, elsewhere d=4   a name stands for one length; sizes= says all of them
b d, «d f» -> b f   an array of 1 dims, (4,), for 'd f'   one dim per name
«...» d, d f -> ... f   sizes has no length for dim '...'   pass shape= with one shape per operand
«(b d)», b -> d   dim 'b d' is 12 long, elsewhere b=8   a name stands for one length; sizes= says all of them
«(b d)», f -> d   dim 'b d' is 12 long, elsewhere no part is known
    a name stands for one length; sizes= says all of them
«(b d)/tp» -> b   blocks may end within a row of 'b', which is 3 long
    it takes equal parts or zigzags of these rows
«(b d)/cyclic(tp)» -> b   blocks may end within a row of 'b', which is 8 long
    it takes equal parts or zigzags of these rows
b ..., «... f» -> b f   '...' stands for 2 and for 1 dims   it stands for the same dims everywhere
"""


def test_wrong_lengths_are_marked():
    for options, (text, message) in zip(GIVEN, (row.values for row in rows(REFUSED)), strict=True):
        with refused(xs.errors.ShapeError, message):
            xs.plan(text, xs.Mesh(tp=2), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"overlap": "often"},
            "XshardError",
            "overlap is 'often', not Overlapping\n  plan takes Literal['never', 'auto', 'always']",
        ),
        (
            {"sizes": SIZES | {"d": -4}},
            "ShapeError",
            "dim 'd' in sizes has -4\n  a length is a whole number >= 0",
        ),
        (
            {"flops_limit": "2e9"},
            "XshardError",
            "flops_limit is '2e9', not int | None\n  plan takes int | None",
        ),
    ],
)
def test_wrong_options(options, error, message):
    with refused(getattr(xs.errors, error), message):
        xs.plan("b d, d f -> b f", xs.Mesh(tp=2), **{"sizes": SIZES, **options})


def test_what_is_wrong_with_a_text_comes_before_what_its_options_are_for():
    with pytest.raises(xs.errors.NotationError, match="dim 'a' is named twice"):
        xs.plan("a a -> a", xs.Mesh(tp=2), (4, 4))
    with pytest.raises(xs.errors.ShapeError, match="sizes and flops_limit are for contractions"):
        xs.plan("a b -> b a/tp", xs.Mesh(tp=2), sizes={"a": 4, "b": 4})


def test_one_operand_with_a_plain_shape_is_a_move_which_sums_nothing():
    mesh = xs.Mesh(tp=2)
    with pytest.raises(xs.errors.NotationError, match="dim names differ across the arrow"):
        xs.plan("b s/tp c -> b c/tp", mesh, (2, 4, 6))
    summed = xs.plan("b s/tp c -> b c/tp", mesh, [(2, 4, 6)])
    assert summed.local == "b s/tp c -> b c | sum(tp)"


def test_a_sum_of_one_operand_has_no_products():
    """So devices may repeat it rather than gather what it sums."""
    sizes = {"a": 8, "b": 64, "c": 16}
    mesh = xs.Mesh(x=2, y=2)
    limit = 8 * 64 * 16 // 2
    plan = xs.plan(
        "a/x b c -> c/(x,y) a", mesh, sizes=sizes, profile="bandwidth", flops_limit=limit
    )
    assert plan.flops == limit and plan.local == "a/x b c -> c a/x"
    assert plan.backward_bytes_received < 8 * 16 * 4 < 8 * 64 * 16
