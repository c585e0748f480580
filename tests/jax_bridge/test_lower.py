"""Plans in JAX: what its three modes make of them, and what the compiled program moves.

The table of cases that all runtimes share is in `test_case_table.py`; here is what only JAX has:
padding, the order of axes in ppermute, and HLO.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

import xshard as xs
from jax_bridge.lower.exchange import tiled, tilings
from jax_bridge.lower.rules import RULES
from jax_bridge.lower.schedule import Schedule, edge_colours, rounds
from jax_bridge.testing.stacked import collectives
from tests.cases import one_of_each
from tests.jax_bridge.helpers import in_jax
from xshard.layout.layout import parse_expression
from xshard.plans.transfer import Transfer
from xshard.steps import Exchange, Step
from xshard.steps.exchange.messages import messages_to
from xshard.testing.plans import RUNTIMES, answer_in_numpy, judge, plan_question

MODES = {runtime.mode: runtime for runtime in RUNTIMES if runtime.mode}

# Expression, mesh, shape. The mesh is never in the order that the expression names its axes in.
CASES = (
    ("n/a/b/c d -> n/c/a/b d", "a=2,b=2,c=2", (16, 2)),
    ("n/(c,a) d/b -> n/b d/(a,c)", "a=2,b=2,c=2", (8, 8)),
    ("n/zigzag(b,a) d -> n/(a,b) d", "a=2,b=4", (32, 2)),
    ("n/zigzag(b,a) d -> n d/zigzag(a,b)", "a=2,b=2", (16, 16)),
    ("n/cyclic(a) d/zigzag(b) -> n d | copy(a,b)", "a=2,b=2", (6, 8)),
    ("n d | sum(a,b) -> n/zigzag(b,a) d", "a=2,b=2", (16, 3)),
    ("n d | max(a,b) -> n/zigzag(b) d | copy(a)", "a=2,b=2", (8, 3)),
    ("n/b d | mean(a) -> n d/a", "a=4,b=2", (4, 8)),
    ("n d/a -> n/b d | mean(a)", "a=4,b=2", (6, 9)),
    ("n | mean(a,b) -> n/a", "a=5,b=1", (50,)),
    ("n/b d | min(a) -> n d", "a=2,b=3", (6, 3)),
    ("n/b d | max(a) -> n/a d/b", "a=2,b=3", (7, 5)),
    ("() | max(a) -> () | copy(a)", "a=8", ()),
    ("() -> () | sum(a)", "a=8", ()),
    ("n/a/b d -> n d/b/a", "a=4,b=2", (9, 10)),
    ("n/balanced(a) d -> n/cyclic(a) d", "a=8", (21, 2)),
    ("n/zigzag(a) d -> n d/a", "a=8", (37, 9)),
)
INTEGERS = (
    ("n/a d -> n d/a", "a=4", (8, 8), "int32"),
    ("n d | sum(a) -> n/a d", "a=4", (8, 2), "int64"),
    ("n/a -> n", "a=4", (8,), "bool"),
    ("n | sum(a) -> n/a", "a=4", (8,), "uint8"),
    ("n/a d -> n/cyclic(a) d", "a=4", (7, 2), "bool"),
    ("n | sum(a) -> n", "a=4", (8,), "complex64"),
    ("n/a -> n | sum(a)", "a=4", (8,), "float16"),
    ("n/a d -> n/b d", "a=4,b=2", (8, 2), "float16"),
    ("n/a d -> n d/a", "a=4", (8, 4), "float8_e4m3fn"),
    ("n/a d -> d n/b", "a=4,b=2", (7, 3), "bfloat16"),
    ("n/a d -> n d", "a=4", (8, 4), "bfloat16"),
)
# What the planner has better steps for, and an exchange must do all the same.
EXCHANGES = (
    ("() | max(a) -> ()", "a=4", ()),
    ("() | min(a) -> () | copy(a)", "a=3,b=2", ()),
    ("n/b d | max(a) -> n d", "a=2,b=3", (7, 2)),
    ("n d | sum(a) -> n d", "a=4", (5, 2)),
    ("n d -> n d | sum(a)", "a=4", (5, 2)),
    ("() -> () | sum(a)", "a=4", ()),
)
# Replicas in the receiver's node of three devices are the senders.
NEAR = (
    ("n/b d -> n/a d", "a=4,b=2", (8, 2)),
    ("n/b d/a -> n d", "a=2,b=4", (7, 3)),
    ("n/zigzag(b) d -> n d/a", "a=2,b=2", (9, 4)),
)


def plans():
    for expression, mesh, shape in CASES:
        yield xs.plan(expression, xs.Mesh.parse(mesh), shape)
    for expression, mesh, shape, dtype in INTEGERS:
        yield xs.plan(expression, xs.Mesh.parse(mesh), shape, dtype)
    for expression, mesh, shape in EXCHANGES:
        src, dst = parse_expression(expression)
        yield xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, "float32", (Exchange(dst),))
    for expression, mesh, shape in NEAR:
        src, dst = parse_expression(expression)
        yield xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, "float32", (Exchange(dst, 3),))


QUESTIONS = [plan_question(plan, seed) for seed, plan in enumerate(plans())]


@pytest.fixture(scope="module")
def answers():
    """The answers to every question, by mode; None if a mode does not run it."""
    by_mode = {}
    plans = {i: question.plan for i, question in enumerate(QUESTIONS)}
    # Without types `shard_map` runs the rules that it runs with types, and `pmap` too: one case of each kind.
    kept = one_of_each(plans)
    for mode, runtime in MODES.items():
        taken = [runtime.takes(plan.mesh) and (mode == "vma" or i in kept) for i, plan in plans.items()]
        answers = iter(runtime.answers(list(itertools.compress(QUESTIONS, taken)), 300))
        by_mode[mode] = [next(answers) if is_taken else None for is_taken in taken]
    return by_mode


@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_those_of_the_reference(answers, mode) -> None:
    wrong = []
    for question, answer in zip(QUESTIONS, answers[mode], strict=True):
        if answer is not None:
            verdict = judge(answer, answer_in_numpy(question))
            if not verdict.agrees:
                wrong.append(f"{verdict}:\n{question.plan}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("mode", MODES)
def test_the_program_moves_what_the_plan_says(answers, mode) -> None:
    """Exactly, where blocks are even. XLA:CPU widens 16-bit floats to add them; those that move are bits."""
    for question, answer in zip(QUESTIONS, answers[mode], strict=True):
        plan = question.plan
        steps = [stage.after.is_even for stage in plan.stages]
        if answer is None or not plan.source.is_even or not all(steps):
            continue
        assert answer.forward_bytes == plan.bytes_received, plan
        widened = plan.dtype == "float16"  # backward, where its plan adds
        if plan.src.is_linear and all(s.after.is_even for s in plan.backward.stages) and not widened:
            assert answer.backward_bytes == plan.backward.bytes_received, plan.backward


def test_every_step_has_a_rule_and_runs_here() -> None:
    steps = set(Step.registry.values()) - {Transfer}  # between two meshes torch carries out the plan
    assert not (missing := steps - set(RULES)), f"no rule in jax_bridge for {missing}"
    run = {type(step) for question in QUESTIONS for step in question.plan.steps}
    run |= {type(s) for q in QUESTIONS if q.plan.src.is_linear for s in q.plan.backward.steps}
    assert run == set(RULES), f"no case here runs {set(RULES) - run}"


def test_uneven_rounds_cost_little_more_than_the_plan() -> None:
    """A round is as long as its longest message: on arrays of some size hardly longer than the others."""
    plan = xs.plan("n/a d -> n d/a", xs.Mesh(a=8), (1001, 999))
    (stage,) = plan.stages
    sent = rounds(stage.step, stage.before).sent
    padded = sum(np.prod(np.max([m.shape for m in r], axis=0)) for r in sent)
    assert padded * plan.itemsize <= 1.01 * plan.bytes_received


def test_rounds_of_very_different_messages_are_not_padded() -> None:
    """Blocks of thirds onto fifths: messages of one shape go together, in more rounds than the fewest."""
    plan = xs.plan("n/a d/b -> n/b d/a", xs.Mesh(a=3, b=5), (90, 90))
    ((step, before, _),) = plan.stages
    for messages in rounds(step, before).every:
        assert len({m.shape for m in messages}) == 1


def test_collectives_are_read_in_every_spelling_of_their_groups() -> None:
    for groups in (
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        "replica_groups=[2,4]<=[8]",
        "replica_groups=mesh['a'=2,'b'=4] {'b'}",
        "replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}",
        "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
    ):
        line = f"  %x = f32[8]{{0}} all-gather(%y), channel_id=1, {groups}, dimensions={{0}}"
        (found,) = collectives(line, 8)
        assert found == ("all-gather", (24,) * 8)
    pairs = "  %x = bf16[4]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0},{2,2}}"
    assert [*collectives(pairs, 3)] == [("collective-permute", (8, 8, 0))]
    with pytest.raises(ValueError, match="cannot read"):
        [*collectives("  %x = f32[8]{0} all-gather(%y), replica_groups=new", 8)]


@pytest.mark.parametrize("n", range(1, 13))
def test_rounds_are_as_few_as_the_busiest_device_has_messages(n) -> None:
    draw = random.Random(n)
    for density in (0.2, 0.5, 0.7, 0.9) * 5:
        edges = [(s, d) for s in range(n) for d in range(n) if draw.random() < density]
        draw.shuffle(edges)
        colours = edge_colours(edges)
        for end in (0, 1):
            together = Counter((e[end], c) for e, c in zip(edges, colours, strict=True))
            assert max(together.values(), default=1) == 1
        degrees = [Counter(e[end] for e in edges).values() for end in (0, 1)]
        assert len(set(colours)) == max((max(d, default=0) for d in degrees), default=0)


@in_jax
def test_picked_rows() -> None:
    """Against numpy, for tables with and without chunks, voids, and rows that all devices share."""
    import jax

    from jax_bridge.lower.row_tables import VOID, pick

    tables = [
        [[4, 5, 6, 7], [0, 1, 2, 3]],
        [[0, 1, 6, 7], [2, 3, 4, 5]],
        [[VOID, VOID, 0, 1], [2, 3, VOID, VOID]],
        [[VOID, 0, 1, 2], [7, VOID, VOID, 0]],
        [[7, 6, 5, 4], [7, 6, 5, 4]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[0, 0, 0, 0], [VOID] * 4],
        [[VOID] * 4, [VOID] * 4],
        [[0, 1, 2, 3, 4, 5, 6, 7]] * 2,
        [[], []],
    ]
    x = np.arange(1, 2 * 3 * 8 * 2 + 1).reshape(2, 3, 8, 2)
    for table in map(np.array, tables):
        table = table.astype(int)
        found = jax.pmap(lambda x, t=table: pick(x, 1, t, ("a",)), "a", devices=jax.devices()[:2])(x)
        for device in (0, 1):
            expected = x[device][:, table[device]]
            expected[:, table[device] == VOID] = 0
            assert np.array_equal(found[device], expected), (table, found[device], expected)


SWAP = ("n/a d/b -> n/b d/a", "a=2,b=4", (8, 8))


def scheduled(expression: str, mesh: str, shape: tuple[int, ...]) -> tuple[xs.Plan, Schedule]:
    src, dst = parse_expression(expression)
    plan = xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, "int32", (Exchange(dst),))
    ((step, before, _),) = plan.stages
    return plan, rounds(step, before)


def kept(messages) -> int:
    return sum(m.src == m.dst for m in messages)


def test_what_devices_keep_takes_part_in_rounds_that_become_no_more() -> None:
    """Half of the devices hold one of their two boxes: two rounds where every device has a box, not three."""
    _, schedule = scheduled(*SWAP)
    assert not schedule.local
    assert [len(messages) for messages in schedule.sent] == [8, 8]
    assert sum(map(kept, schedule.sent)) == 4


@pytest.mark.parametrize(
    "case",
    [("n/a d -> n d/a", "a=4", (8, 8)), ("n/a d | sum(b) -> n/b d", "a=2,b=4", (8, 4))],
    ids=["one round more", "boxes are added"],
)
def test_what_devices_keep_comes_first_elsewhere(case) -> None:
    _, schedule = scheduled(*case)
    assert schedule.local
    assert all(kept(messages) == len(messages) for messages in schedule.local)
    assert not any(map(kept, schedule.sent))


@pytest.mark.parametrize(
    "case",
    [
        SWAP,
        ("n/a d -> n d/a", "a=4", (8, 8)),
        ("n/a/b d -> n/b d/a", "a=2,b=2", (8, 8)),
        ("n/a d/b c -> n d c/(a,b)", "a=2,b=2", (4, 8, 16)),
    ],
    ids=lambda case: case[0],
)
@in_jax
def test_blocks_are_made_of_boxes(case) -> None:
    plan, schedule = scheduled(*case)
    every = schedule.every
    inputs = xs.reference.scatter(np.arange(np.prod(plan.shape)).reshape(plan.shape), plan.src, plan.mesh)
    expected = xs.reference.run(plan, inputs)
    found = tilings(every, plan.target)
    assert found is not None
    for device, tiling in enumerate(found):
        boxes = {}
        for message in messages_to(plan.source, plan.target, device):
            (r,) = [r for r, messages in enumerate(every) if message in messages]
            boxes[r] = inputs[message.src][message.src_index()]
        assert np.array_equal(tiled(tiling, boxes.__getitem__), expected[device])


@pytest.mark.parametrize(
    "case",
    [
        ("n/a d -> n d/a", "a=4", (10, 8)),  # blocks of 3 rows and of 2
        ("n/a -> n | sum(b)", "a=4,b=2", (8,)),  # half of the devices contribute nothing
        ("h/a -> h/a:halo(2,1,zero)", "a=4", (16,)),  # boxes of 4 rows, 2 and 1, and rows beyond the ends
        ("n/a d -> n d/a", "a=8", (8, 8)),  # eight orders: as many branches would be compiled
    ],
    ids=lambda case: case[0],
)
def test_what_leaves_gaps_or_has_many_orders_is_not_made_of_boxes_alone(case) -> None:
    plan, schedule = scheduled(*case)
    assert tilings(schedule.every, plan.target) is None
