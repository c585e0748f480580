"""Folders of orbax: any source layout to any destination, in each of its formats."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bridge as xj
from tests.jax_bridge.helpers import device_mesh, in_jax
from xshard import Mesh
from xshard.state.files import FileError, open_checkpoint

SAVED = Mesh(x=2, y=4)


def saved(folder: Path) -> dict[str, object]:
    """A tree in each format, by folder -> its arrays."""
    import orbax.checkpoint as ocp

    numbers = np.arange(16 * 12, dtype=np.float32).reshape(16, 12)
    tree = {
        "layers": [{"w": numbers.astype(jnp.bfloat16)}, {"w": numbers.astype(jnp.float8_e4m3fn)}],
        "norm": np.arange(5, dtype=np.float32),
        "whole": np.arange(12, dtype=np.int32).reshape(3, 4),
    }
    rules = {"layers.0.w": "o/y i/x", "layers.1.w": "o/(x,y) i", "**": "..."}
    tree = xj.place(tree, rules, device_mesh(SAVED))
    tree["whole"] = np.asarray(tree["whole"])
    odd = {"step": 7, "run": "first", "none": None}
    for name, settings in (
        ("zarr", {"use_ocdbt": False}),
        ("zarr3", {"use_zarr3": True}),
        ("ocdbt", {}),
    ):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)).save(folder / name, tree | odd)
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    return {"layers.0.w": tree["layers"][0]["w"], "layers.1.w": tree["layers"][1]["w"], **tree}


@in_jax
def test_each_format(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    mesh = device_mesh(Mesh(a=2, b=3))
    rules = {"layers.0.w": "o/zigzag(a) i/b", "layers.1.w": "o i/(b,a)", "**": "..."}
    for name in ("zarr", "zarr3", "ocdbt", "manager/3"):
        checkpoint = open_checkpoint(tmp_path / name)
        layouts = {leaf: str(layout) for leaf, layout in checkpoint.layouts.items()}
        assert layouts == {"layers.0.w": "d0/y d1/x", "layers.1.w": "d0/(x,y) d1"}
        assert checkpoint.mesh == SAVED
        assert checkpoint.keys() - expected.keys() == ({"step"} if name != "manager/3" else set())
        with jax.enable_x64(True):  # of numbers without dims
            found = xj.load(checkpoint, rules, mesh)
        assert found.pop("step", np.int64(7)).item() == 7
        for leaf, x in found.items():
            back = xj.reshard(x, "o/zigzag(a) i/b -> o i") if leaf == "layers.0.w" else x
            whole = np.asarray(expected[leaf])
            assert x.dtype == whole.dtype and np.asarray(back).tobytes() == whole.tobytes(), (
                name,
                leaf,
            )
        box = slice(1, 14, 4), slice(5, 9)
        part = checkpoint.read("layers.0.w", box)
        assert part.tobytes() == np.asarray(expected["layers.0.w"])[box].tobytes()
    check_unfinished(tmp_path)


@in_jax
def test_numbers_of_a_tree(tmp_path: Path) -> None:
    """orbax stores them as arrays without dims, of 64 bits, which JAX would not hold."""
    import orbax.checkpoint as ocp

    tree = {"w": np.ones((4, 2), np.float32), "step": 7, "loss": 0.1, "done": True}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", tree)
    mesh = device_mesh(Mesh(a=2))
    like = {"w": tree["w"], "step": 0, "loss": 0.0, "done": False}
    loaded = xj.load(tmp_path / "run", {"w": "o/a i", "**": "..."}, mesh, like=like)
    assert {name: loaded[name] for name in ("step", "loss", "done")} == {
        "step": 7,
        "loss": 0.1,
        "done": True,
    }
    assert [type(loaded[name]) for name in ("step", "loss", "done")] == [int, float, bool]
    assert loaded["w"].sharding.spec == jax.P("a", None)


def check_unfinished(tmp_path: Path) -> None:
    """Of what orbax did not finish, or somebody has changed."""
    with pytest.raises(FileError, match=r"no safetensors files in .*manager"):
        open_checkpoint(tmp_path / "manager")
    zarr = tmp_path / "zarr"
    text = (metadata := zarr / "_METADATA").read_text()
    for wrong, message in (
        (text[:100], "is not what orbax writes"),
        (text.replace("'norm'", "'../norm'").replace('"norm"', '"../norm"'), "Invalid file path"),
        (text.replace("'norm'", "'gone'").replace('"norm"', '"gone"'), "gone"),
    ):
        metadata.write_text(wrong)
        with pytest.raises(FileError) as raised:
            open_checkpoint(zarr)
        assert message in str(raised.value) and str(tmp_path) in str(raised.value)
    metadata.write_text(text)
    (zarr / "norm").rename(tmp_path / "norm")
    (zarr / "norm").symlink_to(tmp_path / "norm")
    with pytest.raises(FileError, match="'norm' is not in the folder"):
        open_checkpoint(zarr)
    (zarr / "norm").unlink()
    (tmp_path / "norm").rename(zarr / "norm")
    chunk = zarr / "layers.0.w" / "0.0"
    checkpoint = open_checkpoint(zarr)
    data = chunk.read_bytes()
    for change in (lambda: chunk.write_bytes(data[:-3]), chunk.unlink):
        change()
        with pytest.raises(FileError, match=r"layers.0.w"):
            checkpoint.read("layers.0.w")
    other = tmp_path / "manager" / "3" / "other"
    other.mkdir()
    (other / "_METADATA").write_text("{}")
    with pytest.raises(FileError, match="but has: default, other"):
        open_checkpoint(other.parent)


@in_jax
def test_chunks_are_read_once_for_all_devices(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp
    import tensorstore

    def bytes_read() -> int:
        found = tensorstore.experimental_collect_matching_metrics(
            "/tensorstore/kvstore/file/bytes_read"
        )
        return sum(each["value"] for one in found for each in one["values"])

    whole = np.random.default_rng(0).random((384, 384), np.float32)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(
        tmp_path / "zarr", {"w": whole}
    )
    before = bytes_read()
    with open_checkpoint(tmp_path / "zarr") as checkpoint:
        found = [checkpoint.read("w", (slice(384), slice(at, at + 64))) for at in range(0, 384, 64)]
    assert np.array_equal(np.concatenate(found, 1), whole)
    stored = sum(path.stat().st_size for path in (tmp_path / "zarr" / "w").iterdir())
    assert bytes_read() - before < 1.1 * stored
