"""Redistribution between two meshes of gloo ranks, forward and backward, against the numpy reference."""

from __future__ import annotations

import functools
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torch_bridge as xt
import xshard as xs
from tests import oracle
from tests.torch_bridge.helpers import (
    SharedRanks,
    assert_refused,
    error_of,
    in_ranks,
    on_ranks,
    still_connected,
)
from xshard.layout.layout import parse_expression


class Crossing(NamedTuple):
    """An expression between two meshes, on these ranks, for an array of a shape."""

    expression: str
    src_mesh: str
    dst_mesh: str
    shape: tuple[int, ...]
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    relabel: bool = False

    @property
    def meshes(self):
        return {"src_mesh": xs.Mesh.parse(self.src_mesh), "dst_mesh": xs.Mesh.parse(self.dst_mesh)}

    def plan(self, profile="bandwidth"):
        devices = {"src_devices": self.src_ranks, "dst_devices": self.dst_ranks}
        options = {"dtype": "float64", "relabel": self.relabel, "profile": profile, **devices}
        return xs.plan(self.expression, **self.meshes, shape=self.shape, **options)


CROSSINGS = [
    # two ranks to two others
    Crossing("n/a d -> n d/b", "a=2", "b=2", (4, 6), (0, 1), (2, 3)),
    Crossing("n/a d -> n d/b", "a=2", "b=2", (5, 3), (0, 1), (2, 3)),
    Crossing("n/a d -> n d | copy(b)", "a=2", "b=2", (4, 6), (0, 1), (3, 2)),
    Crossing("n d | sum(a) -> n d", "a=2", "b=2", (4, 6), (0, 1), (2, 3)),
    Crossing("n d | mean(a) -> n/b d", "a=2", "b=2", (4, 6), (0, 1), (2, 3)),
    Crossing("n d | copy(a) -> n d | sum(b)", "a=2", "b=2", (4, 6), (0, 1), (2, 3)),
    Crossing("n/zigzag(a) -> n/cyclic(b)", "a=2", "b=2", (80,), (0, 1), (2, 3)),
    Crossing("() | sum(a) -> ()", "a=2", "b=2", (), (0, 1), (2, 3)),
    Crossing("n/a -> n/b", "a=2", "b=2", (0,), (0, 1), (2, 3)),
    # four to two, which are among them, and back
    Crossing("n/a d/c -> n d/b", "a=2,c=2", "b=2", (4, 6), (0, 1, 2, 3), (1, 3)),
    Crossing("n/a d | sum(c) -> n d", "a=2,c=2", "b=2", (4, 6), (0, 1, 2, 3), (1, 3)),
    Crossing("n d/b -> n d", "b=2", "a=2,c=2", (4, 6), (2, 0), (0, 1, 2, 3)),
    Crossing("n d -> n d | copy(a) sum(c)", "b=2", "a=2,c=2", (4, 6), (2, 0), (0, 1, 2, 3)),
    Crossing("n -> n", "b=1", "a=3", (7,), (3,), (0, 1, 2)),
    # the same devices: a refined plan, other places
    Crossing("n/a d -> n/b d/c", "a=4", "b=2,c=2", (4, 6), (0, 1, 2, 3), (0, 1, 2, 3)),
    Crossing("n/a d -> n d | copy(b)", "a=4", "b=2,c=2", (4, 6), (0, 1, 2, 3), (0, 1, 2, 3)),
    Crossing("n/a/c d -> n/c/a d", "a=2,c=2", "a=2,c=2", (4, 6), (0, 1, 2, 3), (3, 1, 0, 2)),
    Crossing(
        "n/a/c d -> n/c/a d", "a=2,c=2", "a=2,c=2", (4, 6), (0, 1, 2, 3), (0, 1, 2, 3), relabel=True
    ),
    # ... without a refinement: every rank sends and receives straight
    Crossing("n/x d/y -> n/x d/y", "x=3,y=2", "x=2,y=3", (6, 6), tuple(range(6)), tuple(range(6))),
]


def share(case, plan, inputs, cotangents):
    """This rank's output and gradient; None at the end where it has no block."""
    rank = dist.get_rank()
    x = torch.from_numpy(inputs[case.src_ranks.index(rank)]) if rank in case.src_ranks else None
    leaf = None if x is None else x.clone().requires_grad_()
    quiet = xt.redistribute(x, plan, **case.meshes)
    y = xt.redistribute(leaf, plan, requires_grad=True)
    dst = plan.dst_devices
    if rank in dst:
        assert torch.equal(y.detach(), quiet)
        y.backward(torch.from_numpy(cotangents[dst.index(rank)]))
    else:
        assert quiet is None and y.shape == (0,)
        y.sum().backward()
    assert x is None or torch.equal(leaf.detach(), x)
    return (
        y.detach().numpy() if rank in dst else None,
        None if leaf is None else leaf.grad.numpy(),
    )


