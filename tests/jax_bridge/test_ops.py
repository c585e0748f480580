"""`redistribute` and the named ops: where they can be called, what they accept, what they refuse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge import ops
from jax_bridge.calls import MoveCall, sides_of
from jax_bridge.testing.stacked import padded, unpadded
from tests.jax_bridge.domains import sharded
from tests.jax_bridge.helpers import device_mesh, in_jax

MESH = xs.Mesh(a=2, b=4)
X = np.arange(1.0, 1 + 8 * 8, dtype=np.float32).reshape(8, 8)
UNEVEN = (7, 5)


def mapped(local, specs, **options):
    return jax.shard_map(
        local, mesh=device_mesh(MESH), in_specs=specs[0], out_specs=specs[1], **options
    )


halo = ops.halo_exchange
to_all = partial(ops.all_to_all, split_dim=1, concat_dim=0)
# Each named op, the expression it stands for, and that of its gradient.
NAMED = [
    (partial(ops.all_gather, dim=0, axis="a", grad="sum"), "d0/a d1 -> d0 d1 | copy(a)"),
    (partial(ops.all_gather, dim=-1, axis="a", grad="replicated"), "d0 d1/a -> d0 d1"),
    (
        partial(ops.all_gather, dim=0, axis=("b", "a"), grad="sum"),
        "d0/(b,a) d1 -> d0 d1 | copy(a,b)",
    ),
    (partial(ops.reduce_scatter, dim=1, axis="a"), "d0 d1 | sum(a) -> d0 d1/a"),
    (partial(ops.reduce_scatter, dim=0, axis="b", op="max"), "d0 d1 | max(b) -> d0/b d1"),
    (partial(ops.all_reduce, axis="a", grad="sum"), "d0 d1 | sum(a) -> d0 d1 | copy(a)"),
    (partial(ops.all_reduce, axis="a", op="mean", grad="replicated"), "d0 d1 | mean(a) -> d0 d1"),
    (partial(to_all, axis="b"), "d0/b d1 -> d0 d1/b"),
    (partial(to_all, axis="a", concat_order="zigzag"), "d0/zigzag(a) d1 -> d0 d1/a"),
    (partial(ops.shard, dim=0, axis="a", grad="sum"), "d0 d1 | copy(a) -> d0/a d1"),
    (partial(ops.shard, dim=0, axis="a", grad="replicated"), "d0 d1 -> d0/a d1"),
    (
        partial(halo, width=(1, 2), dim=1, axis="b", boundary="periodic"),
        "d0 d1/b -> d0 d1/b:halo(1,2,periodic)",
    ),
    (
        partial(halo, width=2, dim=-1, axis=("b", "a"), boundary="edge,zero"),
        "d0 d1/(b,a) -> d0 d1/(b,a):halo(2,2,edge,zero)",
    ),
    (
        partial(halo, width=([0, 2, 1, 3], [1, -1, 2, 0]), dim=0, axis="b"),
        "d0/b d1 -> d0/b:halo([0,2,1,3],[1,-1,2,0]) d1",
    ),
    (partial(ops.copy_to, axis="a"), "d0 d1 -> d0 d1 | copy(a)"),
]


@pytest.mark.parametrize(
    "case", range(len(NAMED)), ids=[f"{f.func.__name__}-{e}" for f, e in NAMED]
)
@in_jax
def test_a_named_op_is_its_expression(case) -> None:
    """The same program, forward and backward."""
    op, expression = NAMED[case]

    def program(move):
        def local(x):
            y, pull = jax.vjp(move, x)
            return y, *pull(y)

        return str(
            jax.make_jaxpr(sharded(local, MESH, check_vma=False))(np.zeros((8, 16, 16), np.float32))
        )

    assert program(op) == program(lambda x: xj.redistribute(x, expression))


@in_jax
def test_axes_that_the_expression_does_not_name_are_left_alone() -> None:
    """Blocks differ along `b`, and keep doing so; replicas along `a` are declared where they are."""
    gathered = mapped(lambda x: xj.redistribute(x, "n/a d -> n d"), (P("a", "b"), P(None, "b")))
    assert np.array_equal(gathered(X), X)
    assert np.array_equal(jax.grad(lambda x: (gathered(x) ** 2).sum())(X), 2 * X)
    permuted = mapped(
        lambda x: xj.redistribute(x, "n/a d -> n/cyclic(a) d"), (P("a", "b"), P("a", "b"))
    )
    assert np.array_equal(permuted(X), X[[0, 2, 4, 6, 1, 3, 5, 7]])


@in_jax
def test_a_plan_on_some_axes_is_priced_for_the_links_of_the_whole_mesh() -> None:
    """Two devices along `a` are of two nodes, though a mesh of two devices would be within one."""
    nodes = xs.Profile(
        "nodes", "made up", xs.Link(0.0, 1e12), across=xs.Link(0.0, 1e9), node_devices=4
    )
    made = []

    def local(x):
        made.append(MoveCall(sides_of("n/a d -> n d"), None, profile=nodes).plan(x))
        return x

    jax.eval_shape(mapped(local, (P("a"), P("a"))), X)
    assert [plan.cost for plan in made] == [4 * 8 * 4 / 1e9]  # half of the rows, between nodes


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_some_axes_may_be_automatic(check_vma) -> None:
    def doubled(x):
        return xj.redistribute(x * 2, "n/a d -> n d/a")

    specs = (P("a"), P(None, "a"))
    moved = mapped(doubled, specs, axis_names={"a"}, check_vma=check_vma)
    assert np.array_equal(jax.jit(moved)(X), 2 * X)


@in_jax
def test_every_kind_of_mesh() -> None:
    """For any order of the mesh's axes: an exchange must follow the order of `ppermute`."""
    here = device_mesh(MESH)
    expression = "n/b d/a -> n/a d/b"
    assert [step.kind for step in xs.plan(expression, xs.Mesh(b=4, a=2), X.shape).steps] == [
        "exchange"
    ]
    meshes = (None, here, here.abstract_mesh, MESH, xs.Mesh(b=4, a=2), xs.Mesh(b=4, z=1, a=2))
    for given in meshes:
        moved = mapped(
            lambda x, m=given: xj.redistribute(x, expression, m), (P("b", "a"), P("a", "b"))
        )
        assert np.array_equal(moved(X), X), given
    plan = xs.plan(expression, xs.Mesh(c=1, b=4, a=2), X.shape)
    moved = mapped(lambda x: xj.redistribute(x, plan), (P("b", "a"), P("a", "b")))
    assert np.array_equal(moved(X), X)


