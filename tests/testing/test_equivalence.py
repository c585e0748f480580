"""What `assert_equivalent` compares: trees, meshes, uneven blocks, tags, dtypes, one optimiser step.

Long because each kind of argument and result of `assert_equivalent` has its comparison.
"""

from __future__ import annotations

from functools import partial

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
from tests.testing.programs import TWINS, Jax, Torch, block, normal, rows, sharded, unsharded
from xshard.testing import EquivalenceError, StructureError, assert_equivalent

MESHES = "dp=2,tp=2; tp=3; dp=2"


def wrong(*args, **options) -> EquivalenceError:
    with pytest.raises(EquivalenceError) as raised:
        assert_equivalent(*args, **options)
    return raised.value


def layer(params, x, redistribute):
    h = redistribute(x, "b s/tp d -> b s d | copy(tp)") @ params["up"]
    y = redistribute(h @ params["down"][0], "b s d | sum(tp) -> b s/tp d")
    return {"y": y + redistribute(params["bias"], "d -> d | copy(dp,tp)"), "h": h}


PARAMS = {"up": normal(4, 6, seed=1), "down": [normal(6, 4, seed=2)], "bias": normal(4, seed=3)}
LAYER = {
    "args": [PARAMS, normal(4, 6, 4)],
    "layouts": (
        [{"up": "d f/tp | copy(dp)", "down": ["f/tp d | copy(dp)"], "bias": "d"}, "b/dp s/tp d"],
        {"y": "b/dp s/tp d", "h": "b/dp s f/tp"},
    ),
    "mesh": "dp=2,tp=2; dp=1,tp=3",
}


def layer_torch(params, x, mesh):
    return layer(params, x, lambda x, expression: xt.redistribute(x, expression, mesh))


def layer_jax(params, x):
    return layer(params, x, xj.redistribute)


def test_trees_of_arguments_and_results_on_several_meshes() -> None:
    assert_equivalent(layer_torch, layer_jax, **LAYER)


def test_functions_may_be_closures() -> None:
    scale, matrix = 3.0, torch.eye(4)
    assert_equivalent(
        lambda x: scale * x @ matrix,
        lambda x: scale * x,
        args=[normal(8, 4)],
        layouts=(["n/tp d"], "n/tp d"),
        mesh="tp=2",
    )


def test_uneven_blocks() -> None:
    expression, shape = "s/cp d -> s d/cp", (7, 5)
    assert_equivalent(
        lambda x, mesh: torch.sin(xt.redistribute(x, expression, mesh, shape=shape)),
        lambda x, mesh: jnp.sin(xj.redistribute(x, expression, mesh, shape=shape)),
        args=[normal(*shape)],
        layouts=(["s/cp d"], "s d/cp"),
        mesh="cp=3",
        reference=jnp.sin,
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


def test_any_linear_layout_on_both_sides() -> None:
    """Addends, copies and contributions are arbitrary, and their cotangents are."""

    def moved(redistribute, xs, mesh):
        return [
            redistribute(x, f"{before} -> {after}", mesh, shape=(16, 4))
            for x, (before, after) in zip(xs, LINEAR, strict=True)
        ]

    assert_equivalent(
        lambda xs, mesh: moved(xt.redistribute, xs, mesh),
        lambda xs, mesh: moved(xj.redistribute, xs, mesh),
        args=[[normal(16, 4, seed=i) for i in range(len(LINEAR))]],
        layouts=([[before for before, _ in LINEAR]], [after for _, after in LINEAR]),
        mesh="tp=4",
        reference=lambda xs: [1.0 * x for x in xs],
    )


@settings(max_examples=5)
@given(st.data())
def test_redistributions_of_any_layouts_are_the_same_on_both(data) -> None:
    mesh = data.draw(meshes())
    found = data.draw(st.lists(shapes(), min_size=3, max_size=3))
    ends = [[data.draw(layouts(mesh, len(shape))) for _ in range(2)] for shape in found]

    def moved(redistribute, xs, mesh):
        given = zip(xs, ends, found, strict=True)
        return [redistribute(x, tuple(move), mesh, shape=shape) for x, move, shape in given]

    assert_equivalent(
        lambda xs, mesh: moved(xt.redistribute, xs, mesh),
        lambda xs, mesh: moved(xj.redistribute, xs, mesh),
        args=[[normal(*shape) for shape in found]],
        layouts=([[src for src, _ in ends]], [dst for _, dst in ends]),
        mesh=mesh,
        reference=lambda xs: [1.0 * x for x in xs],
    )


def test_what_one_device_alone_adds_to_a_sum_is_seen() -> None:
    """Inputs under sum(tp) have something on every device."""
    error = wrong(
        lambda x, mesh: xt.redistribute(
            xt.redistribute(x, "n -> n | sum(tp)", mesh), "n | sum(tp) -> n", mesh
        ),
        lambda x: lax.psum(x, "tp"),
        args=[normal(8)],
        layouts=(["n | sum(tp)"], "n"),
        mesh="tp=2",
        reference=lambda x: 1.0 * x,
    )
    assert {m.subject.runtime for m in error.mismatches} == {"torch"}


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16", "complex64"), ("float64", "complex128")])
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
    error = wrong(
        lambda x: x,
        lambda x: x.astype(jnp.float32).astype(jnp.float64),
        args=[np.full(4, 1 / 3)],
        layouts=(["n/tp"], "n/tp"),
        mesh="tp=2",
    )
    assert error.mismatches[0].cause.name == "rounded"


def test_whole_numbers_have_no_gradient_and_any_width() -> None:
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
    error = wrong(
        lambda x: x.double(), lambda x: x, args=[normal(4)], layouts=(["n/tp"], "n/tp"), mesh="tp=2"
    )
    assert error.mismatches[0].problem == "float32 in place of float64"


def test_another_shape_is_a_mismatch_and_tells_both() -> None:
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
        lambda x: x,
        lambda x: x,
        args=[normal(8)],
        layouts=(["n/tp"], "n"),
        mesh="tp=2",
        reference=lambda x: x,
        check_vma=False,
    )
    assert [m.problem for m in error.mismatches] == [
        "shape (4,) in place of (8,), the block of a (8,) array under 'n': "
        "a part of the array, where all of it was meant"
    ] * 2


