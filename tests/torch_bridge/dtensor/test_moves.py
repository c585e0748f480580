"""Moved DTensors: every transition, its values, gradients and what it sends, as in torch's own tests of
`DTensor.redistribute`; what that refuses or gets wrong, too. Blocks are those of `distribute_tensor`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import RECENT, assert_refused, in_ranks, on_threads
from torch_bridge.testing.byte_counter import Meter
from xshard.layout.layout import parse_expression

R = Replicate()
S0 = Shard(0)
S1 = Shard(1)
P = Partial("sum")
MEAN = Partial("avg")
MAX = Partial("max")
MIN = Partial("min")
REDUCED = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
Placements = Sequence[Placement]


def whole_array(*shape: int) -> Tensor:
    """Distinct integers, of which any few sum and halve exactly."""
    n = torch.Size(shape).numel()
    return (torch.arange(1.0, n + 1, dtype=torch.float64) * 64 - 32 * n).view(shape)


def replicated(placements: Placements) -> list[Placement]:
    return [R if isinstance(p, Partial) else p for p in placements]


def blocks_of(whole: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """This rank's block of an array: torch's own, made without communication; addends differ by rank."""
    block = (
        distribute_tensor(whole, mesh, replicated(placements), src_data_rank=None)
        .to_local()
        .clone()
    )
    for at, (index, placement) in enumerate(zip(mesh.get_coordinate(), placements, strict=True)):
        if not isinstance(placement, Partial):
            continue
        n = mesh.size(at)
        noise = torch.arange(block.numel(), dtype=block.dtype).view(block.shape) % 5 - 2
        first = index == 0
        kind = placement.reduce_op
        if kind == "sum":
            block = block - (n - 1) * 2 * noise if first else 0 * block + 2 * noise
        elif kind == "avg":
            block = block - (n - 1) * 2 * noise if first else block + 2 * noise
        elif not first:
            block = block - (noise + 3 if kind == "max" else -noise - 3)
    return block


def dtensor(
    whole: Tensor, mesh: DeviceMesh, placements: Placements, block: Tensor | None = None
) -> DTensor:
    block = blocks_of(whole, mesh, placements) if block is None else block
    return DTensor.from_local(block, mesh, placements, shape=whole.shape, stride=whole.stride())


def assert_is(
    y: DTensor, whole: Tensor, placements: Placements, mesh: DeviceMesh | None = None
) -> None:
    """The DTensor is the array, placed so; addends are reduced by torch to be compared."""
    mesh = y.device_mesh if mesh is None else mesh
    assert (
        y.device_mesh == mesh and list(y.placements) == list(placements) and y.shape == whole.shape
    )
    block = y.to_local().detach().clone()
    for at, placement in enumerate(placements):
        if isinstance(placement, Partial):
            dist.all_reduce(block, REDUCED[placement.reduce_op], mesh.get_group(at))
            block = block / mesh.size(at) if placement == MEAN else block
    assert torch.equal(block, blocks_of(whole, mesh, replicated(placements)).to(block.dtype))


def case(
    mesh: DeviceMesh, shape: Sequence[int], src: Placements, dst: Placements, expression: str = ""
) -> None:
    """Values, and the gradient in every form it may come in, of the array and of its blocks."""

    def moved(x: DTensor) -> DTensor:
        return xt.redistribute(x, expression) if expression else xt.dtensor.redistribute(x, dst)

    whole = whole_array(*shape)
    weight = whole_array(*shape).flip(0) * 2
    x = dtensor(whole, mesh, src).requires_grad_()
    kept = x.to_local().detach().clone()
    y = moved(x)
    assert_is(y, whole, dst)
    for form in (replicated(dst), [P] * mesh.ndim):
        (gradient,) = torch.autograd.grad(y, x, dtensor(weight, mesh, form), retain_graph=True)
        # Addends of a gradient stay addends where the input is a sum too, but under expressions.
        stays = [
            isinstance(of, Partial) and g == P and not expression
            for of, g in zip(src, form, strict=True)
        ]
        assert_is(
            gradient, weight, [P if s else p for s, p in zip(stays, replicated(src), strict=True)]
        )
    assert torch.equal(x.to_local(), kept)

    block = kept.clone().requires_grad_()
    moved(dtensor(whole, mesh, src, block)).backward(dtensor(weight, mesh, replicated(dst)))
    share = blocks_of(weight, mesh, replicated(src))
    for at, (placement, index) in enumerate(zip(src, mesh.get_coordinate(), strict=True)):
        share = share / mesh.size(at) if placement == MEAN else share
        share = (
            share * (index == 0) if placement in (MAX, MIN) else share
        )  # who has the largest, or smallest
    assert torch.equal(block.grad, share)


def cases(
    mesh: DeviceMesh,
    shapes: Sequence[Sequence[int]],
    pairs: Sequence[tuple[Placements, Placements]],
) -> None:
    for shape, (src, dst) in itertools.product(shapes, pairs):
        try:
            case(mesh, shape, src, dst)
        except BaseException as error:
            error.add_note(f"{shape}: {src} -> {dst} on {mesh}")
            raise


@in_ranks(4, on_threads)
def test_every_transition_on_one_axis() -> None:
    mesh = init_device_mesh("cpu", (4,))
    everything = [[R], [S0], [S1], [P], [MEAN], [MAX], [MIN]]
    pairs = [*itertools.product(everything, everything)]
    cases(mesh, [(8, 8)], pairs)
    # Sizes change only moves from and to cuts: every kind of them, on arrays with short and empty blocks.
    cut = [(src, dst) for src, dst in pairs if src in ([S0], [S1]) or dst in ([S0], [S1])]
    cases(mesh, [(7, 5), (13, 3)], cut)
    cases(mesh, [(2, 8), (0, 3)], random.Random(0).sample(cut, 8))


@in_ranks(4, on_threads)
def test_every_transition_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    src = [
        *itertools.product((R, S0, S1, P, MEAN), repeat=2),
        (MAX, S0),
        (S1, MAX),
        (MIN, MIN),
        (R, MAX),
    ]
    dst = [*itertools.product((R, S0, S1, P), repeat=2), (MEAN, S0), (MAX, R), (S1, MIN), (P, MEAN)]
    pairs = [*itertools.product(src, dst)]
    cases(mesh, [(8, 4)], random.Random(0).sample(pairs, 60))
    cases(mesh, [(5, 3), (9, 5), (1, 3)], random.Random(1).sample(pairs, 10))


@in_ranks(8, on_threads)
def test_transitions_on_three_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2))
    src, dst = (itertools.product(kinds, repeat=3) for kinds in ((R, S0, S1, P), (R, S0, S1)))
    pairs = [*itertools.product(src, dst)]
    cases(mesh, [(16, 24)], random.Random(1).sample(pairs, 16))
    cases(mesh, [(5, 9)], random.Random(2).sample(pairs, 8))


@in_ranks(4, on_threads)
def test_orders_of_cuts() -> None:
    """Cuts nested in another order than the mesh's, which DTensor writes as strided shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    first = (_StridedShard(0, split_factor=2), S0)
    pairs = [(first, dst) for dst in ((S0, S0), (R, R), (S1, S0), (R, S0), (P, S1))]
    pairs += [(src, first) for src in ((S0, S0), (R, R), (S1, S0), (P, S0), first)]
    cases(mesh, [(8, 4), (7, 3), (3, 2)], pairs)


