"""`save` and `load` on ranks: any layout to any other, bit by bit, in models and trees, and errors on all."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_bridge as xt
import xshard as xs
from tests.state import checkpoints
from tests.torch_bridge.helpers import on_ranks, same_bits
from xshard import Mesh
from xshard.state import files

MESH = Mesh(dp=2, tp=2)
FSDP = {"{q,k,v}": "o/(dp,tp) i", "f8": "o/dp i/tp", "flags": "n/tp", "norm": "n"}
SERVED = {"{q,k,f8}": "o/tp i", "v": "o i/zigzag(tp)", "flags": "n", "norm": "n/(dp,tp)"}
SLOW = replace(
    xs.load_profile("gloo"), disk=xs.Link(1e-4, 1.0)
)  # a byte per second: what is read is shared
LAYERS = {
    "0.weight": "o/tp i",
    "0.bias": "o/tp",
    "2.weight": "o i/tp",
    "2.bias": "o -> o | sum(tp)",
}


def whole() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(n, 16).bfloat16() for name, n in (("q", 8), ("k", 4), ("v", 4))}
    made |= {"f8": torch.randn(8, 4).to(torch.float8_e4m3fn), "flags": torch.rand(8) > 0.5}
    return made | {"norm": torch.rand(6)}


def cut(layouts: dict[str, str]) -> dict[str, Tensor]:
    """This rank's blocks of the whole arrays."""
    tree = whole()
    found = {}
    for name, layout in xs.Rules(layouts).match(list(tree)).items():
        raw = tree[name].view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tree[name].itemsize])
        block = xs.reference.scatter(raw.numpy(), layout, MESH)[dist.get_rank()]
        found[name] = torch.from_numpy(block.copy()).view(tree[name].dtype)
    return found


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, x in expected.items() if not same_bits(found[name], x)] == []


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = {"": "b i -> b i | copy(tp)"}
    outputs = {"2": "b o | sum(tp) -> b o"}
    return xt.parallelize(layers, LAYERS, inputs, Mesh(tp=4), outputs=outputs)


def _from_training_to_serving(folder: str) -> None:
    xt.save(cut(FSDP), folder, FSDP, MESH, shard_bytes=100)
    check_equal(xt.load(folder, SERVED, MESH, verify=True), cut(SERVED))
    blocks = {
        name: torch.zeros_like(x) for name, x in cut(SERVED).items()
    }  # of different sizes, as norm's
    check_equal(xt.load(folder, SERVED, MESH, like=blocks), cut(SERVED))
    with files.open_checkpoint(folder) as opened:
        check_equal(xt.load(opened, SERVED, MESH, profile=SLOW), cut(SERVED))
        total = torch.tensor(opened.bytes_read)
    dist.all_reduce(total)
    assert int(total) == sum(x.nbytes for x in whole().values())  # each row once


def _trees_and_dtensors(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0), Replicate()])
    weight = nn.Parameter(torch.full((2, 4), float(dist.get_rank() % 2)))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    rules = {"**.{exp_avg,exp_avg_sq}": "o/tp i", "**": "..."}
    xt.save(
        {"x": x, "optimizer": optimizer.state_dict(), "epoch": 3, "name": "a"}, folder, rules, MESH
    )
    zeros = {"x": torch.zeros_like(x), "optimizer": optimizer.state_dict(), "epoch": 0, "name": ""}
    averages = optimizer.state[weight]["exp_avg"].clone()
    for state in optimizer.state[weight].values():
        state.zero_()
    found = xt.load(folder, rules, MESH, like=zeros)
    assert isinstance(found["x"], DTensor) and torch.equal(
        found["x"].full_tensor(), x.full_tensor()
    )
    assert (found["epoch"], found["name"]) == (3, "a")
    assert (
        found["optimizer"]["param_groups"][0]["lr"] == 0.5
        and found["optimizer"]["state"][0]["step"] == 1
    )
    assert torch.equal(optimizer.state[weight]["exp_avg"], averages)  # its own memory is filled


def _models(folder: str) -> None:
    trained = model("cpu")
    served = model("meta")
    with torch.no_grad():
        trained[2].weight.add_(1)
    xt.save(trained, folder)
    assert xt.load(folder, like=served) is served
    x = torch.ones(3, 4)
    assert torch.equal(served(x), trained(x))
    before = [parameter.data_ptr() for parameter in served.parameters()]
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.zero_()
    xt.load(folder, like=served, profile=SLOW)
    assert torch.equal(served(x), trained(x))
    assert [parameter.data_ptr() for parameter in served.parameters()] == before


