"""Domain-parallel layers and models on ranks, beside torch on one device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.bridges.nn_helpers import (
    TOLERANCE,
    check_layer,
    same,
    scattered,
    sizes,
    weights_of,
    whole_gradients,
)
from tests.bridges.torch_helpers import error_of, on_ranks, still_connected
from torch_bridge.collectives import Group
from torch_bridge.nn import overlapped
from xshard import reference

ROW = xs.Mesh(sp=4)
PAIR = xs.Mesh(sp=2)
GRID = xs.Mesh(x=2, y=2)

Layer = tuple[Callable[[], nn.Module], tuple[int, ...], str, xs.Mesh]

# What libraries get wrong: values, lengths, gradients, or they hang.
WRONG_ELSEWHERE: dict[str, Layer] = {
    "patch embedding, k3 s3 over 9+9": (lambda: nn.Conv1d(2, 3, 3, 3), (1, 2, 18), "b c h/sp", PAIR),
    "k3 s2 p1 over 7+7": (lambda: nn.Conv1d(2, 3, 3, 2, 1), (1, 2, 14), "b c h/sp", PAIR),
    "k3 s2 p0 over 8+8": (lambda: nn.Conv1d(2, 3, 3, 2), (1, 2, 16), "b c h/sp", PAIR),
    "k2 s2 over 7+7": (lambda: nn.Conv1d(2, 3, 2, 2), (1, 2, 14), "b c h/sp", PAIR),
    "average pool k2 s2 p1": (lambda: nn.AvgPool1d(2, 2, 1), (1, 2, 16), "b c h/sp", PAIR),
    "bilinear, align_corners": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        (1, 2, 8, 6),
        "b c h/sp w",
        PAIR,
    ),
    "k5 p2 over 4+1+4": (
        lambda: nn.Conv1d(2, 3, 5, padding=2),
        (1, 2, 9),
        "b c h/sizes(sp,4,1,4)",
        xs.Mesh(sp=3),
    ),
    "k3 s2 p1 over 8+8": (lambda: nn.Conv1d(2, 3, 3, 2, 1), (1, 2, 16), "b c h/sp", PAIR),
    "circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        (1, 2, 8, 6),
        "b c h/sp w",
        PAIR,
    ),
    "k3 p2 d2": (lambda: nn.Conv1d(2, 3, 3, padding=2, dilation=2), (1, 2, 16), "b c h/sp", PAIR),
    "k3 p0": (lambda: nn.Conv1d(2, 3, 3), (1, 2, 16), "b c h/sp", PAIR),
    "k3 p2": (lambda: nn.Conv1d(2, 3, 3, padding=2), (1, 2, 16), "b c h/sp", PAIR),
    "k5 s2 p2": (lambda: nn.Conv1d(2, 3, 5, 2, 2), (1, 2, 16), "b c h/sp", PAIR),
    "k4 s1 p1": (lambda: nn.Conv1d(2, 3, 4, 1, 1), (1, 2, 16), "b c h/sp", PAIR),
    "transposed k4 s2 p0": (lambda: nn.ConvTranspose1d(2, 3, 4, 2), (1, 2, 8), "b c h/sp", PAIR),
    "gradient of a group norm": (lambda: nn.GroupNorm(2, 4), (1, 4, 8, 6), "b c h/sp w", PAIR),
    "gradient of a halo": (lambda: nn.Conv2d(2, 3, 3, padding=1), (1, 2, 8, 6), "b c h w/sp", PAIR),
    "groups": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), (1, 4, 8, 6), "b c h/sp w", PAIR),
    "max pool k3 s2 p1": (lambda: nn.MaxPool2d(3, 2, 1), (1, 2, 8, 6), "b c h/sp w", PAIR),
    "average pool k3": (lambda: nn.AvgPool2d(3, 1, 1), (1, 2, 8, 6), "b c h/sp w", PAIR),
    "bilinear": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
        (1, 2, 8, 6),
        "b c h/sp w",
        PAIR,
    ),
}

MORE: dict[str, Layer] = {
    "uneven": (lambda: nn.Conv1d(2, 3, 3, padding=1), (1, 2, 30), "b c h/sp", ROW),
    "multi-hop, periodic": (
        lambda: nn.Conv1d(2, 3, 7, padding=3, padding_mode="circular"),
        (1, 2, 8),
        "b c h/sp",
        ROW,
    ),
    "an empty block": (lambda: nn.Conv1d(2, 3, 3, padding=1), (1, 2, 8), "b c h/sizes(sp,3,0,3,2)", ROW),
    "devices without outputs": (lambda: nn.Conv1d(2, 3, 3, padding=1), (1, 2, 2), "b c h/sp", ROW),
    "zigzag": (lambda: nn.Conv1d(2, 3, 5, padding=2), (1, 2, 16), "b c h/zigzag(sp)", ROW),
    "even kernel, same, circular, groups": (
        lambda: nn.Conv2d(4, 6, (3, 4), padding="same", groups=2, padding_mode="circular"),
        (2, 4, 16, 12),
        "b c h/x w/y",
        GRID,
    ),
    "reflect over two axes": (
        lambda: nn.Conv2d(2, 3, (3, 5), padding="same", padding_mode="reflect"),
        (2, 2, 16, 12),
        "b c h/(x,y) w",
        GRID,
    ),
    "replicate": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"),
        (1, 2, 7, 5),
        "b c h/x w/y",
        GRID,
    ),
    "batch cut too": (
        lambda: nn.Conv2d(2, 3, (3, 4), 2, (1, 2)),
        (3, 2, 17, 12),
        "b/x c h/y w",
        GRID,
    ),
    "without a batch": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 9, 7), "c h/x w/y", GRID),
    "3-D": (lambda: nn.Conv3d(2, 3, (3, 2, 1), (1, 2, 1)), (1, 2, 7, 6, 5), "b c d/x h/y w", GRID),
    "transposed, groups, dilation": (
        lambda: nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, groups=2, dilation=2),
        (1, 2, 9, 7),
        "b c h/x w/y",
        GRID,
    ),
    "transposed, gaps between inputs": (
        lambda: nn.ConvTranspose2d(2, 4, 2, 5, output_padding=3),
        (1, 2, 5, 7),
        "b c h/x w/y",
        GRID,
    ),
    "transposed, empty blocks": (lambda: nn.ConvTranspose1d(2, 4, 2, 2), (1, 2, 2), "b c h/sp", ROW),
    "transposed, aligned blocks": (
        lambda: nn.ConvTranspose1d(2, 4, 4, 2, 1),
        (1, 2, 9),
        "b c h/sizes(sp,4,0,2,3)",
        ROW,
    ),
    "transposed 3-D": (
        lambda: nn.ConvTranspose3d(2, 2, 3, 2, 1),
        (1, 2, 5, 4, 3),
        "b c d/x h w/y",
        GRID,
    ),
    "max pool, ceil": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), (1, 2, 14, 12), "b c h/x w/y", GRID),
    "max pool, dilated": (lambda: nn.MaxPool2d(3, 1, 1, dilation=2), (1, 2, 13, 11), "b c h/x w/y", GRID),
    "max pool, empty blocks": (lambda: nn.MaxPool1d(2, 2), (1, 2, 3), "b c h/sp", ROW),
    "max pool 3-D": (lambda: nn.MaxPool3d(3, 2, 1), (1, 2, 7, 6, 5), "b c d/x h/y w", GRID),
    "average pool, ceil": (
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        (1, 2, 14, 12),
        "b c h/x w/y",
        GRID,
    ),
    "average pool, padding not counted": (
        lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        (1, 2, 13, 11),
        "b c h/sp w",
        ROW,
    ),
    "average pool 1-D, ceil, padding not counted": (
        lambda: nn.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        (1, 2, 14),
        "b c h/sp",
        ROW,
    ),
    "average pool, divisor": (
        lambda: nn.AvgPool3d(3, 2, 1, divisor_override=5),
        (1, 2, 14, 5, 6),
        "b c d/x h w/y",
        GRID,
    ),
    "global average pool": (lambda: nn.AdaptiveAvgPool2d(1), (2, 4, 7, 9), "b c h/y w/x", GRID),
    "nearest, down": (lambda: nn.Upsample(size=(9, 31)), (1, 2, 14, 9), "b c h/x w/y", GRID),
    "nearest-exact": (
        lambda: nn.Upsample(scale_factor=1.7, mode="nearest-exact"),
        (1, 2, 14, 9),
        "b c h/x w/y",
        GRID,
    ),
    "bicubic, scales given": (
        lambda: nn.Upsample(scale_factor=(1.7, 0.6), mode="bicubic"),
        (1, 2, 14, 9),
        "b c h/x w/y",
        GRID,
    ),
    "trilinear": (
        lambda: nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True),
        (1, 2, 5, 4, 3),
        "b c d/x h/y w",
        GRID,
    ),
    "upsampling of empty blocks": (
        lambda: nn.Upsample(scale_factor=1.5, mode="linear"),
        (1, 2, 5),
        "b c h/sp",
        ROW,
    ),
    "group norm, two dims": (lambda: nn.GroupNorm(2, 4), (2, 4, 7, 9), "b c h/x w/y", GRID),
    "group norm, batch cut": (lambda: nn.GroupNorm(2, 4), (3, 4, 7, 9), "b/x c h/y w", GRID),
    "layer norm over cut dims": (lambda: nn.LayerNorm((7, 9)), (2, 4, 7, 9), "b/x c h/y w", GRID),
    "layer norm beside a cut dim": (lambda: nn.LayerNorm(9), (2, 7, 9), "b s/sp c", ROW),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 7, 9), "b/x c h/y w", GRID),
    "batch norm, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (2, 4, 7, 9), "b c h/y w/x", GRID),
    "batch norm, no statistics kept": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        (2, 4, 7),
        "b c h/sp",
        ROW,
    ),
    "batch norm, eval": (lambda: nn.BatchNorm3d(4).eval(), (2, 4, 5, 3, 2), "b c d/x h/y w", GRID),
    "linear": (lambda: nn.Linear(9, 5), (2, 4, 7, 9), "b/x c h/y w", GRID),
}


def _check(layers: dict[str, Layer], mesh: xs.Mesh) -> None:
    for name, (module, shape, layout, its_mesh) in layers.items():
        if its_mesh == mesh:
            try:
                check_layer(module(), shape, layout, mesh)
                if isinstance(module(), nn.Conv1d | nn.Conv2d | nn.Conv3d):
                    check_layer(module(), shape, layout, mesh, overlap=True)
            except Exception as error:
                error.add_note(f"in '{name}'")
                raise


def _check_wrong_elsewhere(mesh: xs.Mesh) -> None:
    _check(WRONG_ELSEWHERE, mesh)


@pytest.mark.parametrize("mesh", [PAIR, xs.Mesh(sp=3)], ids=str)
def test_what_other_libraries_get_wrong(mesh: xs.Mesh) -> None:
    on_ranks(mesh.n_devices, _check_wrong_elsewhere, mesh)


def _check_more() -> None:
    for mesh in (ROW, GRID):
        _check(MORE, mesh)


def test_layers_equal_their_modules() -> None:
    on_ranks(4, _check_more)


class Gate(nn.Module):
    """Squeeze and excite: a whole tensor, of whose gradient every block has a share."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.mix = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.mix(self.pool(x))) * self.scale + (1 - x) / 2