def test_the_place_is_global() -> None:
    def one_wrong(x, mesh):
        y = x.clone()
        if torch.distributed.get_rank() == 1 and mesh.n_devices == 4:
            y[1, 2] += 1.0
        return y

    x = normal(16, 4)
    error = wrong(
        one_wrong, lambda x: 1 * x, args=[x], layouts=(["n/zigzag(a,b) d"], "n/zigzag(a,b) d"), mesh="a=2,b=2"
    )
    (m,) = error.mismatches
    assert (m.device, m.index, m.global_index) == (1, (1, 2), (3, 2))
    assert m.place == "1 (a=0,b=1)"
    assert m.want == pytest.approx(x[3, 2]) and m.got == pytest.approx(x[3, 2] + 1)
    assert (m.n_wrong, m.n_elements, m.wrong_devices) == (1, 64, (1,))
    assert "at global index (3, 2), (1, 2) in its block, on device 1 (a=0,b=1)" in str(error)


def test_a_number_that_is_none_is_wrong_and_two_agree() -> None:
    def root(x):
        return x**0.5

    args = {"args": [np.array([1.0, -1.0], np.float32)], "layouts": (["n/tp"], "n/tp"), "mesh": "tp=2"}
    assert_equivalent(root, root, **args)
    error = wrong(root, jnp.abs, **args)
    assert error.mismatches[0].error == np.inf


def test_the_port_itself_may_be_wrong() -> None:
    error = wrong(layer_torch, lambda params, x: jax.tree.map(jnp.sin, layer_jax(params, x)), **LAYER)
    assert "they differ on one device already" in str(error)


def test_a_reference_in_torch_or_jax() -> None:
    program = TWINS["block"]

    def whole(x, up, down, bias):
        return torch.tanh(x @ up) @ down + bias

    for reference, runtime in ((whole, "torch"), (unsharded(block), "jax")):
        assert_equivalent(
            sharded(Torch, block),
            sharded(Jax, block),
            args=program.args,
            layouts=(program.layouts, program.result),
            mesh="dp=1,tp=4",
            reference=reference,
            reference_runtime=runtime,
        )


