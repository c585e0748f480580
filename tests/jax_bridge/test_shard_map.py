"""`shard_map`: blocks of any layout, exact gradients, trees by rules, orders remembered, errors by name."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax, placed
from xshard import reference

AXES = xs.Mesh(a=2, b=2)
# Every way in which a layout may differ from what JAX can hold; shapes that do not divide, too.
LAYOUTS = {
    "n/a d/b": (4, 6),
    "k/zigzag(a) e": (8, 2),
    "l/a/cyclic(b) f": (8, 3),
    "m/(a,b) g": (7, 2),
    "o/sizes(a,1,4) h/b": (5, 3),
    "p/a:halo(1,2,periodic) i": (6, 2),
    "q/b:halo(1,1,edge) j | copy(a)": (5, 2),
    "r/a:fold(halo(1,1)) d": (6, 2),
    "s t/b | sum(a)": (3, 4),
    "s | mean(a,b)": (3,),
    "... | copy(a,b)": (2, 1, 2),
    "() | sum(b)": (),
}


def mesh(kind: str = "Auto") -> jax.sharding.Mesh:
    return device_mesh(AXES, kind)


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@in_jax
@pytest.mark.parametrize("check_vma", [True, False])
def test_blocks_of_any_layout(check_vma) -> None:
    texts = [*LAYOUTS][:: 1 if check_vma else 3]
    arrays = [whole(*LAYOUTS[text], seed=i) for i, text in enumerate(texts)]
    each = [" ".join(["device/(a,b)", *(f"e{i}" for i in range(x.ndim))]) for x in arrays]

    def doubled(*blocks):
        return [2 * x for x in blocks], [x[None] for x in blocks]

    f = xj.shard_map(doubled, (texts, (texts, each)), mesh(), check_vma=check_vma)
    cotangents = [whole(*x.shape, seed=i + 99) for i, x in enumerate(arrays)]

    def with_gradients(*arrays):
        results, pull, blocks = jax.vjp(f, *arrays, has_aux=True)
        return results, blocks, pull(cotangents)

    stored = [xj.place(x, text, mesh()) for x, text in zip(arrays, texts, strict=True)]
    results, blocks, gradients = jax.jit(with_gradients)(*stored)
    columns = texts, arrays, stored, results, blocks, gradients, cotangents
    for text, x, before, y, found, g, ct in zip(*columns, strict=True):
        expected = reference.scatter(x, text, AXES)
        given = [
            mine[tuple(map(slice, block.shape))]
            for mine, block in zip(found, expected, strict=True)
        ]
        assert np.array_equal(reference.gather(given, text, AXES, x.shape), x), text
        assert "mean" in text or all(map(np.array_equal, given, expected)), text
        assert np.array_equal(y, 2 * np.asarray(before)), text
        assert np.array_equal(g, 2 * ct), text  # A doubles, so its adjoint does


@in_jax
def test_gradients_of_what_layouts_leave_to_types() -> None:
    """Weights that all devices use have no `copy` in their layout: types say it."""
    x = whole(8, 4)
    w = whole(4, 6, seed=1)
    v = whole(6, seed=2)
    layouts = "n/zigzag(a) c, c f/b, f/b -> n/zigzag(a), n/zigzag(a) f/b"

    def layer(x, w, v):
        h = (x @ w) ** 2
        return xj.redistribute(h @ v, "n/zigzag(a) | sum(b) -> n/zigzag(a)"), h

    def loss(f):
        return lambda *args: (f(*args)[0] * np.arange(8)).sum() + f(*args)[1].sum()

    expected = jax.grad(loss(lambda x, w, v: ((x @ w) ** 2 @ v, (x @ w) ** 2)), (0, 1, 2))(x, w, v)
    for kind in ("Auto", "Explicit"):
        f = xj.shard_map(layer, layouts, mesh(kind))
        given = [
            xj.place(y, text, mesh(kind)) for y, text in ((x, "n/a c"), (w, "c f/b"), (v, "f"))
        ]
        found = jax.jit(jax.grad(loss(f), (0, 1, 2)))(*given)
        assert all(map(np.array_equal, found, expected)), kind


@in_jax
def test_gradients_without_types_where_layouts_say_what_devices_share() -> None:
    x = whole(4, 4)
    w = whole(4, 3, seed=1)
    layouts = "n/a c/b, c/b f | copy(a) -> n/a f | sum(b)"
    f = xj.shard_map(jnp.matmul, layouts, mesh(), check_vma=False)
    found = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w)
    expected = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(x, w)
    assert all(map(np.array_equal, found, expected))


@in_jax
def test_under_transformations() -> None:
    x = whole(3, 8, 2)
    f = xj.shard_map(lambda x: x + 1, "n/a:halo(1,1) d -> n/a:halo(1,1) d", mesh())
    assert np.array_equal(jax.jit(jax.vmap(f))(x), x + 1)


@in_jax
def test_inside_another_over_the_axes_that_are_left() -> None:
    x = whole(3, 8, 2)
    f = xj.shard_map(lambda x: x + 1, "n/a:halo(1,1) d -> n/a:halo(1,1) d", mesh())
    along_b = jax.shard_map(
        f, mesh=mesh(), in_specs=P(None, "b"), out_specs=P(None, "b"), axis_names={"b"}
    )
    assert np.array_equal(
        jax.jit(along_b)(x[0]), x[0] + 1
    )  # inside another, over the axes that are left


@in_jax
def test_donation_to_jit() -> None:
    x = whole(3, 8, 2)
    given = xj.place(x, "... d/a", mesh())
    jax.jit(xj.shard_map(lambda x: x + 1, "... d/a -> ... d/a", mesh()), donate_argnums=0)(given)
    assert given.is_deleted()


@in_jax
def test_donation_of_one_argument() -> None:
    x = whole(3, 8, 2)
    tree = {"kept": xj.place(x, "... d/a", mesh()), "gone": [xj.place(x, "... d/a", mesh())]}
    add = lambda kept, gone: [y + kept for y in gone]  # noqa: E731
    step = xj.shard_map(add, "... d/a, ... d/a -> ... d/a", mesh(), donate_argnums=1)
    assert np.array_equal(step(tree["kept"], tree["gone"])[0], 2 * x)
    assert tree["gone"][0].is_deleted() and not tree["kept"].is_deleted()


@in_jax
def test_a_storage_order_is_remembered() -> None:
    x = np.arange(8.0, dtype=np.float32)
    stored = xj.place(x, "s/zigzag(a)", mesh())
    assert stored.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]

    plus_positions = lambda x: x + xj.positions("s/zigzag(a)", shape=(8,), dim="s")  # noqa: E731
    f = xj.shard_map(plus_positions, "s/zigzag(a) -> s/zigzag(a)", mesh())
    y = f(f(stored))
    assert np.array_equal(xj.reshard(y, "s/zigzag(a) -> s"), 3 * x)
    words = r"argument 'x': the rows .* stored as 's/zigzag\(a\)' in 's/a'"
    with pytest.raises(xs.errors.ShapeError, match=words):
        xj.shard_map(lambda x: x, "s/a -> s/a", mesh())(y)
    moving = xj.shard_map(lambda x: 1 * x, (["s/zigzag(a) -> s/a"], "s/a -> s/cyclic(b)"), mesh())
    assert np.array_equal(xj.reshard(moving(y), "s/cyclic(b) -> s"), 3 * x)
    with pytest.raises(xs.errors.ShapeError, match="uneven blocks in the order of 's/zigzag"):
        f(x[:7])


@in_jax
def test_arrays_that_are_cut_otherwise_are_moved() -> None:
    x = whole(4, 8)
    on = mesh()
    f = xj.shard_map(lambda x: x + 1, "n/a d/zigzag(b) -> n/a d/zigzag(b)", on)
    y = f(placed(x, on, None, ("b", "a")))
    assert np.array_equal(y, x + 1) and y.sharding.spec == P("a", "b")
    g = xj.shard_map(lambda x: x + 1, "n d/zigzag(b) -> n d/zigzag(b)", on)
    assert np.array_equal(g(y), x + 2)  # of another cut, in the same order
    with pytest.raises(xs.errors.MeshError, match="argument 'x': the array is not on the mesh"):
        f(placed(x, device_mesh(xs.Mesh(a=3))))


@in_jax
def test_trees_by_rules() -> None:
    rules = xs.Rules({"layers.*.w": "i o/b -> i o", "**.bias|scale": "... | copy(a)"})
    w = whole(4, 4)
    bias = whole(4, seed=1)
    model = {"layers": [{"w": w, "bias": bias}], "scale": bias, "act": jax.nn.relu, "power": 2}
    traced = []

    def forward(model, x, *, times=1):
        traced.append(times)
        first = model["layers"][0]
        h = model["act"](x @ first["w"] + first["bias"]) * model["scale"] ** model["power"]
        return {"h": times * h, "act": model["act"], "model": model}

    f = xj.shard_map(
        forward, ((rules, "n/a i"), {"h": "n/a o", "act": None, "model": rules}), mesh()
    )
    x = whole(6, 4, seed=2)
    words = "result 'model.layers.0.w': the block has 4 rows of dim 'o', not 2"
    with pytest.raises(xs.errors.ShapeError, match=words):
        f(model, x)  # `i o/b -> i o` is said of what the function has whole
    back = xs.Rules({"**.w": "...", "**": "... | copy(a)"})
    f = xj.shard_map(
        forward, ((rules, "n/a i"), {"h": "n/a o", "act": None, "model": back}), mesh()
    )
    expected = jax.nn.relu(x @ w + bias) * bias**2
    placed = xj.place(model, rules, mesh())
    assert placed["layers"][0]["w"].sharding.spec == P(None, "b") and placed["act"] is jax.nn.relu
    for given in (model, placed):
        result = f(given, x)
        assert np.array_equal(result["h"], expected) and result["act"] is jax.nn.relu
        assert result["model"]["power"] == 2 and np.array_equal(result["model"]["scale"], bias)
    n = len(traced)
    f(placed, 2 * x)
    assert len(traced) == n and np.array_equal(f(placed, x, times=3)["h"], 3 * expected)


@in_jax
def test_a_decorator_takes_its_mesh_from_the_arrays() -> None:
    @xj.shard_map(layouts="n/(a,b) -> () | sum(a,b)")
    def total(x):
        """Of all."""
        return x.sum()

    x = xj.place(np.arange(8.0, dtype=np.float32), "n/a", mesh())
    assert total(x) == 28 and total.__name__ == "total" and total.__doc__ == "Of all."
    with jax.set_mesh(mesh()):
        assert np.array_equal(jax.grad(total)(jnp.arange(6.0)), np.ones(6))


@in_jax
def test_keys_are_cut_too() -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (2,)))
    f = xj.shard_map(
        lambda keys: drawn(keys), (["n/a -> n/sizes(b,1,5)"], "n/sizes(b,1,5) d"), mesh()
    )
    assert np.array_equal(f(xj.place(keys, "n/a", mesh())), drawn(keys))


X = whole(4, 2)
UNKNOWN = r"argument 'x': unknown mesh axis 'q' in\n    'n/q d'\n +\^"
WRONG = [
    ("n/q d -> n d", (X,), xs.errors.NotationError, UNKNOWN),
    ("n/a d", (X,), xs.errors.NotationError, "layouts of a function read"),
    ("n/a d, n/a -> n/a d", (X,), xs.XshardError, "1 arguments by position, layouts for 2"),
    ("n/a -> n/a d", (X,), xs.errors.ShapeError, "argument 'x': 'n/a' has 1 dims, the array has 2"),
    (
        "n/a d -> n d",
        (X,),
        xs.errors.ShapeError,
        "the result: the block has 2 rows of dim 'n', not 4",
    ),
    (
        "n d/a -> m d",
        (X,),
        xs.errors.ShapeError,
        "the result: the block has 1 rows of dim 'd', not 2",
    ),
    ("n/a d -> ...", (X,), xs.errors.NotationError, r"the result: the block varies along 'a'"),
    ("n d/sizes(a,2,1) -> n d", (X,), xs.errors.ShapeError, "argument 'x': .* 3 rows, not 2"),
    (((), ()), (X,), xs.XshardError, "1 arguments by position, layouts for 0"),
    (((None,), "n d"), (X,), xs.XshardError, "argument 'x' is an array without a layout"),
    ((("n d",), None), (X,), xs.errors.NotationError, "the result: None is no expression"),
    (
        (("n d",), ("n d", "n d")),
        (X,),
        xs.XshardError,
        "the result: the arrays .* 1 items|the result: the arrays: one array",
    ),
    (
        ((xs.Rules({"w": "n d"}),), "n d"),
        ({"v": X},),
        xs.XshardError,
        r"leaf 'x': no rule .*: v; .*'w' fits",
    ),
    (
        (({"w": "n d"},), "n d"),
        ({"v": X},),
        xs.XshardError,
        "the arrays at 'x' and the layouts differ: keys 'v', and keys 'w'",
    ),
    (((None,), "n d"), ({1, 2},), xs.XshardError, "lacks a hash: unhashable type: 'set'"),
    (5, (X,), xs.errors.NotationError, "5 are not layouts of a function"),
]


@in_jax
def test_errors_name_the_argument_or_the_result() -> None:
    for layouts, args, kind, words in WRONG:
        with pytest.raises(kind, match=words):
            xj.shard_map(lambda x: x, layouts, mesh())(*args)
    with pytest.raises(xs.XshardError, match="argument 'y' is an array without a layout"):
        xj.shard_map(lambda x, y: x, "n d -> n d", mesh())(X, y=X)


@in_jax
def test_lengths_of_results() -> None:
    x = whole(7, 2)
    f = xj.shard_map(
        lambda x: (x, x[:, 0]), "n/(a,b) d -> n/(a,b) d, m/(a,b)", mesh(), sizes={"m": 6}
    )
    assert np.array_equal(f(x)[0], x) and f(x)[1].shape == (6,)
    two = xj.shard_map(lambda x, y: x, (["n/a", "n/a"], "n/a"), mesh())
    with pytest.raises(
        xs.errors.ShapeError, match="2 rows are a block of dim 'n' if it is 3 or 4 long"
    ):
        two(x[:4, 0], x[:3, 0])  # both have blocks of 2


@in_jax
def test_a_cached_program_keeps_no_array_of_its_first_call() -> None:
    doubled = xj.shard_map(lambda x: 2 * x, "n/a d -> n/a d", mesh())
    x = placed(whole(4, 6), mesh(), "a")
    jax.block_until_ready(doubled(x))
    first = weakref.ref(x)
    del x
    gc.collect()
    assert first() is None


@in_jax
def test_a_function_that_nobody_holds_is_freed_with_its_programs() -> None:
    def call_once(held) -> None:
        xj.shard_map(lambda x: x * len(held), "n/a d -> n/a d", mesh())(whole(4, 6))

    held = {1, 2}
    first = weakref.ref(held)
    call_once(held)
    del held
    jax.clear_caches()  # JAX's own programs hold what they were traced from
    gc.collect()
    assert first() is None


class Scale:
    """A callable object, as modules of equinox are."""

    def __call__(self, x):
        return 2 * x


def annotated(x: "block of n rows") -> int:  # noqa: F722  plain words, as the annotations of jaxtyping
    return 2 * x


def taken_as_number(x: int) -> int:
    return 2 * x


@in_jax
def test_any_callable_with_any_annotations() -> None:
    x = whole(4, 6)
    for doubled in (Scale(), partial(jnp.multiply, 2), annotated, taken_as_number):
        assert np.array_equal(xj.shard_map(doubled, "n/a d -> n/a d", mesh())(x), 2 * x)
    assert np.array_equal(xj.shard_map(jnp.add, "n/a d, n/a d -> n/a d", mesh())(x, x), 2 * x)


@in_jax
def test_constants_that_are_equal_and_not_the_same_have_programs_of_their_own() -> None:
    divided = xj.shard_map(lambda x, by: x / by, (("n/a", None), "n/a"), mesh())
    x = np.ones(8, np.float32)
    by_zero = [float(divided(x, by)[0]) for by in (0.0, -0.0, 0.0)]
    assert by_zero == [float("inf"), float("-inf"), float("inf")]
    powered = xj.shard_map(lambda x, by: x * by, (("n/a", None), "n/a"), mesh())
    assert [powered(np.ones(8, np.int32), by).dtype for by in (1, 1.0)] == [np.int32, np.float32]
