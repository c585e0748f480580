"""Heads of keys that are fewer than devices: options that share them, their prices, and their rules."""

from itertools import product

import numpy as np
import pytest

from benchmarks.suggest.models import Model, dense_mlp, grouped_attention
from xshard import Layout, Mesh, Op, Suggestion, TrainingStep, suggest
from xshard.cost.machine import load_profile
from xshard.errors import XshardError
from xshard.layout.sub_axes import SubAxisMesh
from xshard.step.choose.hand import HAND, options_by_hand
from xshard.step.choose.search import StepSearch
from xshard.step.price.moves import MovePrices
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import COPY, REPLICAS, SUM
from xshard.step.record.shared_heads import mesh_with_shared_heads
from xshard.step.say.limits import _placements
from xshard.step.say.rules import written_ends

FOUR = Mesh(tp=4)
LAYER = "model.layers.*.self_attn"
ONE = {"memory": "80GiB", "micro_batches": 1, "recompute": False, "batch_parts": 1}


def a_step(n_keys=2, n_queries=8, batch=1, words=16000):
    """Two layers: `n_queries` heads of queries read each one of keys."""
    model = Model()
    model.layers("model.layers.*", 2, grouped_attention, dense_mlp)
    lengths = {"c": 2048, "g": n_keys, "r": n_queries, "d": 128, "f": 11008, "v": words}
    return model.step(batch, 8192, lengths)


def a_problem(step, mesh):
    step = step.with_shares
    split = mesh_with_shared_heads(step, mesh)
    return StepProblem(step, MovePrices(split, "bfloat16", load_profile("h100")))


def node(problem, name):
    return problem.nodes[problem.node_numbers[name]]


@pytest.mark.parametrize(
    ("heads", "mesh", "expected"),
    [
        ((2, 4), FOUR, "tp_0=2,tp_1=2"),
        ((2, 8), Mesh(dp=4, tp=8), "dp=4,tp_0=2,tp_1=4"),
        ((2, 4), Mesh(tp=4, dp=2), "tp=4,dp=2"),  # the last axis is that of tensor parallelism
        ((2, 4), Mesh(tp_0=3, tp=4), "tp_0=3,tp_0_=2,tp_1_=2"),
        ((8, 4), FOUR, "tp=4"),  # they divide
        ((3, 4), FOUR, "tp=4"),  # no equal groups
        ((1, 4), FOUR, "tp=4"),  # one group: copies along the whole axis
        (
            (2, 3),
            FOUR,
            "tp=4",
        ),  # queries of a head of keys do not divide over the devices that share it
    ],
)
def test_an_axis_is_split_if_equal_groups_share_heads(heads, mesh, expected):
    assert str(mesh_with_shared_heads(a_step(*heads), mesh)) == expected


def test_options_of_whole_axes_stay_and_heads_are_shared():
    mesh = Mesh(dp=2, tp=4)
    step = a_step(batch=2)
    split = a_problem(step, mesh)
    whole = StepProblem(step.with_shares, MovePrices(mesh, "bfloat16", load_profile("h100")))
    for name in whole.node_numbers:
        more = {option.tobytes() for option in node(split, name).placements}
        for option in node(whole, name).placements:
            assert np.ascontiguousarray(option[:, [0, 1, 1]]).tobytes() in more, name
    shared = [[COPY, COPY, COPY], [REPLICAS, 0, COPY], [REPLICAS, 2, COPY]]
    keys = node(split, f"{LAYER}.k_proj").placements.tolist()
    assert [[REPLICAS, COPY, COPY], *shared[1:]] in keys
    attention = node(split, f"{LAYER}.attn").placements.tolist()
    assert [[0, 2, 2], [0, 2, COPY], [0, 2, COPY], [0, 2, 2]] in attention
    stored = node(split, f"{LAYER}.k_proj.weight").placements[:, 0].tolist()
    assert [1, 0, REPLICAS] in stored and [0, 0, REPLICAS] not in stored  # dp would halve heads
    assert len(node(split, "lm_head").placements) == len(node(whole, "lm_head").placements)


def test_blocks_of_an_option_give_the_block_of_the_result():
    """Attention over 8 heads of queries and 2 of keys, on each of four devices."""
    rng = np.random.default_rng(0)
    heads = {"queries": (5, 8, 3), "keys": (5, 2, 3), "values": (5, 2, 3)}
    arrays = {name: rng.normal(size=shape) for name, shape in heads.items()}

    def attended(queries, keys, values):
        repeated = queries.shape[1] // keys.shape[1]
        keys = keys.repeat(repeated, 1)
        values = values.repeat(repeated, 1)
        scores = np.exp(np.einsum("shd,thd->hst", queries, keys))
        return np.einsum("hst,thd->shd", scores / scores.sum(-1, keepdims=True), values)

    problem = a_problem(a_step(), FOUR)
    names = {"queries": f"{LAYER}.q_proj", "keys": f"{LAYER}.k_proj", "values": f"{LAYER}.v_proj"}
    shared = np.array([2, COPY])
    result = attended(**arrays)
    for device in range(4):
        blocks = {}
        for array, name in names.items():
            placements = np.array([2, 2]) if array == "queries" else shared
            layout, _ = written_ends(problem, name, placements, placements)
            last = layout.dims[-1]  # of 128 features in a head; here of whole heads
            heads_layout = Layout((type(last)("h", last.shards),))
            rows = heads_layout.positions(FOUR, (arrays[array].shape[1],), 0, device)
            blocks[array] = arrays[array][:, rows]
        assert blocks["keys"].shape[1] == 1 and blocks["queries"].shape[1] == 2
        own = result[:, 2 * device : 2 * device + 2]
        np.testing.assert_allclose(attended(**blocks), own, rtol=1e-12)


