"""`reshard` of whole pytrees: one program, donated memory, progress in the log, and errors."""

import warnings
from unittest import TestCase

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.stacked import received_bytes
from tests.jax_bridge.helpers import device_mesh, in_jax, placed

X = np.arange(1.0, 1 + 16 * 8, dtype=np.float32).reshape(16, 8)


def mesh(kind: str = "Auto") -> jax.sharding.Mesh:
    return device_mesh(xs.Mesh(a=2, b=4), kind)


def on(*spec, x=X, kind: str = "Auto") -> jax.Array:
    return placed(x, mesh(kind), *spec)


def model() -> dict[str, object]:
    return {
        "w": on("a", "b"),
        "layers": [(on("b"), on("b", x=X[:, 0])), (on("b"), on("b", x=X[:, 1]))],
    }


MOVES = {"w": "n/a d/b -> n/b d/a", "layers": [("n/b d -> n d", "n/b -> n/a")] * 2}


@in_jax
def test_a_tree_of_expressions() -> None:
    before = model()
    after = xj.reshard(before, MOVES)
    chex.assert_trees_all_equal(after, before)
    specs = {"w": P("b", "a"), "layers": [(P(None, None), P("a"))] * 2}
    assert jax.tree.map(lambda x: x.sharding.spec, after) == specs


@in_jax
def test_one_expression_is_for_all_below_it() -> None:
    two = {"p": on("a"), "q": [on("a"), on("a")]}
    for expression in (
        "n/a d -> n d/b",
        ("n/a d", "n d/b"),
        {"p": "n/a d -> n d/b", "q": "n/a d -> n d/b"},
    ):
        for moved in jax.tree.leaves(xj.reshard(two, expression)):
            assert np.array_equal(moved, X) and moved.sharding.spec == P(None, "b")


@in_jax
def test_a_pair_of_expressions_is_one_for_each() -> None:
    pair = (
        on("a"),
        on("b"),
    )  # a pair of expressions is one for each, a pair of layouts one for all
    moved = xj.reshard(pair, ("n/a d -> n d/b", "n/b d -> n/a d"))
    assert [x.sharding.spec for x in moved] == [P(None, "b"), P("a", None)]


@in_jax
def test_an_empty_tree_stays_empty() -> None:
    assert xj.reshard({}, "n -> n") == {} and xj.reshard(None, "n -> n") is None


@in_jax
def test_rules_over_the_names_of_leaves() -> None:
    rules = xs.Rules({"w": "n/a d/b -> n/b d/a", "layers.*.0": "n/b d -> n d", "**": "n/b -> n/a"})
    by_rules = xj.reshard(model(), rules)
    by_tree = xj.reshard(model(), MOVES)
    specs = [[x.sharding.spec for x in jax.tree.leaves(tree)] for tree in (by_rules, by_tree)]
    assert specs[0] == specs[1]
    inner = xs.Rules({"*.0": "n/b d -> n d", "*.1": "n/b -> n/a"})  # names begin where rules stand
    after = xj.reshard(model(), {"w": MOVES["w"], "layers": inner})
    chex.assert_trees_all_equal(after, by_tree)
    for wrong, words in (
        (
            xs.Rules({"w": MOVES["w"], "v": "n"}),
            r"no rule for 4 of 5 names: .*; rule 'v' fits no name",
        ),
        (
            {"w": MOVES["w"], "layers": xs.Rules({"0.*": "n"})},
            "leaf 'layers': no rule for 2 of 4 names",
        ),
        (xs.Rules({"**": "n/b -> n"}), "leaf 'layers.0.0': 'n/b' has 1 dims, the array has 2"),
    ):
        with pytest.raises(xs.XshardError, match=words):
            xj.reshard(model(), wrong)


@in_jax
def test_one_program_that_moves_what_the_plans_say() -> None:
    text = jax.jit(lambda t: xj.reshard(t, MOVES)).lower(model()).compile().as_text()
    axes = xs.Mesh(a=2, b=4)
    vector = (16,)
    moves = (MOVES["w"], X.shape), *(("n/b d -> n d", X.shape), ("n/b -> n/a", vector)) * 2
    plans = [xs.plan(move, axes, shape, profile="host") for move, shape in moves]
    assert received_bytes(text, 8) == sum(plan.bytes_received for plan in plans) > 0


@in_jax
def test_memory_of_donated_arrays_is_used() -> None:
    before = model()
    held = {s.data.unsafe_buffer_pointer() for s in before["w"].addressable_shards}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of what it was given and could not use
        after = xj.reshard(before, MOVES, donate=True)
    jax.block_until_ready(after)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert held & {s.data.unsafe_buffer_pointer() for s in after["w"].addressable_shards}
    chex.assert_trees_all_equal(after, model())