def _errors(folder: str) -> None:
    """On all ranks, with the same old checkpoint after it."""
    rank = dist.get_rank()
    two = {"a": torch.ones(2)}
    rules = {"a": "n/tp"}
    mesh = Mesh(tp=4)
    xt.save(two, folder, rules, mesh)
    for wrong, why in (
        (lambda: xt.save(two, folder, {"a": "n | sum(tp)"}, mesh), "a: 'n | sum"),
        (lambda: xt.save(two, folder, {"b": "n"}, mesh), "no rule for 1 of 1 tensors: a"),
        (lambda: xt.save({"a": object()}, folder, None, mesh), "leaf 'a' is <"),
        (
            lambda: xt.save({"a": torch.eye(2).to_sparse()}, folder),
            "leaf 'a': a tensor of torch.sparse_coo",
        ),
        (
            lambda: xt.save({"a": torch.ones(2, device="meta")}, folder),
            "leaf 'a': it is on the meta",
        ),
        (
            lambda: xt.load(folder, {"a": "n"}, mesh, dtype="int8"),
            "a: float32 in the checkpoint, int8",
        ),
        (lambda: xt.load(folder, {"b": "n"}, mesh), "no rule for 1 of 1 arrays: a"),
        (lambda: xt.load(folder, like={"b": torch.ones(2)}), "in the tree alone: b"),
        (lambda: xt.load(folder, like=two), "shape \\(2,\\), not \\(8,\\)"),
        (lambda: xt.load(f"{folder}/none"), "none: No such file"),
    ):
        with pytest.raises(xs.XshardError, match=why.replace("|", "\\|")):
            wrong()
    with pytest.raises(
        xt.errors.DesyncError, match=r"(?s)disagree.*leaf 'a' Sharding\('n/tp', .*\(12,\)\)"
    ):
        xt.save({"a": torch.ones(2 + rank)}, folder, rules, mesh)
    with pytest.raises(
        xt.errors.DesyncError, match=r"(?s)files, leaf 'seed'.* rank 3: .*leaf 'seed' 3"
    ):
        xt.save({"a": torch.ones(2), "seed": rank}, folder, rules, mesh)
    full = (
        {"side_effect": OSError(28, "No space left on device")}
        if rank == 2
        else {"wraps": os.pwrite}
    )
    message = r"(?s)rank 2: .*FileError: .*No space left on device"  # of one part of the writing
    with (
        mock.patch.object(os, "pwrite", **full),
        pytest.raises(xt.errors.DesyncError, match=message),
    ):
        xt.save({"a": torch.zeros(2)}, folder, rules, mesh)
    assert torch.equal(xt.load(folder)["a"], torch.ones(8))
    dist.barrier()
    assert not list(Path(folder).glob(".saving-*"))


def _beside_a_save(folder: str) -> None:
    """Three ranks open the old checkpoint, and one the new: then all load the new one."""
    rank = dist.get_rank()
    original = files.folder.open_checkpoint
    is_first = [True]

    def opening(path: str) -> files.Checkpoint:
        if not is_first:
            return original(path)
        is_first.clear()
        if rank == 3:
            dist.barrier()
            checkpoints.save(Path(folder), checkpoints.arrays(1))
            return original(path)
        opened = original(path)
        dist.barrier()
        return opened

    if rank == 0:
        checkpoints.save(Path(folder), checkpoints.arrays())
    dist.barrier()
    with mock.patch.object(files.folder, "open_checkpoint", opening):
        found = xt.load(folder, {"w": "o/(dp,tp) i", "b": "n"}, MESH)
    expected = checkpoints.arrays(1)
    assert torch.equal(found["w"], torch.from_numpy(expected["w"][rank : rank + 1]))
    assert torch.equal(found["b"], torch.from_numpy(expected["b"]))
    opened = original(folder)
    dist.barrier()
    if rank == 0:
        checkpoints.save(Path(folder), checkpoints.arrays(2))
        opened = original(folder)
    with pytest.raises(files.FileError, match="processes have opened different checkpoints"):
        xt.load(opened, mesh=MESH)


def test_on_four_ranks(tmp_path: Path) -> None:
    on_ranks(4, _everything, tmp_path)


def _everything(folder: Path) -> None:
    for check in (_from_training_to_serving, _trees_and_dtensors, _models, _errors, _beside_a_save):
        check(str(folder / check.__name__))


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    """Without a world a mesh has one device."""
    tree = whole()
    xt.save(tree, tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    check_equal(safetensors.torch.load_file(shard), tree)
    safetensors.torch.save_file(tree, tmp_path / "theirs.st.safetensors")
    check_equal(xt.load(tmp_path / "theirs.st.safetensors"), tree)


def test_what_is_loaded_into_lies_where_it_lay(tmp_path: Path) -> None:
    """Without a second copy."""
    big = {"w": torch.rand(512, 512)}
    xt.save(big, tmp_path / "big")
    into = {"w": torch.zeros(512, 512)}
    tracemalloc.start()
    try:
        assert xt.load(tmp_path / "big", like=into)["w"] is into["w"]
        assert tracemalloc.get_traced_memory()[1] < big["w"].nbytes / 2
    finally:
        tracemalloc.stop()
    check_equal(into, big)


def test_a_load_may_cast(tmp_path: Path) -> None:
    big = {"w": torch.rand(512, 512)}
    xt.save(big, tmp_path / "big")
    check_equal(xt.load(tmp_path / "big", dtype=torch.bfloat16), {"w": big["w"].bfloat16()})


def test_lazy_views_are_saved_as_their_values(tmp_path: Path) -> None:
    turned = {"conj": torch.randn(3, dtype=torch.complex64).conj()}
    turned["neg"] = turned["conj"].imag
    xt.save(turned | {"best": float("inf")}, tmp_path / "turned")
    into = {name: torch.zeros(3, dtype=torch.complex64).conj() for name in turned}
    into = {"conj": into["conj"], "neg": into["neg"].imag, "best": 0.0}
    found = xt.load(tmp_path / "turned", like=into)
    assert found["best"] == float("inf") and all(
        torch.equal(found[name], x) for name, x in turned.items()
    )
    with pytest.raises(
        xs.errors.DtypeError, match="conj: complex64 in the checkpoint, float32 here"
    ):
        xt.load(tmp_path / "turned", like={"conj": torch.zeros(3), "neg": into["neg"], "best": 0.0})


def test_what_is_refused_in_one_process(tmp_path: Path) -> None:
    xt.save({"w": torch.rand(512, 512)}, tmp_path / "big")
    with pytest.raises(xs.errors.MeshError, match="no process group"):
        xt.load(tmp_path / "big", None, Mesh(tp=2))
    with pytest.raises(xs.XshardError, match="w is on the meta device"):
        xt.load(tmp_path / "big", like={"w": torch.empty(512, 512, device="meta")})