def all_shares(cases):
    return [share(*case) for case in cases]


def prepared(case, profile):
    """A case with its plan, whole-number blocks and cotangents."""
    plan = case.plan(profile)
    rng = np.random.default_rng(0)
    src, dst = parse_expression(case.expression)
    meshes = [*case.meshes.values()]
    inputs = oracle.random_blocks(src, meshes[0], case.shape, rng, 4)
    cotangents = oracle.random_blocks(dst.dual, meshes[1], case.shape, rng, 4)
    return case, plan, [*map(np.asarray, inputs)], [*map(np.asarray, cotangents)]


PREPARED = [prepared(case, profile) for case in CROSSINGS for profile in ("bandwidth", "h100")]


def test_results_are_those_of_numpy():
    for shares, (case, plan, inputs, cotangents) in zip(
        zip(*on_ranks(6, all_shares, PREPARED), strict=True), PREPARED, strict=True
    ):
        outputs = [shares[rank][0] for rank in plan.dst_devices]
        gradients = [shares[rank][1] for rank in case.src_ranks]
        expected = xs.reference.run(plan, inputs)
        pulled = xs.reference.pullback(plan, inputs, cotangents)
        for found, wanted in ((outputs, expected), (gradients, pulled)):
            for have, want in zip(found, wanted, strict=True):
                assert (have.dtype, have.shape) == (want.dtype, want.shape), case
                assert np.array_equal(have, want), case
        assert all(shares[rank][0] is None for rank in range(6) if rank not in plan.dst_devices), (
            case
        )


def test_the_cases_cover_every_kind_of_plan():
    plans = [plan for _, plan, _, _ in PREPARED]
    transfers = [plan for plan in plans if plan.transfer]
    assert len(plans) > len(transfers) and plans[-2].transfer
    assert any(p.steps[0] is not p.transfer for p in transfers)
    assert any(p.steps[-1] is not p.transfer for p in transfers)
    assert any(p.transfer.is_in_place for p in transfers) and any(p.transfer.op for p in transfers)
    assert any(p.dst_devices == (0, 2, 1, 3) for p in transfers)


on_four = SharedRanks(4)


