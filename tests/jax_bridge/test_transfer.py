"""`transfer`: trees on another mesh, bit by bit, with the bytes of their plan, also in other processes."""

import contextlib
import io
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.state import execute
from jax_bridge.testing.stacked import received_bytes
from tests.jax_bridge.helpers import CALL, host, in_jax, joined, needs_flax
from tests.state.test_chains import EXPERTS, GATE_UP, TURNS, WHOLE
from xshard.state import Names, concat, rename, stack
from xshard.testing.pickling import packed


def on(first: int, kind: AxisType = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    """A mesh of the devices from `first` on."""
    found = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.array(found[first : first + int(np.prod([*axes.values()]))]).reshape(*axes.values())
    return jax.sharding.Mesh(grid, tuple(axes), axis_types=(kind,) * len(axes))


def random(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Bits of any kind, with NaNs."""
    size = jnp.dtype(dtype).itemsize
    bits = np.random.default_rng(len(shape)).integers(0, 256, (*shape, size), np.uint8)
    return bits.view(jnp.dtype(dtype))[..., 0]


def bits(x) -> bytes:
    return np.ascontiguousarray(np.asarray(x)).tobytes()


def stored(x: np.ndarray, layout: str, mesh: jax.sharding.Mesh) -> list[bytes]:
    """The blocks that the devices of a mesh are to have."""
    return [bits(b) for b in xs.reference.scatter(x, layout, xs.Mesh(dict(mesh.shape)))]


def held(x: jax.Array) -> list[bytes]:
    """The blocks that they have, in the order of the mesh."""
    blocks = {shard.device: bits(shard.data) for shard in x.addressable_shards}
    return [blocks[device] for device in x.sharding.mesh.devices.flat]


TREE = {
    "up.kernel": (random(8, 12), "i/dp o", "i o/tp"),
    "up.bias": (random(12, dtype="bfloat16"), "o/dp", "o"),
    "down.0": (random(8, 4, dtype="float8_e4m3fn"), "i o/dp", "i/tp o"),
    "down.1": (random(4, 8, dtype="int32"), "i/dp o", "i/dp o -> o/tp i"),
    "order": (random(16, 2, dtype="bool") != 0, "s/zigzag(dp) c", "s/cyclic(tp) c"),
}


@pytest.mark.parametrize("first", [0, 3, 4], ids=["the same devices", "a shared one", "others"])
@in_jax
def test_a_tree_moves_to_fewer_devices_bit_by_bit_with_the_bytes_of_its_plan(first) -> None:
    train = on(0, dp=4)
    serve = on(first, tp=2)
    programs = []
    tree = {name: xj.place(x, src, train) for name, (x, src, _) in TREE.items()} | {
        "count": jnp.int32(3)
    }
    rules = {name: dst for name, (_, _, dst) in TREE.items()} | {"count": "()"}
    made = execute._program

    def counted(*key):
        run = made(*key)
        return lambda *x: programs.append(run.lower(*x).compile().as_text()) or run(*x)

    # This machine's plan gathers there, which is a program of its own; that of h100 sends all of it.
    with mock.patch.object(execute, "_program", counted):
        moved = xj.transfer(tree | {"step": 7}, rules, serve, profile="h100")
    assert moved.pop("step") == 7 and moved.pop("count").sharding.mesh == serve
    for name, (x, _, layout) in TREE.items():
        there = layout.split(" -> ")[-1]
        assert held(moved[name]) == stored(x.T if there == "o/tp i" else x, there, serve), layout
    plan = xj.transfer(tree, rules, serve, dry_run=True, profile="h100")
    assert plan.bytes_received == plan.bytes_lower_bound and "up.kernel" in str(plan)
    [text] = programs
    assert (
        received_bytes(text, len({*train.devices.flat, *serve.devices.flat})) == plan.bytes_received
    )
    # Its record of order goes along: the way back needs no word of it.
    order = xj.transfer(moved["order"], "s/dp c", train)
    assert np.array_equal(order, TREE["order"][0])


SHAPES = {"q": (16, 8), "k": (8, 8), "v": (8, 8), "gate": (24, 8), "up": (24, 8), "out": (8, 16)}


def layers(n: int) -> dict[str, np.ndarray]:
    found = {
        f"{i}.{key}": random(*size, dtype="bfloat16")
        for i in range(n)
        for key, size in SHAPES.items()
    }
    experts = {f"experts.{i}.w": random(4, 6) for i in range(3)}
    return found | experts | {"norm": np.arange(8, dtype=np.float32)}


@in_jax
def test_chained_names_are_one_transfer_with_parts_along_two_dims() -> None:
    weights = {name: x.astype(np.float32) for name, x in (GATE_UP | WHOLE).items()}
    names = EXPERTS.then(TURNS)
    expected = names.apply(weights)
    src = {"w": "o/cyclic(dp) i", "**": "e o/dp i"}
    dst = {"odd.*": "n/tp", "even.*": "a/tp b", "**": "a/tp b"}
    train = on(0, dp=4)
    serve = on(3, tp=2)
    moved = xj.transfer(xj.place(weights, src, train), dst, serve, names=names)
    assert [*moved] == [*expected]
    for name, x in expected.items():
        assert held(moved[name]) == stored(x, xs.Rules(dst).find(name), serve), name
    returned = xj.transfer(moved, src, train, names=names.inverse)
    for name, x in weights.items():
        assert held(returned[name]) == stored(x, xs.Rules(src).find(name), train), name


@in_jax
def test_names_change_on_the_way() -> None:
    to_fused = Names(
        concat(["*.q", "*.k", "*.v"], "*.qkv", rows=(4, 2, 2)),
        concat(["*.gate", "*.up"], "*.gate_up", rows=(24, 24)),
        rename("*.out", "*.out", "o i -> i o"),
        stack("experts.*.w", "experts.w"),
    )
    names = Names(*to_fused.relations, rename("norm", "norm", dtype="bfloat16"))
    apart = {"experts.*.w": "a/dp b", "*.out": "o i/dp", "norm": "n", "**": "o/dp i"}
    fused = {"*.qkv": "o/tp i", "*.gate_up": "o/block(tp,24,24) i", "*.out": "i/tp o"}
    fused |= {"experts.w": "e a b/tp", "norm": "n"}
    train = on(0, dp=4)
    serve = on(4, tp=2)
    weights = layers(2)
    given = xj.place(weights, apart, train)
    seen: list[tuple[int, int]] = []
    options = {"names": names, "bucket_bytes": 600}
    moved = xj.transfer(
        given, fused, serve, **options, progress=lambda *bytes_: seen.append(bytes_)
    )
    plan = xj.transfer(given, fused, serve, **options, dry_run=True)
    assert len(seen) == len(plan.buckets) > 2 and seen[-1] == (plan.bytes_moved, plan.bytes_moved)
    assert seen == sorted(set(seen)) and plan.bytes_received == plan.bytes_lower_bound
    expected = names.apply(weights)
    layouts = {each.name: each.sharding.layout for each in plan.arrays}
    assert [*moved] == [*expected]
    for name, x in expected.items():
        assert held(moved[name]) == stored(x, str(layouts[name]), serve), name
    back = Names(*to_fused.inverse.relations, rename("norm", "norm", dtype="float32"))
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        returned = xj.transfer(moved, apart, train, names=back, progress=True)
    assert "transfer" in shown.getvalue()
    for name, x in weights.items():
        assert bits(returned[name]) == bits(x) and returned[name].dtype == x.dtype, name


@pytest.mark.parametrize(
    ("expression", "src", "dst", "steps"),
    [
        ("n/a d -> n d", {"a": 2}, {"b": 4}, ["transfer", "all_gather"]),
        ("n/a d -> d n", {"a": 2}, {"b": 2, "c": 2}, ["transfer", "all_gather", "transpose"]),
        (
            "n/a d -> d n",
            {"a": 2},
            {"b": 6},
            ["transfer", "exchange", "transpose"],
        ),  # parts of unequal size
        ("n d | sum(a) -> n/b d", {"a": 4}, {"b": 2}, ["reduce_scatter", "transfer"]),
    ],
)
@in_jax
def test_steps_on_either_mesh_are_run_there(expression, src, dst, steps) -> None:
    """What several devices are to have travels once, where that is cheaper; addends are added up."""
    x = np.arange(512 * 50, dtype=np.float32).reshape(512, 50)
    before, after = (side.strip() for side in expression.split("->"))
    n = int(np.prod([*src.values()]))
    train = on(0, AxisType.Explicit, **src)
    serve = on(min(n, 8 - int(np.prod([*dst.values()]))), **dst)
    spec = xj.specs.to_named_sharding(before, train)
    blocks = xs.reference.scatter(x, before, xs.Mesh(src))
    given = [jax.device_put(b, d) for b, d in zip(blocks, train.devices.flat, strict=True)]
    array = jax.make_array_from_single_device_arrays(x.shape, spec, given)
    [planned] = xj.transfer(array, expression, serve, profile="bandwidth", dry_run=True).arrays
    assert [str(step).split()[0].strip(",") for step in planned.moves[0].plan.steps] == steps
    with jax.set_mesh(train):
        moved = xj.transfer(array, expression, serve, profile="bandwidth")
    assert held(moved) == stored(x.T if after == "d n" else x, after, serve)


@in_jax
def test_arrays_without_elements_have_their_blocks_there() -> None:
    """JAX holds all of an empty array on every device, whatever its sharding says."""
    here = on(0, a=4)
    there = on(3, b=2)
    x = {"rows": np.zeros((8, 0), np.float32), "columns": np.zeros((0, 8), np.float32)}
    placed = xj.reshard(xj.place(x, "n d", here), "n d -> n/a d")
    for profile in ("h100", "gloo"):
        for layout, block in (("n d", (8, 0)), ("n/b d", (4, 0))):
            moved = xj.transfer(placed, {"**": layout}, there, profile=profile)
            assert moved["rows"].shape == (8, 0) and moved["columns"].shape == (0, 8)
            assert moved["rows"].sharding.shard_shape((8, 0)) == block
    turned = Names(rename("rows", "rows", "n d -> d n"), rename("**", "**"))
    assert xj.transfer(placed, {"**": "d/b n"}, there, names=turned)["rows"].shape == (0, 8)


@in_jax
def test_sources_are_freed_if_they_are_donated() -> None:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    keys = jax.random.split(jax.random.key(0), 4)
    given = xj.place(
        {"moved": x, "kept": x, "keys": keys}, {"keys": "k/a", "**": "n/a d"}, on(0, a=4)
    )
    rules = {"moved": "n d/b", "kept": "n/(b,c) d", "keys": "k/c"}
    made = xj.transfer(given, rules, on(0, b=2, c=2), donate=True)
    assert all(array.is_deleted() for array in given.values())
    assert np.array_equal(made["kept"], x) and np.array_equal(made["moved"], x)
    assert np.array_equal(jax.random.key_data(made["keys"]), jax.random.key_data(keys))
    assert np.array_equal(xj.reshard(made["keys"], "k/c -> k") == keys, [True] * 4)
    with pytest.raises(xs.XshardError, match="leaf 'kept': the array was donated or deleted"):
        xj.transfer(given, rules, on(0, b=2, c=2))


@in_jax
def test_keys_move_without_names_and_in_processes_that_know_their_type_alone() -> None:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    placed = xj.place(
        {"keys": keys, "w": np.ones((8, 4), np.float32)}, {"keys": "k/a", "w": "n/a d"}, on(0, a=4)
    )
    there = on(4, b=2)
    known = placed["keys"]
    types = placed | {
        "keys": jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=known.sharding)
    }
    rules = {"keys": "k/b", "w": "n d/b"}
    plans = [xj.transfer(tree, rules, there, dry_run=True) for tree in (placed, types)]
    assert plans[0] == plans[1]

    for rule in ("k/b", "k/b words"):
        words = "leaf 'keys': PRNG keys keep their names\n.*without names=, or jax.random.key_data"
        names = Names(rename("keys", "rng"), rename("**", "**"))
        with pytest.raises(xs.errors.DtypeError, match=words):
            xj.transfer(placed, {"rng": rule, "w": "n d/b"}, there, names=names)


@in_jax
def test_what_does_not_fit_is_refused_with_its_leaf() -> None:
    train = on(0, dp=4)
    serve = on(4, tp=2)
    w, v = (
        xj.place(np.zeros((8, 6), np.float32), "i/zigzag(dp) o", mesh)
        for mesh in (train, on(4, dp=2))
    )
    e = xs.errors
    for rule, mesh, kind, words in (
        (
            "i o/tq",
            serve,
            e.NotationError,
            r"leaf 'w': unknown mesh axis 'tq' in\n *'i o/tq'\n *\^\^\n",
        ),
        ("i/tp o -> i o", serve, e.NotationError, "unknown mesh axis 'tp'.*\n.*\n.*\n.*dp=4"),
        ("i o/dp -> i o", serve, e.ShapeError, "leaf 'w': the array is not sharded as 'i o/dp'"),
        (
            "i/dp o -> i o",
            serve,
            e.ShapeError,
            "leaf 'w': the rows of the array are stored as 'i/zigzag",
        ),
        (
            "i/sizes(tp,1,7) o",
            serve,
            e.ShapeError,
            "leaf 'w': a jax.Array cannot have uneven blocks",
        ),
        ("i o | copy(tp)", serve, e.MeshError, "leaf 'w': .*a mesh of Explicit axes only"),
        ("i", serve, e.ShapeError, "leaf 'w': 'i' has 1 dims, the array has 2"),
        ("i o", serve.abstract_mesh, e.MeshError, "is not a mesh of devices"),
        ("i o", {"tp": 2}, e.MeshError, "is not a mesh"),
    ):
        with pytest.raises(kind, match=words):
            xj.transfer({"w": w}, {"w": rule}, mesh)
    for tree, rules, words in (
        ({"w": w}, {"v": "i o"}, "no rule for 1 of 1 names: w"),
        ({"w": np.zeros(3)}, "...", "no array is on a mesh"),
        ({"a": {"b": w}, "a.b": w}, "...", "two leaves are called 'a.b'"),
        ({"w": w, "v": v}, "...", "the arrays are on several meshes"),
    ):
        with pytest.raises(xs.XshardError, match=words):
            xj.transfer(tree, rules, serve)
    with pytest.raises(xs.XshardError, match=r"leaf 'w': the array is traced, float32\[8,6\]"):
        jax.jit(lambda w: xj.transfer({"w": w}, "i o", serve))(w)
    assert xj.transfer({"step": 3}, "...", serve) == {"step": 3}


@needs_flax
@in_jax
def test_modules_of_other_libraries_come_whole() -> None:
    import equinox as eqx
    from flax import nnx

    train = on(0, dp=2)
    serve = on(2, tp=2)
    model = [nnx.Linear(4, 6, rngs=nnx.Rngs(0)), eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))]
    linear, mlp = xj.place(model, {"0.kernel": "i/dp o", "**": "..."}, train)
    rules = {"0.kernel": "i o/tp", "1.**.weight": "o/tp i", "**": "..."}
    moved, moved_mlp = xj.transfer([linear, mlp], rules, serve)
    assert isinstance(moved, nnx.Linear) and moved.kernel[...].sharding == NamedSharding(
        serve, P(None, "tp")
    )
    assert np.array_equal(moved.kernel[...], linear.kernel[...])
    assert (
        moved(np.ones((1, 4), np.float32)).shape == (1, 6)
        and moved_mlp.activation is mlp.activation
    )


def across() -> list[bool]:
    """From the devices of the first process to those of the second: two programs' parts of one."""
    train = on(0, dp=4)
    serve = on(4, tp=2)
    mine = jax.process_index() == 0
    weights = layers(1) | {"step": np.int32(3)}
    names = Names(concat(["*.q", "*.k"], "*.qk"), rename("**", "**"))
    rules = {"norm": "n", "step": "()", "experts.*.w": "a/dp b", "**": "o/dp i"}
    placed = xj.place(weights, rules, train)  # where a process has no device it has no block either
    types = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in placed.items()
    }
    there = {
        "norm": "n",
        "step": "()",
        "experts.*.w": "a b/tp",
        "*.qk": "o/block(tp,16,8) i",
        "**": "o/tp i",
    }
    moved = xj.transfer(placed if mine else types, there, serve, names=names, donate=True)
    expected = names.apply(weights)
    layout = {"norm": "n", "step": "()", "0.qk": "o/block(tp,16,8) i"}
    layout |= {f"experts.{i}.w": "a b/tp" for i in range(3)}
    facts = [placed[name].is_deleted() for name in placed] if mine else []
    for name, x in expected.items():
        blocks = [bits(shard.data) for shard in moved[name].addressable_shards]
        facts.append(blocks == ([] if mine else stored(x, layout.get(name, "o/tp i"), serve)))
    return facts


def test_another_process_gets_them() -> None:
    with joined([host(4)] * 2) as ask:
        for facts in ask(CALL, packed(across)):
            assert len(facts) > 8 and all(facts)
