"""What only JAX has: padding, the order of axes in ppermute, HLO. All runtimes share another table."""

import random
from collections import Counter

import jax
import numpy as np
import pytest

import xshard as xs
from jax_bridge.lower.exchange import tilings
from jax_bridge.lower.row_tables import VOID, pick_rows
from jax_bridge.lower.rules import RULES
from jax_bridge.lower.transports import Schedule, edge_colours, rounds
from jax_bridge.testing.stacked import collectives
from tests.jax_bridge.helpers import in_jax
from xshard.layout.layout import parse_expression
from xshard.plans.transfer import Transfer
from xshard.steps import Exchange, Step
from xshard.testing.plans import RUNTIMES, in_numpy, judge, plan_question

# Expression, mesh, shape, dtype. The mesh is never in the order that the expression names its axes in.
CASES = (
    ("n/a/b/c d -> n/c/a/b d", "a=2,b=2,c=2", (16, 2), "float32"),
    ("n/(c,a) d/b -> n/b d/(a,c)", "a=2,b=2,c=2", (8, 8), "float32"),
    ("n/zigzag(b,a) d -> n/(a,b) d", "a=2,b=4", (32, 2), "float32"),
    ("n/zigzag(b,a) d -> n d/zigzag(a,b)", "a=2,b=2", (16, 16), "float32"),
    ("n/cyclic(a) d/zigzag(b) -> n d | copy(a,b)", "a=2,b=2", (6, 8), "float32"),
    ("n d | sum(a,b) -> n/zigzag(b,a) d", "a=2,b=2", (16, 3), "float32"),
    ("n d | max(a,b) -> n/zigzag(b) d | copy(a)", "a=2,b=2", (8, 3), "float32"),
    ("n d/a -> n/b d | mean(a)", "a=4,b=2", (6, 9), "float32"),
    ("n/b d | max(a) -> n/a d/b", "a=2,b=3", (7, 5), "float32"),
    ("n/a/b d -> n d/b/a", "a=4,b=2", (9, 10), "float32"),
    ("n/zigzag(a) d -> n d/a", "a=8", (37, 9), "float32"),
    ("n/a d -> n d/a", "a=4", (8, 8), "int32"),
    ("n d | sum(a) -> n/a d", "a=4", (8, 2), "int64"),
    ("n/a -> n", "a=4", (8,), "bool"),
    ("n | sum(a) -> n/a", "a=4", (8,), "uint8"),
    ("n/a d -> n/cyclic(a) d", "a=4", (7, 2), "bool"),
    ("n | sum(a) -> n", "a=4", (8,), "complex64"),
    ("n/a -> n | sum(a)", "a=4", (8,), "float16"),
    ("n/a d -> n d/a", "a=4", (8, 4), "float8_e4m3fn"),
    ("n/a d -> d n/b", "a=4,b=2", (7, 3), "bfloat16"),
)
# What the planner has better steps for, and an exchange must do all the same; in nodes of three devices a
# replica in the receiver's is the sender.
EXCHANGES = (
    ("() | max(a) -> ()", "a=4", (), None),
    ("() | min(a) -> () | copy(a)", "a=3,b=2", (), None),
    ("n/b d | max(a) -> n d", "a=2,b=3", (7, 2), None),
    ("n d | sum(a) -> n d", "a=4", (5, 2), None),
    ("n d -> n d | sum(a)", "a=4", (5, 2), None),
    ("() -> () | sum(a)", "a=4", (), None),
    ("n/b d -> n/a d", "a=4,b=2", (8, 2), 3),
    ("n/b d/a -> n d", "a=2,b=4", (7, 3), 3),
    ("n/zigzag(b) d -> n d/a", "a=2,b=2", (9, 4), 3),
)


def exchange(expression, mesh, shape, node=None, dtype="float32") -> xs.Plan:
    src, dst = parse_expression(expression)
    return xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, dtype, (Exchange(dst, node),))


