"""docs/one_step.md: its tables are what the planner computes, and its arithmetic is right."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from xshard import Link, Mesh, Op, Profile, TrainingStep, suggest
from xshard.step.price.moves import MovePrices
from xshard.step.price.nodes import Gathering
from xshard.step.price.parts import BlockPart, StepPart
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import COPY, REPLICAS, SUM, layout_of

PAGE = Path(__file__).parents[2] / "docs/one_step.md"
GATHERED = {Gathering.PER_USE: "for each use", Gathering.PER_STEP: "once per step"}
DIMS = {"x": "bc", "up.weight": "fc", "up": "bf", "loss": ""}
N = 1000  # the length of each dim
MEGABYTES = 4 * N * N / 1e6  # of each array


class Plan(NamedTuple):
    """What dp does in x where it arrives, in the weight where it is stored, and in both operations."""

    x: int
    stored: int
    gathering: Gathering
    up: tuple[int, int, int]
    loss: tuple[int, int]


PLANS = {
    "data parallel": Plan(0, REPLICAS, Gathering.PER_STEP, (0, COPY, 0), (0, SUM)),
    "ZeRO-3": Plan(0, 0, Gathering.PER_USE, (0, COPY, 0), (0, SUM)),
    "ZeRO-1": Plan(0, 0, Gathering.PER_STEP, (0, COPY, 0), (0, SUM)),
    "tensor parallel": Plan(REPLICAS, 0, Gathering.PER_STEP, (COPY, 0, 1), (1, SUM)),
}


def step_of_two_operations():
    up = Op("up", "b c, f c -> b f", ("x", "up.weight"))
    loss = Op("loss", "b f ->", ("up",), kind="loss")
    lengths = {"b": N, "c": N, "f": N}
    return TrainingStep([up, loss], lengths, {"x": "b c"}, {"up.weight": "f c"}, dtype="float32")


def machine():
    rates = {"copy_bytes_per_s": 1e10, "flops_per_s": (("float32", 1e12),)}
    return Profile("round numbers", "made up", Link(0.0, 1e9), **rates)


@pytest.fixture(scope="module")
def problem():
    return problem_on(machine(), step_of_two_operations())


def problem_on(profile, step):
    """Every choice of a step on two devices, with all prices."""
    problem = StepProblem(step, MovePrices(Mesh(dp=2), "float32", profile))
    for edge in problem.edges:
        for i in range(len(problem.nodes[edge.source].placements)):
            for j in range(len(problem.nodes[edge.user].placements)):
                edge.raise_to_price(i, j)
    return problem


def shown(name, placement):
    """A layout in a cell of a table."""
    text = str(layout_of([placement], DIMS[name], ["dp"]))
    return f"`{text}`".replace("|", "\\|")


def amount(part, value):
    """A part of the cost with its unit, if it is not zero."""
    name, _, unit = part.name.rpartition("_")
    number = f"{value * 1e3:.2f} ms" if unit == "S" else f"{value / 1e6:.0f} MB"
    return [f"{name.lower().replace('_', ' ')} {number}"] if value else []


def option(problem, node, i):
    """An option of a node, and the parts of its cost."""
    operation = problem.step.by_name.get(node.name)
    if operation is not None:
        rule = operation.text_of(node.placements[i, :, 0]).replace("(x)", "(dp)")
        text = f"`{rule.replace('/x', '/dp')}`".replace("|", "\\|")
    else:
        text = shown(node.name, node.placements[i, -1, 0])
    if node.gathering is not None:
        text += f", {GATHERED[node.gathering[i]]}"
    costs = [amount(part, node.costs[i, part]) for part in (*BlockPart, *StepPart)]
    return text, ", ".join(cost for each in costs for cost in each) or "nothing"


def test_every_option_of_each_node_is_there(problem):
    rows = []
    for node in problem.nodes:
        for i in range(len(node.placements)):
            text, costs = option(problem, node, i)
            rows.append(f"| `{node.name}` | {text} | {costs} |")
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)


def test_every_edge_with_its_seconds_is_there(problem):
    for edge in problem.edges:
        assert not edge.banned.any()
        source = problem.nodes[edge.source].name
        user = problem.nodes[edge.user].name
        columns = [shown(source, placement) for (placement,) in edge.used_layouts]
        rows = [f"| `{source}` to `{user}` | {' | '.join(columns)} |"]
        rows.append("|---" * (1 + len(columns)) + "|")
        made = [*dict.fromkeys(placement for (placement,) in edge.made_layouts.tolist())]
        for row, placement in enumerate(made):
            seconds = edge.moves.seconds[:, row].T * 1e3
            cells = [f"{forward:.0f} + {backward:.0f}" for forward, backward in seconds]
            rows.append(f"| {shown(source, placement)} | {' | '.join(cells)} |")
        assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)


def assignment_of(problem, plan):
    x, weight, up, loss = problem.nodes
    stored = (weight.placements[:, -1, 0] == plan.stored) & (weight.gathering == plan.gathering)
    return [
        x.placements[:, 0, 0].tolist().index(plan.x),
        stored.tolist().index(True),
        up.placements[:, :, 0].tolist().index([*plan.up]),
        loss.placements[:, :, 0].tolist().index([*plan.loss]),
    ]


def test_every_sum_is_there(problem):
    rows = []
    for name, plan in PLANS.items():
        vector = problem.vector(assignment_of(problem, plan))
        seconds = float(problem.cost(1.0).total(vector))
        n_bytes = float(problem.cost(1.0).largest_limit_share(vector))
        parts = [part for part in BlockPart if part.name.endswith("_S")]
        parts = [part for part in parts if "ACTIVATIONS" not in part.name] + [StepPart.OPTIMIZER_S]
        cells = [f"{vector[part] * 1e3:.2f}" for part in parts]
        total = f"**{seconds * 1e3:.2f} ms** | {n_bytes / 1e6:.0f} MB"
        rows.append(f"| {name} | {' | '.join(cells)} | {total} |")
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)


def test_the_arithmetic_of_the_page(problem):
    """The sentences of the page, in numbers: they are the code's."""
    forward = 2 * N**3 / (machine().layer_efficiency * 1e12)
    assert forward == pytest.approx(2.78e-3, rel=1e-3)
    read = 4 * MEGABYTES * 1e6 / 2e10
    assert read == pytest.approx(0.8e-3)
    vectors = {name: problem.vector(assignment_of(problem, plan)) for name, plan in PLANS.items()}
    seconds = {name: float(problem.cost(1.0).total(vector)) for name, vector in vectors.items()}
    computing = forward / 2 + read / 2
    backward = 2 * forward / 2 + read / 2
    optimizer = 7 * MEGABYTES * 1e6 / 2e10
    assert seconds["tensor parallel"] == pytest.approx(computing + backward + optimizer / 2)
    assert seconds["data parallel"] == pytest.approx(computing + backward + 4e-3 + optimizer)
    in_zero_1 = computing + 2e-3 + backward + 2e-3
    assert seconds["ZeRO-1"] == pytest.approx(in_zero_1 + optimizer / 2)
    _, memory = problem.summary(vectors["tensor parallel"])
    assert [n / 1e6 for n in memory.values()] == [
        2,
        0,
        4,
        2,
        2,
        0,
    ]  # the logits, and their gradient
    _, memory = problem.summary(vectors["data parallel"])
    assert [n / 1e6 for n in memory.values()] == [4, 8, 8, 0, 0, 0]  # a gradient, and its sum