@pytest.mark.skipif(not RECENT, reason="DTensor flattens cut dims since torch 2.13")
@in_ranks(4, on_threads)
def test_cuts_of_a_flattened_dim() -> None:
    """Of others that were flattened into it: strided shards that are no nesting."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = set()
    for shape in ((2, 8, 3), (2, 7, 3), (4, 6, 2)):
        whole = whole_array(*shape)
        flat = whole.flatten(0, 1)
        for cut in itertools.product((R, S0, S1, Shard(2)), repeat=2):
            if S1 not in cut or (
                cut == (S1, S1) and shape[1] % 4
            ):  # torch does not flatten the last
                continue
            x = distribute_tensor(whole, mesh, cut, src_data_rank=None).flatten(0, 1)
            assert torch.equal(x.to_local(), blocks_of(flat, mesh, x.placements))
            found.add((tuple(flat.shape), x.placements))
    for at, (shape, placements) in enumerate(sorted(found, key=str)):
        ends = [(R, R), (S0, S1), (S1, R), (S0, S0), (R, S0)]
        cases(mesh, [shape], [(placements, ends[at % 5]) if at % 2 else (ends[at % 5], placements)])
    # Pieces that are uneven themselves, and what an expression says.
    odd = (R, _StridedShard(0, split_factor=3))
    cases(mesh, [(8, 4), (11, 2), (0, 2)], [(odd, (S0, R)), ((S0, S0), odd)])
    x = dtensor(whole_array(16, 3), mesh, [_StridedShard(0, split_factor=2), R])
    assert_is(xt.redistribute(x, "n/cyclic(a,4) d -> n d"), whole_array(16, 3), [R, R])
    y = xt.redistribute(x, "n/cyclic(a,4) d -> n/cyclic(b,2) d")
    assert_is(y, whole_array(16, 3), [R, _StridedShard(0, split_factor=4)])


@in_ranks(4, on_threads)
def test_expressions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    linear = ("n/a d/b -> n/b d/a", "n/b/a d -> n d/a", "n d/b -> n/a d", "n/a d -> n d")
    for text in (*linear, *(f"n d | {kind}(a) -> n/a d" for kind in ("sum", "mean", "max"))):
        src, dst = (xt.dtensor.to_placements(end, mesh, (7, 6)) for end in parse_expression(text))
        case(mesh, (7, 6), src, dst, text)
    # Dims in another order, alone and with others; copies, which have addends as gradients, at either end.
    whole = whole_array(7, 6)
    weight = whole_array(7, 6).flip(0)
    turned = ("n/a d/b -> d/a n/b", "n/b d -> d n/b", "n/a d -> d n | copy(a)")
    for text in (*turned, "n/a d -> n d | copy(a)", "n d/b | copy(a) -> n/a d/b"):
        src, dst = parse_expression(text)
        order = [src.names.index(name) for name in dst.names]
        start, stop = (xt.dtensor.to_placements(end, mesh) for end in (src, dst))
        x = dtensor(whole, mesh, start).requires_grad_()
        y = xt.redistribute(x, text)
        for z in (y, xt.redistribute([x.detach()] * 2, text)[0]):
            assert_is(z, whole.permute(order), stop)
        pulled, wanted = (
            [
                P if axis in end.tagged("copy") else p
                for axis, p in zip("ab", placements, strict=True)
            ]
            for end, placements in ((dst, stop), (src, start))
        )
        arrives = dtensor(weight.permute(order).contiguous(), mesh, pulled)
        assert_is(torch.autograd.grad(y, x, arrives)[0], weight, wanted)


@in_ranks(4)
def test_how_much_is_sent() -> None:
    """How many collectives run forward and backward: as in torch's tests, or fewer."""
    mesh = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    inner_first: list[Placement] = [_StridedShard(0, split_factor=2), S0]
    table: list[tuple[DeviceMesh, tuple[int, ...], list[Placement], list[Placement], int, int]] = [
        (mesh, (12, 3), [S0], [R], 1, 0),
        (mesh, (13, 3), [S0], [R], 1, 0),
        (mesh, (3, 14), [S1], [R], 1, 0),
        (mesh, (12, 3), [R], [R], 0, 0),
        (mesh, (12, 3), [P], [P], 0, 0),
        (mesh, (12, 3), [R], [S0], 0, 1),
        (mesh, (12, 3), [P], [R], 1, 0),
        (mesh, (12, 3), [P], [S0], 1, 1),
        (mesh, (13, 3), [P], [S0], 1, 1),
        (mesh, (8, 8), [S0], [S1], 1, 1),
        (mesh, (8, 5), [S0], [S1], 1, 1),
        (mesh, (8, 8), [R], [P], 0, 0),
        (mesh, (8, 8), [S0], [P], 0, 0),
        (mesh, (8, 8), [S0], [Shard(-1)], 1, 1),
        (grid, (8, 8), [S0, S1], [S1, S0], 1, 1),
        (grid, (8, 4), [S0, S0], inner_first, 1, 1),
        (grid, (8, 8), [S0, S0], [R, R], 1, 0),
        (grid, (8, 8), [P, P], [R, R], 1, 0),
        (grid, (8, 8), [P, P], [S0, S0], 1, 1),
        (init_device_mesh("cpu", (4, 1)), (8, 8), [R, S0], [R, S1], 0, 0),
        # DTensor reduces the product, and leaves the shards of the other mesh dim where they are.
        (grid, (8, 8), [Partial("product"), S0], [R, S0], 1, 0),
    ]
    for on, shape, src, dst, there, back in table:
        x = dtensor(whole_array(*shape), on, src).requires_grad_()
        xt.dtensor.redistribute(x, dst)  # makes groups
        weight = dtensor(
            whole_array(*shape), on, replicated([p if p != Shard(-1) else S1 for p in dst])
        )
        with Meter() as forward:
            y = xt.dtensor.redistribute(x, dst)
        with Meter() as backward:
            y.backward(weight)
        found = len(forward.received), len(backward.received)
        assert found == (there, back), f"{src} -> {dst}: {found}, not {(there, back)}"
    # A gradient of addends for a replicated input: one all-reduce, or none where the sum may wait.
    for placement, sent in ((R, 1), (P, 0)):
        x = dtensor(whole_array(4, 2), mesh, [R]).requires_grad_()
        y = xt.dtensor.redistribute(x, [R], grad_placements=[placement])
        with Meter() as backward:
            y.to_local(grad_placements=[P]).sum().backward()
        assert len(backward.received) == sent
        assert_is(x.grad, torch.full((4, 2), 4.0), [placement])