@in_jax
def test_axes_of_one_device() -> None:
    one = device_mesh(xs.Mesh(a=1, b=4))
    for src, dst, specs in [
        ("n/a d/b", "n d/b", (P("a", "b"), P(None, "b"))),
        (
            "n d/b",
            "n/a d/b",
            (P("a", "b"), P("a", "b")),
        ),  # varying where the source holds one value
        ("n d/b | sum(a)", "n d", (P("a", "b"), P())),
        ("n/a/b d", "n/b d/a", (P(("a", "b")), P("b", "a"))),
    ]:
        local = partial(xj.redistribute, layouts=f"{src} -> {dst}")
        moved = jax.shard_map(local, mesh=one, in_specs=specs[0], out_specs=specs[1])
        assert np.array_equal(moved(X), X)
        assert np.array_equal(jax.grad(lambda x, f=moved: (f(x) * X).sum())(X), X)
    alone = jax.pmap(
        lambda x: xj.redistribute(x, "n/a/b d -> n d | copy(a)", xs.Mesh(a=1, b=2)), "b"
    )
    assert np.array_equal(
        alone(X.reshape(2, 4, 8))[1], X
    )  # `a` is not bound: nothing to move along it


PADDED = (
    "n/b d -> n d",
    "n/b d -> n d/b",
    "n d/b -> n/b d",
    "n/zigzag(b) d -> n/b d",
    "n/b d -> n d | sum(b)",
)
PADDED += (
    "n/b d | sum(a) -> n/b d",
    "n/b d -> n/b d",
    "n/b d -> n/a d",
    "n/b d | max(a) -> n/b d | copy(a)",
)


