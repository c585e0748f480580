"""`reshard` on global arrays, and layouts as PartitionSpecs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.arrays import stored
from jax_bridge.testing.worker import Timer
from tests.jax_bridge.helpers import device_mesh, in_jax, placed
from xshard import errors
from xshard.layout.layout import parse_expression
from xshard.notation.parser import Shard
from xshard.steps import AllGather, AllToAll, Exchange, Permute, Slice

X = np.arange(1.0, 1 + 16 * 8, dtype=np.float32).reshape(16, 8)
AXES = xs.Mesh(a=2, b=4)
KINDS = ("Auto", "Explicit")


def mesh(kind: str = "Auto") -> jax.sharding.Mesh:
    return device_mesh(AXES, kind)


def on(kind: str, *spec, x=X) -> jax.Array:
    return placed(x, mesh(kind), *spec)


CASES = [
    (P("a", "b"), "n/a d/b -> n/b d/a", P("b", "a")),
    (P(("a", "b")), "n/(a,b) d -> n d/b/a", P(None, ("b", "a"))),
    (P("a"), "n/a ... -> n ...", P()),
    (P(), "n d -> n/b d", P("b")),
    (P("b"), "n/b d -> n/a d", P("a")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "expression", "after"), CASES)
@in_jax
def test_arrays_get_the_sharding(kind, before, expression, after) -> None:
    y = xj.reshard(on(kind, *before), expression)
    assert np.array_equal(y, X)
    assert y.sharding == NamedSharding(mesh(kind), P(*after, *[None] * (X.ndim - len(after))))
    for shard in y.addressable_shards:
        assert np.array_equal(shard.data, X[shard.index])


@pytest.mark.parametrize("kind", KINDS)
@in_jax
def test_under_transformations(kind) -> None:
    weights = on(kind, "b", "a", x=X % 7)

    @jax.jit
    def loss(x):
        return (xj.reshard(x * 2, "n/a d/b -> n/b d/a", mesh(kind)) * weights).sum()

    with jax.set_mesh(mesh(kind)):
        gradient = jax.grad(loss)(on(kind, "a", "b"))
    assert np.array_equal(gradient, 2 * (X % 7))


@pytest.mark.parametrize("kind", KINDS)
@in_jax
def test_dims_in_another_order(kind) -> None:
    def turned(x):
        return xj.reshard(x, "n/a d/b -> d/a n/b", mesh(kind))

    x = on(kind, "a", "b")
    y, pull = jax.vjp(turned, x)
    assert np.array_equal(y, X.T) and y.sharding.spec == P("a", "b")
    assert np.array_equal(pull(y)[0], X)
    both = jax.vmap(turned)(jnp.stack([x, 2 * x]))
    assert np.array_equal(both, np.stack([X.T, 2 * X.T]))


@in_jax
def test_the_order_of_rows_is_remembered() -> None:
    """And no other is read. What JAX computed, or nobody moved, is believed, unless debugging is on."""
    contiguous = on("Auto", "b")
    back = "n/zigzag(b) d -> n d/b"
    with pytest.raises(
        errors.ShapeError, match=r"the rows of the array are stored as 'n/b d'"
    ) as caught:
        xj.reshard(xj.reshard(contiguous, "n/b d -> n/b d"), back)
    assert "stored_as(array, 'n/zigzag(b) d')" in str(caught.value)
    ordered = xj.reshard(contiguous, "n/b d -> n/zigzag(b) d")
    kept = np.concatenate(xs.reference.scatter(X, "n/zigzag(b) d", xs.Mesh(b=4)))
    assert np.array_equal(ordered, kept) and ordered.sharding.is_equivalent_to(
        contiguous.sharding, 2
    )
    assert np.array_equal(xj.reshard(np.asarray(ordered), back, mesh()), X)
    for wrong in ("n/b d -> n d/b", "n/cyclic(b) d -> n d/b"):
        with pytest.raises(
            errors.ShapeError, match=r"the rows of the array are stored as 'n/zigzag\(b\) d'"
        ):
            xj.reshard(ordered, wrong)
    doubled = ordered * 2
    assert np.array_equal(xj.reshard(doubled, back), 2 * X)
    with pytest.MonkeyPatch.context() as debugging:
        debugging.setattr(stored, "STRICT", True)
        for unknown in (contiguous, X, doubled):
            with pytest.raises(
                errors.ShapeError, match=r"nothing says that the rows .* 'n/zigzag\(b\) d'"
            ):
                xj.reshard(unknown, back, mesh())
    assert np.array_equal(xj.reshard(xj.stored_as(doubled, "n/zigzag(b) d"), back), 2 * X)
    assert np.array_equal(xj.reshard(xj.stored_as(ordered, "n/b d"), "n/b d -> n d/b"), ordered)
    jitted = jax.jit(lambda x: xj.reshard(x, back))
    assert np.array_equal(jitted(xj.stored_as(doubled, "n/zigzag(b) d")), 2 * X)
    one = jax.make_mesh((1,), ("b",), devices=jax.devices()[:1])  # where zigzag changes nothing
    assert np.array_equal(xj.reshard(X, back, one), X)
    with pytest.raises(errors.MeshError, match="the array lacks a mesh"):
        xj.stored_as(jnp.ones(4), "n/zigzag(b)")
    keys = jax.random.split(jax.random.key(0), 8)
    moved = xj.reshard(xj.reshard(keys, "n -> n/cyclic(b)", mesh()), "n/cyclic(b) -> n")
    assert (moved == keys).all()


@in_jax
def test_compiled_once() -> None:
    x = on("Auto", "a", "b", x=np.ones((24, 8)))
    compiled = []  # of a shape that no other test has
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name)
    )
    for _ in range(2):
        first = len(compiled)
        xj.reshard(x, "n/a d/b -> n/b d/a")
    named = [name for name in compiled[first:] if "compile" in name or "trace" in name]
    assert not named and any("compile" in name for name in compiled)


OVER_B = (Shard(("b",)),)
MOVES = [
    (P("b"), "n/b d -> n d", AllGather("n", OVER_B)),
    (P("b"), "n/b d -> n d/b", AllToAll("n", OVER_B, "d", OVER_B)),
    (P(), "n d -> n/b d", Slice((("n", OVER_B),))),
    (P(("a", "b")), "n/a/b d -> n/b/a d", Permute(xs.Layout.parse("n/b/a d"))),
    (P("b"), "n/b d -> n d/b", Exchange(xs.Layout.parse("n d/b"))),
    (P("b", "a"), "n/zigzag(b) d/a -> n/cyclic(b) d", Exchange(xs.Layout.parse("n/cyclic(b) d"))),
]


@pytest.mark.parametrize(
    ("spec", "expression", "step", "dtype"),
    [(*move, ("bfloat16", "float8_e4m3fn")[i % 2]) for i, move in enumerate(MOVES)],
    ids=[f"{e}, {s.kind}" for _, e, s in MOVES],
)
@in_jax
def test_short_floats_are_moved_without_a_wider_copy(spec, expression, step, dtype) -> None:
    """XLA would make them wider on CPUs: not only in collectives, slices and concatenations too."""
    src, dst = parse_expression(expression)
    plan = xs.Plan(src, dst, AXES, X.shape, dtype, (step,))
    x = on("Auto", *spec, x=X.astype(dtype))
    compiled = jax.jit(lambda x: xj.reshard(x, plan)).lower(x).compile()
    y = compiled(x)
    held = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    expected = xs.reference.run(plan, [held[device] for device in mesh().devices.flat])
    found = {shard.device: np.asarray(shard.data) for shard in y.addressable_shards}
    for device, block in zip(mesh().devices.flat, expected, strict=True):
        assert found[device].dtype == dtype and np.array_equal(found[device], block)
    assert not re.findall(r"\b(?:f16|f32|f64)\[", compiled.as_text())


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
@in_jax
def test_numbers_of_four_bits_are_moved_as_bytes(dtype) -> None:
    x = on("Auto", "b", x=(X % 4).astype(dtype))
    turn = "n/b d -> n/cyclic(b) d"
    back = "n/cyclic(b) d -> n d/b"
    compiled = jax.jit(lambda x: xj.reshard(xj.reshard(x, turn), back))
    y = compiled(x)
    assert y.dtype == dtype and np.array_equal(y, X % 4) and y.sharding.spec == P(None, "b")
    sent = re.findall(
        r"(\w+)\[.* (?:all-to-all|collective-permute)\(", compiled.lower(x).compile().as_text()
    )
    assert sent and set(sent) == {"u8"}
    with pytest.raises(errors.DtypeError, match=f"dtype {dtype} cannot be reduced"):
        xs.plan("n d | sum(b) -> n d", xs.Mesh(b=4), X.shape, dtype)


@pytest.mark.parametrize("kind", KINDS)
@in_jax
def test_a_plan_may_borrow_an_axis_that_neither_side_names(kind) -> None:
    """Here it takes a slice over it and gathers that again."""
    axes = xs.Mesh(a=2, b=2, c=2)
    mesh_3d, (src, dst) = device_mesh(axes, kind), parse_expression("n/a d -> n/a d")
    steps = (Slice((("d", (Shard(("c",)),)),)), AllGather("d", (Shard(("c",)),)))
    plan = xs.Plan(src, dst, axes, X.shape, "float32", steps)
    x = placed(X, mesh_3d, "a")
    y = xj.reshard(x, plan)
    assert np.array_equal(y, X) and y.sharding == NamedSharding(mesh_3d, P("a", None))
    with jax.set_mesh(mesh_3d):
        gradient = jax.grad(lambda x: (xj.reshard(x, plan) ** 2).sum())(x)
    assert np.array_equal(gradient, 2 * X)


@in_jax
def test_partial_sums_on_explicit_meshes() -> None:
    """An unreduced product is reduce-scattered by its name, and so is its gradient gathered."""
    with jax.set_mesh(mesh("Explicit")):
        a = jax.reshard(X, P(None, "b"))
        b = jax.reshard(X.T, P("b", None))

        def product(a, b):
            return jnp.einsum("ik,kj->ij", a, b, out_sharding=P(unreduced={"b"}))

        @jax.jit
        def loss(a, b):
            return (xj.reshard(product(a, b), "i j | sum(b) -> i/b j") ** 2).sum()

        partial = jax.jit(product)(a, b)
        assert np.array_equal(xj.reshard(partial, "i j | sum(b) -> i/b j"), X @ X.T)
        assert np.allclose(
            jax.grad(loss)(a, b), jax.grad(lambda a: ((a @ X.T) ** 2).sum())(X), rtol=1e-5
        )
        there = xj.reshard(a, "n d/b -> n d | copy(b)")
        assert jax.typeof(there).sharding.spec.reduced == {"b"}
        assert np.array_equal(xj.reshard(there, "n d | copy(b) -> n/b d"), X)
        with pytest.raises(errors.ShapeError, match=r"not sharded as 'n d' says in 'n d -> n/b d'"):
            xj.reshard(there, "n d -> n/b d")
        addends = xj.reshard(a, "n d/b -> n d | sum(b)")
        assert jax.typeof(addends).sharding.spec.unreduced == {"b"}
        assert np.array_equal(xj.reshard(addends, "n d | sum(b) -> n d"), X)


@in_jax
def test_idle_replicas_take_shares_of_a_sum() -> None:
    """The plan uses an axis that the expression does not name: its replicas are the same values."""
    plan = xs.plan("n d | sum(b) -> n d", AXES, X.shape, profile="bandwidth")
    assert "a" in plan.axes
    with jax.set_mesh(mesh("Explicit")):
        addends = xj.reshard(jax.reshard(X, P(None, None)), "n d -> n d | sum(b)")
        whole = xj.reshard(addends, "n d | sum(b) -> n d", profile="bandwidth")
        assert np.array_equal(whole, X)
        assert jax.typeof(whole).sharding.spec == P(None, None)


@in_jax
def test_errors() -> None:
    """Ours, whose hints lead out, instead of those of what happens to fail first."""
    x = on("Auto", "a", "b")
    move = "n/a d/b -> n d/b"
    e = errors
    specs = xj.specs
    here = mesh()
    reshard = xj.reshard
    from_spec = specs.from_partition_spec
    unknown = "on which mesh the array is in 'n/a d -> n d'"
    wrong = [
        (
            lambda: reshard(x, "n/b d -> n d"),
            e.ShapeError,
            "not sharded as 'n/b d' says in 'n/b d -> n d'",
        ),
        (
            lambda: reshard(X[:14], "n/a d -> n/b d", here),
            e.ShapeError,
            r"\(14, 8\) does not divide",
        ),
        (
            lambda: reshard(x, "n/a d/b -> n d/b | copy(a)"),
            e.MeshError,
            "Explicit axes only in 'n/a d/b",
        ),
        (lambda: reshard(X, "n/a d -> n d"), e.MeshError, unknown),
        # And JAX knows no sharding either.
        (lambda: jax.jit(lambda x: reshard(x, "n/a d -> n d"))(X), e.MeshError, unknown),
        (
            lambda: reshard(x, "n/a d/b -> n d", here.abstract_mesh),
            e.MeshError,
            "the mesh passed lacks",
        ),
        (lambda: reshard(x, "n/c d -> n d"), e.NotationError, "unknown mesh axis 'c'"),
        (lambda: reshard(x, move, AXES), e.MeshError, "lacks devices\n.* jax.sharding.Mesh"),
        (lambda: reshard(x, move, "a=2,b=4"), e.MeshError, "'a=2,b=4' is not a mesh"),
        (lambda: specs.to_named_sharding("n/a d", xs.Mesh(a=2)), e.MeshError, "lacks devices"),
        (lambda: specs.to_named_sharding("n/q d", here), e.NotationError, "unknown mesh axis 'q'"),
        (
            lambda: specs.to_named_sharding("n/a d | sum(b)", here),
            e.MeshError,
            "Explicit axes only",
        ),
        (lambda: xj.positions("n/a d", "a", shape=(4, 2), dim=0), e.MeshError, "'a' is not a mesh"),
        (
            lambda: reshard(x, P("a"), here),
            e.NotationError,
            "place of a layout\n.*from_partition_spec",
        ),
        (lambda: reshard(x, (P("a"), P())), e.NotationError, "in place of a layout"),
        (lambda: reshard(x, x.sharding), e.NotationError, "a NamedSharding in place of a layout"),
        (lambda: reshard(move, x), e.NotationError, "the array comes first"),
        (lambda: reshard(np.array(["a"]), "n -> n", here), e.DtypeError, "cannot hold <U1"),
        (lambda: xj.redistribute(move, x), e.NotationError, "the array comes first"),
        (
            lambda: xj.redistribute(move, move),
            e.NotationError,
            "an expression in place of the array",
        ),
        (lambda: xj.redistribute(object(), move), e.DtypeError, "cannot make an array of a object"),
        (lambda: xj.redistribute(x, P("a")), e.NotationError, "in place of a layout"),
        (lambda: xj.redistribute(x, move, (2, 4)), e.MeshError, r"\(2, 4\) is not a mesh"),
        (lambda: xj.redistribute(x, 3), e.NotationError, "3 is no"),
        (lambda: xj.ops.valid_mask("n", shape=8), e.XshardError, "shape is 8, not Sequence"),
        (
            lambda: xj.positions("n/a d", here, shape=8, dim=0),
            e.XshardError,
            "shape is 8, not Sequence",
        ),
        (lambda: from_spec(x.sharding, 2), e.XshardError, "spec is .*, not PartitionSpec"),
        (lambda: from_spec(("a", None), 2), e.XshardError, "spec is .*, not PartitionSpec"),
        (lambda: from_spec(P("a"), 2, ["n"]), e.ShapeError, "1 names for 2 dims"),
        (lambda: from_spec(P("a", "b"), 1), e.ShapeError, "has 2 dims, the array has 1"),
        (lambda: from_spec(P(P.UNCONSTRAINED), 1), e.PlanError, "names no axes"),
        (lambda: specs.to_partition_spec("n/zigzag(a) d"), e.PlanError, "cannot cut 'n/zigzag"),
        (
            lambda: specs.to_partition_spec("n | mean(a)"),
            e.PlanError,
            "only have the reduction sum",
        ),
        (lambda: specs.to_partition_spec("n/a:halo(1,1)"), e.PlanError, "cannot have overlaps"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()
    gather = jax.vmap(lambda _: xj.ops.all_gather([1.0, 2.0], 0, "a", grad="sum"), axis_name="a")
    assert gather(np.ones(2)).tolist() == [[1, 2, 1, 2]] * 2  # a list is an array to JAX


@in_jax
def test_specs() -> None:
    for text in (
        "d0/a d1",
        "d0 d1/(b,a)",
        "d0 d1",
        "d0/a d1/b",
        "d0/a d1 | sum(b)",
        "d0 d1 | sum(a) copy(b)",
    ):
        layout = xs.Layout.parse(text)
        assert xj.specs.from_partition_spec(xj.specs.to_partition_spec(layout), 2) == layout
    # Nested and grouped cuts are one to JAX.
    assert xj.specs.to_partition_spec("n/a/b d") == P(("a", "b"), None)
    assert xj.specs.to_partition_spec("n/a ... c/b", ndim=4) == P("a", None, None, "b")
    assert str(xj.specs.from_partition_spec(P("a"), 3, names="xyz")) == "x/a y z"
    sharding = xj.specs.to_named_sharding("n/a d | sum(b)", mesh("Explicit"))
    assert sharding == NamedSharding(mesh("Explicit"), P("a", None, unreduced={"b"}))


@in_jax
def test_what_a_calibration_times_makes_all_of_the_result() -> None:
    """XLA makes no more than is read: with one element read, a gather would leave out its copy."""
    plan = xs.plan("n d/b -> n d", AXES, X.shape)
    [y] = Timer(plan).program()
    assert np.array_equal(y, np.ones((1, 1, *plan.target.local_shape(0))))