@in_ranks(4)
def test_dtypes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    kinds = [None, torch.float32, torch.bfloat16]
    for forward, backward, src in itertools.product(kinds, kinds, ([R], [S0])):
        x = dtensor(whole_array(8, 2).float(), mesh, src).requires_grad_()
        y = xt.dtensor.redistribute(x, [R], forward_dtype=forward, backward_dtype=backward)
        assert y.dtype == y.to_local().dtype == (forward or torch.float32)
        y.sum().backward()
        assert x.grad.dtype == torch.float32 and x.grad.placements == tuple(src)
        assert torch.equal(x.grad.to_local(), torch.ones_like(x.to_local()))
    # What is lost shows where it travels: 257 is no bfloat16.
    x = dtensor(torch.full((4, 1), 257.0), mesh, [S0]).requires_grad_()
    assert xt.dtensor.redistribute(x, [R], forward_dtype=torch.bfloat16).to_local()[0].item() == 256
    y = xt.dtensor.redistribute(x, [R], backward_dtype=torch.bfloat16)
    assert y.to_local()[0].item() == 257
    (y * 257).sum().backward()
    assert x.grad.to_local().item() == 256
    for dtype in (torch.complex64, torch.int32, torch.bool, torch.float8_e5m2):
        whole = torch.arange(10).view(5, 2).to(dtype)
        block = distribute_tensor(whole, mesh, [S0], src_data_rank=None).to_local()
        x = DTensor.from_local(block, mesh, [S0], shape=whole.shape, stride=whole.stride())
        y = xt.dtensor.redistribute(x, [S1])
        assert y.dtype == dtype and y.placements == (S1,)
        assert (
            xt.dtensor.redistribute(y, [R]).to_local().float().equal(whole.float())
            or dtype.is_complex
        )