class UNet(nn.Module):
    """Strides, skips, cat along channels, norms of all kinds, a time that every device has whole."""

    def __init__(self) -> None:
        super().__init__()
        wrap = {"padding_mode": "circular"}
        self.enter = nn.Conv2d(2, 4, 3, padding=1, **wrap)
        self.mix = nn.Conv2d(4, 4, 1)
        self.down = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.Conv2d(4, 6, 3, 2, 1))
        self.time, self.bands = nn.Linear(3, 6), nn.Parameter(torch.rand(4, 1, 1))
        self.middle = nn.Sequential(nn.BatchNorm2d(6), nn.PReLU(6), nn.MaxPool2d(3, 1, 1), Gate(6))
        self.up = nn.ConvTranspose2d(6, 4, 4, 2, 1)
        self.leave = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 2, 3, padding=1)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first = self.enter(x) + self.mix(x[:, :1] * self.bands)
        low = self.down(first) + self.time(time)[:, :, None, None]
        low = low + self.middle(low)
        y = torch.cat([self.up(low), first], 1)
        a, b = y[:, :4], y[..., 4:, :, :]
        return self.leave(torch.cat((a + 2 * b, F.relu(b - 1)), dim=1)) / 3


def _unet() -> None:
    torch.manual_seed(0)
    model = UNet().double()
    alone = copy.deepcopy(model)
    every = torch.randn(2, 2, 24, 12, dtype=torch.float64)
    time = torch.randn(2, 3, dtype=torch.float64)
    for overlap, (layout, mesh, rows) in enumerate(
        # The last two: blocks of two rows and one, or of two and none; half of that further down.
        (
            ("b c h/sp w", ROW, 24),
            ("b c h/x w/y", GRID, 24),
            ("b c h/balanced(sp) w", ROW, 6),
            ("b c h/sp w", ROW, 6),
        )
    ):
        x = every[:, :, :rows].clone()
        alone.zero_grad()
        model.zero_grad()
        y, of_x, of_parameters = whole_gradients(alone, x, time)
        parallel = xt.nn.domain_parallel(model, mesh, layout, shape=x.shape, overlap=overlap % 2 == 1)
        assert parallel.state_dict().keys() == model.state_dict().keys()
        assert all(p is q for p, q in zip(parallel.parameters(), model.parameters(), strict=True))
        block = scattered(x, layout, mesh).requires_grad_()
        mine = parallel(block, time=time)
        sharding = xt.nn.sharding_of(mine)
        assert str(sharding.layout) == layout and sharding.shape == y.shape
        same(mine, scattered(y, layout, mesh), "outputs")
        (mine * scattered(weights_of(y), layout, mesh)).sum().backward()
        same(block.grad, scattered(of_x, layout, mesh), "gradient of the input")
        for (name, p), wanted in zip(model.named_parameters(), of_parameters, strict=True):
            same(p.grad, wanted, f"gradient of {name}")
        for a, b in zip(model.buffers(), alone.buffers(), strict=True):
            same(a, b, "statistics")
        elsewhere = pickle.loads(pickle.dumps(mine.detach())), copy.deepcopy(mine.detach())
        assert torch.equal(*elsewhere)
        assert not hasattr(x, "_xshard_placed") and not hasattr(block, "_xshard_placed")
    # The ordinary model is as it was, and by now has the statistics that it would have had on one device.
    assert type(model.enter) is nn.Conv2d and not model._forward_pre_hooks
    assert (model.eval()(x, time) - alone.eval()(x, time)).abs().max() <= TOLERANCE


