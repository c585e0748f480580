"""CREDIT's functions beyond the worked numbers: managers, halos, exact models, what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, error_of, numbers, still_connected
from tests.torch_bridge.nn.helpers import same, weights_of, whole_gradients
from torch_bridge.compat import credit

on_four = SharedRanks(4)


@on_four
def test_managers_count_ranks_as_the_original() -> None:
    rank = dist.get_rank()
    for size, shard_dim in ((1, -2), (2, -1), (4, -2)):
        manager = credit.initialize_domain_parallel(4, size, shard_dim=shard_dim)
        assert credit.get_domain_parallel_manager() is manager
        assert (manager.world_size, manager.domain_parallel_size, manager.shard_dim) == (
            4,
            size,
            shard_dim,
        )
        first = rank // size * size
        ranks = dist.get_process_group_ranks
        assert ranks(manager.domain_group) == list(range(first, first + size))
        assert ranks(manager.data_parallel_group) == list(range(rank % size, 4, size))
        assert (manager.dp_rank, manager.domain_rank) == divmod(rank, size)
        assert (manager.dp_world_size, manager.domain_world_size) == (4 // size, size)
        edges = manager.is_first_domain_rank, manager.is_last_domain_rank
        assert edges == (rank == first, rank == first + size - 1)
        assert manager.neighbor_ranks() == (
            None if edges[0] else rank - 1,
            None if edges[1] else rank + 1,
        )
    for sizes in ((4, 3), (8, 2)):
        kind, text = error_of(lambda sizes=sizes: credit.DomainParallelManager(*sizes))
        assert kind == "MeshError" and str(sizes[0]) in text
    assert still_connected()


def test_without_a_manager_a_block_is_the_whole() -> None:
    x = torch.ones(1, 2, 4, 4)
    assert credit.get_domain_parallel_manager() is None
    for call in (credit.HaloExchange(1), credit.shard_tensor, credit.gather_tensor):
        assert call(x) is x
    batch = {"x": x, "y": x[None], "stop": torch.tensor(1), "name": "a"}
    assert all(credit.shard_batch(batch)[key] is value for key, value in batch.items())
    assert error_of(lambda: credit.convert_to_domain_parallel(nn.Conv2d(1, 1, 3)))[0] == "MeshError"


@on_four
def test_halos_are_exact_at_every_width() -> None:
    """Two widths, over several blocks, other boundaries, uneven blocks, all derivatives."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    manager = credit.initialize_domain_parallel(n, n)
    whole = torch.from_numpy(numbers(1, 1, 10, 2))
    block = credit.shard_tensor(whole, manager=manager, uneven=True)
    start = sum(len(part) for part in torch.arange(10).chunk(n)[:rank])
    for (before, after), boundary in itertools.product(
        ((1, 2), (4, 0), (3, 3)), ("zero", "periodic", "edge")
    ):
        halo = credit.HaloExchange((before, after), boundary=boundary, shape=whole.shape)
        rows = torch.arange(start - before, start + block.shape[2] + after)
        beyond = (rows < 0) | (rows > 9)
        rows = rows % 10 if boundary == "periodic" else rows.clamp(0, 9)
        wanted = whole[:, :, rows]
        if boundary == "zero":
            wanted[:, :, beyond] = 0
        assert torch.equal(halo(block), wanted), (before, after, boundary)
        assert torch.equal(halo.trim(wanted, before, after), block)
        _, tangent = torch.func.jvp(halo, (block,), (block,))
        assert torch.equal(tangent, wanted)
        leaf = block.clone().requires_grad_()
        (first,) = torch.autograd.grad(halo(leaf).pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        copies = torch.autograd.grad(halo(leaf).sum(), leaf)[0]
        assert torch.equal(second, 6 * block * copies)
    assert torch.equal(credit.gather_tensor(block, shape=whole.shape), whole)
    assert credit.HaloExchange(0)(block) is block


on_two = SharedRanks(2)


@on_two
def test_batches_are_cut_along_space() -> None:
    manager = credit.initialize_domain_parallel(2, 2)
    rank = dist.get_rank()
    x = torch.arange(16.0).view(1, 1, 4, 4)
    batch = {"x": x, "y": x.view(1, 1, 1, 4, 4), "index": torch.arange(4), "name": "a"}
    mine = credit.shard_batch(batch, spatial_dims_5d=-1, manager=manager)
    assert torch.equal(mine["x"], x.chunk(2, 2)[rank])
    assert torch.equal(mine["y"], batch["y"].chunk(2, 4)[rank])
    assert mine["index"] is batch["index"] and mine["name"] == "a"
    kind, text = error_of(lambda: credit.shard_tensor(torch.ones(1, 1, 5, 4)))
    assert (
        kind == "ShapeError"
        and "the length 5 is not divisible by 2" in text
        and "uneven=True" in text
    )
    assert issubclass(xs.errors.ShapeError, ValueError)
    # Both gradients of a gather: addends, or one and the same.
    for grad, wanted in (("sum", 3.0), ("replicated", 1.0 + rank)):
        leaf = mine["x"].clone().requires_grad_()
        y = credit.gather_tensor(leaf, grad=grad)
        (gradient,) = torch.autograd.grad(y, leaf, torch.full_like(y, 1.0 + rank))
        assert torch.equal(y, x) and gradient.unique().tolist() == [wanted]


class Opaque(nn.Module):
    """A module of the user's own, of another kind than any that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bchw->bchw", x) * self.scale


class Gate(nn.Module):
    """One that is followed as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((2, 1, 1), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(x) * self.gamma


# What the original has wrong (strides, dilation, padding, even kernels, norms), and what it leaves alone.
MODELS: dict[str, Any] = {
    "stride 2 of an odd kernel": lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2),
    "no padding": lambda: nn.Conv2d(2, 3, 5),
    "even kernel": lambda: nn.Conv2d(2, 3, 4, padding=1),
    "circular": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "same": lambda: nn.Conv2d(2, 3, 3, padding="same"),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 4, stride=2),
    "interpolated": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "chain": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(3, 2, 1),
        nn.ConvTranspose2d(4, 2, 4, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1),
    ),
    "one's own": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Opaque(), nn.Conv2d(2, 1, 3)),
    "norm over what is cut": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.LayerNorm([16, 6])),
    "a gate in the code": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), Gate()),
}  # fmt: skip


