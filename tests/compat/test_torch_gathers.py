"""ksuit's and poptorch's functions: dtypes, plain values, one process, groups, bytes, all derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected
from torch_bridge.compat import ksuit, nvsubquadratic, poptorch
from torch_bridge.compat.ksuit import _served_in
from torch_bridge.testing.byte_counter import Meter

N = 2


def _dtypes() -> None:
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8):
        x = torch.tensor([rank, 1]).to(dtype)
        for gather in (ksuit.all_gather_grad, ksuit.all_gather_grad_overwrite, ksuit.all_gather_nograd):
            y = gather(x)
            assert y.dtype == dtype and y.tolist() == [0, 1, 1, 1]
        assert ksuit.all_gather_nograd_clipped(x, 3).tolist() == torch.tensor([0, 1, 1]).to(dtype).tolist()
        total = ksuit.all_reduce_sum_grad(x)
        assert total.dtype == dtype
        assert total.tolist() == ([True, True] if dtype == torch.bool else [1, 2])
        mean = ksuit.all_reduce_mean_nograd(x)
        if dtype == torch.bool:
            assert mean.tolist() == [True, True]
        else:
            assert mean.dtype == (dtype if dtype.is_floating_point else torch.float32)
            assert mean.tolist() == [0.5, 1]


def _rounding() -> None:
    x = torch.tensor([256.0, 1.0, 1.0, 1.0][dist.get_rank()]).bfloat16()
    assert x + 1 == 256 or dist.get_rank()
    total = ksuit.all_reduce_sum_grad(x)
    assert total.dtype == torch.bfloat16 and total == torch.tensor(259.0).bfloat16() == 260


def _plain_values() -> None:
    rank = dist.get_rank()
    assert ksuit.all_gather_grad(1.5 + rank).tolist() == [1.5, 2.5]
    assert ksuit.all_gather_nograd([rank, 7]).tolist() == [0, 7, 1, 7]
    assert ksuit.all_gather_nograd((rank,)).tolist() == [0, 1]
    assert ksuit.all_gather_nograd(rank == 0).tolist() == [True, False]
    assert ksuit.all_reduce_sum_nograd(3).tolist() == 6
    assert ksuit.all_reduce_sum_nograd(rank == 0).item() is True
    assert ksuit.all_reduce_mean_grad(rank).item() == 0.5
    uneven = torch.arange(3 - rank)
    assert ksuit.all_gather_grad(uneven[: 2 - rank], shape=(3,)).tolist() == [0, 1, 0]


def test_without_a_process_group_every_block_is_the_whole() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for name in ("all_gather_grad", "all_gather_grad_autograd", "all_gather_grad_overwrite"):
        assert getattr(ksuit, name)(x) is x
        assert getattr(ksuit, name)(3).tolist() == [3]
    assert ksuit.all_gather_nograd(x).tolist() == [1, 2] and not ksuit.all_gather_nograd(x).requires_grad
    assert ksuit.all_gather_nograd_clipped(x, 1).tolist() == [1, 2]
    for name in ("sum_grad", "sum_nograd", "mean_grad", "mean_nograd"):
        reduce = getattr(ksuit, f"all_reduce_{name}")
        assert reduce(x).tolist() == [1, 2] and reduce(x).requires_grad == name.endswith("_grad")
        assert reduce(3).tolist() == 3
    for call in (ksuit.AllGatherGradAutograd.apply, ksuit.AllGatherGradOverwrite.apply):
        assert error_of(lambda call=call: call(x))[0] == "MeshError"


def _no_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    for name in ("all_gather_nograd", "all_reduce_sum_nograd", "all_reduce_mean_nograd"):
        assert not getattr(ksuit, name)(x).requires_grad
    assert not ksuit.all_gather_nograd_clipped(x, 3).requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # autograd's, of kernels that are not registered
        ksuit.all_reduce_sum_grad(x).sum().backward()


def _clipped() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    samples = torch.arange(10)
    padded = torch.cat([samples, samples[: -10 % n]])  # as DistributedSampler does
    assert ksuit.all_gather_nograd_clipped(padded[rank::n], 10).tolist() == samples.tolist()
    rows = padded[rank::n, None] * torch.tensor([1, 100])
    assert torch.equal(ksuit.all_gather_nograd_clipped(rows, 9), samples[:9, None] * torch.tensor([1, 100]))


def _adjoints() -> None:
    """<A x, y> = <x, A* y> in integers over all ranks, the second derivative, and the tangent."""
    rank, n = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)

    def whole_numbers(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator).double()

    x = whole_numbers(2 * n, 3)
    for name, call in LINEAR.items():
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        cotangent = whole_numbers(*y.shape)
        (gradient,) = torch.autograd.grad(y, leaf, cotangent)
        products = torch.stack([(y.detach() * cotangent).sum(), (x * gradient).sum()])
        dist.all_reduce(products)
        assert products[0] == products[1], name
        _, tangent = torch.func.jvp(call, (x,), (cotangent.flatten()[: x.numel()].reshape(x.shape),))
        assert torch.equal(tangent, call(cotangent.flatten()[: x.numel()].reshape(x.shape))), name
        (first,) = torch.autograd.grad(call(leaf).pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        assert second.abs().sum() > 0, name


# Those whose gradient is the adjoint where every rank's loss counts.
LINEAR: dict[str, Any] = {
    "AllGatherGradAutograd": lambda x: torch.stack(ksuit.AllGatherGradAutograd.apply(x)),
    "all_gather_grad": lambda x: ksuit.all_gather_grad(x, 1),
    "all_gather_cross_replica": lambda x: poptorch.all_gather_cross_replica(x, 3),
    "all_to_all_single_cross_replica": lambda x: poptorch.all_to_all_single_cross_replica(x, 3),
}


def _bytes() -> dict[str, tuple[int, int]]:
    x = torch.ones(64, requires_grad=True)
    received = {}
    for name, call in (
        ("gather", lambda: torch.stack(ksuit.AllGatherGradAutograd.apply(x))),
        ("own slot", lambda: torch.stack(ksuit.AllGatherGradOverwrite.apply(x))),
        ("sum", lambda: poptorch.all_reduce_cross_replica_sum(x, 4)),
        ("copy", lambda: poptorch.all_reduce_cross_replica_sum(x, 4, insert_in_grad_graph=True)),
    ):
        with Meter() as forward, xs.use_profile("h100"):
            y = call()
        with Meter() as backward:
            y.sum().backward()
        received[name] = sum(forward.received), sum(backward.received)
    return received


def _conventions() -> None:
    """ksuit's sum passes the gradient; torch's own, and ksuit's successor's, sums it: both can be said."""
    weight = float([1, 10][dist.get_rank()])
    x = torch.ones(1, requires_grad=True)
    for y, wanted in (
        (ksuit.all_reduce_sum_grad(x), weight),
        (xt.ops.all_reduce(x, "dp", xs.Mesh(dp=N), grad="sum"), 11.0),
    ):
        (gradient,) = torch.autograd.grad(y, x, torch.tensor([weight]))
        assert gradient.tolist() == [wanted]


def _replicas() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    y = poptorch.all_gather_cross_replica(torch.tensor(rank), 2, group=pair)
    assert y.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    parts = poptorch.all_to_all_single_cross_replica(torch.tensor([10 * rank, 10 * rank + 1]), 2, group=pair)
    assert parts.tolist() == [10 * (rank // 2 * 2 + other) + rank % 2 for other in (0, 1)]
    found = [
        error_of(lambda: poptorch.all_gather_cross_replica(torch.ones(2), 2)),
        error_of(lambda: poptorch.all_to_all_single_cross_replica(torch.ones(6, 2), 4)),
        error_of(lambda: poptorch.all_to_all_single_cross_replica(torch.tensor(1.0), 4)),
        error_of(lambda: ksuit.all_gather_grad(torch.ones(2), batch_dim=1)),
    ]
    assert still_connected()
    return found


def test_tensors_travel_on_a_device_that_a_backend_serves() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for device, config, wanted in (
        (cpu, "cpu:gloo", cpu),
        (cuda, "cpu:gloo,cuda:gloo", cpu),
        (cuda, "cpu:gloo,cuda:nccl", cuda),
        (cpu, "cpu:gloo,cuda:nccl", cpu),
        (cpu, "cuda:nccl", torch.device("cuda")),
    ):
        assert _served_in(device, config) == wanted


def _compiled() -> None:
    """One graph of each, with the values and gradients of the call that is not compiled."""
    for name, call in (
        ("all_gather_grad", ksuit.all_gather_grad),
        ("all_reduce_mean_grad", ksuit.all_reduce_mean_grad),
        ("all_to_all_single_fn", lambda x: nvsubquadratic.all_to_all_single_fn(None, "split_to_full", x)),
        ("all_gather_cross_replica", lambda x: poptorch.all_gather_cross_replica(x, N)),
    ):
        x = torch.arange(8.0).view(1, 2, 4).requires_grad_()
        y, compiled = call(x), torch.compile(call, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(y, compiled), name
        gradients = (torch.autograd.grad(result.pow(2).sum(), x)[0] for result in (y, compiled))
        assert torch.equal(*gradients), name


def _together(*checks: Callable[[], Any]) -> list[Any]:
    return [check() for check in checks]


def test_values_dtypes_conventions_and_graphs() -> None:
    on_ranks(2, _together, _dtypes, _plain_values, _no_gradients, _conventions, _compiled)


def test_exact_adjoints_all_derivatives_and_samples_in_their_order() -> None:
    on_ranks(3, _together, _clipped, _adjoints)


def test_groups_bytes_and_what_is_refused() -> None:
    """The gradient of a gather reduce-scatters: as many bytes as the call, not 2 P times a block's."""
    block, refused = 64 * 4, (
        ("MeshError", "replication_factor 2, the group has 4 processes"),
        ("ShapeError", "6 rows cannot be split into 4 equal parts"),
        ("ShapeError", "a scalar cannot be split into 4 equal parts"),
        ("ShapeError", "no dim 1 in a block of shape (2,)"),
    )  # fmt: skip
    received = {
        "gather": (3 * block, 3 * block), "own slot": (3 * block, 0), "sum": (2 * 3 * block // 4, 0),
        "copy": (0, 2 * 3 * block // 4),
    }  # fmt: skip
    for _, _, bytes_, errors in on_ranks(4, _together, _rounding, _clipped, _bytes, _replicas):
        assert bytes_ == received
        for (kind, text), (wanted, part) in zip(errors, refused, strict=True):
            assert kind == wanted and part in text and issubclass(getattr(xs.errors, kind), ValueError)