@pytest.mark.parametrize("expression", PADDED)
@in_jax
def test_padding_does_not_leak(expression) -> None:
    """NaN in the padding of blocks and of cotangents reaches no value and no gradient."""
    plan = xs.plan(expression, MESH, UNEVEN)

    def local(x, g):
        y, pull = jax.vjp(lambda x: xj.redistribute(x, plan), x)
        return y, *pull(g)

    both = jax.jit(sharded(local, MESH, check_vma=False))
    y, g = both(padded_with_nan(plan.source), padded_with_nan(plan.target))
    for found, sharding in ((np.asarray(y), plan.target), (np.asarray(g), plan.source)):
        assert np.array_equal(found, padded(unpadded(found, sharding), sharding, fill=0))


def padded_with_nan(sharding: xs.Sharding) -> np.ndarray:
    return padded(
        [np.ones(sharding.local_shape(d), np.float32) for d in range(8)], sharding, fill=np.nan
    )


@pytest.mark.parametrize("layout", ["n/b d", "n/(b,a) d", "n/a d/b", "n/zigzag(b) d/a", "n d"])
@in_jax
def test_the_mask_is_the_blocks(layout) -> None:
    sharding = xs.Sharding(xs.Layout.parse(layout), MESH, UNEVEN)
    mask = sharded(lambda _: xj.ops.valid_mask(layout, shape=UNEVEN), MESH, check_vma=False)
    ones = [np.ones(sharding.local_shape(d), bool) for d in range(8)]
    assert np.array_equal(jax.jit(mask)(np.zeros(8)), padded(ones, sharding))


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_a_loss_of_uneven_blocks(check_vma) -> None:
    """The mask keeps NaN out of a sum of squares; its gradient is the array's own, and 0 in the padding."""
    x = np.arange(1.0, 36.0, dtype=np.float32).reshape(UNEVEN)

    def local(x):
        def loss(x):
            y = xj.redistribute(x, "n/b d -> n d/b", shape=UNEVEN)
            mine = jnp.where(xj.ops.valid_mask("n d/b", shape=UNEVEN), y, 0)
            return xj.redistribute((mine**2).sum(), "() | sum(b) -> ()")

        value, gradient = jax.value_and_grad(loss)(x[0])
        return value, gradient[None]

    both = mapped(local, (P("b"), (P(), P("b"))), check_vma=check_vma)
    sharding = xs.Sharding(xs.Layout.parse("n/b d"), xs.Mesh(b=4), UNEVEN)
    blocks = padded(xs.reference.scatter(x, "n/b d", xs.Mesh(b=4)), sharding, fill=np.nan)
    value, gradient = jax.jit(both)(blocks)
    assert value == (x**2).sum()
    assert np.array_equal(
        gradient, padded(xs.reference.scatter(2 * x, "n/b d", xs.Mesh(b=4)), sharding)
    )


def traced(local, x=X, **options) -> None:
    jax.eval_shape(mapped(local, (P("a"), P("a")), **options), x)


def using(expression, given=None, x=X, manual=("a", "b"), **options):
    """A call of `redistribute` on blocks of x."""
    return partial(
        traced,
        partial(xj.redistribute, layouts=expression, mesh=given, **options),
        x,
        axis_names={*manual},
    )


