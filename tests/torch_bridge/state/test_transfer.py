"""Trees of tensors between meshes of gloo ranks: bit-equal, in few messages, bucket by bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_bridge as xt
import xshard as xs
from tests.state.test_transfer import FUSED, FUSED_RULES, SHAPES, whole
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected
from xshard import Mesh
from xshard.state import Names, rename

HERE = Mesh(dp=4)
PLACES = ((0, 1), (3, 1), (2, 3))  # a server among the trainer's ranks


def server(ranks: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("tp",))


def cut(x: np.ndarray, layout: str, mesh: Mesh, device: int, dtype: torch.dtype) -> torch.Tensor:
    """A block with the bits of small whole numbers in any dtype."""
    return torch.from_numpy(xs.reference.scatter(x, layout, mesh)[device].copy()).to(dtype)


def test_trees_on_four_ranks() -> None:
    on_ranks(4, _everything)


def _everything() -> None:
    for check in (_fused, _stored_types, _optimizer, _dtensors, _apart, _one_message, _donated, _refused):
        check()
    assert still_connected()


def _fused() -> None:
    """FSDP over four ranks -> tensor parallel over two of them, q, k, v and gate, up fused, and back."""
    rank, arrays = dist.get_rank(), whole(SHAPES)
    here = xs.Rules(FUSED_RULES[0]).match(list(arrays))
    there = xs.Rules(FUSED_RULES[1]).match(list(FUSED.apply(arrays)))
    blocks = {name: cut(x, here[name], HERE, rank, torch.bfloat16) for name, x in arrays.items()}
    for ranks in PLACES:
        mesh, options = server(ranks), {"names": FUSED, "bucket_bytes": 500}
        found = xt.transfer(blocks, FUSED_RULES, src_mesh=HERE, dst_mesh=mesh, shapes=SHAPES, **options)
        assert (found is None) == (rank not in ranks)
        if found is not None:
            for name, x in FUSED.apply(arrays).items():
                expected = cut(x, there[name], Mesh(tp=2), ranks.index(rank), torch.bfloat16)
                assert torch.equal(found[name], expected), name
        shapes = {name: x.shape for name, x in FUSED.apply(arrays).items()}
        back = FUSED_RULES[::-1], {"names": FUSED.inverse, "shapes": shapes}
        again = xt.transfer(found, back[0], src_mesh=mesh, dst_mesh=HERE, **back[1])
        assert all(torch.equal(again[name], x) for name, x in blocks.items())
        assert again.keys() == blocks.keys()


def _stored_types() -> None:
    """What torch can only store, booleans and complex numbers, in one bucket; casts on the way."""
    kinds = (torch.float8_e4m3fn, torch.bool, torch.complex128, torch.int8, torch.float8_e5m2, torch.float64)
    x, rank, ranks = np.arange(56).reshape(8, 7) % 2, dist.get_rank(), (2, 0)
    blocks = {str(kind): cut(x, "o/cyclic(dp) i", HERE, rank, kind) for kind in kinds}
    mesh = server(ranks)
    found = xt.transfer(blocks, {"**": "o/cyclic(dp) i -> i o/zigzag(tp)"}, src_mesh=HERE, dst_mesh=mesh)
    # Names have stars for whole parts: "torch" and the dtype.
    names = Names(rename("torch.float64", "small", dtype="float8_e4m3fn"), rename("torch.*", "torch.*"))
    rules = ({"**": "o/cyclic(dp) i"}, {"**": "o/zigzag(tp) i"})
    cast = xt.transfer(blocks, rules, src_mesh=HERE, dst_mesh=mesh, names=names)
    if found is not None and cast is not None:
        at = ranks.index(rank)
        for kind in kinds:
            expected = cut(x.T, "i o/zigzag(tp)", Mesh(tp=2), at, kind)
            assert _same_bits(found[str(kind)], expected), kind
        small = cut(x, "o/zigzag(tp) i", Mesh(tp=2), at, torch.float8_e4m3fn)
        assert _same_bits(cast["small"], small)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def _optimizer() -> None:
    """AdamW's moments, its steps and its settings arrive as `load_state_dict` takes them."""
    rank, ranks = dist.get_rank(), (1, 2)
    weights = whole({"w": (8, 4), "b": (3,)})

    def trained(layouts: dict[str, str], mesh: Mesh, device: int) -> torch.optim.AdamW:
        params = [cut(weights[n], layouts[n], mesh, device, torch.float32) for n in ("w", "b")]
        optimizer = torch.optim.AdamW(params, lr=0.25)
        for _ in range(2):
            for x in params:
                x.grad = x / 7
            optimizer.step()
        return optimizer

    state = trained({"w": "o/dp i", "b": "o"}, HERE, rank).state_dict()
    rules = {"state.0.exp_avg*": "o/dp i -> o i/tp", "**": "..."}
    found = xt.transfer(state, rules, src_mesh=HERE, dst_mesh=server(ranks))
    if found is not None:
        own = trained({"w": "o i/tp", "b": "o"}, Mesh(tp=2), ranks.index(rank))
        expected = own.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        for i, moments in expected["state"].items():
            assert all(torch.equal(found["state"][i][name], x) for name, x in moments.items())
        own.load_state_dict(found)