@in_ranks(4)
def test_right_where_dtensor_is_not() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    # A flattened mesh, after which torch 2.13 gathers [0, 1, 2, 0, 3] (pytorch#194457).
    mesh["a", "b"]._flatten("ab")
    x = dtensor(torch.arange(5.0), mesh, [S0, S0]).requires_grad_()
    y = xt.dtensor.redistribute(x, [R, R])
    assert y.to_local().tolist() == [0, 1, 2, 3, 4]
    weight = torch.tensor([1.0, 2, 3, 4, 5])
    y.backward(dtensor(weight, mesh, [R, P], weight * (rank % 2)))
    assert torch.equal(x.grad.to_local(), blocks_of(weight, mesh, [S0, S0]))
    # The mean of an array, which DTensor's own operator left as Partial("avg"): the array's gradient.
    x = dtensor(whole_array(8, 4), mesh, [S0, R]).requires_grad_()
    mean = x.mean()
    assert mean.placements == (MEAN, R)
    xt.dtensor.redistribute(mean, [R, R]).backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 4), 1 / 32, dtype=torch.float64))
    # Equal winners share.
    block = torch.tensor([float(rank // 2), 1.0], requires_grad=True)
    xt.dtensor.redistribute(
        DTensor.from_local(block, mesh, [MAX, R]), [R, R]
    ).to_local().sum().backward()
    assert block.grad.tolist() == [float(rank // 2), 0.5]
    # Four rows over 2 x 3 devices (the same on 2 x 2): no row is lost or doubled.
    x = dtensor(whole_array(3, 2), mesh, [P, P])
    assert_is(xt.dtensor.redistribute(x, [S0, S0]), whole_array(3, 2), [S0, S0])
    # Mixed sums and means.
    x = DTensor.from_local(torch.full((4,), 8.0), mesh, [R, R])
    partial = DTensor.from_local(torch.full((4,), 8.0), mesh, [P, P])
    assert xt.dtensor.redistribute(partial, [MEAN, P]).to_local().tolist() == [16.0] * 4
    assert_is(xt.dtensor.redistribute(x, [P, MEAN]), torch.full((4,), 8.0), [P, MEAN])


@in_ranks(4)
def test_other_meshes_of_the_same_processes() -> None:
    rank = dist.get_rank()
    whole = whole_array(8, 6)
    weight = whole_array(8, 6).flip(1)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    turned_line = DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("a",))
    others = [init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [[3, 1], [0, 2]]), turned_line]
    ends: dict[int, list[list[Placement]]] = {
        1: [[R], [S0], [S1], [P], [MEAN], [MAX]],
        2: [[R, R], [S0, S1], [S1, S1], [P, S0], [R, MEAN], [MAX, S0]],
    }
    for at, mesh in enumerate(others):
        # Every pair of ends on one of the meshes, and every end on each.
        every = [
            (i, j) for i, j in itertools.product(range(6), repeat=2) if (i + j) % len(others) == at
        ]
        for src, dst in ((ends[2][i], ends[mesh.ndim][j]) for i, j in every):
            for here, there, start, stop in ((grid, mesh, src, dst), (mesh, grid, dst, src)):
                x = dtensor(whole, here, start).requires_grad_()
                y = xt.dtensor.redistribute(x, stop, device_mesh=there)
                assert_is(y, whole, stop, there)
                (gradient,) = torch.autograd.grad(y, x, dtensor(weight, there, replicated(stop)))
                assert_is(gradient, weight, replicated(start), here)
    # A part of the world, where the rest need not call.
    pair = DeviceMesh("cpu", [[3, 1]])
    turned = DeviceMesh("cpu", [1, 3])
    if rank in (1, 3):
        x = dtensor(whole, pair, [R, S0])
        assert_is(xt.dtensor.redistribute(x, [S0], device_mesh=turned), whole, [S0], turned)
    # If it calls, nothing happens there, as in torch.
    part = DeviceMesh("cpu", [[1, 3]], mesh_dim_names=("a", "b"))
    x = distribute_tensor(whole, part, [R, S0], src_data_rank=None).requires_grad_()
    by_layouts = xt.redistribute(x, "n/b d -> n d/b", debug=True, check_replicated=True)
    for y in (xt.dtensor.redistribute(x, [R, S1], debug=True), by_layouts):
        theirs = x.redistribute(placements=[R, S1])
        assert y.placements == theirs.placements and torch.equal(y.to_local(), theirs.to_local())
        (gradient,) = torch.autograd.grad(y, x, y.detach())
        assert gradient.placements == x.placements and torch.equal(
            gradient.to_local(), x.to_local()
        )
    # A result is on the mesh that was asked for, though another may be equal to it.
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert again == grid
    assert xt.dtensor.redistribute(dtensor(whole, again, [R, S0]), [S0, R]).device_mesh is again
    # Of other processes: refused on all that call.
    x = dtensor(whole, grid, [R, R])
    refused = "MeshError: ...are of different processes"
    assert_refused(
        (lambda: xt.dtensor.redistribute(x, [R], device_mesh=turned), refused), is_alike=False
    )


@in_ranks(4)
def test_blocks_of_any_size() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    whole = whole_array(9, 4)
    weight = whole_array(9, 4).flip(0)
    sizes = [2, 0, 4, 3]
    block = whole.split(sizes)[rank].clone().requires_grad_()
    x = dtensor(whole, mesh, [S0], block)
    for dst in ([R], [S0], [S1], [P]):
        y = xt.dtensor.redistribute(x, dst, src_layout="n/sizes(a,2,0,4,3) d")
        assert_is(y, whole, dst)
        (gradient,) = torch.autograd.grad(y, block, dtensor(weight, mesh, replicated(dst)))
        assert torch.equal(gradient, weight.split(sizes)[rank])
    # Another order of rows, whose gradient comes in that order.
    even = whole_array(8, 4)
    weight = whole_array(8, 4).flip(0)
    x = dtensor(even, mesh, [S1]).requires_grad_()
    z = xt.dtensor.redistribute(x, [S0], dst_layout="n/zigzag(a) d")
    rows = [rank, 7 - rank]
    assert z.placements == (S0,) and torch.equal(z.to_local(), even[rows])
    z.backward(dtensor(even, mesh, [S0], weight[rows]))
    assert_is(x.grad, weight, [S1])
    back = xt.dtensor.redistribute(z, [R], src_layout="n/zigzag(a) d")
    assert torch.equal(back.to_local(), even)
    x = dtensor(whole, mesh, [S0], whole.split(sizes)[rank])
    refused = "ShapeError: ...blocks of other sizes need src_layout="
    assert_refused((lambda: xt.dtensor.redistribute(x, [R], debug=True), refused), is_alike=False)


@in_ranks(4, on_threads)
def test_derivatives_of_higher_order() -> None:
    """Of sum(y**3), of the square of its gradient, and of that gradient: all in the array's terms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(-8.0, 8.0, dtype=torch.float64).view(4, 4)
    for src, dst in [
        ([S0, S1], [R, S0]),
        ([R, R], [S0, S1]),
        ([S0, S0], [S1, S0]),
        ([S1, R], [S0, S1]),
    ]:
        x = dtensor(whole, mesh, src).requires_grad_()
        y = xt.dtensor.redistribute(x, dst)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        assert_is(first, 3 * whole**2, src)
        (second,) = torch.autograd.grad((first * first).sum(), x, create_graph=True)
        assert_is(second, 36 * whole**3, src)
        (third,) = torch.autograd.grad(second.sum(), x)
        assert_is(third, 108 * whole**2, src)


@in_ranks(4)
def test_a_product_is_ended_as_dtensor_does() -> None:
    mesh = init_device_mesh("cpu", (4,))
    block = whole_array(8, 3) % 3 + dist.get_rank() + 1
    found = DTensor.from_local(block, mesh, [Partial("product")])
    every = [whole_array(8, 3) % 3 + rank + 1 for rank in range(4)]
    product = every[0] * every[1] * every[2] * every[3]
    for dst in (R, S0, S1):
        assert torch.equal(xt.dtensor.redistribute(found, [dst]).full_tensor(), product)
    # ... and stays where it stays: then its blocks move like any others.
    grid = init_device_mesh("cpu", (2, 2))
    whole = whole_array(8, 4) % 5 + dist.get_rank() // 2
    for op in ("product", "prod", "band"):
        kept = Partial(op)
        for src, dst in itertools.product((R, S0, S1), repeat=2):
            block = blocks_of(whole, grid, [R, src]).requires_grad_()
            y = xt.dtensor.redistribute(dtensor(whole, grid, [kept, src], block), [kept, dst])
            assert y.placements == (kept, dst)
            assert torch.equal(y.to_local(), blocks_of(whole, grid, [R, dst]))
            (gradient,) = torch.autograd.grad(y, block, dtensor(whole, grid, [R, dst]))
            assert torch.equal(gradient, blocks_of(whole, grid, [R, src]))
    # That of an embedding knows the rows of its block.
    table = distribute_tensor(whole_array(8, 2), mesh, [S0], src_data_rank=None)
    rows = torch.nn.functional.embedding(dtensor(torch.arange(8), mesh, [R]), table)
    assert type(rows.placements[0]) is not Partial
    assert xt.dtensor.redistribute(rows, rows.placements).placements == rows.placements
    assert torch.equal(xt.dtensor.redistribute(rows, [R]).to_local(), whole_array(8, 2))


@in_ranks(4)
def test_what_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = whole_array(8, 4)
    by_layouts = xt.redistribute
    move = xt.dtensor.redistribute
    x = dtensor(whole, mesh, [S0, R])
    product, average = (DTensor.from_local(whole, mesh, [p, R]) for p in (Partial("product"), MEAN))
    turned = dtensor(whole, mesh, [S0, S0])
    turned._spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    odd = dist.get_rank() == 3
    block = x.to_local()

    def simulated(call: Callable[[], Any]) -> None:
        with LocalTensorMode(4):
            call()

    one_rank = "MeshError: LocalTensorMode runs the program of rank 0"
    placed = "the DTensor is placed as"
    assert_refused(
        (lambda: move(x, [Partial("product"), R]), "PlanError: ...Partial(product)"),
        (lambda: move(x, [R]), "PlanError: 1 placements for"),
        (lambda: move(x, [Shard(2), R]), "ShapeError: no dim 2"),
        (lambda: move(x, [P, MAX]), "NotationError: ...max and sum in one layout"),
        (lambda: move(x, [MAX, MIN]), "NotationError: ...in one layout"),
        (
            lambda: move(product, [Partial("product"), P]),
            "PlanError: ...keeps one reduction and has another",
        ),
        (
            lambda: move(x, [S0, R], dst_layout="n/b d"),
            "PlanError: 'n/b d' contradicts the placement S(0) of",
        ),
        (lambda: move(x, [S0, R], dst_layout="n/sizes(a,2,3) d"), "ShapeError: ...5"),
        (lambda: move(turned, [R, R]), "PlanError: mesh dims (1, 0) cut dim 0 in that order"),
        (
            lambda: move(x, [S1 if odd else R, R], debug=True),
            "DesyncError: ...disagree about a redistribution: placements",
        ),
        (lambda: move(x, [Shard(5) if odd else R, R], debug=True), "DesyncError: ...no dim 5"),
        (lambda: simulated(lambda: move(x, [R, R])), one_rank),
        (lambda: simulated(lambda: by_layouts(block, "n/a d -> n d", mesh)), one_rank),
        (
            lambda: by_layouts(x, "n d/a -> n d"),
            f"NotationError: {placed} 'n/a d' in\n    'n d/a -> n d'\n     ^^^^^",
        ),
        (lambda: by_layouts(x, "n/a d -> n/zigzag(a) d"), "PlanError: "),
        (lambda: by_layouts(x, "n/a d -> n d", xs.Mesh(a=2, b=2)), "MeshError: "),
        (lambda: by_layouts(x, "n/a d -> n d", shape=(8, 6)), "ShapeError: "),
        (
            lambda: by_layouts(average, "n d | sum(a) -> n d"),
            f"NotationError: {placed} 'n d | mean(a)'",
        ),
    )


@in_ranks(2)
def test_helpers_can_fail() -> None:
    """A block with one wrong element is not the array."""
    mesh = init_device_mesh("cpu", (2,))
    whole = whole_array(4, 2)
    for placement in (S0, R, P):
        block = blocks_of(whole, mesh, [placement])
        block[0, 0] += 1
        with pytest.raises(AssertionError):
            assert_is(dtensor(whole, mesh, [placement], block), whole, [placement])
