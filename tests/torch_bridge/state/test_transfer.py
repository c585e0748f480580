"""Trees of tensors between meshes of gloo ranks: bit-equal, in few messages, bucket by bucket."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_bridge as xt
import xshard as xs
from tests.state.test_chains import EXPERTS, GATE_UP, TURNS, WHOLE, experts, turns
from tests.state.test_transfer import FUSED, FUSED_RULES, SHAPES, whole
from tests.torch_bridge.helpers import error_of, on_ranks, same_bits, still_connected
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
    for check in (_fused, _chained, _cast, _dtensors, _apart, _one_message, _donated, _refused):
        check()
    assert still_connected()


def _fused() -> None:
    """FSDP over four ranks -> tensor parallel over two of them, q, k, v and gate, up fused, and back."""
    rank = dist.get_rank()
    arrays = whole(SHAPES)
    here = xs.Rules(FUSED_RULES[0]).match(list(arrays))
    there = xs.Rules(FUSED_RULES[1]).match(list(FUSED.apply(arrays)))
    blocks = {name: cut(x, here[name], HERE, rank, torch.bfloat16) for name, x in arrays.items()}
    for ranks in PLACES:
        mesh = server(ranks)
        options = {"names": FUSED, "bucket_bytes": 500}
        found = xt.transfer(
            blocks, FUSED_RULES, src_mesh=HERE, dst_mesh=mesh, shapes=SHAPES, **options
        )
        assert (found is None) == (rank not in ranks)
        if found is not None:
            for name, x in FUSED.apply(arrays).items():
                expected = cut(x, there[name], Mesh(tp=2), ranks.index(rank), torch.bfloat16)
                assert torch.equal(found[name], expected), name
        shapes = {name: x.shape for name, x in FUSED.apply(arrays).items()}
        back = FUSED_RULES[::-1], {"names": FUSED.inverse, "shapes": shapes}
        again = xt.transfer(found, back[0], src_mesh=mesh, dst_mesh=HERE, **back[1])
        assert again.keys() == blocks.keys()
        assert all(torch.equal(again[name], x) for name, x in blocks.items())


def _chained() -> None:
    """A stack of fused experts -> gate and up of each, and rows by turns along two dims; and back."""
    rank = dist.get_rank()
    arrays = {**GATE_UP, **WHOLE}
    names = EXPERTS.then(TURNS)
    made = names.apply(arrays)
    assert made.keys() == experts(GATE_UP).keys() | turns(WHOLE).keys()
    rules = (
        {"w": "o/cyclic(dp) i", "**": "e/sizes(dp,1,0,2,0) o i"},
        {"odd.*": "n/tp", "**": "a b/tp"},
    )
    here = xs.Rules(rules[0]).match(list(arrays))
    there = xs.Rules(rules[1]).match(list(made))
    blocks = {name: cut(x, here[name], HERE, rank, torch.float32) for name, x in arrays.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    mesh = server((3, 1))
    found = xt.transfer(blocks, rules, mesh, src_mesh=HERE, names=names, shapes=shapes)
    if found is not None:
        for name, x in made.items():
            expected = cut(x, there[name], Mesh(tp=2), (3, 1).index(rank), torch.float32)
            assert torch.equal(found[name], expected), name
    shapes = {name: x.shape for name, x in made.items()}
    options = {"src_mesh": mesh, "names": names.inverse, "shapes": shapes}
    again = xt.transfer(found, rules[::-1], HERE, **options)
    assert again.keys() == blocks.keys()
    assert all(torch.equal(again[name], x) for name, x in blocks.items())


def _cast() -> None:
    """To what torch can only store."""
    x = np.arange(56).reshape(8, 7) % 2
    rank = dist.get_rank()
    ranks = (2, 0)
    names = Names(rename("w", "small", dtype="float8_e4m3fn"))
    rules = {"w": "o/cyclic(dp) i"}, {"small": "o/zigzag(tp) i"}
    blocks = {"w": cut(x, rules[0]["w"], HERE, rank, torch.float64)}
    found = xt.transfer(blocks, rules, server(ranks), src_mesh=HERE, names=names)
    if found is not None:
        expected = cut(x, rules[1]["small"], Mesh(tp=2), ranks.index(rank), torch.float8_e4m3fn)
        assert same_bits(found["small"], expected)


def _dtensors() -> None:
    """They bring their layout, uneven ones too, and their mesh; what a rule says on the left has to be so."""
    rank = dist.get_rank()
    ranks = (3, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.arange(35.0).view(7, 5)
    placed = [Shard(0), Shard(1)], [Replicate(), Replicate()]
    tree = {
        "layers": [{"w": distribute_tensor(x, mesh, each, src_data_rank=None)} for each in placed]
    }
    found = xt.transfer(tree, {"**": "o i/tp"}, dst_mesh=server(ranks))
    if found is not None:
        expected = cut(x.numpy(), "o i/tp", Mesh(tp=2), ranks.index(rank), torch.float32)
        assert all(torch.equal(layer["w"], expected) for layer in found["layers"])
    found = xt.transfer(tree, {"**": "..."}, dst_mesh=server(ranks))
    assert (found is None) == (rank not in ranks)
    assert found is None or all(torch.equal(layer["w"], x) for layer in found["layers"])
    wrong = error_of(
        lambda: xt.transfer(nn.Linear(2, 2), {"**": "..."}, src_mesh=mesh, dst_mesh=mesh)
    )
    assert "the tree is Linear" in wrong[1] and "model.state_dict() is a tree" in wrong[1]
    wrong = error_of(lambda: xt.transfer(tree, {"**": "o/tp i -> o i"}, dst_mesh=server(ranks)))
    assert wrong[0] == "NotationError"
    assert (
        "leaf 'layers.0.w': the DTensor is placed as 'o/dp i/tp' in\n    'o/tp i -> o i'"
        in wrong[1]
    )


def _apart() -> None:
    """Ranks that are not in the source know nothing of the tree before."""
    rank = dist.get_rank()
    source = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("dp",))
    x = np.arange(12).reshape(6, 2)
    block = [cut(x, "o/dp i", Mesh(dp=2), 1 - rank, torch.int64)] if rank < 2 else []
    tree = {"a": [*block, 5, None, "text"], 7: torch.tensor(True)} if rank < 2 else None
    rules = {"a.0": "o/dp i -> o/tp i", "**": "..."}
    found = xt.transfer(tree, rules, src_mesh=source, dst_mesh=server((2, 3)))
    assert (found is None) == (rank < 2)
    if found is not None:
        assert found["a"][1:] == [5, None, "text"] and found[7].item() is True
        assert torch.equal(found["a"][0], torch.from_numpy(x)[3 * (rank - 2) :][:3])


def _one_message() -> None:
    """Between two ranks one buffer a bucket, of the bytes that the plan says."""
    rank = dist.get_rank()
    arrays = whole({f"w{i}": (8, 4) for i in range(6)})
    blocks = {name: cut(x, "o/dp i", HERE, rank, torch.float32) for name, x in arrays.items()}
    options = {"src_mesh": HERE, "dst_mesh": server((0, 3)), "bucket_bytes": 2 * (48 + 16)}
    rules = {"**": "o/dp i -> o i/tp"}
    plan = xt.transfer(blocks, rules, **options, dry_run=True)
    assert len(plan.buckets) == 3 and plan.bytes_received == plan.bytes_lower_bound
    sent: list[int] = []
    seen: list[tuple[int, int]] = []
    begin = dist.batch_isend_irecv

    def counting(work: list[dist.P2POp]) -> list[dist.Work]:
        sends = [each.op is dist.isend for each in work]
        assert sends == sorted(
            sends
        )  # else gloo's receivers say behind what they send that they are ready
        sent.extend(each.tensor.nbytes for each in work if each.op is dist.isend)
        return begin(work)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        xt.transfer(blocks, rules, **options, progress=lambda *figures: seen.append(figures))
    total = torch.tensor([len(sent), sum(sent)])
    dist.all_reduce(total)
    assert total.tolist() == [plan.messages, plan.bytes_moved]
    assert seen == [(plan.bytes_moved * n // 3, plan.bytes_moved) for n in (1, 2, 3)]


def _donated() -> None:
    """What has gone is given back with its bucket, but for the memory that others share."""
    n = 8
    size = 64 * 256  # bytes of a rank's block: a quarter of 4 * size
    blocks = {f"w{i}": torch.full((size // 256 // 4, 256), float(i)) for i in range(n)}
    view = torch.zeros(4, 8)
    held: list[int] = []

    def account(done: int, total: int) -> None:
        held.append(sum(x.untyped_storage().nbytes() for x in blocks.values()))

    rules = {"view": "a b", "**": "o/dp i -> o i/tp"}
    options = {"dst_mesh": server((0, 1)), "bucket_bytes": 2 * size}
    tree = {**blocks, "view": view[:2]}
    found = xt.transfer(tree, rules, src_mesh=HERE, **options, donate=True, progress=account)
    assert held[-1] == 0 and held == sorted(held, reverse=True) and len(held) > 3
    assert held[0] >= (n - 2) * size
    assert view.untyped_storage().nbytes() == 128  # of a view the rest is another's
    if found is not None:
        assert all((found[f"w{i}"] == i).all() for i in range(n))


def _refused() -> None:
    """Before anything is sent, on all ranks alike."""
    rank = dist.get_rank()
    w = torch.ones(2, 4)
    tree = {"w": w}
    rules = {"w": "o/dp i -> o i/tp"}
    options = {"src_mesh": HERE, "dst_mesh": server((0, 1))}
    uneven = {"w": torch.ones(3 if rank == 3 else 2, 4)}
    sizes = {"shapes": {"w": (8, 4)}}
    half = {"w": w.half() if rank == 1 else w}
    other = "unknown mesh axis 'cp' in\n    'o/dp i -> o i/cp'"
    for given, asked, more, kind, words in (
        (
            None if rank == 2 else tree,
            rules,
            {},
            "MeshError",
            "ranks [2] of the source bring no tree",
        ),
        (None, rules, {}, "MeshError", "no rank brings a tree"),
        (half, rules, {}, "DesyncError", "disagree about a redistribution: leaf w\n"),
        ({"v": w} if rank == 1 else tree, {"*": rules["w"]}, {}, "DesyncError", "leaf w, leaf v"),
        (
            uneven,
            rules,
            sizes,
            "DesyncError",
            "'w': the block of rank 3 has shape (3, 4), not (2, 4)",
        ),
        (tree, {"w": "o/dp i -> o i/cp"}, {}, "NotationError", other),
        (tree, {"v": "o"}, {}, "XshardError", "no rule for 1 of 1 names: w"),
        (
            {"a.b": w, "a": {"b": w}},
            {"**": "o/dp i"},
            {},
            "XshardError",
            "two leaves are called 'a.b'",
        ),
        ({"w": w, "o": object()}, rules, {}, "XshardError", "leaf 'o' is <"),
    ):
        raised = error_of(partial(xt.transfer, given, asked, **options | more))
        assert raised[0] == kind and words in raised[1], raised