def _dtensors() -> None:
    """They bring their layout, uneven ones too, and their mesh; what a rule says on the left has to be so."""
    rank, ranks = dist.get_rank(), (3, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.arange(35.0).view(7, 5)
    tree = {
        "layers": [
            {"w": xt_dtensor(x, mesh, [Shard(0), Shard(1)])},
            {"w": xt_dtensor(x, mesh, [Replicate()] * 2)},
        ]
    }
    found = xt.transfer(tree, {"**": "o i/tp"}, dst_mesh=server(ranks))
    if found is not None:
        expected = cut(x.numpy(), "o i/tp", Mesh(tp=2), ranks.index(rank), torch.float32)
        assert all(torch.equal(layer["w"], expected) for layer in found["layers"])
    found = xt.transfer(tree, {"**": "..."}, dst_mesh=server(ranks))
    assert (found is None) == (rank not in ranks)
    assert found is None or all(torch.equal(layer["w"], x) for layer in found["layers"])
    wrong = error_of(lambda: xt.transfer(nn.Linear(2, 2), {"**": "..."}, src_mesh=mesh, dst_mesh=mesh))
    assert "the tree is Linear" in wrong[1] and "model.state_dict() is a tree" in wrong[1]
    wrong = error_of(lambda: xt.transfer(tree, {"**": "o/tp i -> o i"}, dst_mesh=server(ranks)))
    assert wrong[0] == "NotationError"
    assert "leaf 'layers.0.w': the DTensor is placed as 'o/dp i/tp' in\n    'o/tp i -> o i'" in wrong[1]


def xt_dtensor(x: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    whole_ = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
    return whole_.redistribute(mesh, placements)


def _apart() -> None:
    """Ranks that are not in the source know nothing of the tree before."""
    rank, source = dist.get_rank(), DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("dp",))
    x = np.arange(12).reshape(6, 2)
    tree = None
    if rank < 2:
        tree = {
            "a": [cut(x, "o/dp i", Mesh(dp=2), 1 - rank, torch.int64), 5, None, "text"],
            7: torch.tensor(True),
        }
    rules = {"a.0": "o/dp i -> o/tp i", "**": "..."}
    found = xt.transfer(tree, rules, src_mesh=source, dst_mesh=server((2, 3)))
    assert (found is None) == (rank < 2)
    if found is not None:
        assert found["a"][1:] == [5, None, "text"] and found[7].item() is True
        assert torch.equal(found["a"][0], torch.from_numpy(x)[3 * (rank - 2) :][:3])


def _one_message() -> None:
    """Between two ranks one buffer a bucket, of the bytes that the plan says."""
    rank, arrays = dist.get_rank(), whole({f"w{i}": (8, 4) for i in range(6)})
    blocks = {name: cut(x, "o/dp i", HERE, rank, torch.float32) for name, x in arrays.items()}
    options = {"src_mesh": HERE, "dst_mesh": server((0, 3)), "bucket_bytes": 2 * (48 + 16)}
    rules = {"**": "o/dp i -> o i/tp"}
    plan = xt.transfer(blocks, rules, **options, dry_run=True)
    assert len(plan.buckets) == 3 and plan.bytes_received == plan.bytes_lower_bound
    sent: list[int] = []
    begin = dist.batch_isend_irecv

    def counting(work: list[dist.P2POp]) -> list[dist.Work]:
        sends = [each.op is dist.isend for each in work]
        assert sends == sorted(sends)  # else gloo's receivers say behind what they send that they are ready
        sent.extend(each.tensor.nbytes for each in work if each.op is dist.isend)
        return begin(work)

    seen: list[tuple[int, int]] = []
    dist.batch_isend_irecv = counting
    try:
        xt.transfer(blocks, rules, **options, progress=lambda *figures: seen.append(figures))
    finally:
        dist.batch_isend_irecv = begin
    total = torch.tensor([len(sent), sum(sent)])
    dist.all_reduce(total)
    assert total.tolist() == [plan.messages, plan.bytes_moved]
    assert seen == [(plan.bytes_moved * n // 3, plan.bytes_moved) for n in (1, 2, 3)]


def _donated() -> None:
    """What has gone is given back with its bucket, but for the memory that others share."""
    n, size = 8, 64 * 256
    blocks = {f"w{i}": torch.full((size // 256 // 4, 256), float(i)) for i in range(n)}
    view = torch.zeros(4, 8)
    tree = {**blocks, "view": view[:2]}
    held: list[int] = []

    def account(done: int, total: int) -> None:
        held.append(sum(x.untyped_storage().nbytes() for x in blocks.values()))

    rules = {"view": "a b", "**": "o/dp i -> o i/tp"}
    options = {"dst_mesh": server((0, 1)), "bucket_bytes": 2 * size}
    found = xt.transfer(tree, rules, src_mesh=HERE, **options, donate=True, progress=account)
    each = size  # bytes of a rank's block: a quarter of 4 * size
    assert held[-1] == 0 and held == sorted(held, reverse=True) and len(held) > 3
    assert held[0] >= (n - 2) * each
    assert view.untyped_storage().nbytes() == 128  # of a view the rest is another's
    if found is not None:
        assert all((found[f"w{i}"] == i).all() for i in range(n))


def _refused() -> None:
    """Before anything is sent, on all ranks alike."""
    rank = dist.get_rank()
    tree = {"w": torch.ones(2, 4)}
    options = {"src_mesh": HERE, "dst_mesh": server((0, 1))}

    def refused(tree: Any, rules: Any, **more: Any) -> tuple[str, str]:
        return error_of(lambda: xt.transfer(tree, rules, **options | more))

    rules = {"w": "o/dp i -> o i/tp"}
    missing = refused(None if rank == 2 else tree, rules)
    assert missing[0] == "MeshError" and "ranks [2] of the source bring no tree" in missing[1]
    assert "no rank brings a tree" in refused(None, rules)[1]
    cast = refused({"w": tree["w"].half() if rank == 1 else tree["w"]}, rules)
    assert cast[0] == "DesyncError" and "disagree about a redistribution: leaf w\n" in cast[1]
    other = refused({"v": tree["w"]} if rank == 1 else tree, {"*": "o/dp i -> o i/tp"})
    assert other[0] == "DesyncError" and "leaf w, leaf v" in other[1]
    uneven = refused({"w": torch.ones(3 if rank == 3 else 2, 4)}, rules, shapes={"w": (8, 4)})
    assert (
        uneven[0] == "DesyncError"
        and "leaf 'w': the block of rank 3 has shape (3, 4), not (2, 4)" in uneven[1]
    )
    assert "unknown mesh axis 'cp' in\n    'o/dp i -> o i/cp'" in refused(tree, {"w": "o/dp i -> o i/cp"})[1]
    assert "no rule for 1 of 1 names: w" in refused(tree, {"v": "o"})[1]
    twice = refused({"a.b": tree["w"], "a": {"b": tree["w"]}}, {"**": "o/dp i"})
    assert "two leaves are called 'a.b'" in twice[1]
    assert "leaf 'o' is <" in refused({"w": tree["w"], "o": object()}, rules)[1]