def test_both_runtimes_may_be_wrong_in_the_same_way() -> None:
    error = wrong(
        lambda x: 2 * x,
        lambda x: 2 * x,
        args=[normal(4)],
        layouts=(["n/tp"], "n/tp"),
        mesh="tp=2",
        reference=lambda x: x,
    )
    assert [(m.subject.kind, m.subject.runtime) for m in error.mismatches] == [
        ("output", "torch"),
        ("output", "jax"),
        ("gradient", "torch"),
        ("gradient", "jax"),
    ]


def test_what_is_within_tolerance_of_the_truth_may_differ_from_each_other() -> None:
    options = {"args": [np.ones(4)], "layouts": (["n/tp"], "n/tp"), "mesh": "tp=2"}
    functions = (lambda x: x + 0.015, lambda x: x - 0.015)
    error = wrong(*functions, **options, reference=lambda x: 1 * x, tol=1e-2)
    assert [m.subject.against for m in error.mismatches] == ["jax"]
    assert_equivalent(*functions, **options, reference=lambda x: 1 * x, tol=2e-2)


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
        assert {(m.subject.kind, m.subject.name) for m in error.mismatches} == {
            ("parameter", "params['up']"),
            ("parameter", "params['down']"),
        }
        assert "parameter of params['down'], jax on dp=1,tp=1, against torch on one device" in str(error)


def test_functions_without_types() -> None:
    """check_vma=False: an all-gather leaves equal blocks, which no type says."""
    options = {"args": [np.arange(4)], "layouts": (["n/tp"], "n"), "mesh": "tp=2"}
    functions = (
        lambda x, mesh: xt.redistribute(x, "n/tp -> n", mesh),
        lambda x: lax.all_gather(x, "tp", tiled=True),
    )
    assert_equivalent(*functions, **options, check_vma=False)
    with pytest.raises(
        StructureError, match="output of the JAX function varies along 'tp', where its layout"
    ):
        assert_equivalent(*functions, **options)


def test_a_replica_in_jax_without_types_and_two_weights_that_are_transposed() -> None:
    options = {"args": [normal(8, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)], "mesh": "tp=2"}

    def layer(tanh, x, w, v):
        return tanh(tanh(x @ w) @ v)

    def gathered(x, w, v):
        return layer(jnp.tanh, xj.redistribute(x, "n/tp d -> n d"), w, v)

    def right(x, w, v, mesh):
        return layer(torch.tanh, xt.redistribute(x, "n/tp d -> n d | copy(tp)", mesh), w, v)

    options["layouts"] = (["n/tp d", "d f | copy(tp)", "f e/tp"], "n e/tp")
    error = wrong(right, gathered, **options, check_vma=False)
    assert {(m.subject.runtime, m.cause.name) for m in error.mismatches} == {("jax", "replica")}
    assert "in 'n/tp d -> n d'; by" in error.mismatches[0].cause.text

    options["layouts"] = (["n/tp d", "d f | copy(tp)", "f e | copy(tp)"], "n/tp e")
    error = wrong(partial(layer, torch.tanh), lambda x, w, v: layer(jnp.tanh, x, w.T, v.T), **options)
    outputs = [m.cause for m in error.mismatches if m.subject.kind == "output"]
    assert [(c.name, "right with w and v transposed" in c.text) for c in outputs] == [("transposed", True)]


def test_a_mesh_may_be_given_as_a_value() -> None:
    options = {"args": [normal(4, 4)], "layouts": (["n/tp d"], "n d"), "mesh": [xs.Mesh(tp=2), "tp=4"]}
    assert_equivalent(sharded(Torch, rows), sharded(Jax, rows), **options)


def test_what_differs_on_one_device_is_told_once_and_cuts_are_judged_by_themselves() -> None:
    """A port that computes something else, and is cut wrongly besides."""

    def port(x):
        return jnp.cos(xj.redistribute(x, "n/cp d -> n/zigzag(cp) d"))

    error = wrong(
        lambda x, mesh: torch.sin(x), port, args=[normal(16, 4)], layouts=(["n/cp d"], "n/cp d"), mesh="cp=4"
    )
    outputs = [m for m in error.mismatches if m.subject.kind == "output"]
    assert [(m.subject.mesh.n_devices, m.subject.against) for m in outputs] == [
        (1, "torch on one device"),
        (4, "jax on one device"),
    ]
    assert "stored as 'n/zigzag(cp)' are taken for 'n/cp'" in outputs[1].cause.text


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
