"""`place`, and the names of leaves that its rules are about: dicts, flax, equinox."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.trees import leaves_with_given_values
from tests.jax_bridge.helpers import device_mesh, in_jax, needs_flax, placed
from xshard import errors


def mesh() -> jax.sharding.Mesh:
    return device_mesh(xs.Mesh(a=2, b=2))


def array(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def names(tree) -> list[str]:
    return [leaf.name for leaf in leaves_with_given_values("...", tree, lambda said: said == "...")]


@in_jax
def test_leaves_have_the_names_that_their_library_gives_them() -> None:
    import equinox as eqx

    tree = {"b": [1, (2, {"value": 3})], "a.c": 4, 5: None, "d": 6}
    assert names({str(k): v for k, v in tree.items()}) == [
        "a.c",
        "b.0",
        "b.1.0",
        "b.1.1.value",
        "d",
    ]
    keys = jax.tree_util.tree_flatten_with_path([{"x": (1,)}])[0][0][0]
    assert names([{"x": (1,)}]) == [jax.tree_util.keystr(keys, simple=True, separator=".")]
    assert names(7) == [""]
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    expected = [f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    assert names(eqx.filter(mlp, eqx.is_array)) == expected
    placed = xj.place(mlp, {"**.weight": "i/a o", "**": "..."}, mesh())
    assert placed.layers[0].weight.sharding.spec == P("a", None)
    assert placed.activation is mlp.activation


@needs_flax
@in_jax
def test_leaves_of_flax_are_named_without_their_boxes() -> None:
    from flax import linen, nnx

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = {"layers": [model], "value": model}
    assert names(found) == ["layers.0.bias", "layers.0.kernel", "value.bias", "value.kernel"]
    assert names(nnx.state(model)) == ["bias", "kernel"]
    boxed = linen.Partitioned(array(2, 2), names=("i", "o"))
    assert names({"params": {"Dense_0": {"kernel": boxed}}}) == ["params.Dense_0.kernel"]
    placed = xj.place(
        {"nnx": model, "box": {"kernel": boxed}}, {"**.kernel": "i/a o", "**": "..."}, mesh()
    )
    assert placed["nnx"].kernel[...].sharding.spec == P("a", None)
    assert np.array_equal(placed["nnx"](jnp.ones((1, 2))), model(jnp.ones((1, 2))))
    assert placed["box"]["kernel"].value.sharding.spec == P("a", None)
    # A dict is rules for a state, too, and an error has names and no arrays.
    layouts = ({"kernel": "i o/a", "**": "..."}, "n i"), "n o/a"
    twice = nnx.state(nnx.Linear(2, 8, rngs=nnx.Rngs(0)))
    up = xj.shard_map(lambda state, x: x @ state["kernel"][...], layouts, mesh())
    assert np.allclose(up(twice, jnp.ones((1, 2))), twice["kernel"][...].sum(0))
    with pytest.raises(xs.XshardError, match="no rule for 2 of 2 names: bias, kernel") as error:
        xj.shard_map(lambda state: (), (({"kernal": "..."},), ()), mesh())(twice)
    assert len(str(error.value).splitlines()) < 5


@in_jax
def test_devices_get_their_part_of_what_is_on_the_host() -> None:
    x = array(8, 3)
    tree = {"w": x, "s": [x, x[:7]], "step": 5, "none": None, "scalar": np.float32(2)}
    rules = {"w": "n/b d -> n d", "s.0": "n/zigzag(a) d | copy(b)", "s.1": "n/(a,b) d", "**": "..."}
    placed = xj.place(tree, rules, mesh())
    assert placed["step"] == 5 and placed["none"] is None and placed["scalar"] == 2
    assert placed["w"].sharding.spec == P("b", None)
    assert placed["w"].addressable_shards[0].data.shape == (4, 3)
    assert np.array_equal(placed["s"][0], x[[0, 1, 6, 7, 2, 3, 4, 5]])
    assert np.array_equal(xj.reshard(placed["s"][0], "n/zigzag(a) d -> n d"), x)
    fused = xj.place(x, "n/block(a,6,2) d", mesh())  # each of two segments is cut
    assert np.array_equal(fused, x[[0, 1, 2, 6, 3, 4, 5, 7]])
    assert np.array_equal(placed["s"][1], x[:7])  # 7 rows do not divide, and are whole


@in_jax
def test_arrays_on_the_mesh_are_moved_by_a_plan() -> None:
    x = array(8, 4)
    on = mesh()
    for given in (
        placed(x, on, None, "a"),
        xj.place(x, "n/zigzag(b) d", on),
        xj.place(x, "n/cyclic(a) d/b", on),
        jnp.asarray(x),
    ):
        [moved] = xj.place([given], {"0": "n/zigzag(a) d"}, on)
        assert np.array_equal(moved, x[[0, 1, 6, 7, 2, 3, 4, 5]])
    keys = jax.random.split(jax.random.key(0), 4)
    assert (xj.place(keys, "n/a", on) == keys).all()
    gradient = jax.grad(lambda x: (xj.place(x, "n/zigzag(a) d", on)[2] ** 2).sum())
    found = jax.jit(gradient)(xj.place(x, "n/a d", on))
    assert np.array_equal(found[6], 2 * x[6]) and found.sum() == 2 * x[6].sum()


@in_jax
def test_errors_come_with_the_leaf_before_anything_moves() -> None:
    tree = {"up": {"w": array(4, 2), "b": array(7)}}
    e = errors
    rest = {"**": "..."}
    stored = xj.place(array(6), "n/zigzag(c)", device_mesh(xs.Mesh(c=3)))
    unknown = {"**.w": "...", "**.b": "i", "**.c": "i"}
    for given, rules, kind, words in (
        (tree, {"**.w": "i/q o"} | rest, e.NotationError, r"leaf 'up.w': unknown mesh axis 'q'"),
        (
            tree,
            {"**.w": "i/a"} | rest,
            e.ShapeError,
            r"leaf 'up.w': 'i/a' has 1 dims, the array has 2",
        ),
        (
            tree,
            {"**.b": "i/zigzag(a)"} | rest,
            e.ShapeError,
            r"leaf 'up.b': .* uneven blocks in the",
        ),
        (tree, {"**.w": "..."}, xs.XshardError, "no rule for 1 of 2 names: up.b"),
        (tree, unknown, xs.XshardError, r"rule '\*\*.c' fits no name\n.*up.b, up.w"),
        (tree, "i", e.ShapeError, "leaf 'up.w'"),
        ({"x": np.zeros(2)}, {"x": "n"}, e.DtypeError, "leaf 'x': .*which JAX would make"),
        ({"x": np.array(["a"])}, {"x": "n"}, e.DtypeError, "leaf 'x': .*cannot hold <U1"),
        (
            {"x": np.zeros(2, ">f4")},
            {"x": "n"},
            e.DtypeError,
            "leaf 'x': .*>f4: its bytes are swapped",
        ),
        ({"x": np.zeros(2, "f4,f4")}, {"x": "n"}, e.DtypeError, "leaf 'x': JAX cannot hold .*'f0'"),
        ({"x": np.zeros(2, "g")}, {"x": "n"}, e.DtypeError, "leaf 'x': JAX cannot hold float128"),
        (
            {"x": np.ma.masked_equal(array(2), 0)},
            {"x": "n"},
            e.DtypeError,
            "leaf 'x': a masked array",
        ),
        (
            {"x": stored},
            {"x": "n/a"},
            e.ShapeError,
            "leaf 'x': the rows .* are stored as 'n/zigzag",
        ),
    ):
        with pytest.raises(kind, match=words):
            xj.place(given, rules, mesh())
    with pytest.raises(e.MeshError, match="is not a mesh"):
        xj.place(tree, "...", {"a": 2})
