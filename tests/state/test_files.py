"""Files: each element is written once, a device reads its rows alone, and a save is there whole or not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xshard import Layout, Link, Mesh, Sharding, XshardError, dtypes, load_profile
from xshard.errors import DtypeError, PlanError
from xshard.state import Names, concat, rename, split, stack
from xshard.state.files import FileError, open_checkpoint, verify
from xshard.state.files.checkpoint import box_pairs
from xshard.state.files.folder import INDEX, KEY
from xshard.state.files.loading import plan_load, read_block, source_sharding
from xshard.state.files.saving import Saving, Source, abort, begin, commit, plan_save, save_blocks, write
from xshard.state.llama import named
from xshard.state.names import names_from_json, names_to_json

MESH = Mesh(dp=2, tp=2)
LAYOUTS = [
    "o i",
    "o/tp i",
    "o i/tp",
    "o/tp i/dp",
    "o/dp/tp i",
    "o/zigzag(tp) i",
    "o/cyclic(tp,1) i",
    "o/(tp,dp) i",
]
SHAPES = {
    "q": (8, 6),
    "k": (4, 6),
    "v": (4, 6),
    "e.0": (4, 3),
    "e.1": (4, 3),
    "gate_up": (8, 6),
    "odd": (7, 5),
}
FUSED = Names(
    concat(["q", "k", "v"], "qkv", rows=(2, 1, 1)),
    stack("e.*", "experts", 1),
    split("gate_up", ["gate", "up"], 1, rows=(1, 1), order="o i -> i o"),
    rename("odd", "turned", "o i -> i o"),
)
WHOLE = {
    name: np.arange(100 * i, 100 * i + np.prod(shape), dtype=np.float32).reshape(shape)
    for i, (name, shape) in enumerate(SHAPES.items())
}


def block(x: NDArray[Any], sharding: Sharding, device: int) -> NDArray[Any]:
    rows = [sharding.layout.positions(sharding.mesh, x.shape, d, device) for d in range(x.ndim)]
    return x[np.ix_(*rows)] if rows else x


def cut(layouts: dict[str, str], arrays: dict[str, NDArray[Any]] = WHOLE) -> dict[str, Source]:
    return {
        name: Source(Sharding(Layout(layouts.get(name, "...")), MESH, x.shape), str(x.dtype), range(4))
        for name, x in arrays.items()
    }


def save(path: Path, saving: Saving, arrays: dict[str, NDArray[Any]] = WHOLE) -> None:
    """As four processes do, one after the other."""
    token, sums = begin(saving, path), dict[str, list[Any]]()
    for process in range(4):
        given_back = write(
            saving, path, token, process, lambda n, d, _: block(arrays[n], saving.sources[n].sharding, d)
        )
        for name, some in given_back.items():
            sums.setdefault(name, []).extend(some)
    commit(saving, path, token, sums)


@given(st.data())
def test_any_layouts_and_names_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Each element is in one process's parts, the files are the whole arrays, and every block comes back."""
    layouts = {name: data.draw(st.sampled_from(LAYOUTS)) for name in SHAPES}
    names = data.draw(st.sampled_from([None, FUSED]))
    saving = plan_save(cut(layouts), names, shard_bytes=data.draw(st.sampled_from([200, 2**20])))
    stored = {name: np.zeros(array.shape, np.float32) for name, array in saving.arrays.items()}
    times = {name: np.zeros(array.shape, int) for name, array in saving.arrays.items()}
    for process in range(4):
        for name, device, pairs in saving.writes(process):
            x = block(WHOLE[name], saving.sources[name].sharding, device)
            for pair in pairs:
                stored[pair.name][pair.box] = pair.view(x)
                times[pair.name][pair.box] += 1
    assert all((n == 1).all() for n in times.values())
    for name, x in (FUSED.apply(WHOLE) if names else WHOLE).items():
        np.testing.assert_array_equal(stored[name], x, err_msg=name)
    other = {
        name: Sharding(Layout(data.draw(st.sampled_from(LAYOUTS))), MESH, SHAPES[name]) for name in SHAPES
    }
    back = (names.inverse if names else Names(rename("**", "**"))).resolve(
        {n: x.shape for n, x in stored.items()}
    )
    for name, sharding in other.items():
        for device in range(4):
            out = np.full(sharding.local_shape(device), -1, np.float32)
            for pair in box_pairs(back[name].pieces, sharding, device):
                pair.view(out)[...] = stored[pair.name][pair.box]
            np.testing.assert_array_equal(out, block(WHOLE[name], sharding, device), err_msg=name)


