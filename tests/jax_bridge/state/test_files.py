"""`xj.save` and `xj.load`: every layout to every other, each device's block read where it lies, and once."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax, needs_flax
from xshard.cost.model import Link
from xshard.state import Names, rename
from xshard.state.files import FileError, open_checkpoint
from xshard.state.files.loading import plan_load

LAYOUTS = ["o i", "o/a i", "o/(b,a) i/c", "o/zigzag(a) i/b", "o/cyclic(b) i", "o/block(b,4,12) i/c"]
DTYPES = ["int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"]
DTYPES += ["float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"]


def mesh() -> jax.sharding.Mesh:
    return device_mesh(xs.Mesh(a=2, b=2, c=2))


def whole(dtype: object = np.float32) -> np.ndarray:
    return np.arange(16 * 12, dtype=np.float32).reshape(16, 12).astype(dtype)


def bits(x: object) -> bytes:
    return np.asarray(x).tobytes()


@in_jax
def test_every_layout_to_every_layout(tmp_path: Path) -> None:
    here = mesh()
    x = whole(ml_dtypes.bfloat16)
    for i, src in enumerate(LAYOUTS):
        xj.save({"w": x}, tmp_path / str(i), {"w": src}, here)
        for dst in LAYOUTS:
            checkpoint = open_checkpoint(tmp_path / str(i))
            assert str(checkpoint.layouts.get("w", "o i")) == src
            found = xj.load(checkpoint, {"w": dst}, here)["w"]
            expected = xj.place(x, dst, here)
            assert found.sharding == expected.sharding and bits(found) == bits(expected), (src, dst)
            assert checkpoint.bytes_read == x.nbytes  # however many devices have a block
            assert bits(checkpoint.read("w")) == bits(x)
        back = xj.reshard(found, f"{dst} -> o i")  # the order of its rows is remembered
        assert bits(back) == bits(x)


@in_jax
def test_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    here = mesh()
    tree = {name: np.arange(48, dtype=np.uint8).view(name).reshape(2, -1) for name in DTYPES}
    tree |= {"bool": np.eye(4, dtype=bool), "scalar": jnp.float32(3), "none": jnp.zeros((0, 4))}
    xj.save(tree, tmp_path, {"scalar": "()", "bool": "o i/c", "**": "o/a i"}, here, shard_bytes=100)
    assert len(list(tmp_path.glob("model-*"))) > 5
    found = xj.load(tmp_path, {"scalar": "()", "none": "o i", "**": "o/b i"}, here, verify=True)
    for name, x in tree.items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape, name
        assert bits(found[name]) == bits(x), name


@in_jax
def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    """Of equinox, with a function in it; numbers and texts are in the index."""
    import equinox as eqx

    here = mesh()
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    tree = {
        "model": xj.place(model, {"**.weight": "o/a i", "**": "..."}, here),
        "step": 7,
        "run": "first",
    }
    tree["moments"] = [jnp.ones(3), (np.int32(4), None)]
    xj.save(tree, tmp_path)
    fresh = {"model": eqx.filter_eval_shape(lambda: model), "step": 0, "run": ""}
    fresh["moments"] = [jnp.zeros(3), (jnp.int32(0), None)]
    found = xj.load(tmp_path, {"**.weight": "o i/b", "**": "..."}, here, like=fresh)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["step"] == 7 and found["run"] == "first"
    assert str(open_checkpoint(tmp_path).mesh) == "a=2,b=2,c=2"
    assert found["model"].layers[0].weight.sharding.spec == P(None, "b")
    arrays = [jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (found, tree)]
    assert [bits(x) for x in arrays[0]] == [bits(x) for x in arrays[1]] and len(arrays[0]) == 6
    x = jnp.arange(4.0)
    assert bits(found["model"](x)) == bits(model(x))


@needs_flax
@in_jax
def test_a_module_of_flax_comes_back(tmp_path: Path) -> None:
    from flax import nnx

    here = mesh()
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    xj.save(nnx.state(model), tmp_path)
    assert set(open_checkpoint(tmp_path)) == {"kernel", "bias"}
    state = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 6, rngs=nnx.Rngs(1))))
    found = xj.load(tmp_path, {"kernel": "i/a o/b", "bias": "o"}, here, like=state)
    assert found["kernel"][...].sharding.spec == P("a", "b")
    nnx.update(model, found)
    assert bits(model.kernel[...]) == bits(found["kernel"][...])


@in_jax
def test_a_load_gives_what_is_asked_for(tmp_path: Path) -> None:
    here = mesh()
    x = whole()
    with jax.enable_x64(True):
        xj.save(
            {"w": x, "norm": np.ones(3, np.float64)}, tmp_path, {"w": "o/a i/b", "**": "..."}, here
        )
    turned = Names(rename("w", "kernel", "o i -> i o"), rename("**", "**", dtype="float32"))
    found = xj.load(
        tmp_path, {"kernel": "i/b o/a", "norm": "n"}, here, names=turned, dtype=jnp.bfloat16
    )
    assert bits(found["kernel"]) == bits(x.T.astype(ml_dtypes.bfloat16))
    assert found["norm"].dtype == jnp.bfloat16
    like = {"norm": jax.ShapeDtypeStruct((3,), jnp.float32), "new": jnp.ones(2)}
    part = xj.load(tmp_path, None, here, like=like, strict=False)
    assert bits(part["norm"]) == bits(np.ones(3, np.float32)) and part["new"] is like["new"]
    for wanted, kind, words in (
        (like, xs.XshardError, "in the tree alone: new\n  names= maps"),
        (None, xs.errors.DtypeError, "norm: the block is float64, which JAX would make float32"),
        (
            {"norm": jnp.ones(4), "w": x},
            xs.errors.ShapeError,
            r"norm: shape \(3,\) in .*, \(4,\) here",
        ),
    ):
        with pytest.raises(kind, match=words):
            xj.load(tmp_path, None, here, like=wanted)


@in_jax
def test_what_devices_share_where_the_disk_is_slow(tmp_path: Path) -> None:
    here = mesh()
    slow = replace(xs.load_profile("h100"), disk=Link(1e-4, 1e8))
    x = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    xj.save({"w": x}, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    planned = plan_load(checkpoint, {"w": "o/a i"}, xs.Mesh(a=2, b=2, c=2), profile=slow)["w"]
    assert planned.is_shared and planned.source.layout.axes == ("a", "b", "c")
    found = xj.load(checkpoint, {"w": "o/a i"}, here, profile=slow)["w"]
    assert bits(found) == bits(x) and found.sharding == NamedSharding(here, P("a", None))
    assert checkpoint.bytes_read == x.nbytes


@in_jax
def test_scalars_of_numpy_come_back(tmp_path: Path) -> None:
    """np.float64, as the mean of losses is, is a float of Python as well; other scalars are arrays."""
    tree = {"best": np.mean([1.0, 2.0]), "scale": np.float32(2.5), "name": np.str_("a")}
    started = {"best": 0.0, "scale": np.float32(0), "name": ""}
    for number, rules in enumerate((None, {"scale": "..."})):
        xj.save(tree, tmp_path / f"run_{number}", rules, mesh())
        for like in (tree, started):
            loaded = xj.load(tmp_path / f"run_{number}", None, mesh(), like=like)
            assert loaded == {"best": 1.5, "scale": 2.5, "name": "a"}
            assert type(loaded["best"]) is float
    # A number of the tree may have been a counter on a device.
    xj.save({"optimizer": {"step": jnp.int32(7)}}, tmp_path / "counted")
    names = Names(rename("optimizer.step", "step"))
    assert xj.load(tmp_path / "counted", None, mesh(), like={"step": 0}, names=names) == {"step": 7}
    with pytest.raises(xs.XshardError, match="in the tree alone: step"):
        xj.load(tmp_path / "counted", None, mesh(), like={"step": "7"}, names=names)


@in_jax
def test_what_is_no_state(tmp_path: Path) -> None:
    """Each is refused before the folder is made."""
    here = mesh()
    x = jnp.ones((4, 4))
    gone = jnp.ones(4)
    gone.delete()
    wrong = [
        ({"a.b": x, "a": {"b": x}}, {}, "two leaves are called 'a.b'"),
        ({"key": jax.random.key(0)}, {}, "leaf 'key': PRNG keys\n  save jax.random.key_data"),
        ({"w": x}, {"rules": {"w": "o/a i"}}, "rules without a mesh"),
        ({"w": x}, {"rules": {"v": "o/a i"}, "mesh": here}, "no rule for 1 of 1 names: w"),
        ({"w": x}, {"names": Names(rename("v", "w"))}, "no relation for 1 names: w"),
        ({"w": x}, {"shard_bytes": "5 bananas"}, "'5 bananas' is not a number of bytes"),
        ({"w": jnp.ones(4, jnp.int4)}, {}, "w: safetensors has no int4"),
        ({"w": jnp.ones(4, "float8_e3m4")}, {}, "leaf 'w': unknown dtype 'float8_e3m4'"),
        ({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, {}, "leaf 'w': a type cannot be saved"),
        ({"w": gone}, {}, "leaf 'w': the array was donated or deleted"),
        ({"w": x, "z": 3j}, {}, "leaf 'z': complex cannot be saved\n  save an array: np.asarray"),
        ({"w": x, "loader": b"7"}, {}, "leaf 'loader': bytes cannot be saved"),
    ]
    for tree, options, message in wrong:
        with pytest.raises(xs.XshardError) as raised:
            xj.save(tree, tmp_path / "none", **options)
        assert message in str(raised.value)
    with pytest.raises(xs.XshardError, match="leaf 'w': a traced array cannot be saved"):
        jax.jit(lambda w: xj.save({"w": w}, tmp_path / "none"))(x)
    assert not (tmp_path / "none").exists()
    with pytest.raises(xs.errors.MeshError, match="an abstract mesh cannot hold arrays"):
        xj.load(tmp_path, None, here.abstract_mesh)
    with pytest.raises(FileError, match="none: No such file"):
        xj.load(tmp_path / "none", None, here)
