"""Redistribution between two meshes of gloo ranks, forward and backward, against the numpy reference.

Long because one world of ranks runs all of it.
"""

from __future__ import annotations

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
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected
from xshard.layout.layout import parse_expression


class Crossing(NamedTuple):
    """An expression between two meshes, on these ranks, for an array of a shape."""

    expression: str
    src_mesh: str
    dst_mesh: str
    shape: tuple[int, ...]
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    dtype: str = "float64"
    relabel: bool = False

    def plan(self, profile="bandwidth"):
        meshes = {"src_mesh": xs.Mesh.parse(self.src_mesh), "dst_mesh": xs.Mesh.parse(self.dst_mesh)}
        devices = {"src_devices": self.src_ranks, "dst_devices": self.dst_ranks}
        options = {"dtype": self.dtype, "relabel": self.relabel, "profile": profile}
        return xs.plan(self.expression, **meshes, shape=self.shape, **devices, **options)


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
    Crossing("n/a/c d -> n/c/a d", "a=2,c=2", "a=2,c=2", (4, 6), (0, 1, 2, 3), (0, 1, 2, 3), relabel=True),
]


def share(case, plan, inputs, cotangents):
    """This rank's output and gradient; None at the end where it has no block."""
    rank = dist.get_rank()
    x = torch.from_numpy(inputs[case.src_ranks.index(rank)]) if rank in case.src_ranks else None
    leaf = None if x is None else x.clone().requires_grad_()
    quiet = xt.redistribute(
        x, plan, src_mesh=xs.Mesh.parse(case.src_mesh), dst_mesh=xs.Mesh.parse(case.dst_mesh)
    )
    y = xt.redistribute(leaf, plan, requires_grad=True)
    dst = plan.dst_devices
    if rank in dst:
        assert torch.equal(y.detach(), quiet)
        y.backward(torch.from_numpy(cotangents[dst.index(rank)]))
    else:
        assert quiet is None and y.shape == (0,)
        y.sum().backward()
    assert x is None or torch.equal(leaf.detach(), x)
    return (y.detach().numpy() if rank in dst else None, None if leaf is None else leaf.grad.numpy())


def all_shares(cases):
    return [share(*case) for case in cases]


def prepared(case, profile):
    """A case with its plan, whole-number blocks and cotangents."""
    plan, rng = case.plan(profile), np.random.default_rng(0)
    src, dst = parse_expression(case.expression)
    meshes = xs.Mesh.parse(case.src_mesh), xs.Mesh.parse(case.dst_mesh)
    inputs = oracle.random_blocks(src, meshes[0], case.shape, rng, 4)
    cotangents = oracle.random_blocks(dst.dual, meshes[1], case.shape, rng, 4)
    return case, plan, [*map(np.asarray, inputs)], [*map(np.asarray, cotangents)]


PREPARED = [prepared(case, profile) for case in CROSSINGS for profile in ("bandwidth", "h100")]


@pytest.fixture(scope="module")
def results():
    """Per case, what every rank has."""
    return list(zip(*on_ranks(4, all_shares, PREPARED), strict=True))


def assert_like_the_reference(shares, case, plan, inputs, cotangents):
    """What the ranks have, against the reference."""
    takers = plan.dst_devices
    outputs = [shares[rank][0] for rank in takers]
    gradients = [shares[rank][1] for rank in case.src_ranks]
    expected = xs.reference.run(plan, inputs)
    pulled = xs.reference.pullback(plan, inputs, cotangents)
    for found, wanted in ((outputs, expected), (gradients, pulled)):
        for have, want in zip(found, wanted, strict=True):
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            assert np.array_equal(have, want)
    assert all(shares[rank][0] is None for rank in range(len(shares)) if rank not in takers)


@pytest.mark.parametrize("at", range(len(PREPARED)), ids=lambda at: str(PREPARED[at][0].expression))
def test_values_and_gradients(results, at):
    assert_like_the_reference(results[at], *PREPARED[at])


