"""Dims that do not divide: heads and nearly even rows are options where even blocks are none."""

import numpy as np
import pytest

from xshard import Mesh, Op, TrainingStep, suggest
from xshard.cost.machine import load_profile
from xshard.errors import XshardError
from xshard.step.price.moves import MovePrices
from xshard.step.price.nodes import _devices_that_split
from xshard.step.price.problem import StepProblem

# 6 heads of 16 features, and 103 words; the batch has 12 rows.
LENGTHS = {"b": 12, "s": 7, "c": 36, "f": 96, "h": 6, "k": 16, "v": 103}
PROJECTIONS = [
    Op("query", "b s c, f c -> b s f", ("x", "query.weight")),
    Op("heads", "b s (h k) -> b s (h k)", ("query",), kind="pointwise", whole="k"),
    Op("out", "b s f, c f -> b s c", ("heads", "out.weight")),
    Op("words", "b s c, v c -> b s v", ("out", "words.weight")),
    Op("loss", "b s v -> ", ("words",), kind="loss"),
]
PARAMETERS = {"query.weight": "f c", "out.weight": "c f", "words.weight": "v c"}


def a_step(**lengths):
    return TrainingStep(
        PROJECTIONS, LENGTHS | lengths, inputs={"x": "b s c"}, parameters=PARAMETERS
    )


def a_problem(step, mesh):
    return StepProblem(step.with_shares, MovePrices(mesh, "bfloat16", load_profile("h100")))


def layouts(problem, name):
    """The distinct layouts of an array's own node, as placements of one axis."""
    node = problem.nodes[problem.node_numbers[name]]
    return sorted({int(placement) for placement in node.placements[:, -1, 0]})


def test_dims_that_one_rule_shards_have_the_same_units():
    units = a_step().units
    assert units["query.weight", 0] == units["query", 2] == units["out.weight", 1] == 6
    assert units["words.weight", 0] == units["words", 2] == 103
    assert ("x", 0) not in units and ("x", 1) not in units  # the batch decides how long they are


def test_uneven_blocks_are_options_only_where_units_do_not_divide():
    uneven = a_problem(a_step(), Mesh(tp=4))
    even = a_problem(a_step(), Mesh(tp=3))
    # Rows of 96 divide by 4, too: 24 each. Whole heads are the dim's second number, 0 + 2.
    assert layouts(uneven, "query.weight") == [-1, 0, 1, 2]
    assert layouts(uneven, "words.weight") == [-1, 1, 2]
    assert layouts(uneven, "heads") == [-1, 0, 5]
    assert layouts(even, "query.weight") == [-1, 0, 1]
    assert layouts(even, "heads") == [-1, 0, 2]
    assert layouts(a_problem(a_step(), Mesh(tp=8)), "heads") == [-1]  # fewer heads than devices


def test_the_largest_block_is_priced():
    problem = a_problem(a_step(), Mesh(tp=4))
    node = problem.nodes[problem.node_numbers["query.weight"]]
    stored = problem.block_bytes("query.weight", np.array([[0], [2]]), 1)
    assert stored.tolist() == [24 * 36, 2 * 16 * 36]
    assert len(node.placements) == 8
    query = problem.nodes[problem.node_numbers["query"]].placements
    devices = _devices_that_split(problem, problem.step.by_name["query"], query)
    by_result = dict(zip(query[:, -1, 0].tolist(), devices.tolist(), strict=True))
    assert (by_result[2], by_result[2 + 3]) == (4, 3)  # the slowest device has 2 of 6 heads


def test_rules_of_uneven_blocks_are_read_again():
    fixed = {"heads": "b s (h 16)/balanced(tp)", "words": "b s v/balanced(tp)"}
    plan = suggest(a_step(), Mesh(tp=4), fixed=fixed, micro_batches=1, overlap=0.0, gap=0.9)
    assert plan.layouts["words"][0].dims[-1].shards[0].order == "balanced"
    assert plan.estimate().seconds == pytest.approx(plan.seconds)
    assert "balanced(tp)" in plan.why("words")
    rules = str(dict(plan.inputs) | dict(plan.outputs))
    assert "sizes(tp,2,2,1,1)" in rules


def test_rows_that_no_option_has_are_refused():
    with pytest.raises(XshardError, match=r"no option has 'b s \(h 16\)/tp'|is not searched"):
        suggest(a_step(), Mesh(tp=4), fixed={"heads": "b s (h 16)/tp"}, micro_batches=1)
