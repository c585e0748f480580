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

from tests.state.checkpoints import save, sources
from xshard import Layout, Link, Mesh, Sharding, XshardError, dtypes, load_profile, reference
from xshard.errors import DtypeError, PlanError
from xshard.state import Names, concat, rename, split, stack
from xshard.state.files import FileError, open_checkpoint, verify
from xshard.state.files.folder import INDEX, KEY
from xshard.state.files.loading import source_sharding
from xshard.state.files.saving import SaveTask, Source, abort, begin, plan_save, save_blocks
from xshard.state.llama import names_from_text
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
]
LAYOUTS += ["o/(tp,dp) i"]
SHAPES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "e.0": (4, 3), "e.1": (4, 3), "gate_up": (8, 6)}
SHAPES |= {"odd": (7, 5, 2)}  # of three dims, whose cycle is not its own inverse
FUSED = Names(
    concat(["q", "k", "v"], "qkv", rows=(2, 1, 1)),
    stack("e.*", "experts", 1),
    split("gate_up", ["gate", "up"], 1, rows=(1, 1), order="o i -> i o"),
    rename("odd", "turned", "o i c -> i c o"),
)
WHOLE = {
    name: np.arange(100 * i, 100 * i + np.prod(shape), dtype=np.float32).reshape(shape)
    for i, (name, shape) in enumerate(SHAPES.items())
}


def written(layouts: dict[str, str]) -> dict[str, str]:
    """The layouts, with a third dim for the arrays that have one."""
    return {name: layout + " c" * (len(SHAPES[name]) - 2) for name, layout in layouts.items()}


def cut(layouts: dict[str, str]) -> dict[str, Source]:
    return sources(WHOLE, layouts, MESH)


@given(st.data())
def test_each_element_is_written_once(data: st.DataObject) -> None:
    """Under any layouts and names it is in one process's parts, and the files are the whole arrays."""
    layouts = written({name: data.draw(st.sampled_from(LAYOUTS)) for name in SHAPES})
    names = data.draw(st.sampled_from([None, FUSED]))
    saving = plan_save(cut(layouts), names)
    stored = {name: np.zeros(array.shape, np.float32) for name, array in saving.arrays.items()}
    times = {name: np.zeros(array.shape, int) for name, array in saving.arrays.items()}
    for process in range(4):
        for name, device, boxes in saving.writes(process):
            block = reference.scatter(WHOLE[name], layouts[name], MESH)[device]
            for common_box in boxes:
                stored[common_box.name][common_box.box] = common_box.view(block)
                times[common_box.name][common_box.box] += 1
    assert all((n == 1).all() for n in times.values())
    for name, x in (FUSED.apply(WHOLE) if names else WHOLE).items():
        np.testing.assert_array_equal(stored[name], x, err_msg=name)


@pytest.mark.parametrize("names", [None, FUSED], ids=["same", "fused"])
def test_the_safetensors_library_reads_them(tmp_path: Path, names: Names | None) -> None:
    layouts = written(dict(zip(SHAPES, LAYOUTS, strict=False)))
    save(tmp_path, WHOLE, layouts, MESH, names, shard_bytes=200, constants={"step": 3})
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
            assert checkpoint.layouts == {
                n: Layout(x) for n, x in layouts.items() if Layout(x).axes
            }
        else:
            assert checkpoint.layouts == {"turned": Layout("i c o/cyclic(tp,1)")}
        assert verify(checkpoint) == sum(len(s) for s in checkpoint.sums.values()) > len(checkpoint)


def test_files_of_the_safetensors_library(tmp_path: Path) -> None:
    """With other metadata, scalars, and arrays without elements, each under the carrier of its dtype."""
    kinds = ["bool", "uint8", "int64", "float16", "float64", "complex64"]
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    arrays |= {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 3), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", {"format": "np"})
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        for name, x in arrays.items():
            assert checkpoint[name].dtype == str(x.dtype)
            found = checkpoint.read(name)
            assert np.array_equal(found, x) and found.dtype == x.dtype


def test_each_short_dtype_under_its_carrier(tmp_path: Path) -> None:
    for kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        one = {kind: np.arange(6).astype(dtypes.carrier(kind))}
        save(tmp_path / kind, one, {kind: "n/tp"}, MESH, dtype=kind)
        with open_checkpoint(tmp_path / kind) as checkpoint:
            assert checkpoint.dtypes == {kind: kind}
            np.testing.assert_array_equal(checkpoint.read(kind), one[kind])


def test_all_write_alike() -> None:
    """A hundred arrays of which everyone has a copy: each process writes 25; and each array is aligned."""
    source = Source(Sharding(Layout("n"), MESH, (6,)), "float32", range(4))
    saving = plan_save({f"w{i}": source for i in range(100)})
    assert [len(list(saving.writes(process))) for process in range(4)] == [25] * 4
    mixed = plan_save({"flags": source._replace(dtype="bool"), "w": source})
    starts = mixed.shards[0].starts.items()
    assert all(start % dtypes.itemsize(mixed.arrays[name].dtype) == 0 for name, start in starts)
    assert saving.digest == plan_save({f"w{i}": source for i in range(100)}).digest
    assert saving.digest != plan_save({f"w{i}": source for i in range(99)}).digest


