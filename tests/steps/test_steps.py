"""Every step on its own: its result, its values, its traffic and its errors."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from tests.cases import CASES
from tests.messages import refused
from xshard import Layout
from xshard.notation.parser import Shard
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Mask,
    Permute,
    ReduceScatter,
    Retag,
    Scale,
    Slice,
    Step,
    Transpose,
)
from xshard.steps.traffic import LinkSpan

MESH = xs.Mesh(a=2, b=3)
A = Shard(("a",))
B = Shard(("b",))
ZIGZAG = Shard(("a",), "zigzag")


def sharding(text, shape=(12, 6), mesh=MESH):
    return xs.Sharding(text, mesh, shape)


def exchange(text):
    return Exchange(Layout(text))


# step, layout before, layout after
STEPS = [
    (AllGather("n", (A,)), "n/b/a d", "n/b d"),
    (AllGather("n", (A, B)), "n/a/b d", "n d"),
    (AllGather("d", (A, B), ("b",)), "n d/a/b", "n d | copy(b)"),
    (AllGather("n", (ZIGZAG,), ("a",)), "n/zigzag(a) d/b", "n d/b | copy(a)"),
    (Slice((("n", (A, B)),)), "n d", "n/a/b d"),
    (Slice((("d", (ZIGZAG,)),)), "n d/b | copy(a)", "n d/b/zigzag(a)"),
    (Slice((("n", (Shard(("b",), "cyclic"),)),)), "n d | sum(a)", "n/cyclic(b) d | sum(a)"),
    (ReduceScatter("n", (A,)), "n d | sum(a,b)", "n/a d | sum(b)"),
    (ReduceScatter("d", (B, A)), "n d | sum(a,b)", "n d/b/a"),
    (ReduceScatter("n", (ZIGZAG,), "max"), "n d/b | max(a)", "n/zigzag(a) d/b"),
    (AllReduce(("a",)), "n/b d | sum(a)", "n/b d"),
    (AllReduce(("b",), "sum", ("b",)), "n d | sum(a,b)", "n d | sum(a) copy(b)"),
    (AllReduce(("a", "b"), "min"), "n d | min(a,b)", "n d"),
    (AllToAll("n", (A,), "d", (A,)), "n/a d", "n d/a"),
    (AllToAll("n", (A, B), "d", (B, A)), "n/a/b d", "n d/b/a"),
    (AllToAll("d", (A,), "n", (ZIGZAG,)), "n/b d/a", "n/b/zigzag(a) d"),
    (Permute(Layout("n/b/a d")), "n/a/b d", "n/b/a d"),
    (Permute(Layout("n d/a/b")), "n d/(b,a)", "n d/a/b"),
    (Embed("n", (A,)), "n/b/a d", "n/b d | sum(a)"),
    (Embed("d", (ZIGZAG,)), "n d/zigzag(a) | sum(b)", "n d | sum(a,b)"),
    (Mask(("a",)), "n d/b | copy(a)", "n d/b | sum(a)"),
    (Mask(("a", "b")), "n d", "n d | sum(a,b)"),
    (Retag(copies=("a",)), "n/b d", "n/b d | copy(a)"),
    (Retag(copies=("b",), replicas=("a",)), "n d | copy(a)", "n d | copy(b)"),
    (Scale(Fraction(3, 7)), "n/a d", "n/a d"),
    (Transpose(("d", "n")), "n/a d/b", "d/b n/a"),
    (Transpose(("d",)), "n d/zigzag(a) | sum(b)", "n d/zigzag(a) | sum(b)"),
    (exchange("n/b d/a"), "n/a d/b", "n/b d/a"),
    (exchange("n d/a/b"), "n/a/b d", "n d/a/b"),
    (exchange("n/zigzag(a) d | copy(b)"), "n/a d | sum(b)", "n/zigzag(a) d | copy(b)"),
    (exchange("n d/a | max(b)"), "n/a d | max(b)", "n d/a | max(b)"),
    (exchange("n d | sum(a,b)"), "n/a d", "n d | sum(a,b)"),
]


def test_every_step_is_exercised():
    steps = Step.registry.keys() - {"transfer"}  # between two meshes: tests/plans/test_transfer.py
    assert steps - {step.kind for step, *_ in STEPS} == set()
    assert steps - {step.kind for step, *_ in WRONG_USE} == {"scale"}  # applies everywhere


@pytest.mark.parametrize(
    ("step", "before", "after"), STEPS, ids=[f"{step} of {before}" for step, before, _ in STEPS]
)
def test_a_step_keeps_the_global_array(step, before, after):
    """Arbitrary addends keep the array that they stand for, and the input is not changed."""
    here = sharding(before)
    assert str(step.after(here).layout) == after
    blocks = oracle.random_blocks(here.layout, MESH, here.shape, np.random.default_rng(0), unit=7)
    given = [block.copy() for block in blocks]
    result = step.run(blocks, here)
    factor = step.factor if isinstance(step, Scale) else Fraction(1)
    value = (
        oracle.gather(blocks, here.layout, MESH, here.shape) * factor.numerator / factor.denominator
    )
    expected = value.transpose([here.layout.names.index(name) for name in Layout(after).names])
    assert np.array_equal(oracle.gather(result, Layout(after), MESH, expected.shape), expected)
    assert all(np.array_equal(a, b) for a, b in zip(blocks, given, strict=True))


@pytest.mark.parametrize(
    ("step", "before"),
    [
        (s, before)
        for s, before, _ in STEPS
        if "max" not in before and s.kind not in ("all_reduce", "scale")
    ],
    ids=str,
)
def test_it_receives_what_it_says(step, before):
    """The traffic is the number of elements that other devices contribute to the busiest device."""
    here = sharding(before)
    received = max(oracle.foreign_elements(step, here))
    traffic = step.traffic(here)
    assert traffic.received == received
    assert sum(hop.received for hop in traffic.hops) == received
    assert all(hop.messages > 0 for hop in traffic.hops)


def test_scale_is_local():
    """Multiples of 49: a rounded 1/49 would miss many of them."""
    step = Scale(Fraction(1, 49))
    before = sharding("n/a d")
    assert (step.traffic(before).received, step.traffic(before).hops) == (0, ())


def test_scale_is_exact():
    step = Scale(Fraction(1, 49))
    before = sharding("n/a d")
    wholes = np.arange(-40, 41)
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        (result,) = step.run([(49 * wholes).astype(dtype)], before)
        assert result.dtype == dtype and result.tolist() == wholes.tolist()


def test_all_reduce_receives_what_its_two_halves_do():
    before = sharding("n d | sum(a,b)")
    scatter = ReduceScatter("n", (A, B))
    gather = AllGather("n", (A, B))
    halves = scatter.traffic(before).received + gather.traffic(scatter.after(before)).received
    assert AllReduce(("a", "b")).traffic(before).received == halves == 2 * 72 * 5 // 6


@pytest.mark.parametrize(
    ("step", "before", "hops"),
    [
        # The 12 elements of a block cross the slow axis first; then 24 cross the fast one twice.
        (AllGather("n", (A, B)), "n/a/b d", [("a", 12), ("b", 48)]),
        # 72 elements shrink to 24 before they cross the slow axis.
        (ReduceScatter("n", (A, B)), "n d | sum(a,b)", [("b", 48), ("a", 12)]),
        (AllReduce(("a", "b")), "n d | sum(a,b)", [("b", 96), ("a", 24)]),
        # Three of the five peers differ along the slow axis; each sends 2 of 12 elements.
        (AllToAll("n", (A, B), "d", (A, B)), "n/a/b d", [("a", 6), ("b", 4)]),
        (Permute(Layout("n/b/a d")), "n/a/b d", [("a", 12)]),
        (exchange("n d"), "n/a/b d", [("a", 36), ("b", 24)]),
    ],
    ids=str,
)
def test_each_hop_is_charged_to_its_own_axis(step, before, hops):
    """`a` is the slow axis: collectives send as little as possible over it."""
    traffic = step.traffic(sharding(before), (LinkSpan("a", 2, 0), LinkSpan("b", 3, 1)))
    assert [(hop.axis, hop.received) for hop in traffic.hops] == hops


NOT_THE_SAME = " does not move the same axes between two dims"
# step, layout before, message
WRONG_USE = [
    (AllGather("n", (A,)), "n/a/b d", "'a' is not the innermost cut of dim 'n' in 'n/a/b d'"),
    (AllGather("n", (A,), ("b",)), "n/a d", "copies ('b',) are not among the axes ('a',)"),
    (AllGather("d", (A,)), "n d", "'a' is not the innermost cut of dim 'd' in 'n d'"),
    (Slice((("n", (A,)),)), "n d/a", "axis 'a' is not replicated in 'n d/a'"),
    (Slice((("n", (A,)),)), "n d | sum(a)", "axis 'a' is not replicated in 'n d | sum(a)'"),
    (Slice((("q", (A,)),)), "n d", "no dim 'q' in 'n d'"),
    (ReduceScatter("n", (A,)), "n d", "no sum(a) to reduce in 'n d'"),
    (ReduceScatter("n", (A,), "max"), "n d | sum(a)", "no max(a) to reduce in 'n d | sum(a)'"),
    (AllReduce(("a",)), "n d | copy(a)", "no sum(a) to reduce in 'n d | copy(a)'"),
    (AllReduce(()), "n d", "no sum() to reduce in 'n d'"),
    (AllToAll("n", (A,), "d", (B,)), "n/a d", "'all_to_all n/a -> d/b'" + NOT_THE_SAME),
    (AllToAll("n", (A,), "n", (A,)), "n/a d", "'all_to_all n/a -> n/a'" + NOT_THE_SAME),
    (Embed("n", (A,)), "n d/a", "'a' is not the innermost cut of dim 'n' in 'n d/a'"),
    (Mask(("a",)), "n/a d", "axis 'a' is not replicated in 'n/a d'"),
    (Retag(copies=("a",)), "n d | copy(a)", "'retag -> copy(a)' does not apply to 'n d | copy(a)'"),
    (Retag(replicas=("a",)), "n d", "'retag -> replica(a)' does not apply to 'n d'"),
    (Transpose(("n", "b")), "n d/a", "'transpose -> n b' does not apply to 'n d/a'"),
    (Transpose(("n",)), "n d", "'transpose -> n' does not apply to 'n d'"),
    (Permute(Layout("n d/a")), "n/a d", "no permutation of blocks leads from 'n/a d' to 'n d/a'"),
    (Permute(Layout("n d")), "n d | sum(a)", "a permutation keeps sums: 'n d | sum(a)' -> 'n d'"),
    (
        Slice((("n", (A,)), ("n", (B,)))),
        "n d",
        "'slice n/a n/b' cuts a dim twice: one cut may have several shards",
    ),
    (exchange("n d | max(a)"), "n/a d", "'n/a d' lacks the max of 'n d | max(a)'"),
]


@pytest.mark.parametrize(("step", "before", "message"), WRONG_USE, ids=str)
def test_wrong_use(step, before, message):
    with refused(xs.errors.PlanError, message):
        step.after(sharding(before))


def test_collectives_move_equal_pieces():
    """Seven rows do not divide by two; six columns do."""
    for step, before in (
        (AllGather("n", (A,)), "n/a d"),
        (AllToAll("n", (A,), "d", (A,)), "n/a d"),
        (AllToAll("d", (A,), "n", (A,)), "n d/a"),
        (ReduceScatter("n", (A,)), "n d | sum(a)"),
    ):
        with refused(xs.errors.PlanError, f"'a' cuts dim 'n' of '{before}' unevenly"):
            step.after(sharding(before, (7, 6)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_pairs_add_up_to_what_the_busiest_device_receives(case):
    for stage in case.plan().stages:
        received = Counter()
        for src, dst, elements in stage.step.pair_traffic(stage.before):
            assert src != dst and elements >= 0
            received[dst] += elements
        expected = stage.step.traffic(stage.before).received
        if stage.step.kind == "all_reduce":  # shares are rounded up, for each peer here
            assert expected <= max(received.values()) <= expected + stage.before.mesh.n_devices
        else:
            assert max(received.values(), default=0) == expected, stage.step


def test_pairs_between_two_meshes_are_the_messages_of_the_transfer():
    (stage,) = xs.plan(
        "n/a -> n/b", src_mesh=xs.Mesh(a=2), dst_mesh=xs.Mesh(b=4), shape=(8,)
    ).stages
    # Devices 0 and 1 keep rows 0-1 and hand on the others.
    assert stage.step.pair_traffic(stage.before) == ((0, 1, 2), (1, 2, 2), (1, 3, 2))