UNKNOWN = "unknown mesh axis 'c' in\n    'n/c d -> n d'\n       ^\n  the mesh has: a=2, b=4"
NOT_MANUAL = "mesh axis 'b' is not manual here in\n    'n/b d -> n d'"
LARGER = "the block has shape (3, 8), not (4, 8) in\n    'n/zigzag(a) d -> n d'\n     ^"
BFLOAT16 = xs.plan("n/a d -> n d", xs.Mesh(a=2), (8, 8), "bfloat16")
# A call, the error, and words of its text.
WRONG = [
    (using("n/c d -> n d"), "NotationError", UNKNOWN),
    (using("n/b d -> n d", manual="a"), "MeshError", NOT_MANUAL, "manual are: a=2"),
    (using("n/a d -> n d", xs.Mesh(a=4)), "MeshError", "axis 'a' has size 4", "and 2 here"),
    (using("n/a -> n"), "ShapeError", "in 'n/a -> n'"),
    (using("n/zigzag(a) d -> n d", x=X[:6]), "ShapeError", LARGER, "shape="),
    (using("n/a d -> n d", shape=(12, 8)), "ShapeError", "not (6, 8)", "a (12, 8) array"),
    (using(BFLOAT16), "DtypeError", "float32", "bfloat16"),
    (using("n d | mean(a) -> n d", x=X.astype("int32")), "DtypeError", "in 'n d | mean(a) -> n d'"),
    (using("n d -> n/a d"), "NotationError", "the block varies along 'a'", "copy(a)"),
    (
        partial(traced, lambda _: ops.valid_mask("n/c d", shape=UNEVEN)),
        "NotationError",
        "'c' in\n    'n/c d'",
    ),
    (partial(traced, lambda _: ops.valid_mask("n/a", shape=UNEVEN)), "ShapeError", "in 'n/a'"),
    (
        partial(traced, lambda x: ops.all_gather(x, 0, "a", grad="both")),
        "XshardError",
        "replicated",
    ),
    (partial(traced, lambda x: ops.all_gather(x, 2, "a", grad="sum")), "ShapeError", "no dim 2"),
    # Outside of shard_map.
    (
        lambda: xj.redistribute(X, "n/a d -> n d"),
        "MeshError",
        "not manual here",
        "reshard works outside",
    ),
    (
        lambda: xj.redistribute(X, "n/a d -> n d", device_mesh(xs.Mesh(a=2))),
        "MeshError",
        "not manual here",
    ),
]


@in_jax
def test_errors_mark_the_expression() -> None:
    for call, kind, *words in WRONG:
        with pytest.raises(xs.XshardError) as caught:
            call()
        assert type(caught.value).__name__ == kind
        assert all(word in str(caught.value) for word in words), str(caught.value)


@in_jax
def test_a_maximum_that_stays_has_no_gradient() -> None:
    everywhere = P(("a", "b"))
    expression = "n/b d | max(a) -> n d/b | max(a)"
    kept = mapped(lambda x: xj.redistribute(x, expression), (everywhere, everywhere))
    jax.eval_shape(kept, np.zeros((32, 16), np.float32))
    with pytest.raises(xs.errors.LinearityError):
        jax.eval_shape(jax.grad(lambda x: kept(x).sum()), np.zeros((32, 16), np.float32))


@in_jax
def test_types_of_jax_are_accepted() -> None:
    """JAX's own types for addends and copies enter as `sum` and `copy`."""

    def local(x):
        addends = jax.lax.pcast(x, "a", to="unreduced")
        copies = jax.lax.all_gather(x, "a", axis=0, tiled=True, to="reduced")
        total = xj.redistribute(addends, "n d | sum(a) -> n d")
        mine = xj.redistribute(copies, "n d | copy(a) -> n/a d")
        return total, mine

    moved = jax.jit(mapped(local, (P("a"), (P(), P("a")))))
    total, mine = moved(X)
    assert np.array_equal(total, X[:4] + X[4:]) and np.array_equal(mine, X)
    gradient = jax.jit(jax.grad(lambda x: (moved(x)[0] * X[:4]).sum() + (moved(x)[1] * X).sum()))(X)
    assert np.array_equal(gradient, np.concatenate([X[:4], X[:4]]) + X)