def test_the_next_save_makes_room_first(tmp_path: Path) -> None:
    """Leftovers of a save that was killed go before another takes any space."""
    save(tmp_path, WHOLE, shard_bytes=200)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    saving = plan_save(cut({}), shard_bytes=200)
    unfinished = tmp_path / f".saving-{begin(saving, tmp_path)}"
    (unfinished / saving.shards[0].name).rename(
        tmp_path / "model-0123abcd-00001-of-00009.safetensors"
    )
    again = begin(saving, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*old, f".saving-{again}"}
    abort(SaveTask(saving, tmp_path, lambda *_: np.empty(0)), again)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
    index = json.loads((tmp_path / INDEX).read_text())
    assert set(index["weight_map"].values()) == {p.name for p in tmp_path.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in WHOLE.values())


def test_what_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = Source(Sharding(Layout("n"), MESH, (6,)), "float32", range(4))
    for written, options, error, message in (
        (cut({"q": "o i | sum(tp)"}), {}, PlanError, r"q: 'o i \| sum\(tp\)' cannot be in files"),
        (cut({"q": "o/tp:halo(1,1) i"}), {}, PlanError, "halos"),
        ({"__metadata__": source}, {}, FileError, "an array is called '__metadata__'"),
        ({"w": source}, {"shard_bytes": 1.5}, PlanError, r"shard_bytes is 1\.5"),
        ({"w": source}, {"constants": {"a": {1}}}, XshardError, "constants: Object of type set"),
        (
            {"x": source._replace(dtype="complex128")},
            {},
            DtypeError,
            "x: safetensors has no complex128",
        ),
    ):
        with pytest.raises(error, match=message):
            plan_save(written, **options)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="which others would read instead of model"):
        begin(plan_save(cut({})), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_one_save_at_a_time(tmp_path: Path) -> None:
    """Another would take this one's files for leftovers; and the index is JSON whatever the constants are."""
    here = {name: source._replace(processes=[0] * 4) for name, source in cut({}).items()}
    saving = plan_save(here, constants={"best": -math.inf})
    refused = []

    def block_of(name: str, device: int, dtype: str) -> NDArray[Any]:
        if not refused:
            with pytest.raises(FileError, match="another save is writing into it") as error:
                save_blocks(SaveTask(saving, tmp_path, block_of))
            refused.append(error)
        return WHOLE[name]

    save_blocks(SaveTask(saving, tmp_path, block_of))
    save_blocks(SaveTask(saving, tmp_path, block_of))
    json.loads((tmp_path / INDEX).read_text(), parse_constant=pytest.fail)
    with open_checkpoint(tmp_path) as checkpoint:
        assert verify(checkpoint) == len(SHAPES) and checkpoint.constants == {"best": -math.inf}


def test_what_is_not_cut_has_no_say_in_the_layouts() -> None:
    """Buffers of an FSDP model are not on the mesh of its parameters."""
    buffer = Source(Sharding(Layout("n"), Mesh(world=4), (6,)), "int64", range(4))
    saving = plan_save({"buffer": buffer, "q": cut({"q": "o/tp i"})["q"]})
    said = json.loads(json.loads(saving.shards[0].header[8:])["__metadata__"][KEY])
    assert said == {"mesh": str(MESH), "layouts": {"q": "o/tp i"}}


def test_replicas_read_a_part_each_where_the_disk_is_slow(tmp_path: Path) -> None:
    """A disk is a link: gathering over the network in the node beats reading four times from a slow one."""
    target = Sharding(Layout("o/tp i"), Mesh(dp=4, tp=2), (8192, 4096))
    fast = load_profile("h100")
    assert source_sharding(target, "bfloat16", fast) == target
    assert (
        str(source_sharding(target, "bfloat16", replace(fast, disk=Link(1e-4, 5e9))).layout)
        == "o/tp/dp i"
    )
    assert source_sharding(target, "bfloat16", replace(fast, disk=Link(1e-4, 1e15))) == target
    slow = replace(fast, name="slow", disk=Link(1e-4, 5e9))
    (tmp_path / "slow.json").write_text(slow.to_json())
    assert load_profile(tmp_path / "slow.json") == slow


@pytest.mark.parametrize(
    "text", ["llama-to-flax", "llama-to-fused:4,2,8", "llama-to-megatron:4,2,8"]
)
def test_names_of_llama_have_inverses(text: str) -> None:
    layer = {f"self_attn.{x}_proj.weight": (n, 16) for x, n in (("q", 32), ("k", 16), ("v", 16))}
    layer |= {f"mlp.{x}_proj.weight": (24, 16) for x in ("gate", "up")}
    layer |= {"self_attn.o_proj.weight": (16, 32), "mlp.down_proj.weight": (16, 24)}
    layer |= {"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {
        "model.embed_tokens.weight": (50, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (50, 16),
    }
    model = {
        name: np.random.default_rng(i).normal(size=s) for i, (name, s) in enumerate(shapes.items())
    }
    names = names_from_text(text)
    verb = text.partition(":")
    there = names_from_json(json.loads(json.dumps(names_to_json(names)))).apply(model)
    back = names_from_text("-to-".join(verb[0].split("-to-")[::-1]) + verb[1] + verb[2]).apply(
        there
    )
    assert back.keys() == model.keys() and there.keys() != model.keys()
    assert all(np.array_equal(back[name], x) for name, x in model.items())


def test_names_that_are_no_json_of_relations() -> None:
    code = {"parts": ["a"], "whole": "b", "code": "x"}
    for wrong in ({"whole": "a"}, {"parts": "a", "whole": "b"}, code, 3):
        with pytest.raises(XshardError, match="is not a relation"):
            names_from_json([wrong])
    with pytest.raises(XshardError, match="did you mean 'llama-to-flax'"):
        names_from_text("llama-to-flix")