@in_jax
def test_arrays_that_are_not_donated_stay() -> None:
    kept = model()
    xj.reshard(kept, MOVES)
    chex.assert_trees_all_equal(kept, model())


@in_jax
def test_gradients_through_a_tree() -> None:
    def loss(tree):
        moved = xj.reshard(tree, {"p": "n/a d -> n d/b", "q": "n/b d -> n/a d"}, mesh())
        return (moved["p"] * X).sum() + (moved["q"] ** 2).sum()

    gradient = jax.jit(jax.grad(loss))({"p": on("a"), "q": on("b")})
    assert np.array_equal(gradient["p"], X) and np.array_equal(gradient["q"], 2 * X)


@in_jax
def test_progress_is_logged() -> None:
    pair = [on("a", x=X[:8]), on("b", x=X[:8])]  # of a shape that no other test has
    with TestCase().assertLogs("xshard", "INFO") as logs:
        for _ in range(2):
            xj.reshard(pair, ["n/a d -> n d/b", "n/b d -> n/b d"])
    first, *rest = [record.getMessage() for record in logs.records]
    assert first.startswith("array 1 of 2: n/a d -> n d/b, float32[8, 8]: ")
    second = (
        "array 2 of 2: n/b d -> n/b d, float32[8, 8]: 0 steps, 0 B received by the busiest device"
    )
    assert rest == [second, "tracing one program for 2 arrays"]  # and nothing the second time


@in_jax
def test_wrong_trees() -> None:
    elsewhere = placed(X, device_mesh(xs.Mesh(c=8)), "c")
    for tree, layouts, words in (
        (
            {"p": on("a")},
            {"q": "n/a d -> n d"},
            "the arrays and the layouts differ: keys 'p', and keys 'q'",
        ),
        (
            [on("a")] * 2,
            ["n/a d -> n d", "n/b d -> n d"],
            "not sharded as 'n/b d' says in 'n/b d -> n d'",
        ),
        ([on("a"), elsewhere], ["n/a d -> n d", "n/c d -> n d"], "on several meshes"),
    ):
        with pytest.raises(xs.XshardError, match=words):
            xj.reshard(tree, layouts)
    with pytest.raises(xs.XshardError, match="a traced array cannot be donated in 'n/a d -> n d'"):
        jax.jit(lambda x: xj.reshard(x, "n/a d -> n d", mesh(), donate=True))(on("a"))
    kept = on("a")
    with pytest.raises(xs.errors.ShapeError):
        xj.reshard(kept, "n/b d -> n d", donate=True)
    assert not kept.is_deleted()


@in_jax
def test_wide_numbers_are_not_narrowed_in_silence() -> None:
    for dtype in ("float64", "int64", "complex128"):
        with pytest.raises(
            xs.errors.DtypeError, match=f"block is {dtype}, which JAX would .*n/a d -> n d"
        ):
            xj.reshard(X.astype(dtype), "n/a d -> n d", mesh())
    with pytest.raises(xs.errors.DtypeError, match="jax_enable_x64"):
        xj.redistribute(X.astype("float64"), "n/a d -> n d", mesh())


@in_jax
def test_a_traced_array_of_an_explicit_mesh_is_sharded_as_its_type_says() -> None:
    explicit = mesh("Explicit")
    x = on("a", kind="Explicit")
    with jax.set_mesh(explicit):
        for given in (None, explicit, explicit.abstract_mesh):
            moved = jax.jit(lambda x, m=given: xj.reshard(x, "n/a d -> n d/b", m))(x)
            assert np.array_equal(moved, X) and moved.sharding == NamedSharding(
                explicit, P(None, "b")
            )
        with pytest.raises(
            xs.errors.ShapeError, match="not sharded as 'n/b d' says in 'n/b d -> n d'"
        ):
            jax.jit(lambda x: xj.reshard(x, "n/b d -> n d"))(x)


@in_jax
def test_the_mesh_of_the_context_may_have_no_devices() -> None:
    """A program made for an abstract mesh runs on the devices of the mesh that is set."""
    with jax.set_mesh(mesh()):
        abstract = mesh().abstract_mesh
        moved = jax.jit(lambda x: xj.reshard(x, "n/a d -> n d/b", abstract))(on("a"))
    assert np.array_equal(moved, X) and moved.sharding.is_equivalent_to(on(None, "b").sharding, 2)