def parts_on(profile, *, n_kernels=1):
    """The seconds of the parts of a step by ZeRO-1 on a machine, in ms."""
    step = step_of_two_operations()
    up = replace(step.ops[0], kernels=n_kernels, calls=n_kernels)
    step = TrainingStep(
        [up, step.ops[1]], step.lengths, step.inputs, step.parameters, dtype="float32"
    )
    problem = problem_on(profile, step)
    vector = problem.vector(assignment_of(problem, PLANS["ZeRO-1"]))
    return {part: vector[part] * 1e3 for part in (*BlockPart, StepPart.OPTIMIZER_S)}


def test_layers_that_reach_the_measured_rate_compute_as_fast_as_it():
    peak, measured = machine(), replace(machine(), layer_efficiency=1.0)
    part = BlockPart.FORWARD_COMPUTING_S
    product = 2 * N**3 / 2 / 1e12 * 1e3  # on each of two devices
    assert parts_on(peak)[part] - parts_on(measured)[part] == pytest.approx(
        product * (1 / 0.72 - 1)
    )


def test_moves_of_a_step_take_longer_by_the_slowdown():
    usual, slow = parts_on(machine()), parts_on(replace(machine(), step_slowdown=1.5))
    moving = [BlockPart.FORWARD_PARAMETERS_S, BlockPart.GRADIENTS_S]
    assert all(usual[part] > 0 for part in moving)
    for part, seconds in usual.items():
        assert slow[part] == pytest.approx(seconds * (1.5 if part in moving else 1))


def test_a_host_that_calls_each_operation_runs_a_kernel_for_each():
    """Four kernels in the place of one: between them three arrays are written and read, twice backward."""
    eager = replace(machine(), call_s=1e-6)
    one, four = parts_on(eager), parts_on(eager, n_kernels=4)
    between = 3 * 2 * MEGABYTES / 2 * 1e6 / 2e10 * 1e3  # blocks of half an array
    calls = 3 * 1e-3
    forward, backward = BlockPart.FORWARD_COMPUTING_S, BlockPart.BACKWARD_COMPUTING_S
    assert four[forward] - one[forward] == pytest.approx(between + calls)
    assert four[backward] - one[backward] == pytest.approx(2 * (between + calls))
    # AdamW accesses memory 20 times, and 7 times in one kernel; it calls twice a parameter.
    compiled = parts_on(machine())
    optimizer = (20 - 7) * MEGABYTES / 2 * 1e6 / 2e10 * 1e3 + 2 * 1e-3
    assert one[StepPart.OPTIMIZER_S] - compiled[StepPart.OPTIMIZER_S] == pytest.approx(optimizer)
    # And 7 times for each move of a parameter or of its gradient.
    for part in (BlockPart.FORWARD_PARAMETERS_S, BlockPart.GRADIENTS_S):
        assert one[part] - compiled[part] == pytest.approx(7 * 1e-3)
    # What a compiler fuses is one kernel.
    assert parts_on(machine(), n_kernels=4) == compiled


def test_a_compiled_step_is_called_once():
    """JAX compiles a step: what a host takes for an operation of eager torch is not charged."""
    step = step_of_two_operations()
    anywhere = TrainingStep(
        step.ops, step.lengths, step.inputs, step.parameters, dtype="float32", moves_anywhere=True
    )
    how = {"mesh": Mesh(dp=2), "micro_batches": 1}
    eager = replace(machine(), call_s=1e-3)
    assert suggest(step, profile=eager, **how).seconds > 6e-3
    compiled = [suggest(anywhere, profile=each, **how).seconds for each in (eager, machine())]
    assert compiled[0] == compiled[1]


def test_the_best_plan_is_the_one_that_the_page_says():
    plan = suggest(step_of_two_operations(), Mesh(dp=2), profile=machine(), micro_batches=1)
    assert plan.seconds == pytest.approx(5.67e-3, rel=1e-3)
    assert plan.gap < 1e-4
    assert math.prod(len(node.placements) for node in plan.search.problem.nodes) == 216