@pytest.mark.parametrize("mesh", [FOUR, Mesh(dp=2, tp=4)], ids=str)
@pytest.mark.parametrize("words", [16000, 16001])
def test_what_rules_say_is_read_again(mesh, words):
    problem = a_problem(a_step(batch=2, words=words), mesh)
    texts = set()
    for priced in problem.nodes:
        for placements in priced.placements[:, -1]:
            layout, _ = written_ends(problem, priced.name, placements, placements)
            assert not layout.axes or {*layout.axes} <= {*mesh.axes}
            texts.add(str(layout))
            assert _placements(problem, priced.name, layout) == placements.tolist()
    assert "(o 128)/spread(tp) i" in texts
    assert "b s (gd 128)/spread(tp) | copy(tp)" in texts
    assert ("o/balanced(tp) i" in texts) == (words == 16001)
    moved, used = map(np.array, ([0, 0], [0, COPY]))
    name = f"{LAYER}.k_proj.weight"
    if mesh == FOUR:
        ends = written_ends(problem, name, moved, used)
        assert list(map(str, ends)) == ["o_128/tp i", "(o 128)/spread(tp) i | copy(tp)"]


@pytest.mark.parametrize(
    ("mesh", "sizes", "machine"),
    [
        (FOUR, (2, 2), "gloo"),
        (Mesh(dp=2, tp=16), (4, 4), "h100"),  # nodes of 8: tp_0 is inside one, and between two
        (Mesh(dp=3, tp=6), (3, 2), "h100:2"),
    ],
)
def test_moves_along_a_whole_axis_have_its_prices(mesh, sizes, machine):
    profile = load_profile(machine)
    split = SubAxisMesh(mesh, (("tp", sizes),))
    prices = MovePrices(mesh, "bfloat16", profile)
    split_prices = MovePrices(split, "bfloat16", profile)
    assert prices.n_near_devices == split_prices.n_near_devices
    ways = np.array([*product((SUM, COPY, REPLICAS, 0, 1), repeat=len(mesh.axes))])
    origins = [mesh.position(split.origin(axis)) for axis in split.axes]
    shape = (96, 1536)
    for i, j in np.random.default_rng(0).integers(len(ways), size=(20, 2)):
        seconds = prices.planned_seconds(ways[i], ways[j], shape)
        ends = ways[i][origins], ways[j][origins]
        assert split_prices.planned_seconds(*ends, shape) == seconds
        [[bound]] = split_prices.bounds(ends[0][None], ends[1][None], shape)
        assert bound == pytest.approx(prices.bounds(ways[[i]], ways[[j]], shape)[0, 0])
    split_ways = np.array([*product((SUM, COPY, REPLICAS, 0, 1), repeat=len(split.axes))])
    for i, j in np.random.default_rng(1).integers(len(split_ways), size=(10, 2)):
        [[bound]] = split_prices.bounds(split_ways[[i]], split_ways[[j]], shape)
        seconds = split_prices.planned_seconds(split_ways[i], split_ways[j], shape)
        assert bound <= seconds * (1 + 1e-9)


def test_an_axis_is_not_split_in_the_middle_of_nodes():
    mesh = Mesh(tp=12)
    assert str(mesh_with_shared_heads(a_step(2, 12), mesh)) == "tp_0=2,tp_1=6"
    plan = suggest(a_step(2, 12), mesh, profile="h100:4", **ONE)
    assert plan.search.problem.mesh == mesh


@pytest.fixture(scope="module")
def found():
    fixed = {f"{LAYER}.attn": "b s h/tp"}
    return suggest(a_step(), FOUR, fixed=fixed, **ONE)


def test_a_suggestion_shares_heads(found):
    assert "Mesh(tp=4)" in str(found) and "tp_" not in str(found)
    assert "spread(tp)" in str(found.layouts[f"{LAYER}.k_proj"][1])
    assert "spread(tp)" in found.parameters.find(f"{LAYER}.k_proj.weight") + str(found.outputs)
    assert found.estimate().seconds == pytest.approx(found.seconds)
    assert "spread(tp)" in found.why(f"{LAYER}.v_proj")