# Blocks [8, 8] made of an argument `w`, whole, and of `x`, of which each device along b has rows.
EQUAL = {
    "an argument": lambda w, x: w,
    "a gradient of one": lambda w, x: jax.grad(lambda w: (x @ w).sum())(w),
    "a sum already": lambda w, x: jax.lax.psum(x.T @ x, "b"),
    "copies": lambda w, x: jax.lax.pcast(w, "b", to="reduced"),
    "a result": lambda w, x: xj.redistribute(x.T @ x, "d0 d1 | mean(b) -> d0 d1"),
}
DIFFERENT = {
    "of rows": lambda w, x: x.T @ x,
    "declared varying": lambda w, x: jax.lax.pcast(w, "b", to="varying"),
    "declared addends": lambda w, x: jax.lax.pcast(x.T @ x, "b", to="unreduced"),
    "of an index": lambda w, x: w * jax.lax.axis_index("b"),
    "a number of rows": lambda w, x: jnp.full((8, 8), len(x), np.float32),
    "a constant of jit": lambda w, x: jax.jit(lambda: jnp.ones((8, 8)) * 2)(),
}
# What adds up a block over b, by the kind of addends; on the left of each is `kind(b)`.
SUMS = {
    "redistribute": lambda y, kind: xj.redistribute(y, f"d0 d1 | {kind}(b) -> d0 d1"),
    "to copies": lambda y, kind: ops.all_reduce(y, "b", op=kind, grad="sum"),
    "to parts": lambda y, kind: ops.reduce_scatter(y, 0, "b", op=kind),
    "a tree": lambda y, kind: xj.redistribute({"y": y}, f"d0 d1 | {kind}(b) -> d0 d1/b")["y"],
}
EINSUMS = {
    "first": lambda y: xj.einsum("i j | sum(b), j -> i", y, jnp.ones(8)),
    "second": lambda y: xj.einsum("j, i j | sum(b) -> i", jnp.ones(8), y),
}


def refusal(combine, value, check_vma) -> str:
    """The error of a combination of addends, which is traced alone; "" if there is none."""

    def local(w, x):
        found = combine(value(w, x))
        # The rest of the program is none of the combination: its result varies.
        return found.sum()[None] + 0 * x[:1, 0]

    try:
        jax.eval_shape(mapped(local, ((P(), P("b")), P("b")), check_vma=check_vma), X, X)
    except xs.errors.NotationError as error:
        return str(error)
    return ""


@in_jax
def test_equal_values_are_no_addends() -> None:
    """What JAX's types know to be equal is not summed or averaged; what may differ is, and constants are."""
    combinations = {
        f"{verb}, {kind}": partial(sums, kind=kind)
        for verb, sums in SUMS.items()
        for kind in ("sum", "mean", "max")
        if kind == "sum" or verb == "redistribute"
    }
    combinations |= {f"einsum, {place}, sum": einsum for place, einsum in EINSUMS.items()}
    wrong = []
    for name, combine in combinations.items():
        for kind, value in (EQUAL | DIFFERENT).items():
            if kind == "declared addends" and "sum" not in name:
                continue  # JAX's type says sum
            error = refusal(combine, value, check_vma=True)
            is_refused = "is equal on all 4 devices of 'b', where the source holds addends" in error
            if (
                is_refused != (kind in EQUAL and name.endswith(("sum", "mean")))
                or bool(error) != is_refused
            ):
                wrong.append((name, kind, error))
        if refusal(combine, EQUAL["an argument"], check_vma=False):
            wrong.append((name, "without types"))
    assert not wrong

    def both(w, x):
        values = [DIFFERENT[kind](w, x) for kind in DIFFERENT if kind != "declared addends"]
        summed = [SUMS["redistribute"](y, "sum") for y in values]
        return summed, [jax.lax.psum(y, "b") for y in values]

    found, right = jax.jit(mapped(both, ((P(), P("b")), P())))(X, X)
    jax.tree.map(np.testing.assert_array_equal, found, right)
    with pytest.raises(xs.errors.NotationError, match=r"divide it by 4 for the mean"):
        xj.shard_map(EQUAL["a gradient of one"], "i j, n/b j -> i j | sum(b)", device_mesh(MESH))(
            X, X
        )