def test_the_same_devices_without_a_refinement():
    """3x2 -> 2x3: every rank sends and receives straight."""
    ranks = tuple(range(6))
    case = Crossing("n/x d/y -> n/x d/y", "x=3,y=2", "x=2,y=3", (6, 6), ranks, ranks)
    everything = prepared(case, "bandwidth")
    assert everything[1].transfer
    shares = [share for (share,) in on_ranks(6, all_shares, [everything])]
    assert_like_the_reference(shares, *everything)


def test_the_cases_cover_every_kind_of_plan():
    plans = [plan for _, plan, _, _ in PREPARED]
    transfers = [plan for plan in plans if plan.transfer]
    assert len(plans) > len(transfers)
    assert any(p.steps[0] is not p.transfer for p in transfers)
    assert any(p.steps[-1] is not p.transfer for p in transfers)
    assert any(p.transfer.is_in_place for p in transfers) and any(p.transfer.op for p in transfers)
    assert any(p.dst_devices == (0, 2, 1, 3) for p in transfers)


def through_device_meshes():
    """Expressions and DeviceMeshes that are parts of the world, twice, so that groups are made once."""
    src_mesh, dst_mesh = (
        DeviceMesh("cpu", ranks, mesh_dim_names=names)
        for ranks, names in (([[0, 1], [2, 3]], ("dp", "tp")), ([3, 1], ("ep",)))
    )
    rank, shape = dist.get_rank(), (4, 6)
    whole = torch.arange(24.0).reshape(shape)
    x = whole[2 * (rank // 2) :][:2, 3 * (rank % 2) :][:, :3]
    for expression, dst in (("n/dp d/tp -> n d/ep", (whole[:, 3:], whole[:, :3])),) * 2:
        y = xt.redistribute(x, expression, src_mesh=src_mesh, dst_mesh=dst_mesh, shape=shape)
        assert y is None if rank in (0, 2) else torch.equal(y, dst[rank // 2])
    back = xt.redistribute(
        y, "n d/ep -> n/dp d/tp", src_mesh=dst_mesh, dst_mesh=src_mesh, shape=shape, dtype=torch.float32
    )
    assert torch.equal(back, x)
    same = xt.redistribute(x, "n/dp d/tp -> n/x d", src_mesh=src_mesh, dst_mesh=xs.Mesh(x=4), shape=shape)
    assert torch.equal(same, whole[rank : rank + 1])
    # A DTensor brings its mesh and its shape; what arrives is a block.
    cut = DTensor.from_local(x, src_mesh, [Shard(0), Shard(1)])
    y = xt.redistribute(cut, expression, dst_mesh=dst_mesh, debug=True)
    assert y is None if rank in (0, 2) else type(y) is torch.Tensor and torch.equal(y, dst[rank // 2])
    leaf = None if y is None else DTensor.from_local(y, dst_mesh, [Shard(1)]).requires_grad_()
    ends = {"src_mesh": dst_mesh, "dst_mesh": src_mesh, "shape": shape, "dtype": torch.float32}
    back = xt.redistribute(leaf, "n d/ep -> n/dp d/tp", **ends, requires_grad=True)
    assert torch.equal(back.detach(), x)
    (back**2).sum().backward()
    assert leaf is None or torch.equal(leaf.grad.to_local(), 2 * y)
    for error, wrong in (
        ("MeshError", lambda: xt.redistribute(cut, expression, src_mesh=dst_mesh, dst_mesh=src_mesh)),
        ("ShapeError", lambda: xt.redistribute(cut, expression, dst_mesh=dst_mesh, shape=(4, 7))),
        ("NotationError", lambda: xt.redistribute(cut, "n/tp d/dp -> n d", dst_mesh=dst_mesh)),
    ):
        kind, told = error_of(wrong)
        assert kind == error and "the DTensor" in told, told
    # Replicas are compared, those of the gradient too; all ranks hear of it.
    ends = {"src_mesh": src_mesh, "dst_mesh": dst_mesh, "shape": shape, "check_replicated": True}
    rows = whole[2 * (rank // 2) :][:2].clone().requires_grad_()
    y = xt.redistribute(rows, "n/dp d -> n d", **ends, requires_grad=True)
    assert rank in (0, 2) or torch.equal(y, whole)
    kind, told = error_of(lambda: (y * (rank + 1)).sum().backward())
    assert kind == "ReplicaError" and "cotangents differ along 'ep'" in told and "ranks 3, 1" in told, told
    kind, told = error_of(lambda: xt.redistribute(rows.detach() + rank, "n/dp d -> n d", **ends))
    assert kind == "ReplicaError" and "blocks differ along 'tp'" in told and "ranks 0, 1" in told, told
    return still_connected()


def test_device_meshes():
    assert all(on_ranks(4, through_device_meshes))


def every_dtype(names):
    mesh, other = xs.Mesh(a=2), xs.Mesh(b=3)
    plan = lambda name: xs.plan(  # noqa: E731
        "n/a d -> n/b d", src_mesh=mesh, dst_mesh=other, dst_devices=(1, 2, 3), shape=(5, 2), dtype=name
    )
    for name in names:
        dtype = getattr(torch, name)
        small = torch.arange(10, dtype=torch.uint8).reshape(5, 2)  # torch casts to no dtype of 4 bits
        whole = small.view(dtype) if name == "int4" else small.to(dtype)
        rank = dist.get_rank()
        y = xt.redistribute(whole[3 * rank :][:3] if rank < 2 else None, plan(name))
        wanted = whole[2 * (rank - 1) :][:2] if rank else None
        assert y is wanted is None or (
            y.dtype == wanted.dtype
            and torch.equal(y.view(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
        ), name
    return True


def one_number():
    """A block of one element has any strides, and torch calls it contiguous."""
    x = torch.tensor([7.0, 8.0])[::2]
    assert x.stride() == (2,) and x.is_contiguous()
    y = xt.redistribute(
        x if dist.get_rank() == 0 else None,
        plan := xs.plan("n -> n", src_mesh=xs.Mesh(a=1), dst_mesh=xs.Mesh(b=1), dst_devices=(1,), shape=(1,)),
    )
    return y is None if dist.get_rank() not in plan.dst_devices else y.tolist() == [7.0]


def test_a_block_of_one_number_moves():
    assert all(on_ranks(4, one_number))


def test_every_dtype_moves():
    names = ["float64", "bfloat16", "complex64", "int16", "uint16", "uint64", "bool", "float8_e4m3fn", "int4"]
    assert all(on_ranks(4, every_dtype, names))


def twice():
    """The second derivative of sum((A x)^3 / 6), at each end through the other."""
    rank = dist.get_rank()
    plan = xs.plan(
        "n/a -> n | copy(b)",
        src_mesh=xs.Mesh(a=2),
        dst_mesh=xs.Mesh(b=2),
        dst_devices=(2, 3),
        shape=(4,),
        dtype="float64",
    )
    x = torch.arange(1.0, 5, dtype=torch.float64)[2 * rank :][:2].requires_grad_() if rank < 2 else None
    leaf = torch.empty(0, dtype=torch.float64, requires_grad=True) if x is None else x
    y = xt.redistribute(x, plan, requires_grad=True)
    loss = (y**3).sum() / 6
    loss.backward()
    return None if x is None else leaf.grad.tolist()


def test_a_loss_on_the_other_mesh():
    """Two copies that are used apart: their gradients x^2 / 2 add up."""
    assert on_ranks(4, twice) == [[1, 4], [9, 16], None, None]


def refused():
    """Each of these raises on all ranks, before anything is sent."""
    rank, a, b = dist.get_rank(), xs.Mesh(a=1), xs.Mesh(b=2)
    x = torch.ones(4) if rank == 0 else None

    def move(*args, **options):
        options = {"dtype": torch.float32, "shape": (4,), **options}
        return lambda: xt.redistribute(x, *args, **options)

    plan = lambda **options: xs.plan(  # noqa: E731
        "n -> n/b", src_mesh=a, dst_mesh=b, **{"shape": (4,), "dst_devices": (1, 2), **options}
    )
    maximum = xs.plan("n | max(a) -> n", src_mesh=xs.Mesh(a=2), dst_mesh=a, dst_devices=(2,), shape=(4,))
    found = [
        error_of(move("n -> n/b")),
        error_of(move("n -> n/b", src_mesh=a)),
        error_of(move("n -> n/b", src_mesh=a, dst_mesh=b, shape=None)),
        error_of(move("n -> n/c", src_mesh=a, dst_mesh=b)),
        error_of(move("n -> n/b", src_mesh=a, dst_mesh=xs.Mesh(b=8))),
        error_of(move(plan(dst_devices=(1, 9)))),
        error_of(move(plan(dtype="int64"), requires_grad=True)),
        error_of(move(maximum, requires_grad=True)),
    ]
    if rank == 0:
        local = [
            error_of(lambda: xt.redistribute(None, plan())),
            error_of(lambda: xt.redistribute(torch.ones(3), plan())),
        ]
        local += [error_of(lambda: xt.redistribute(torch.ones(4).double(), plan()))]
    else:
        local = [error_of(lambda: xt.redistribute(torch.ones(4), plan()))]
    return found, local, still_connected()


def test_wrong_input():
    ranks = on_ranks(3, refused)
    assert all(connected for _, _, connected in ranks)
    assert ranks[0][0] == ranks[1][0] == ranks[2][0]
    assert ranks[0][0] == [
        ("MeshError", "two meshes are needed\n  redistribute(x, layouts, src_mesh=..., dst_mesh=...)"),
        ("MeshError", "two meshes are needed\n  redistribute(x, layouts, src_mesh=..., dst_mesh=...)"),
        (
            "ShapeError",
            "the global shape is missing\n"
            "  shape= and dtype= of the global array: processes without a block know neither",
        ),
        (
            "NotationError",
            "unknown mesh axis 'c' in\n    'n -> n/c'\n            ^\n  the destination's mesh has: b=2",
        ),
        (
            "MeshError",
            "the meshes have a rank 7, the world has 3 processes\n"
            "  device numbers of a plan are global ranks",
        ),
        (
            "MeshError",
            "the meshes have a rank 9, the world has 3 processes\n"
            "  device numbers of a plan are global ranks",
        ),
        ("DtypeError", "int64 cannot have a gradient\n  floats and complex numbers can"),
        (
            "LinearityError",
            "'n | max(a)' lacks a dual: max and min are not linear\n"
            "  their gradient goes to the winners; redistribute of either bridge computes it",
        ),
    ]
    part = "\n  under 'n' on Mesh(a=1) that is its part of a (4,) array"
    assert ranks[0][1] == [
        ("ShapeError", f"rank 0 is in the source and brings no block{part}"),
        ("ShapeError", f"the block of rank 0 has shape (3,), not (4,){part}"),
        ("DtypeError", "the block of rank 0 is torch.float64, the plan is for float32"),
    ]
    assert ranks[1][1] == [("ShapeError", "rank 1 is not in the source and has a block\n  pass None there")]


def test_without_a_process_group():
    with pytest.raises(xs.errors.MeshError, match="no process group is initialised"):
        xt.redistribute(torch.ones(4), "n -> n", src_mesh=xs.Mesh(a=1), dst_mesh=xs.Mesh(b=1), shape=(4,))


def test_plans_travel_to_ranks():
    plan = PREPARED[0][1]
    assert pickle.loads(pickle.dumps(plan)) == plan


def a_tree():
    """The tensors of a tree between two meshes, each as it travels alone; a gradient on the way back."""
    rank, src, dst = dist.get_rank(), xs.Mesh(a=2), DeviceMesh("cpu", [2, 3], mesh_dim_names=("b",))
    whole = {"w": torch.arange(12.0).view(4, 3), "layers": [torch.arange(4.0)]}
    here = rank < 2
    cut = {"w": whole["w"].chunk(2)[rank], "layers": [whole["layers"][0].chunk(2)[rank]]} if here else None
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
    return [error_of(lambda: xt.redistribute(tree, layouts, src, dst_mesh=dst)), still_connected()]


def test_a_tree_moves_between_meshes():
    refused, connected = on_ranks(4, a_tree)[0]
    assert connected and refused[0] == "MeshError" and "are for one mesh" in refused[1]
