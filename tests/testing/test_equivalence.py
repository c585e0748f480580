"""What `assert_equivalent` compares: trees, meshes, uneven blocks, tags, dtypes, one optimiser step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jax_bridge as xj
import torch_bridge as xt
import xshard as xs
from tests.strategies import layouts, meshes, shapes
from tests.testing.programs import normal
from xshard.testing import EquivalenceError, StructureError, assert_equivalent

ROWS: dict[str, Any] = {"args": [normal(4)], "layouts": (["n/tp"], "n/tp"), "mesh": "tp=2"}


def same(x):
    return 1 * x


def wrong(*args, **options) -> EquivalenceError:
    with pytest.raises(EquivalenceError) as raised:
        assert_equivalent(*args, **options)
    return raised.value


def layer(params, x, redistribute):
    h = redistribute(x, "b s/tp d -> b s d | copy(tp)") @ params["up"]
    y = redistribute(h @ params["down"][0], "b s d | sum(tp) -> b s/tp d")
    return {"y": y + redistribute(params["bias"], "d -> d | copy(dp,tp)"), "h": h}


def test_trees_on_several_meshes() -> None:
    params = {"up": normal(4, 6, seed=1), "down": [normal(6, 4, seed=2)], "bias": normal(4, seed=3)}
    weights = {"up": "d f/tp | copy(dp)", "down": ["f/tp d | copy(dp)"], "bias": "d"}
    assert_equivalent(
        lambda params, x, mesh: layer(params, x, lambda *move: xt.redistribute(*move, mesh)),
        lambda params, x: layer(params, x, xj.redistribute),
        args=[params, normal(4, 6, 4)],
        layouts=([weights, "b/dp s/tp d"], {"y": "b/dp s/tp d", "h": "b/dp s f/tp"}),
        mesh=[xs.Mesh(dp=2, tp=2), "dp=1,tp=3"],
    )


def test_functions_may_be_closures() -> None:
    scale = 3.0
    matrix = torch.eye(4)
    options = {"args": [normal(8, 4)], "layouts": (["n/tp d"], "n/tp d"), "mesh": "tp=2"}
    assert_equivalent(lambda x: scale * x @ matrix, lambda x: scale * x, **options)


@pytest.mark.parametrize(("reference", "runtime"), [(torch.sin, "torch"), (jnp.sin, "jax")])
def test_uneven_blocks_against_a_reference(reference, runtime: str) -> None:
    expression = "s/cp d -> s d/cp"
    shape = (7, 5)
    assert_equivalent(
        lambda x, mesh: torch.sin(xt.redistribute(x, expression, mesh, shape=shape)),
        lambda x, mesh: jnp.sin(xj.redistribute(x, expression, mesh, shape=shape)),
        args=[normal(*shape)],
        layouts=(["s/cp d"], "s d/cp"),
        mesh="cp=3",
        reference=reference,
        reference_runtime=runtime,
    )


LINEAR = (
    ("n d | sum(tp)", "n/tp d"),
    ("n d | mean(tp)", "n d"),
    ("n/tp d", "n d | copy(tp)"),
    ("n/tp d", "n/tp:halo(1,1) d"),
    ("n/tp:fold(halo(1,1)) d", "n/tp d"),
    ("n/zigzag(tp) d", "n d | sum(tp)"),
    ("n d | copy(tp)", "n d | mean(tp)"),
    ("n/tp:halo(1,2,periodic) d", "n d/tp"),
)


def check_moves(moves, shapes, mesh) -> None:
    """Each moves its own array; addends, copies and contributions are arbitrary, and their cotangents."""

    def moved(redistribute, xs, mesh):
        rows = zip(xs, moves, shapes, strict=True)
        return [redistribute(x, tuple(move), mesh, shape=shape) for x, move, shape in rows]

    assert_equivalent(
        lambda xs, mesh: moved(xt.redistribute, xs, mesh),
        lambda xs, mesh: moved(xj.redistribute, xs, mesh),
        args=[[normal(*shape, seed=i) for i, shape in enumerate(shapes)]],
        layouts=([[src for src, _ in moves]], [dst for _, dst in moves]),
        mesh=mesh,
        reference=lambda xs: [1.0 * x for x in xs],
    )


def test_any_linear_layout_on_both_sides() -> None:
    check_moves(LINEAR, [(16, 4)] * len(LINEAR), "tp=4")


@settings(max_examples=5)
@given(st.data())
def test_redistributions_of_any_layouts_are_the_same_on_both(data) -> None:
    mesh = data.draw(meshes())
    found = data.draw(st.lists(shapes(), min_size=3, max_size=3))
    check_moves(
        [[data.draw(layouts(mesh, len(shape))) for _ in range(2)] for shape in found], found, mesh
    )


def test_what_one_device_alone_adds_to_a_sum_is_seen() -> None:
    """Inputs under sum(tp) have something on every device."""
    moves = "n -> n | sum(tp)", "n | sum(tp) -> n"
    error = wrong(
        lambda x, mesh: xt.redistribute(xt.redistribute(x, moves[0], mesh), moves[1], mesh),
        lambda x: lax.psum(x, "tp"),
        **{**ROWS, "layouts": (["n | sum(tp)"], "n")},
        reference=same,
    )
    assert {m.subject.runtime for m in error.mismatches} == {"torch"}


@pytest.mark.parametrize(
    "dtypes", [("float16", "bfloat16", "complex64"), ("float64", "complex128")]
)
def test_dtypes(dtypes: tuple[str, ...]) -> None:
    def array(dtype: str) -> np.ndarray:
        rng = np.random.default_rng(0)
        x = rng.integers(-3, 4, (4, 4)).astype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
        return x if x.dtype.kind != "c" else x + (1j * rng.integers(-3, 4, (4, 4))).astype(dtype)

    assert_equivalent(
        lambda xs, mesh: [xt.redistribute(x * x, "n/tp d -> n d/tp", mesh) for x in xs],
        lambda xs: [xj.redistribute(x * x, "n/tp d -> n d/tp") for x in xs],
        args=[[array(dtype) for dtype in dtypes]],
        layouts=(["n/tp d"], "n d/tp"),
        mesh="tp=2",
    )


def test_float64_keeps_its_width() -> None:
    options = {**ROWS, "args": [np.full(4, 1 / 3)]}
    error = wrong(same, lambda x: x.astype(jnp.float32).astype(jnp.float64), **options)
    assert error.mismatches[0].cause.name == "rounded"


def test_whole_numbers_have_no_gradient() -> None:
    def lookup(table, rows):
        return {"rows": rows + 1, "values": table[rows]}

    assert_equivalent(
        lookup,
        lookup,
        args=[normal(5, 3), np.arange(4, dtype=np.int64)],
        layouts=(["v d | copy(tp)", "n/tp"], {"rows": "n/tp", "values": "n/tp d"}),
        mesh="tp=2",
    )


def test_another_dtype_is_a_mismatch() -> None:
    error = wrong(lambda x: x.double(), same, **ROWS)
    assert error.mismatches[0].problem == "float32 in place of float64"


def test_a_mismatch_of_shapes_tells_both() -> None:
    error = wrong(
        lambda x, mesh: xt.redistribute(x, "n d -> n/(a,b) d", mesh),
        lambda x: lax.pcast(x, ("a", "b"), to="varying"),
        args=[normal(16, 4)],
        layouts=(["n d"], "n/(a,b) d"),
        mesh="a=2,b=2",
    )
    assert [m.subject.runtime for m in error.mismatches] == ["jax"]
    assert error.mismatches[0].problem == (
        "shape (16, 4) in place of (4, 4), the block of a (16, 4) array under 'n/(a,b) d': "
        "the whole array, where a block was meant"
    )


def test_a_part_where_the_whole_was_meant() -> None:
    error = wrong(
        same, same, **{**ROWS, "layouts": (["n/tp"], "n")}, reference=same, check_vma=False
    )
    assert [m.problem for m in error.mismatches] == [
        "shape (2,) in place of (4,), the block of a (4,) array under 'n': "
        "a part of the array, where all of it was meant"
    ] * 2


def test_the_place_is_global() -> None:
    def one_wrong(x, mesh):
        y = x.clone()
        if torch.distributed.get_rank() == 1 and mesh.n_devices == 4:
            y[1, 2] += 1.0
        return y

    x = normal(16, 4)
    layout = "n/zigzag(a,b) d"
    error = wrong(one_wrong, same, args=[x], layouts=([layout], layout), mesh="a=2,b=2")
    (m,) = error.mismatches
    assert (m.device, m.index, m.global_index) == (1, (1, 2), (3, 2))
    assert m.place == "1 (a=0,b=1)"
    assert m.want == pytest.approx(x[3, 2]) and m.got == pytest.approx(x[3, 2] + 1)
    assert (m.n_wrong, m.n_elements, m.wrong_devices) == (1, 64, (1,))
    assert "at global index (3, 2), (1, 2) in its block, on device 1 (a=0,b=1)" in str(error)
    assert "right rows: " in str(error)


def root(x):
    return x**0.5


# The root of one of them is no number.
WITH_NEGATIVE = {**ROWS, "args": [np.array([1.0, -1.0], np.float32)]}


def test_two_that_are_no_numbers_agree() -> None:
    assert_equivalent(root, root, **WITH_NEGATIVE)


def test_one_that_is_no_number_is_wrong() -> None:
    assert wrong(root, jnp.abs, **WITH_NEGATIVE).mismatches[0].error == np.inf


def test_both_runtimes_may_be_wrong_in_the_same_way() -> None:
    error = wrong(lambda x: 2 * x, lambda x: 2 * x, **ROWS, reference=same)
    runs = [(m.subject.kind, m.subject.runtime) for m in error.mismatches]
    assert runs == [
        ("output", "torch"),
        ("output", "jax"),
        ("gradient", "torch"),
        ("gradient", "jax"),
    ]


def test_what_is_within_tolerance_of_the_truth_may_differ_from_each_other() -> None:
    options = {**ROWS, "args": [np.ones(4)], "reference": same}
    functions = (lambda x: x + 0.015, lambda x: x - 0.015)
    error = wrong(*functions, **options, tol=1e-2)
    assert [m.subject.against for m in error.mismatches] == ["jax"]
    assert_equivalent(*functions, **options, tol=2e-2)


@pytest.mark.parametrize("decay", [0.5, 0.0])
def test_one_optimiser_step(decay: float) -> None:
    params = {"up": "d f/tp", "down": "f/tp d"}
    params_layouts = list(params.items())

    def function(params, x, redistribute):
        up, down = (redistribute(params[k], f"{v} -> {v} | copy(dp)") for k, v in params_layouts)
        x = redistribute(x, "n/dp d -> n/dp d | copy(tp)")
        return redistribute(x @ up @ down, "n/dp d | sum(tp) -> n/dp d")

    options = {
        "args": [{"up": normal(4, 6), "down": normal(6, 4, seed=1)}, normal(8, 4, seed=2)],
        "layouts": ([params, "n/dp d"], "n/dp d"),
        "mesh": "dp=2,tp=2",
        "parameters": [0],
        "optimisers": (
            lambda values: torch.optim.SGD(values, lr=0.1, weight_decay=0.5),
            lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * (g + decay * p), p, g),
        ),
    }
    functions = (
        lambda params, x, mesh: function(params, x, lambda *a: xt.redistribute(*a, mesh)),
        lambda params, x: function(params, x, xj.redistribute),
    )
    if decay:
        assert_equivalent(*functions, **options)
    else:
        error = wrong(*functions, **options)
        wrong_arrays = {(m.subject.kind, m.subject.name) for m in error.mismatches}
        assert wrong_arrays == {("parameter", "params['up']"), ("parameter", "params['down']")}
        assert "parameter of params['down'], jax on dp=1,tp=1, against torch on one device" in str(
            error
        )


def test_functions_without_types() -> None:
    """check_vma=False: an all-gather leaves equal blocks, which no type says."""
    options = {**ROWS, "args": [np.arange(4)], "layouts": (["n/tp"], "n")}
    functions = (
        lambda x, mesh: xt.redistribute(x, "n/tp -> n", mesh),
        lambda x: lax.all_gather(x, "tp", tiled=True),
    )
    assert_equivalent(*functions, **options, check_vma=False)
    message = "output of the JAX function varies along 'tp', where its layout"
    with pytest.raises(StructureError, match=message):
        assert_equivalent(*functions, **options)


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_a_replica_that_devices_use_in_their_own_ways(side: str) -> None:
    """It is told of every array that the gather touches."""
    gathered = {"torch": "n d | copy(tp)", "jax": "n d | copy(tp)", side: "n d"}

    def columns(x, scale, w, redistribute, to):
        x = x * redistribute(scale, "d -> d | copy(tp)")
        return redistribute(x, f"n/tp d -> {to}") @ w

    error = wrong(
        lambda *xs, mesh: columns(
            *xs, lambda *move: xt.redistribute(*move, mesh), gathered["torch"]
        ).sin(),
        lambda *xs: jnp.sin(columns(*xs, xj.redistribute, gathered["jax"])),
        args=[normal(32, 4), np.array([1, 0.5, 1, 1.5], np.float32), normal(4, 8, seed=1)],
        layouts=(["n/tp d", "d", "d f/tp"], "n f/tp"),
        mesh="tp=2",
        check_vma=False,
    )
    assert {(m.subject.runtime, m.cause.name) for m in error.mismatches} == {(side, "replica")}
    assert [m.subject.name[-3:] for m in error.mismatches] == ["[0]", "[1]"]
    assert len({m.cause for m in error.mismatches}) == 1
    assert "in 'n/tp d -> n d'; by" in error.mismatches[0].cause.text


@pytest.mark.parametrize("turned", ["w", "w and v"])
def test_weights_that_are_transposed(turned: str) -> None:
    def port(x, w, v):
        return jnp.tanh(jnp.tanh(x @ w.T) @ (v.T if "v" in turned else v))

    error = wrong(
        lambda x, w, v: torch.tanh(torch.tanh(x @ w) @ v),
        port,
        args=[normal(8, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)],
        layouts=(["n/tp d", "d f | copy(tp)", "f e | copy(tp)"], "n/tp e"),
        mesh="tp=2",
    )
    outputs = [m.cause for m in error.mismatches if m.subject.kind == "output"]
    words = f"right with {turned} transposed"
    assert [(c.name, words in c.text) for c in outputs] == [("transposed", True)]


def test_wrong_cuts_are_told_apart_from_a_wrong_function() -> None:
    """A port that computes something else, and is cut wrongly besides."""

    def port(x):
        return jnp.cos(xj.redistribute(x, "n/cp d -> n/zigzag(cp) d"))

    options = {"args": [normal(16, 4)], "layouts": (["n/cp d"], "n/cp d"), "mesh": "cp=4"}
    error = wrong(lambda x: torch.sin(x), port, **options)
    outputs = [m for m in error.mismatches if m.subject.kind == "output"]
    assert [(m.subject.mesh.n_devices, m.subject.against) for m in outputs] == [
        (1, "torch on one device"),
        (4, "jax on one device"),
    ]
    assert "stored as 'n/zigzag(cp)' are taken for 'n/cp'" in outputs[1].cause.text
    assert "they differ on one device already" in str(error)


def test_a_parameter_is_wrong_because_its_gradient_is() -> None:
    error = wrong(
        lambda w, x, mesh: w * x,
        lambda w, x: w * x,
        args=[normal(4), normal(8, 4, seed=1)],
        layouts=(["d", "n/dp d"], "n/dp d"),
        mesh="dp=2",
        parameters=[0],
        optimisers=(
            lambda values: torch.optim.SGD(values, lr=1.0),
            lambda p, g: jax.tree.map(jnp.subtract, p, g),
        ),
    )
    causes = {(m.subject.kind, m.subject.runtime): m.cause.name for m in error.mismatches}
    assert causes == {("gradient", "torch"): "not summed", ("parameter", "torch"): "gradient"}