@on_four
def test_converted_models_are_exact() -> None:
    """Outputs, gradients of inputs, and those of parameters once they are averaged, times the processes."""
    n = dist.get_world_size()
    manager = credit.initialize_domain_parallel(n, n)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        x = torch.randn(2, 2, 16, 6, dtype=torch.float64)
        model = make().double()
        y, of_x, of_parameters = whole_gradients(copy.deepcopy(model), x)
        assert credit.convert_to_domain_parallel(model, manager, -2, {Opaque: lambda m: m}) is model
        assert list(model.state_dict()) == list(make().state_dict())
        block = credit.shard_tensor(x).requires_grad_()
        mine = model(block)
        part = xt.nn.sharding_of(mine)
        rows = part.mesh.index(dist.get_rank(), ("domain",))
        cuts = list(part.local_sizes[2])
        same(mine, y.split(cuts, 2)[rows], f"{name}: outputs")
        (mine * weights_of(y).split(cuts, 2)[rows]).sum().backward()
        same(block.grad, credit.shard_tensor(of_x), f"{name}: gradient of the input")
        credit.sync_domain_gradients(model, manager)
        for (parameter, p), wanted in zip(model.named_parameters(), of_parameters, strict=True):
            same(p.grad * n, wanted, f"{name}: gradient of {parameter}")


@on_two
def test_any_dim_may_be_cut() -> None:
    """Of other numbers of dims, and other cut ones, counted from either end."""
    manager = credit.initialize_domain_parallel(2, 2)
    torch.manual_seed(0)
    for alone, shape, dims in (
        (nn.Conv3d(1, 2, 3, padding=1), (1, 1, 3, 8, 4), (-2, -1)),
        (nn.Conv2d(1, 2, 3, padding=1), (1, 1, 8, 4), (-2, -1)),
        (nn.Conv1d(1, 1, 3, padding=1), (1, 1, 8), (2,)),
    ):
        for dim in dims:
            x = torch.randn(shape)
            model = copy.deepcopy(alone)
            credit.convert_to_domain_parallel(model, manager, shard_dim=dim)
            part = credit.shard_tensor(x, dim)
            torch.testing.assert_close(credit.gather_tensor(model(part), dim), alone(x))


def test_any_manager_that_counts_its_domain() -> None:
    """Nothing is sent for a part, so that one process can take each of them."""
    x = torch.from_numpy(numbers(1, 2, 5, 2)).requires_grad_()
    manager = SimpleNamespace(domain_parallel_size=2, domain_rank=1)
    part = credit.shard_tensor(x, manager=manager, uneven=True)
    assert torch.equal(part, x[:, :, 3:]) and part.is_contiguous()
    part.sum().backward()
    assert torch.equal(x.grad, (torch.arange(5) > 2).double()[:, None].expand_as(x))
    assert "5 is not divisible by 2" in error_of(lambda: credit.shard_tensor(x, manager=manager))[1]
    assert (
        error_of(lambda: credit.gather_tensor(part, manager=manager))[0] == "MeshError"
    )  # no processes
    manager.domain_parallel_size = 1
    assert credit.shard_tensor(x, manager=manager) is x