def test_a_norm_of_shared_heads_is_told_that_its_input_differs():
    """Around it devices do the same work. A block does not tell how many heads there are."""
    attention = "b s (g r d), b t g d, b t (g d) -> b s (g r d)"
    projections = {"q": "(g r d)", "k": "(g d)", "v": "(g d)"}
    ops = [Op("first", "b s c, c -> b s c", ("x", "first.weight"), "pointwise", whole="c")]
    ops += [
        Op(each, f"b s c, {dims} c -> b s {dims}", ("first", f"{each}.weight"), whole="d")
        for each, dims in projections.items()
    ]
    ops += [
        Op("heads", "b s (g d) -> b s g d", ("k",), "linear", whole="d"),
        Op("norm", "b s g d, d -> b s g d", ("heads", "norm.weight"), "pointwise", whole="d"),
        Op("attention", attention, ("q", "norm", "v"), "attention", whole=("d", "t")),
        Op("out", "b s (g r d), c (g r d) -> b s c", ("attention", "out.weight"), whole="d"),
        Op("loss", "b s c ->", ("out",), "loss"),
    ]
    weights = {f"{each}.weight": f"{dims} c" for each, dims in projections.items()}
    weights |= {"first.weight": "c", "norm.weight": "d", "out.weight": "c (g r d)"}
    lengths = {"b": 1, "s": 64, "t": 64, "c": 64, "g": 2, "r": 4, "d": 8}
    step = TrainingStep(ops, lengths, {"x": "b s c"}, weights)
    problem = a_problem(step, FOUR)
    both = dict.fromkeys(("x", "first", "first.weight", "norm.weight", "loss"), [REPLICAS] * 2)
    both |= {"out": [SUM] * 2}
    both |= {"q": [2, 2], "q.weight": [0, 0], "attention": [2, 2], "out.weight": [1, 1]}
    both |= {"k.weight": [0, REPLICAS], "v.weight": [0, REPLICAS]}
    both |= {name: [2, COPY] for name in ("k", "v", "heads", "norm")}
    assignment = []
    for priced in problem.nodes:
        made = priced.placements[:, -1].tolist()
        if priced.name in both:
            assignment.append(made.index(both[priced.name]))
        else:  # the result of the first one is copied
            assignment.append(made.index([COPY, COPY]))
    search = StepSearch(problem, np.inf)
    search.offer(assignment)
    plan = Suggestion(search, assignment, 0.0, {})
    assert np.isfinite(plan.seconds)
    assert plan.inputs["norm"] == "b s g d | copy(tp)"
    assert plan.parameters.find("norm.weight") == "n"
    assert plan.estimate().layouts["norm"] == plan.layouts["norm"]


def test_sharing_heads_is_an_option_and_no_duty(found):
    free = suggest(a_step(), FOUR, **ONE)
    whole = suggest(a_step(), FOUR, fixed={f"{LAYER}.k_proj": "b s/tp k"}, **ONE)
    assert free.bound <= min(found.seconds, whole.seconds)


def test_shared_heads_can_be_fixed_and_priced(found):
    fixed = {f"{LAYER}.{each}_proj.weight": "(o 128)/spread(tp) i" for each in "kv"}
    stored = suggest(a_step(), FOUR, fixed=fixed, **ONE)
    assert stored.parameters.find(f"{LAYER}.k_proj.weight").startswith("(o 128)/spread(tp) i")
    rules = dict(found.parameters)
    with pytest.raises(XshardError, match="is not searched"):
        found.estimate({f"{LAYER}.k_proj.weight": "(o 64)/spread(tp) i"} | rules)


@pytest.mark.parametrize(
    ("heads", "mesh", "text"),
    [
        ((8, 4), FOUR, "(o 128)/spread(tp) i"),  # heads divide: o/tp
        ((2, 4), Mesh(dp=4, tp=2), "(o 128)/spread(dp) i"),  # not the last axis
        ((2, 4), Mesh(dp=4, tp=4), "(o 128)/spread(dp) i"),
        ((2, 4), FOUR, "o (i 1024)/spread(tp)"),  # no heads
    ],
)
def test_other_dims_and_axes_share_nothing(heads, mesh, text):
    with pytest.raises(XshardError, match=r"is not searched|no option has"):
        suggest(a_step(*heads), mesh, fixed={f"{LAYER}.k_proj.weight": text}, **ONE)


def test_tensor_parallelism_by_hand_shares_heads():
    problem = a_problem(a_step(), FOUR)
    flags = options_by_hand(problem, HAND["tensor + sequence parallel"])
    for name, expected in (("q_proj", {(2, 2)}), ("k_proj", {(2, COPY)}), ("attn", {(2, 2)})):
        number = problem.node_numbers[f"{LAYER}.{name}"]
        made = problem.nodes[number].placements[flags[number], -1]
        assert expected <= {tuple(row) for row in made.tolist()} <= {*expected, (2, COPY)}