def test_every_plan_does_what_it_says() -> None:
    """Bytes where blocks are even. XLA:CPU widens 16-bit floats to add them; those that move are bits."""
    plans = [xs.plan(text, xs.Mesh.parse(mesh), *given) for text, mesh, *given in CASES]
    plans += [exchange(*case) for case in EXCHANGES]
    questions = [plan_question(plan, seed) for seed, plan in enumerate(plans)]
    (with_types,) = (runtime for runtime in RUNTIMES if runtime.mode == "vma")
    for question, answer in zip(questions, with_types.answers(questions, 300), strict=True):
        plan = question.plan
        verdict = judge(answer, in_numpy(question))
        assert verdict.agrees, f"{verdict}:\n{plan}"
        if not plan.source.is_even or not all(stage.after.is_even for stage in plan.stages):
            continue
        assert answer.forward_bytes == plan.bytes_received, plan
        widened = plan.dtype == "float16"  # backward, where its plan adds
        if (
            plan.src.is_linear
            and all(s.after.is_even for s in plan.backward.stages)
            and not widened
        ):
            assert answer.backward_bytes == plan.backward.bytes_received, plan.backward


def test_every_step_has_a_rule() -> None:
    assert set(RULES) == set(Step.registry.values()) - {Transfer}  # which is for two meshes


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
    for messages in rounds(step, before).all_rounds:
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
    for table in (np.array(rows, int) for rows in tables):
        found = jax.pmap(
            lambda x, t=table: pick_rows(x, 1, t, ("a",)), "a", devices=jax.devices()[:2]
        )(x)
        for device in (0, 1):
            expected = x[device][:, table[device]]
            expected[:, table[device] == VOID] = 0
            assert np.array_equal(found[device], expected), (table, found[device], expected)


SWAP = ("n/a d/b -> n/b d/a", "a=2,b=4", (8, 8))


def scheduled(*case) -> tuple[xs.Plan, Schedule]:
    plan = exchange(*case, dtype="int32")
    ((step, before, _),) = plan.stages
    return plan, rounds(step, before)


def kept(messages) -> int:
    return sum(m.src == m.dst for m in messages)


def test_what_devices_keep() -> None:
    """It takes part in rounds that become no more: half of the devices hold one of their two boxes, which
    makes two rounds where every device has a box, not three. Elsewhere it comes first."""
    _, schedule = scheduled(*SWAP)
    assert not schedule.local
    assert [len(messages) for messages in schedule.sent] == [8, 8]
    assert sum(map(kept, schedule.sent)) == 4
    for case in (
        ("n/a d -> n d/a", "a=4", (8, 8)),  # one round more
        ("n/a d | sum(b) -> n/b d", "a=2,b=4", (8, 4)),  # boxes are added
    ):
        _, schedule = scheduled(*case)
        assert schedule.local
        assert all(kept(messages) == len(messages) for messages in schedule.local)
        assert not any(map(kept, schedule.sent))


@pytest.mark.parametrize(
    ("case", "made_of_boxes"),
    [
        (SWAP, True),
        (("n/a d -> n d/a", "a=4", (8, 8)), True),
        (("n/a/b d -> n/b d/a", "a=2,b=2", (8, 8)), True),
        (("n/a d/b c -> n d c/(a,b)", "a=2,b=2", (4, 8, 16)), True),
        (("n/a d -> n d/a", "a=4", (10, 8)), False),  # blocks of 3 rows and of 2
        (("n/a -> n | sum(b)", "a=4,b=2", (8,)), False),  # half of the devices contribute nothing
        (
            ("h/a -> h/a:halo(2,1,zero)", "a=4", (16,)),
            False,
        ),  # boxes of 4 rows, 2, 1; rows beyond the ends
        (
            ("n/a d -> n d/a", "a=8", (8, 8)),
            False,
        ),  # eight orders: as many branches would be compiled
    ],
    ids=str,
)
def test_which_blocks_are_made_of_boxes(case, made_of_boxes) -> None:
    plan, schedule = scheduled(*case)
    assert (tilings(schedule.all_rounds, plan.target) is not None) == made_of_boxes