def test_a_model_with_code_between_its_layers() -> None:
    on_ranks(4, _unet)


def _overlapped() -> None:
    """The same numbers as without, and the order of work that hides the exchange."""
    torch.manual_seed(0)
    module = nn.Conv2d(2, 3, (5, 3), padding=(2, 1), padding_mode="circular").double()
    x = torch.randn(1, 2, 32, 6, dtype=torch.float64)
    found, log = [], []
    begin, convolve = Group.begin_all_to_all, overlapped._backward

    def logged_begin(*arguments: Any) -> Callable[[], Tensor]:
        end = begin(*arguments)
        log.append("begin")
        return lambda: (log.append("end"), end())[1]

    def logged(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (log.append(what), function(*arguments))[1]

    Group.begin_all_to_all = logged_begin
    xt.nn.Convolution.__call__ = logged("conv", xt.nn.Convolution.__call__)
    overlapped._backward = logged("backward", convolve)
    for overlap in (False, True):
        layer = xt.nn.Conv2d.from_module(module, ROW, "b c h/sp w", overlap=overlap)
        block = scattered(x, "b c h/sp w", ROW).requires_grad_()
        module.zero_grad()
        del log[:]
        y = layer(block)
        y.sin().sum().backward()
        found.append([y.detach(), block.grad, *(p.grad.clone() for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-12
    # Interior, then both borders; gradients of both borders, then of the interior.
    forward = ["begin", "conv", "end", "conv", "conv"]
    assert log == [*forward, "backward", "backward", "begin", "backward", "end"]


def test_convolutions_compute_while_rows_travel() -> None:
    on_ranks(4, _overlapped)


def _inference() -> None:
    """What is kept between calls serves a backward pass that comes later."""
    model = nn.Sequential(
        nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Upsample(scale_factor=2, mode="bilinear")
    )
    parallel = xt.nn.domain_parallel(model, PAIR, "b c h/sp w")
    with torch.inference_mode():
        parallel(torch.ones(1, 1, 2, 4, dtype=torch.float64))
    check_layer(model, (1, 1, 4, 4), "b c h/sp w", PAIR)


def test_inference_before_training() -> None:
    on_ranks(2, _inference)


def _second_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    convolution = xt.nn.Convolution((3, 3), (1, 1), ((1, 1),) * 2, (1, 1), padding_mode="circular")
    for form in (xt.nn.conv, overlapped.overlapped_conv):

        def whole(x: Tensor, weight: Tensor, form: Callable[..., Any] = form) -> Tensor:
            """Whole in, whole out, so that every rank differentiates the same function."""
            block = xt.redistribute(x, "b c h w -> b c h/sp w", PAIR)
            placed = xt.nn.placed_as(block, "b c h/sp w", PAIR)
            y = form(block, placed, weight, None, convolution)[0]
            return xt.redistribute(y, "b c h/sp w -> b c h w", PAIR).square()

        inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        assert torch.autograd.gradcheck(whole, inputs)
        assert torch.autograd.gradgradcheck(whole, inputs)


def test_second_derivatives_of_a_convolution() -> None:
    on_ranks(2, _second_order)


NO_LAYER: dict[str, tuple[Callable[[], Any], str]] = {
    "a layer of no kind": (
        lambda: nn.Sequential(nn.ReLU(), nn.ModuleDict({"rnn": nn.LSTM(2, 2)})),
        "1.rnn (LSTM) has no exact form",
    ),
    "channel dropout": (lambda: nn.Sequential(nn.Dropout2d(0.1)), "0 (Dropout2d) has no exact form"),
    "adaptive pool": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2)), "0: output_size=2"),
    "indices": (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "0: return_indices=True"),
    "a kind of its own": (
        lambda: nn.Sequential(type("Periodic", (nn.Conv2d,), {})(1, 1, 3)),
        "0 (Periodic) is a Conv2d of its own kind",
    ),
}


class Code(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.function, self.conv = function, nn.Conv2d(2, 2, 3)

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


NO_FUNCTION: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows of a block": (lambda x: x[:, :, ::2], "a slice needs dim 'h' whole"),
    "a mean of rows": (lambda x: x.mean((2, 3)), "mean() needs dim 'h' whole"),
    "a mean of all": (lambda x: x.mean(), "mean() needs dim 'h' whole"),
    "cat of rows": (lambda x: torch.cat([x, x], 2), "cat() needs dim 'h' whole"),
    "cat with rows": (lambda x: torch.cat([x.mean(1, keepdim=True), x], -2), "cat() needs dim 'h' whole"),
    "padding of rows": (lambda x: F.pad(x, (1, 1, 1, 1)), "pad() needs dim 'h' whole"),
    "a function of neighbours": (lambda x: F.max_pool2d(x, 2), "of a block is not that of the array"),
    "a flip": (lambda x: x.flip(2), "flip() of a block"),
    "rows of unknown origin": (
        lambda x: x + torch.ones(4, 1),
        "4 rows, of which nothing is known, meet dim 'h/sp'",
    ),
    "a view": (lambda x: x.view(-1), "view() of a block"),
    "a sum over rows": (lambda x: x.cumsum(2), "cumsum() of a block"),
}


def _refusals() -> dict[str, tuple[str, str]]:
    found = {}
    for name, (model, _) in NO_LAYER.items():
        found[name] = error_of(lambda model=model: xt.nn.domain_parallel(model(), PAIR, "b c h/sp w"))
    x = torch.ones(1, 2, 4, 6)
    for name, (function, _) in NO_FUNCTION.items():
        model = xt.nn.domain_parallel(nn.Sequential(Code(function)), PAIR, "b c h/sp w")
        found[name] = error_of(lambda model=model: model(x))
    conv = xt.nn.Conv2d.from_module(nn.Conv2d(2, 2, 9), PAIR, "b c h/sp w")
    found["a kernel larger than the array"] = error_of(lambda: conv(x))
    found["channels"] = error_of(lambda: conv(torch.ones(1, 3, 8, 6)))
    wide = nn.Conv2d(2, 2, 3, padding=(1, 7), padding_mode="circular")
    wide = xt.nn.Conv2d.from_module(wide, PAIR, "b c h/sp w")
    found["padding wider than the array"] = error_of(lambda: wide(x))
    cut = xt.nn.Conv2d.from_module(nn.Conv2d(4, 2, 3), PAIR, "b c/sp h w")
    found["channels that are cut"] = error_of(lambda: cut(x))
    lost = nn.Sequential(Code(lambda x: x.data), nn.Conv2d(2, 2, 3))
    lost = xt.nn.domain_parallel(lost, PAIR, "b c h/sp w")
    found["a lost record"] = error_of(lambda: lost(x))
    assert still_connected()
    return found


REFUSED = {name: text for name, (_, text) in (*NO_LAYER.items(), *NO_FUNCTION.items())} | {
    "a kernel larger than the array": "Conv2d: no output: kernel (9, 9) over (8, 6) in 'b c h/sp w'",
    "padding wider than the array": "Conv2d: circular padding 7 of 6 rows",
    "channels": "Conv2d: 3 channels, the layer has 2",
    "channels that are cut": "Conv2d: this layer needs dim 'c' whole",
    "a lost record": "1: nothing is known of an input of shape (1, 2, 4, 6)",
}


def test_what_has_no_exact_form_is_refused_on_every_rank() -> None:
    for found in on_ranks(2, _refusals):
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert text in found[name][1], name
        for name in NO_FUNCTION:
            assert "0: " in found[name][1], "the path in the model"


def _adjoint(source: str, shape: tuple[int, ...], mesh: xs.Mesh, layout: str) -> None:
    x = torch.arange(torch.tensor(shape).prod()).reshape(shape) % 11 - 5.0
    block = scattered(x.double(), layout, mesh).requires_grad_()
    y = xt.redistribute(block, f"{layout} -> {source}", mesh, shape=shape)
    z = (torch.arange(y.numel()).reshape(y.shape) * (dist.get_rank() + 3)) % 7 - 3.0
    y.backward(z.double())
    inner = torch.stack([(y.detach() * z).sum(), (block.detach() * block.grad).sum()])
    dist.all_reduce(inner)
    assert inner[0] == inner[1], source


def _adjoints(sources: list[tuple[str, str, tuple[int, ...]]]) -> None:
    for layout, source, shape in sources:
        _adjoint(source, shape, ROW, layout)


@st.composite
def _overlaps(draw: st.DrawFn) -> tuple[str, str, tuple[int, ...]]:
    boundary = draw(st.sampled_from(["zero", "periodic", "reflect", "edge", "none", "pole", "pole(w,-1)"]))
    length, order = draw(st.integers(1, 14)), draw(st.sampled_from(["sp", "balanced(sp)"]))
    if draw(st.booleans()):
        widths = draw(st.tuples(st.integers(-2, 6), st.integers(-2, 6)))
        overlap = f"halo({widths[0]},{widths[1]},{boundary})"
    else:
        k, s, d = (draw(st.integers(1, most)) for most in (4, 3, 2))
        p = draw(st.integers(0, d * (k - 1)))
        overlap = f"window(k={k},s={s},d={d},p={p},{boundary})"
    return f"h/{order} w", f"h/{order}:{overlap} w", (length, 4)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(_overlaps(), min_size=12, max_size=12))