@pytest.mark.parametrize("names", [None, FUSED], ids=["same", "fused"])
def test_the_safetensors_library_reads_them(tmp_path: Path, names: Names | None) -> None:
    layouts = dict(zip(SHAPES, LAYOUTS, strict=False))
    save(tmp_path, plan_save(cut(layouts), names, shard_bytes=200, constants={"step": 3}))
    expected = WHOLE if names is None else names.apply(WHOLE)
    shards = sorted(tmp_path.glob("*.safetensors"))
    found = {name: x for shard in shards for name, x in safetensors.numpy.load_file(shard).items()}
    assert len(shards) > 1 and found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.mesh == MESH and checkpoint.constants == {"step": 3}
        assert names is None or checkpoint.names.relations == names.relations
        if names is None:
            assert checkpoint.layouts == {n: Layout(x) for n, x in layouts.items() if Layout(x).axes}
        else:
            assert checkpoint.layouts == {"turned": Layout("i o/cyclic(tp,1)")}
        assert verify(checkpoint) == sum(len(s) for s in checkpoint.sums.values()) > len(checkpoint)


def test_files_of_the_safetensors_library_and_each_dtype(tmp_path: Path) -> None:
    """With other metadata, scalars, and arrays without elements, each under the carrier of its dtype."""
    kinds = ["bool", "uint8", "int64", "float16", "float64", "complex64"]
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    arrays |= {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 3), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", {"format": "np"})
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        for name, x in arrays.items():
            assert checkpoint[name].dtype == str(x.dtype)
            found = checkpoint.read(name, tuple(slice(0, n) for n in x.shape))
            assert np.array_equal(found, x) and found.dtype == x.dtype
    for kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        one = {kind: np.arange(6).astype(dtypes.carrier(kind))}
        source = Source(Sharding(Layout("n/tp"), MESH, (6,)), kind, range(4))
        save(tmp_path / kind, plan_save({kind: source}), one)
        with open_checkpoint(tmp_path / kind) as checkpoint:
            assert checkpoint.dtypes == {kind: kind}
            np.testing.assert_array_equal(checkpoint.read(kind, (slice(0, 6),)), one[kind])
    with pytest.raises(DtypeError, match="x: safetensors has no complex128"):
        plan_save({"x": Source(Sharding(Layout("n"), MESH, (6,)), "complex128", range(4))})


def test_bytes_read_are_the_bytes_needed(tmp_path: Path) -> None:
    layouts = {"odd": "o/tp i", "q": "o i/tp", "k": "o/zigzag(tp) i", "**": "..."}
    save(tmp_path, plan_save(cut({})))
    with open_checkpoint(tmp_path) as checkpoint:
        for name, load in plan_load(checkpoint, layouts, MESH).items():
            for device in range(4):
                before = checkpoint.bytes_read
                found = read_block(checkpoint, load, device)
                np.testing.assert_array_equal(found, block(WHOLE[name], load.target, device), err_msg=name)
                assert checkpoint.bytes_read - before == found.nbytes


def test_all_write_alike(tmp_path: Path) -> None:
    """A hundred arrays of which everyone has a copy: each process writes 25; and each array is aligned."""
    source = Source(Sharding(Layout("n"), MESH, (6,)), "float32", range(4))
    saving = plan_save({f"w{i}": source for i in range(100)})
    assert [len(list(saving.writes(process))) for process in range(4)] == [25] * 4
    mixed = plan_save({"flags": source._replace(dtype="bool"), "w": source})
    assert all(
        start % dtypes.itemsize(mixed.arrays[n].dtype) == 0 for n, start in mixed.shards[0].starts.items()
    )
    assert saving.digest == plan_save({f"w{i}": source for i in range(100)}).digest
    assert saving.digest != plan_save({f"w{i}": source for i in range(99)}).digest


def test_a_save_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """Until the index has its name the old checkpoint is there; the next save removes what one left."""
    twice = {name: 2 * x for name, x in WHOLE.items()}
    saving = plan_save(cut({}), shard_bytes=200)
    save(tmp_path, saving)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    token = begin(saving, tmp_path)
    for process in range(4):
        write(saving, tmp_path, token, process, lambda n, d, _: twice[n])
    unfinished = tmp_path / f".saving-{token}"
    (unfinished / saving.shards[0].name).rename(tmp_path / "model-0123abcd-00001-of-00009.safetensors")
    left = {path.name for path in tmp_path.iterdir()} - old.keys()
    assert left == {unfinished.name, "model-0123abcd-00001-of-00009.safetensors"}
    with open_checkpoint(tmp_path) as checkpoint:
        assert verify(checkpoint) == len(SHAPES)
    assert all((tmp_path / name).read_bytes() == was for name, was in old.items())
    again = begin(saving, tmp_path)  # there is room for it first
    assert {path.name for path in tmp_path.iterdir()} == {*old, f".saving-{again}"}
    abort(tmp_path, again)
    save(tmp_path, saving, twice)
    assert len(list(tmp_path.iterdir())) == len(old) and not old.keys() & left
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("odd", (slice(0, 7), slice(0, 5))), twice["odd"])
    index = json.loads((tmp_path / INDEX).read_text())
    assert set(index["weight_map"].values()) == {p.name for p in tmp_path.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in WHOLE.values())


