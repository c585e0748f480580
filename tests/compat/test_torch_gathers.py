"""The worked examples in torch, on gloo; ksuit's and poptorch's functions: dtypes, values, groups, bytes."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xshard as xs
from tests.compat.worked import SYSTEM_OF, WORKED
from tests.torch_bridge.helpers import SharedRanks, error_of, on_ranks, still_connected
from torch_bridge import compat
from torch_bridge.compat import ksuit, nvsubquadratic, poptorch
from torch_bridge.compat.ksuit import _communication_device
from torch_bridge.testing.byte_counter import Meter

Found = dict[str, tuple[np.ndarray, np.ndarray]]


def _run(names: list[str]) -> Found:
    """The result and the gradient of every example on this rank; tangents and second derivatives."""
    rank = dist.get_rank()
    found = {}
    for name in names:
        worked = WORKED[name]
        call = partial(worked.torch, getattr(compat, SYSTEM_OF[name]))
        x = torch.from_numpy(worked.blocks[rank].copy()).requires_grad_()
        cotangent = torch.from_numpy(worked.cotangents[rank].copy())
        y = call(x)
        (gradient,) = torch.autograd.grad(y, x, cotangent)
        assert np.array_equal(x.detach(), worked.blocks[rank]), f"{name}: the input was written to"
        assert np.array_equal(cotangent, worked.cotangents[rank]), (
            f"{name}: the gradient was written to"
        )
        found[name] = y.detach().numpy(), gradient.numpy()
        direction = 3 * x.detach() + 1
        moved = call(direction)
        assert torch.equal(torch.func.jvp(call, (x.detach(),), (direction,))[1], moved), name
        # The gradient of y**2 is the pullback of 2 y, whose own pullback is the call.
        y = call(x)
        (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * direction).sum(), x, retain_graph=True)
        assert torch.equal(second, torch.autograd.grad(y, x, 2 * moved)[0]), name
    return found


@pytest.fixture(scope="module")
def ran() -> dict[int, list[Found]]:
    sizes = sorted({worked.n for worked in WORKED.values()})
    return {n: on_ranks(n, _run, [name for name, w in WORKED.items() if w.n == n]) for n in sizes}


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name: str, ran: dict[int, list[Found]]) -> None:
    """To the last bit."""
    worked = WORKED[name]
    for rank, found in enumerate(ran[worked.n]):
        for ours, theirs in zip(found[name], (worked.results, worked.gradients), strict=True):
            assert ours.shape == theirs[rank].shape and np.array_equal(ours, theirs[rank]), (
                f"rank {rank}"
            )


on_two = SharedRanks(2)


@on_two
def test_dtypes_stay() -> None:
    rank = dist.get_rank()
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.uint8,
    ):
        x = torch.tensor([rank, 1]).to(dtype)
        for gather in (
            ksuit.all_gather_grad,
            ksuit.all_gather_grad_overwrite,
            ksuit.all_gather_nograd,
        ):
            assert gather(x).dtype == dtype and gather(x).tolist() == [0, 1, 1, 1]
        assert (
            ksuit.all_gather_nograd_clipped(x, 3).tolist()
            == torch.tensor([0, 1, 1]).to(dtype).tolist()
        )
        total = ksuit.all_reduce_sum_grad(x)
        mean = ksuit.all_reduce_mean_nograd(x)
        any_ = dtype == torch.bool
        assert total.dtype == dtype and total.tolist() == ([True, True] if any_ else [1, 2])
        assert mean.tolist() == ([True, True] if any_ else [0.5, 1])
        assert mean.dtype == (dtype if any_ or dtype.is_floating_point else torch.float32)


on_four = SharedRanks(4)


@on_four
def test_a_sum_is_rounded_once() -> None:
    x = torch.tensor([256.0, 1.0, 1.0, 1.0][dist.get_rank()]).bfloat16()
    assert x + 1 == 256 or dist.get_rank()
    total = ksuit.all_reduce_sum_grad(x)
    assert total.dtype == torch.bfloat16 and total == torch.tensor(259.0).bfloat16() == 260


@on_two
def test_python_values_are_gathered() -> None:
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
    for sizes in ((1, 2), (0, 3), (2, 2)):
        for dim, options in ((0, {}), (0, {"sizes": sizes}), (-1, {})):
            rows = torch.arange(sum(sizes))
            weights = torch.arange(1.0, sum(sizes) + 1)
            x = rows.split(sizes)[rank].double().requires_grad_()
            y = ksuit.all_gather_grad(x.unsqueeze(dim - 1), dim, **options)
            (y.flatten() * weights * (1 + rank)).sum().backward()
            assert (
                y.flatten().tolist() == rows.tolist()
                and x.grad.tolist() == (3 * weights).split(sizes)[rank].tolist()
            )
    odd = torch.ones(2, 3 + rank)
    assert error_of(lambda: ksuit.all_gather_grad(odd))[0] == "DesyncError"
    assert error_of(lambda: ksuit.all_gather_grad(odd, 2))[0] == "ShapeError"


def test_without_a_process_group_every_block_is_the_whole() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for name in ("all_gather_grad", "all_gather_grad_autograd", "all_gather_grad_overwrite"):
        assert getattr(ksuit, name)(x) is x
        assert getattr(ksuit, name)(3).tolist() == [3]
    assert (
        ksuit.all_gather_nograd(x).tolist() == [1, 2]
        and not ksuit.all_gather_nograd(x).requires_grad
    )
    assert ksuit.all_gather_nograd_clipped(x, 1).tolist() == [1, 2]
    for name in ("sum_grad", "sum_nograd", "mean_grad", "mean_nograd"):
        reduce = getattr(ksuit, f"all_reduce_{name}")
        assert reduce(x).tolist() == [1, 2] and reduce(x).requires_grad == name.endswith("_grad")
        assert reduce(3).tolist() == 3
    for call in (ksuit.AllGatherGradAutograd.apply, ksuit.AllGatherGradOverwrite.apply):
        assert error_of(lambda call=call: call(x))[0] == "MeshError"


@on_two
def test_verbs_without_gradients_record_none() -> None:
    x = torch.ones(2, requires_grad=True)
    for name in ("all_gather_nograd", "all_reduce_sum_nograd", "all_reduce_mean_nograd"):
        assert not getattr(ksuit, name)(x).requires_grad
    assert not ksuit.all_gather_nograd_clipped(x, 3).requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # autograd's, of kernels that are not registered
        ksuit.all_reduce_sum_grad(x).sum().backward()


@on_four
def test_samples_are_clipped() -> None:
    rank = dist.get_rank()
    n = dist.get_world_size()
    samples = torch.arange(10)
    padded = torch.cat([samples, samples[: -10 % n]])  # as DistributedSampler does
    assert ksuit.all_gather_nograd_clipped(padded[rank::n], 10).tolist() == samples.tolist()
    rows = padded[rank::n, None] * torch.tensor([1, 100])
    assert torch.equal(
        ksuit.all_gather_nograd_clipped(rows, 9), samples[:9, None] * torch.tensor([1, 100])
    )


@on_four
def test_gradients_take_as_many_bytes_as_calls() -> None:
    """The gradient of a gather reduce-scatters: as many bytes as the call, not 2 P times a block's."""
    n = 3 * 64 * 4
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
    assert received == {
        "gather": (n, n),
        "own slot": (n, 0),
        "sum": (n // 2, 0),
        "copy": (0, n // 2),
    }


@on_four
def test_replicas_are_of_a_group() -> None:
    rank = dist.get_rank()
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    y = poptorch.all_gather_cross_replica(torch.tensor(rank), 2, group=pair)
    assert y.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    parts = poptorch.all_to_all_single_cross_replica(
        torch.tensor([10 * rank, 10 * rank + 1]), 2, group=pair
    )
    assert parts.tolist() == [10 * (rank // 2 * 2 + other) + rank % 2 for other in (0, 1)]
    assert still_connected()


def test_tensors_travel_on_a_device_that_a_backend_serves(monkeypatch) -> None:
    cpu = torch.device("cpu")
    cuda = torch.device("cuda", 0)
    for device, config, wanted in (
        (cpu, "cpu:gloo", cpu),
        (cuda, "cpu:gloo,cuda:gloo", cpu),
        (cuda, "cpu:gloo,cuda:nccl", cuda),
        (cpu, "cpu:gloo,cuda:nccl", cpu),
        (cpu, "cuda:nccl", torch.device("cuda")),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda config=config: config)
        assert _communication_device(device) == wanted


@on_two
def test_each_verb_compiles_to_one_graph() -> None:
    """One graph of each, with the values and gradients of the call that is not compiled."""
    for name, call in (
        ("all_gather_grad", ksuit.all_gather_grad),
        ("all_reduce_mean_grad", ksuit.all_reduce_mean_grad),
        (
            "all_to_all_single_fn",
            lambda x: nvsubquadratic.all_to_all_single_fn(None, "split_to_full", x),
        ),
        ("all_gather_cross_replica", lambda x: poptorch.all_gather_cross_replica(x, 2)),
    ):
        x = torch.arange(8.0).view(1, 2, 4).requires_grad_()
        y = call(x)
        compiled = torch.compile(call, backend="eager", fullgraph=True)(x)
        assert torch.equal(y, compiled), name
        gradients = (torch.autograd.grad(result.pow(2).sum(), x)[0] for result in (y, compiled))
        assert torch.equal(*gradients), name