def test_gradients_are_exact_adjoints(sources: list[tuple[str, str, tuple[int, ...]]]) -> None:
    on_ranks(4, _adjoints, sources)


def _halo_exchange() -> None:
    rank = dist.get_rank()
    x = torch.arange(16.0).reshape(8, 2)
    block = x.chunk(4)[rank].clone().requires_grad_()
    y = xt.halo_exchange(block, (1, 2), 0, "sp", ROW, boundary="periodic")
    rows = torch.arange(2 * rank - 1, 2 * rank + 4) % 8
    assert torch.equal(y, x[rows])
    y.sum().backward()
    assert block.grad.tolist() == [[2, 2], [3, 3]]  # its own, as one of two after, as the one before
    layer = xt.HaloExchange(halo_width=1, dim=-2, axis="sp", mesh=ROW, boundary="reflect", shape=(7, 2))
    part = reference.scatter(x[:7].numpy(), "h/sp w", ROW)[rank]
    wide = layer(torch.from_numpy(part))
    assert torch.equal(layer.trim(wide), torch.from_numpy(part))
    if rank == 0:
        assert torch.equal(wide, x[[1, 0, 1, 2]])


def test_halo_exchange() -> None:
    on_ranks(4, _halo_exchange)


def _out_rules() -> None:
    for rule, wanted in (("", [2, 2, 1, 0]), ("balanced", [2, 1, 1, 1]), ("aligned", [2, 1, 2, 0])):
        found = check_layer(nn.Conv1d(2, 3, 3, 2, 1), (1, 2, 10), "b c h/sp", ROW, out_rule=rule)
        assert sizes(found, 2) == wanted, rule


def test_the_cut_of_the_outputs_is_told() -> None:
    on_ranks(4, _out_rules)