class Periodic(nn.Module):
    """Circular columns, and rows that reflect."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 5)
        self.padding = 2

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(
            F.pad(F.pad(x, (2, 2, 0, 0), mode="circular"), (0, 0, 2, 2), mode="reflect")
        )


# The layers by their own names, the shapes they are for, and modules that are right on one device.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3, 2, 1), (1, 2, 12, 4)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, (1, 3, 3), padding=(0, 1, 1)), (1, 2, 2, 8, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 4, 2, 1), (1, 2, 8, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 4, 2, 1), (1, 2, 2, 8, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 2), (1, 2, 8, 4)),
    "PeriodicConv2d": (Periodic, (1, 2, 8, 4)),
    "CrossEmbedBranch": (
        lambda: nn.Sequential(nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(2, 3, 4)),
        (1, 2, 8, 4),
    ),
}


@on_two
def test_layers_by_their_own_names_are_exact() -> None:
    """Each by itself, as they are where a model is written with them, with a manager of another kind."""
    n = dist.get_world_size()
    alone = {name: make().double() for name, (make, _) in LAYERS.items()}
    credit._manager = None
    manager = SimpleNamespace(domain_parallel_size=n, domain_rank=dist.get_rank(), shard_dim=-2)
    for name, (_, shape) in LAYERS.items():
        torch.manual_seed(0)
        for p in alone[name].parameters():
            nn.init.normal_(p)
        x = torch.randn(shape).double()
        layer = copy.deepcopy(alone[name])
        y, of_x, of_parameters = whole_gradients(alone[name], x)
        layer = getattr(credit, f"DomainParallel{name}")(layer)
        same(layer(x), y, f"{name}, without a manager")
        credit._manager = manager
        block = credit.shard_tensor(x, manager=manager).requires_grad_()
        mine = layer(block)
        same(credit.gather_tensor(mine.detach(), manager=manager), y, name)
        (mine * credit.shard_tensor(weights_of(y))).sum().backward()
        same(block.grad, credit.shard_tensor(of_x), f"{name}: gradient of the input")
        credit.sync_domain_gradients(layer, manager)
        for p, wanted in zip(layer.parameters(), of_parameters, strict=True):
            same(p.grad * n, wanted, f"{name}: gradient of a parameter")
        credit._manager = None
    names = [name for name, _ in credit.DomainParallelConv2d(nn.Conv2d(1, 1, 3)).named_parameters()]
    kinds = (
        credit.DomainParallelConvTranspose2d,
        credit.DomainParallelConvTranspose3d,
        credit.DomainParallelConv2d,
    )
    convs = (
        nn.ConvTranspose2d(1, 1, 4, 2, 1),
        nn.ConvTranspose3d(1, 1, (2, 4, 3), (2, 4, 3)),
        nn.Conv2d(1, 1, 8, 2),
    )
    assert [kind(conv).halo_width for kind, conv in zip(kinds, convs, strict=True)] == [1, 0, 3]
    assert names == ["conv.weight", "conv.bias"]
    resize = credit.DomainParallelInterpolate((6, 10))
    x = torch.randn(1, 2, 8, 5)
    wanted = F.interpolate(x, size=(6 * n, 10), mode="bilinear")
    credit.initialize_domain_parallel(n, n)
    torch.testing.assert_close(credit.gather_tensor(resize(credit.shard_tensor(x))), wanted)
    assert error_of(lambda: credit.DomainParallelPeriodicConv2d(Periodic(), -1))[0] == "XshardError"


@on_two
def test_parts_of_a_converted_model_run_one_by_one() -> None:
    """The parts of a converted model, called as those of the model: with blocks, records lost or not."""
    manager = credit.initialize_domain_parallel(2, 2)
    torch.manual_seed(0)
    alone = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    model = copy.deepcopy(alone)
    x = torch.randn(1, 4, 16, 8)
    credit.convert_to_domain_parallel(model, manager)
    y = x
    mine = credit.shard_tensor(x)
    for part, whole in zip(model, alone, strict=True):
        y = whole(y)
        mine = part(mine)
        torch.testing.assert_close(credit.gather_tensor(mine), y)
        if isinstance(whole, nn.GroupNorm):
            mine = mine.detach().clone()


class Shrinking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1:]


@on_two
def test_modules_without_an_exact_form_are_refused() -> None:
    """The original runs a module without an exact form on every part by itself."""
    manager = credit.initialize_domain_parallel(2, 2)
    shrinking = {Shrinking: lambda m: m}
    for model, kind, part in (
        (
            nn.MultiheadAttention(4, 2),
            "XshardError",
            "0 (MultiheadAttention) lacks an exact form on blocks",
        ),
        (Opaque(), "XshardError", "0: einsum() of a block is not a block of einsum() of the array"),
        (Shrinking(), "ShapeError", "0: a block of shape (1, 2, 4, 4) became one of (1, 2, 3, 4)"),
        (nn.Conv2d(3, 2, 3), "ShapeError", "2 channels"),
    ):
        found, text = error_of(
            lambda model=model: credit.convert_to_domain_parallel(
                nn.Sequential(model), manager, custom_converters=shrinking
            )(torch.ones(1, 2, 4, 4))
        )
        assert found == kind and part in text, text
    assert still_connected()