@on_four
def test_device_meshes():
    """Expressions and DeviceMeshes that are parts of the world, twice, so that groups are made once."""
    src_mesh, dst_mesh = (
        DeviceMesh("cpu", ranks, mesh_dim_names=names)
        for ranks, names in (([[0, 1], [2, 3]], ("dp", "tp")), ([3, 1], ("ep",)))
    )
    rank = dist.get_rank()
    shape = (4, 6)
    whole = torch.arange(24.0).reshape(shape)
    x = whole[2 * (rank // 2) :][:2, 3 * (rank % 2) :][:, :3]
    for expression, dst in (("n/dp d/tp -> n d/ep", (whole[:, 3:], whole[:, :3])),) * 2:
        y = xt.redistribute(x, expression, src_mesh=src_mesh, dst_mesh=dst_mesh, shape=shape)
        assert y is None if rank in (0, 2) else torch.equal(y, dst[rank // 2])
    back = xt.redistribute(
        y,
        "n d/ep -> n/dp d/tp",
        src_mesh=dst_mesh,
        dst_mesh=src_mesh,
        shape=shape,
        dtype=torch.float32,
    )
    assert torch.equal(back, x)
    same = xt.redistribute(
        x, "n/dp d/tp -> n/x d", src_mesh=src_mesh, dst_mesh=xs.Mesh(x=4), shape=shape
    )
    assert torch.equal(same, whole[rank : rank + 1])
    # A DTensor brings its mesh and its shape; what arrives is a block.
    cut = DTensor.from_local(x, src_mesh, [Shard(0), Shard(1)])
    y = xt.redistribute(cut, expression, dst_mesh=dst_mesh, debug=True)
    assert (
        y is None if rank in (0, 2) else type(y) is torch.Tensor and torch.equal(y, dst[rank // 2])
    )
    leaf = None if y is None else DTensor.from_local(y, dst_mesh, [Shard(1)]).requires_grad_()
    ends = {"src_mesh": dst_mesh, "dst_mesh": src_mesh, "shape": shape, "dtype": torch.float32}
    back = xt.redistribute(leaf, "n d/ep -> n/dp d/tp", **ends, requires_grad=True)
    assert torch.equal(back.detach(), x)
    (back**2).sum().backward()
    assert leaf is None or torch.equal(leaf.grad.to_local(), 2 * y)
    move = functools.partial(xt.redistribute, cut, dst_mesh=dst_mesh)
    assert_refused(
        (lambda: move(expression, src_mesh=dst_mesh, dst_mesh=src_mesh), "MeshError: the DTensor"),
        (lambda: move(expression, shape=(4, 7)), "ShapeError: the DTensor"),
        (lambda: move("n/tp d/dp -> n d"), "NotationError: the DTensor"),
    )
    # Replicas are compared, those of the gradient too; all ranks hear of it.
    ends = {"src_mesh": src_mesh, "dst_mesh": dst_mesh, "shape": shape, "check_replicated": True}
    rows = whole[2 * (rank // 2) :][:2].clone().requires_grad_()
    y = xt.redistribute(rows, "n/dp d -> n d", **ends, requires_grad=True)
    assert rank in (0, 2) or torch.equal(y, whole)
    kind, told = error_of(lambda: (y * (rank + 1)).sum().backward())
    assert (
        kind == "ReplicaError" and "cotangents differ along 'ep'" in told and "ranks 3, 1" in told
    ), told
    kind, told = error_of(lambda: xt.redistribute(rows.detach() + rank, "n/dp d -> n d", **ends))
    assert kind == "ReplicaError" and "blocks differ along 'tp'" in told and "ranks 0, 1" in told, (
        told
    )
    assert still_connected()


DTYPES = [
    "float64",
    "bfloat16",
    "complex64",
    "int16",
    "uint16",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "int4",
]


@on_four
def test_every_dtype_moves():
    ends = {
        "src_mesh": xs.Mesh(a=2),
        "dst_mesh": xs.Mesh(b=3),
        "dst_devices": (1, 2, 3),
        "shape": (5, 2),
    }
    for name in DTYPES:
        dtype = getattr(torch, name)
        small = torch.arange(10, dtype=torch.uint8).reshape(
            5, 2
        )  # torch casts to no dtype of 4 bits
        whole = small.view(dtype) if name == "int4" else small.to(dtype)
        rank = dist.get_rank()
        plan = xs.plan("n/a d -> n/b d", **ends, dtype=name)
        y = xt.redistribute(whole[3 * rank :][:3] if rank < 2 else None, plan)
        wanted = whole[2 * (rank - 1) :][:2] if rank else None
        assert y is wanted is None or y.dtype == wanted.dtype, name
        assert y is None or torch.equal(*(z.reshape(-1).view(torch.uint8) for z in (y, wanted))), (
            name
        )


@on_four
def test_a_block_of_one_number_moves():
    rank = dist.get_rank()
    # A block of one element has any strides, and torch calls it contiguous.
    x = torch.tensor([7.0, 8.0])[::2]
    assert x.stride() == (2,) and x.is_contiguous()
    plan = xs.plan(
        "n -> n", src_mesh=xs.Mesh(a=1), dst_mesh=xs.Mesh(b=1), dst_devices=(1,), shape=(1,)
    )
    y = xt.redistribute(x if rank == 0 else None, plan)
    assert y is None if rank != 1 else y.tolist() == [7.0]


@on_four
def test_a_loss_on_the_other_mesh():
    """Of sum((A x)^3 / 6), two copies that are used apart: their gradients x^2 / 2 add up."""
    rank = dist.get_rank()
    ends = {"src_mesh": xs.Mesh(a=2), "dst_mesh": xs.Mesh(b=2), "dst_devices": (2, 3)}
    plan = xs.plan("n/a -> n | copy(b)", **ends, shape=(4,))
    x = torch.arange(1.0, 5)[2 * rank :][:2].requires_grad_() if rank < 2 else None
    ((xt.redistribute(x, plan, requires_grad=True) ** 3).sum() / 6).backward()
    assert x is None or torch.equal(x.grad, x.detach() ** 2)


@in_ranks(3)
def test_wrong_input():
    """Each of these raises on all ranks, before anything is sent."""
    rank = dist.get_rank()
    a = xs.Mesh(a=1)
    b = xs.Mesh(b=2)
    far = xs.Mesh(b=8)
    x = torch.ones(4) if rank == 0 else None

    def move(*args, **options):
        options = {"dtype": torch.float32, "shape": (4,), **options}
        return lambda: xt.redistribute(x, *args, **options)

    def plan(dst_devices=(1, 2), **options):
        return xs.plan(
            "n -> n/b", src_mesh=a, dst_mesh=b, dst_devices=dst_devices, shape=(4,), **options
        )

    maximum = xs.plan(
        "n | max(a) -> n", src_mesh=xs.Mesh(a=2), dst_mesh=a, dst_devices=(2,), shape=(4,)
    )
    two = "MeshError: two meshes are needed\n  redistribute(x, layouts, src_mesh=..., dst_mesh=...)"
    world = "the world has 3 processes\n  device numbers of a plan are global ranks"
    part = "\n  under 'n' on Mesh(a=1) that is its part of a (4,) array"
    assert_refused(
        (move("n -> n/b"), two),
        (move("n -> n/b", src_mesh=a), two),
        (move("n -> n/b", src_mesh=a, dst_mesh=b, shape=None), "ShapeError: the global shape is missing\n"
            "  shape= and dtype= of the global array: processes without a block know neither"),
        (move("n -> n/c", src_mesh=a, dst_mesh=b), "NotationError: unknown mesh axis 'c' in\n    'n -> n/c'\n"
            "            ^\n  the destination's mesh has: b=2"),
        (move("n -> n/b", src_mesh=a, dst_mesh=far), f"MeshError: the meshes have a rank 7, {world}"),
        (move(plan((1, 9))), f"MeshError: the meshes have a rank 9, {world}"),
        (move(plan(dtype="int64"), requires_grad=True),
            "DtypeError: int64 cannot have a gradient\n  floats and complex numbers can"),
        (move(maximum, requires_grad=True), "LinearityError: 'n | max(a)' lacks a dual: max and min are not "
            "linear\n  their gradient goes to the winners; redistribute of either bridge computes it"),
        is_whole=True,
    )  # fmt: skip
    of_own = "is not in the source and has a block\n  pass None there"
    of_source = [
        (None, f"ShapeError: rank 0 is in the source and brings no block{part}"),
        (torch.ones(3), f"ShapeError: the block of rank 0 has shape (3,), not (4,){part}"),
        (
            torch.ones(4).double(),
            "DtypeError: the block of rank 0 is torch.float64, the plan is for float32",
        ),
    ]
    wrong = [(torch.ones(4), f"ShapeError: rank {rank} {of_own}")] if rank else of_source
    local = ((functools.partial(xt.redistribute, block, plan()), words) for block, words in wrong)
    assert_refused(*local, is_alike=False, is_whole=True)


def test_without_a_process_group():
    with pytest.raises(xs.errors.MeshError, match="no process group is initialised"):
        xt.redistribute(
            torch.ones(4), "n -> n", src_mesh=xs.Mesh(a=1), dst_mesh=xs.Mesh(b=1), shape=(4,)
        )


def test_plans_travel_to_ranks():
    plan = PREPARED[0][1]
    assert pickle.loads(pickle.dumps(plan)) == plan


@on_four
def test_a_tree_moves_between_meshes():
    """The tensors of a tree between two meshes, each as it travels alone; a gradient on the way back."""
    rank = dist.get_rank()
    src = xs.Mesh(a=2)
    dst = DeviceMesh("cpu", [2, 3], mesh_dim_names=("b",))
    whole = {"w": torch.arange(12.0).view(4, 3), "layers": [torch.arange(4.0)]}
    here = rank < 2
    cut = (
        {"w": whole["w"].chunk(2)[rank], "layers": [whole["layers"][0].chunk(2)[rank]]}
        if here
        else None
    )
    tree = cut or {"w": None, "layers": [None]}
    shapes = {"w": (4, 3), "layers": [(4,)]}
    ends = {"src_mesh": src, "dst_mesh": dst, "dtype": torch.float32, "shape": shapes}
    layouts = {"w": "n/a d -> n d/b", "layers": "n/a -> n/b"}
    y = xt.redistribute(tree, layouts, **ends)
    if here:
        assert y == {"w": None, "layers": [None]}
    else:
        assert torch.equal(y["layers"][0], whole["layers"][0].chunk(2)[rank - 2])
        assert torch.equal(y["w"], whole["w"].chunk(2, 1)[rank - 2])
    leaf = None if cut is None else cut["w"].requires_grad_()
    z = xt.redistribute([leaf], [layouts["w"]], **{**ends, "shape": [(4, 3)]}, requires_grad=True)
    z[0].sum().backward()
    assert leaf is None or leaf.grad.tolist() == [[1.0] * 3] * 2
    refused = "MeshError: ...are for one mesh"
    assert_refused((lambda: xt.redistribute(tree, layouts, src, dst_mesh=dst), refused))