def test_what_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"q: 'o i \| sum\(tp\)' cannot be in files"):
        plan_save(cut({"q": "o i | sum(tp)"}))
    with pytest.raises(PlanError, match="halos"):
        plan_save(cut({"q": "o/tp:halo(1,1) i"}))
    source = Source(Sharding(Layout("n"), MESH, (6,)), "float32", range(4))
    with pytest.raises(FileError, match="an array is called '__metadata__'"):
        plan_save({"__metadata__": source})
    with pytest.raises(PlanError, match=r"shard_bytes is 1\.5"):
        plan_save({"w": source}, shard_bytes=1.5)
    with pytest.raises(XshardError, match="constants: Object of type set"):
        plan_save({"w": source}, constants={"a": {1}})
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="which others would read instead of model"):
        begin(plan_save(cut({})), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_one_save_at_a_time(tmp_path: Path) -> None:
    """Another would take this one's files for leftovers; and the index is JSON whatever the constants are."""
    here = {name: source._replace(processes=[0] * 4) for name, source in cut({}).items()}
    saving, refused = plan_save(here, constants={"best": -math.inf}), []

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        if not refused:
            with pytest.raises(FileError, match="another save is writing into it") as error:
                save_blocks(saving, tmp_path, block_of)
            refused.append(error)
        return WHOLE[name]

    save_blocks(saving, tmp_path, block_of)
    save_blocks(saving, tmp_path, block_of)
    json.loads((tmp_path / INDEX).read_text(), parse_constant=pytest.fail)
    with open_checkpoint(tmp_path) as checkpoint:
        assert verify(checkpoint) == len(SHAPES) and checkpoint.constants == {"best": -math.inf}


def test_what_is_not_cut_has_no_say_in_the_layouts() -> None:
    """Buffers of an FSDP model are not on the mesh of its parameters."""
    buffer = Source(Sharding(Layout("n"), Mesh(world=4), (6,)), "int64", range(4))
    saving = plan_save({"buffer": buffer, "q": cut({"q": "o/tp i"})["q"]})
    said = json.loads(json.loads(saving.shards[0].header[8:])["__metadata__"][KEY])
    assert said == {"mesh": str(MESH), "layouts": {"q": "o/tp i"}}


def test_a_changed_byte_has_the_wrong_checksum(tmp_path: Path) -> None:
    save(tmp_path, plan_save(cut({"q": "o i/tp"})))
    (shard,) = tmp_path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(FileError) as error:
        verify(checkpoint)
    assert str(error.value).startswith(f"{shard.name}: odd: wrong checksum ")


def test_replicas_read_a_part_each_where_the_disk_is_slow(tmp_path: Path) -> None:
    """A disk is a link: gathering over the network in the node beats reading four times from a slow one."""
    target = Sharding(Layout("o/tp i"), Mesh(dp=4, tp=2), (8192, 4096))
    fast = load_profile("h100")
    assert source_sharding(target, "bfloat16", fast) == target
    assert str(source_sharding(target, "bfloat16", replace(fast, disk=Link(1e-4, 5e9))).layout) == "o/tp/dp i"
    assert source_sharding(target, "bfloat16", replace(fast, disk=Link(1e-4, 1e15))) == target
    slow = replace(fast, name="slow", disk=Link(1e-4, 5e9))
    (tmp_path / "slow.json").write_text(slow.to_json())
    assert load_profile(tmp_path / "slow.json") == slow


@pytest.mark.parametrize("text", ["llama-to-flax", "llama-to-fused:4,2,8", "llama-to-megatron:4,2,8"])
def test_names_of_llama_there_and_back_and_as_json(text: str) -> None:
    layer = {f"self_attn.{x}_proj.weight": (n, 16) for x, n in (("q", 32), ("k", 16), ("v", 16))}
    layer |= {f"mlp.{x}_proj.weight": (24, 16) for x in ("gate", "up")}
    layer |= {"self_attn.o_proj.weight": (16, 32), "mlp.down_proj.weight": (16, 24)}
    layer |= {"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,), "lm_head.weight": (50, 16)}
    model = {name: np.random.default_rng(i).normal(size=s) for i, (name, s) in enumerate(shapes.items())}
    names, verb = named(text), text.partition(":")
    there = names_from_json(json.loads(json.dumps(names_to_json(names)))).apply(model)
    back = named("-to-".join(verb[0].split("-to-")[::-1]) + verb[1] + verb[2]).apply(there)
    assert back.keys() == model.keys() and there.keys() != model.keys()
    assert all(np.array_equal(back[name], x) for name, x in model.items())


def test_names_that_are_no_json_of_relations() -> None:
    for wrong in (
        {"whole": "a"},
        {"parts": "a", "whole": "b"},
        {"parts": ["a"], "whole": "b", "code": "x"},
        3,
    ):
        with pytest.raises(XshardError, match="is not a relation"):
            names_from_json([wrong])
    with pytest.raises(XshardError, match="did you mean 'llama-to-flax'"):
        named("llama-to-flix")


def test_metadata_that_lies_about_an_array(tmp_path: Path) -> None:
    save(tmp_path, plan_save(cut({})))
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"][KEY]["sums"]["q"] = [[[[0, 99, 1], [0, 6, 1]], 0]]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(FileError, match=r"a checksum of .* in shape \(8, 6\)"):
        open_checkpoint(tmp_path)
