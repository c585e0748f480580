"""Sums in the order of ranks, in plans: every path has the same bits, and the plan says what it costs."""

import json
from dataclasses import replace

import pytest

import xshard as xs
from tests.reductions import bits, random_reductions
from xshard import reference
from xshard.cost.machine import load_profile, resolve_profile, use_profile, with_addends
from xshard.errors import PlanError, ProfileError, XshardError
from xshard.steps import AllReduce

MESH = xs.Mesh(a=2, b=3)


def test_every_path_has_the_bits_of_the_sum_in_the_order_of_ranks() -> None:
    differs_when_free = 0
    for reduction in random_reductions(60):
        paths = {
            "search": [reduction.plan()],
            "axes in another order": [reduction.other_order],
            "direct": [reduction.direct],
            "scattered and gathered": reduction.gathered,
        }
        if reduction.kind == "sum":
            paths["gradient of copies"] = [reduction.adjoint.backward]
        for name, plans in paths.items():
            blocks = reduction.blocks
            for plan in plans:
                blocks = reference.run(plan, blocks)
            for found, wanted in zip(blocks, reduction.wanted, strict=True):
                assert bits(found) == bits(wanted), (name, reduction)
        # With the axes in turn, as a free plan may add, the bits are others: the test can fail.
        if len(reduction.summed) == 2 and reduction.mesh.size("b") > 1 and reduction.dst == "n d":
            src = f"n d | {reduction.kind}"
            in_turn = (f"{src}(a,b) -> n d | {reduction.kind}(a)", f"{src}(a) -> n d")
            blocks = reduction.blocks
            for text in in_turn:
                blocks = reference.run(reduction.plan(text), blocks)
            pairs = zip(blocks, reduction.wanted, strict=True)
            differs_when_free += any(bits(found) != bits(wanted) for found, wanted in pairs)
    assert differs_when_free


def test_rows_travel_to_who_adds_them() -> None:
    """Without an all-reduce: large blocks travel as often, small ones in fewer messages."""
    move = ("n d | sum(a) -> n d", xs.Mesh(a=8), (4096, 4096))
    free = xs.plan(*move)
    ordered = xs.plan(*move, addends="ranks")
    assert [str(step) for step in ordered.steps] == ["exchange", "all_gather n/a"]
    assert ordered.bytes_received == free.bytes_received == ordered.bytes_lower_bound
    assert "priced for h100:ranks" in str(ordered)
    short = xs.plan("n | sum(a) -> n", xs.Mesh(a=8), (7,), addends="ranks")
    assert short.bytes_received == 7 * 7 * 4  # the blocks of seven others


def test_gradients_and_files_of_plans_keep_the_order() -> None:
    plan = xs.plan("n/a d -> n d | copy(a)", MESH, (12, 6), addends="ranks")
    assert [step.kind for step in plan.backward.steps] == ["exchange"]
    assert xs.Plan.from_json(plan.to_json()) == plan
    other_machine = plan.from_json(plan.to_json(), "a100")
    assert other_machine.profile.adds_in_order
    data = json.loads(plan.backward.to_json())
    data["steps"] = [{"step": "reduce_scatter", "dim": "n", "shards": ["a"], "op": "sum"}]
    with pytest.raises(PlanError, match=r"adds in an order of its own, 'h100:ranks' in that of"):
        xs.Plan.from_json(json.dumps(data))
    sums = xs.plan("n | sum(a) -> n", MESH, (4,), addends="ranks")
    with pytest.raises(PlanError, match="adds in an order of its own"):
        replace(sums, steps=(AllReduce(("a",)),))


def test_contractions_add_in_order_and_never_in_rounds() -> None:
    sizes = {"b": 4096, "d": 4096, "f": 4096}
    text = "b d/a, d/a f -> b/a f"
    free = xs.plan(text, xs.Mesh(a=4), sizes=sizes, overlap="always")
    ordered = xs.plan(text, xs.Mesh(a=4), sizes=sizes, overlap="always", addends="ranks")
    assert [part.ring is not None for part in free.parts] == [True]
    assert [part.ring for part in ordered.parts] == [None]
    kinds = {step.kind for move in (*ordered.moves, ordered.result) for step in move.steps}
    assert not kinds & {"all_reduce", "reduce_scatter"}


def test_two_meshes_add_addends_in_one_order() -> None:
    """Reduced before the transfer or by those who receive: the bits are those of one mesh."""
    for reduction in random_reductions(12, seed=3):
        ends = {"src_mesh": reduction.mesh, "dst_mesh": xs.Mesh(c=3), "dst_devices": (6, 7, 8)}
        layouts = reduction.text_of("n d/c")
        plan = xs.plan(
            layouts, shape=reduction.shape, dtype=reduction.dtype, addends="ranks", **ends
        )
        found = reference.run(plan, reduction.blocks)
        wanted = reference.scatter(reduction.total, "n d/c", xs.Mesh(c=3))
        assert list(map(bits, found)) == list(map(bits, wanted)), reduction


def test_any_profile_may_add_in_order() -> None:
    assert load_profile("h100:4:ranks").node_devices == 4
    assert load_profile("h100:ranks") == with_addends(load_profile("h100"), "ranks")
    assert with_addends("auto", "ranks") == with_addends("auto:ranks", "ranks") == "auto:ranks"
    assert resolve_profile("auto:ranks") == "auto:ranks"
    with use_profile("a100:4"):
        assert resolve_profile("auto:ranks").name == "a100:4:ranks"
        assert xs.plan("n -> n", MESH, (4,), profile="auto", addends="ranks").profile.adds_in_order
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XSHARD_PROFILE", "auto:ranks")
        assert resolve_profile("auto") == "auto:ranks"
        assert xs.plan("n -> n", MESH, (4,), profile="auto").profile.name == "h100:ranks"
    with use_profile("a100:ranks"):
        assert resolve_profile("auto").name == "a100:ranks"
    with pytest.raises(ProfileError, match="no profile 'h100:rank'"):
        load_profile("h100:rank")
    with pytest.raises(XshardError, match="addends"):
        xs.plan("n -> n", MESH, (4,), addends="rank")
