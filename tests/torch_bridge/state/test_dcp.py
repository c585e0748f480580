"""Folders of `torch.distributed.checkpoint`: any box of any tensor, and nothing of theirs is trusted."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_bridge as xt
from tests.state.checkpoints import Runs
from tests.torch_bridge.helpers import on_ranks, same_bits
from xshard import Mesh
from xshard.state.files import FileError, open_checkpoint

PLACEMENTS = {
    "model.rows": (Shard(0), Replicate()),
    "model.columns": (Replicate(), Shard(1)),
    "model.both": (Shard(0), Shard(1)),
    "model.uneven": (Shard(0), Shard(0)),
    "optim.whole": (Replicate(), Replicate()),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64)


def tree() -> dict[str, Tensor]:
    """By flat name."""
    arrays = [torch.arange(7 * 6).reshape(7, 6) + i for i in range(5)]
    found = {n: x.to(dtype) for n, x, dtype in zip(PLACEMENTS, arrays, DTYPES, strict=True)}
    return found | {
        "model.turned": torch.arange(12.0).reshape(3, 4).T,
        "optim.step": torch.tensor(3.0),
    }


def _save_and_load(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {"model": {}, "optim": {"lr": 0.5}, "steps": [3, "first"]}
    for name, x in tree().items():
        (kind, own), cut = name.split("."), PLACEMENTS.get(name)
        state[kind][own] = x if cut is None else distribute_tensor(x, mesh, cut, src_data_rank=None)
    dcp.save(state, checkpoint_id=folder)
    rules = {
        "model.rows": "o i/(tp,dp)",
        "model.columns": "o/dp i",
        "model.turned": "i/tp o",
        "**": "...",
    }
    found = xt.load(folder, rules, Mesh(dp=2, tp=2))
    expected, (dp, tp) = tree(), divmod(torch.distributed.get_rank(), 2)
    expected["model.rows"] = expected["model.rows"].tensor_split([2, 4, 6], 1)[2 * tp + dp]
    expected["model.columns"] = expected["model.columns"].split(4)[dp]
    expected["model.turned"] = expected["model.turned"].split(2)[tp]
    assert (found.pop("optim.lr"), found.pop("steps")) == (0.5, [3, "first"])
    assert found.keys() == expected.keys()
    assert [name for name, x in expected.items() if not same_bits(found[name], x)] == []


def bits(x: Tensor) -> np.ndarray:
    return (
        x.contiguous().view(getattr(torch, f"uint{8 * x.itemsize}")).numpy()
        if x.itemsize < 8
        else x.numpy()
    )


def test_what_ranks_have_saved(tmp_path: Path) -> None:
    on_ranks(4, _save_and_load, str(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.keys() == tree().keys()
    for name, x in tree().items():
        boxes = [
            (),
            (slice(1, 6, 2), slice(4)),
            (slice(6, 7), slice(2, 6, 3)),
            (slice(5, 5), slice(6)),
        ]
        for box in boxes if x.ndim else boxes[:1]:
            whole = box or tuple(slice(n) for n in x.shape)
            np.testing.assert_array_equal(
                checkpoint.read(name, whole).view(bits(x).dtype), bits(x)[whole]
            )
    assert dict(checkpoint.constants) == {"optim.lr": 0.5, "steps": [3, "first"]}
    # Lists are one value there, and leaves here.
    into: dict[str, Any] = {"optim": {"lr": 0.1, "new": 1}, "steps": [0, ""]}
    found = xt.load(tmp_path, like=into, strict=False)
    assert found == {"optim": {"lr": 0.5, "new": 1}, "steps": [3, "first"]}


def test_what_is_stored_as_its_conjugate(tmp_path: Path) -> None:
    """Is refused, and not read as it lies there; and a value that nobody can read hinders no arrays."""
    x = torch.arange(3.0) * 1j
    dcp.save(
        {"x": x.conj(), "y": x, "what": Runs(tmp_path / "ran")}, checkpoint_id=tmp_path / "dcp"
    )
    checkpoint = open_checkpoint(tmp_path / "dcp")
    assert torch.equal(torch.from_numpy(checkpoint.read("y")), x)
    with pytest.raises(FileError, match="is stored as its conjugate"):
        checkpoint.read("x")
    with pytest.raises(FileError, match="Weights only load failed"):
        xt.load(tmp_path / "dcp", like={"what": 0}, strict=False)
    assert not (tmp_path / "ran").exists()


def saved(folder: Path) -> Metadata:
    dcp.save({"w": torch.arange(6.0).reshape(2, 3), "lr": 0.5}, checkpoint_id=folder, no_dist=True)
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def lying(of: str, **facts: Any) -> Callable[[Metadata, Path], Metadata]:
    """Metadata that say something else of a tensor, or of its place."""

    def changed(found: Metadata, _: Path) -> Metadata:
        place = next(info for index, info in found.storage_data.items() if index.fqn == "w")
        vars(place if of == "place" else found.state_dict_metadata["w"]).update(facts)
        return found

    return changed


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata, Path], Metadata]:
    found = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
    return lying("tensor", chunks=found)


BAD = {
    "it runs a function": (lambda found, path: [found, Runs(path)], "it names pathlib.Path.touch"),
    "it is no metadata": (lambda found, path: {"w": found.storage_data}, "has no attribute"),
    "the folder above": (lying("place", relative_path="../x"), "'../x' is not a file in the folder"),
    "an absolute path": (lying("place", relative_path="/etc/passwd"), "is not a file in the folder"),
    "no file": (lying("place", relative_path="none"), "No such file or directory"),
    "behind the file": (lying("place", length=10**9), "has 2"),
    "before the file": (lying("place", offset=-1), "and not -1 to"),
    "an extension": (lying("place", transform_descriptors=["a"]), "by ['a']"),
    "a gap": (chunks(((0, 0), (1, 3))), "w: the parts of its (2, 3) elements leave a gap, or overlap"),
    "an overlap": (chunks(((0, 0), (1, 3)), ((0, 0), (1, 3))), "leave a gap, or overlap"),
    "outside": (chunks(((1, 0), (2, 3))), "leave a gap, or overlap"),
    "more than memory": (lying("tensor", size=torch.Size((2**62, 3))), "leave a gap"),
    "a part without a place": (chunks(((0, 0), (1, 3)), ((1, 0), (1, 3))), "('w', (1, 0))"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_metadata_that_lies(what: str, tmp_path: Path) -> None:
    """Refused when it is opened."""
    change, message = BAD[what]
    found = saved(tmp_path / "x")
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(change(found, tmp_path / "ran")))
    with pytest.raises(FileError) as raised:
        open_checkpoint(tmp_path / "x")
    assert message in str(raised.value) and f"{tmp_path / 'x'}" in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_metadata_that_is_cut_off(tmp_path: Path) -> None:
    saved(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for n in range(0, len(whole), 5):
        (tmp_path / ".metadata").write_bytes(whole[:n])
        with pytest.raises(FileError, match="metadata is not what DCP writes"):
            open_checkpoint(tmp_path)


def test_files_that_have_another_thing(tmp_path: Path) -> None:
    """In the place of a tensor: nothing is made of it but tensors that torch itself trusts."""
    found = saved(tmp_path)
    places = {index.fqn: info for index, info in found.storage_data.items()}
    others = {
        "a pickle": (Runs(tmp_path / "ran"), "is not what DCP writes: Weights only load failed"),
        "a number": (3, "is not what DCP writes"),
        "another shape": (torch.zeros(3, 2), "in the metadata"),
        "another dtype": (torch.zeros(2, 3, dtype=torch.float16), "in the metadata"),
        "a tensor that ends behind its bytes": (torch.zeros(4000)[-6:].view(2, 3), "has more than"),
    }
    for what, (other, message) in others.items():
        file = tmp_path / places["w"].relative_path
        torch.save(other, file)
        if what.startswith("a tensor"):
            cut_off(file)
        for place in places.values():
            place.offset, place.length = 0, file.stat().st_size
        (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
        checkpoint = open_checkpoint(tmp_path)
        with pytest.raises(FileError) as raised:
            checkpoint.read("w", (slice(2), slice(3)))
        assert message in str(raised.value) and str(raised.value).startswith(str(file)), what
        if what == "a pickle":
            with pytest.raises(FileError, match="Weights only load failed"):
                checkpoint.constants["lr"]
    assert not (tmp_path / "ran").exists()


def cut_off(file: Path) -> None:
    """Of the numbers 24 bytes are left."""
    with zipfile.ZipFile(file) as found:
        records = {name: found.read(name) for name in found.namelist()}
    with zipfile.ZipFile(file, "w") as left:
        for name, data in records.items():
            left.writestr(name, data[:24] if name.endswith("data/0") else data)
