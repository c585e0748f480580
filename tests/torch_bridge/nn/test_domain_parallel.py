"""Models made domain-parallel on ranks: code between layers is followed, or refused."""

from __future__ import annotations

import copy
import pickle
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, assert_refused, error_of, in_ranks
from tests.torch_bridge.nn.helpers import (
    check_layer,
    compare,
    same,
    scattered,
    weights_of,
    whole_gradients,
)
from torch_bridge.testing.byte_counter import Meter

ROOT = Path(__file__).parents[3]
ROW = xs.Mesh(sp=4)
PAIR = xs.Mesh(sp=2)
GRID = xs.Mesh(x=2, y=2)


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
        self.down = nn.Sequential(
            nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.Conv2d(4, 6, 3, 2, 1)
        )
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
        a = y[:, :4]
        b = y[..., 4:, :, :]
        return self.leave(torch.cat((a + 2 * b, F.relu(b - 1)), dim=1)) / 3


@in_ranks(4)
def test_a_model_with_code_between_its_layers() -> None:
    torch.manual_seed(0)
    model = UNet().double()
    alone = copy.deepcopy(model)
    every = torch.randn(2, 2, 24, 12, dtype=torch.float64)
    time = torch.randn(2, 3, dtype=torch.float64)
    for layout, mesh, rows in (
        ("b c h/sp w", ROW, 24),
        ("b c h/x w/y", GRID, 24),
        # Blocks of two rows and one, or of two and none; half of that further down.
        ("b c h/balanced(sp) w", ROW, 6),
        ("b c h/sp w", ROW, 6),
    ):
        x = every[:, :, :rows].clone()
        alone.zero_grad()
        model.zero_grad()
        wanted = whole_gradients(alone, x, time)
        parallel = xt.nn.domain_parallel(model, layout, mesh, shape=x.shape)
        assert parallel.state_dict().keys() == model.state_dict().keys()
        assert all(p is q for p, q in zip(parallel.parameters(), model.parameters(), strict=True))
        block = scattered(x, layout, mesh).requires_grad_()
        mine = parallel(block, time=time)
        assert str(compare(mine, block, layout, model, wanted).layout) == layout
        for a, b in zip(model.buffers(), alone.buffers(), strict=True):
            same(a, b, "statistics")
        elsewhere = pickle.loads(pickle.dumps(mine.detach())), copy.deepcopy(mine.detach())
        assert torch.equal(*elsewhere)
        assert not hasattr(x, "_xshard_placed") and not hasattr(block, "_xshard_placed")
    # The ordinary model is as it was, and by now has the statistics that it would have had on one device.
    assert type(model.enter) is nn.Conv2d and not model._forward_pre_hooks
    same(model.eval()(x, time), alone.eval()(x, time), "outputs of the ordinary model")


class Recomputed(nn.Module):
    """Checkpoints of a module and of a function with code around a module."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = Gate(2), nn.Conv2d(2, 2, (3, 5), padding=(1, 2))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.checkpoint(self.first, x))
        return self.checkpoint(lambda x, by: torch.sin(self.second(x * by) + x), y, by=2)


class Forgetful(nn.Module):
    """Right on blocks of rows, but with a checkpoint that computes again without the copied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        by = lambda x: x * self.weight  # noqa: E731
        return (torch.utils.checkpoint.checkpoint(by, x, use_reentrant=True) + 1,)


on_two = SharedRanks(2)


@on_two
def test_checkpoints_are_followed() -> None:
    torch.manual_seed(0)
    model = Recomputed(xt.nn.checkpoint).double()
    check_layer(model, (1, 2, 8, 6), "b c h/sp w", PAIR)
    # torch's own computes again outside of the model, where nothing is followed.
    model.checkpoint = lambda *given, **named: torch.utils.checkpoint.checkpoint(
        *given, use_reentrant=False, **named
    )
    parallel = xt.nn.domain_parallel(model, "b c h/sp w", PAIR)
    y = parallel(torch.ones(1, 2, 4, 6, dtype=torch.float64, requires_grad=True))
    model = nn.Sequential(nn.Conv2d(2, 2, 1), Forgetful())
    forgets = xt.nn.domain_parallel(model, "b c h/sp w", PAIR, converters={Forgetful: lambda m: m})
    assert_refused(
        (
            lambda: forgets(torch.ones(1, 2, 4, 6)),
            "...: 1: a reentrant checkpoint inside a converted module",
        ),
        (lambda: y.sum().backward(), "...second: nothing is known of an input...xt.nn.checkpoint"),
    )


class Rows(nn.Module):
    """What works row by row: slices that cut nothing, views that keep rows, functions along other dims."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(5, 4, padding_idx=0), nn.RMSNorm(4)
        self.apart, self.groups = nn.InstanceNorm2d(4, affine=True), nn.Unflatten(1, (2, 2))
        self.mix, self.shift = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(3))
        self.gates, self.scale = nn.GLU(1), nn.Parameter(torch.rand(4))
        self.channels = nn.Sequential(nn.LocalResponseNorm(3), nn.ChannelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape  # the block's
        x = x[:, 0:] + x[..., -99:, :][:, :, None, 0:99].squeeze(2)
        x = self.gates(torch.cat([self.apart(x), self.channels(x)], 1))
        x = self.groups(x).flatten(1, 2).movedim(1, -1).reshape(b, h, w * 4).view(b, h, w, 4)
        x = self.norm(x) + self.tokens((x[..., 0] * 2).abs().clamp(max=4).long())
        x = F.rms_norm(F.layer_norm(x, [4], self.scale), [4], self.scale) @ self.mix + F.linear(
            x, self.mix.T
        )
        x = torch.stack(
            [x @ self.shift, x.max(-1).values, F.normalize(x, dim=-1).roll(1, 2)[..., 0]], 1
        )
        low, high = x.flip(1, 3).sort(1, descending=True).values.cumsum(-1).tensor_split(2, dim=-1)
        first, *_ = (low * F.softmin(high, 1)).transpose(1, 2).unbind(-1)
        return (
            first.std(-1, keepdim=True).mT[:, None].expand(b, 3, 1, h)
            * x.logsumexp(1, True).max(x).mT
        )


class Code(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class LayerNorm2d(nn.LayerNorm):
    """ConvNeXt's: its `forward` is made of functions that have rules."""

    def forward(self, x: Tensor) -> Tensor:
        rows = F.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return rows.permute(0, 3, 1, 2)


def _spectrum(x: Tensor) -> Tensor:
    low = torch.fft.rfftn(x, s=(x.shape[2], -1), dim=(2, 3), norm="forward")
    y = torch.fft.irfft2(low * low.abs() + low.real)
    return y + y * torch.fft.hfft(torch.fft.ihfft(x, dim=-2), dim=-2)


class Functions(nn.Module):
    """Calls what layers compute by the functions of torch, at two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4, 3, 3, 3)), nn.Parameter(torch.rand(4))
        self.wide, self.scale = nn.Parameter(torch.rand(4, 2, 4, 4)), nn.Parameter(torch.rand(8))
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        first = F.conv2d(x, self.weight / 2, self.bias, padding="same")
        low = F.max_pool2d(first, 3, 2, padding=1) + F.avg_pool2d(first, 2)
        wide = F.conv_transpose2d(low, self.wide, stride=2, padding=1, groups=2)
        up = F.interpolate(low, size=x.shape[2:], mode="bilinear") + F.interpolate(
            low, scale_factor=2.0
        )
        y = F.group_norm(torch.cat([wide, up], 1), 2, self.scale, eps=1e-3)
        y = (
            y * F.adaptive_avg_pool2d(y, (1, 1))
            + y.mean((2, 3), keepdim=True)
            - y.sum(-2).mean(dim=-1)[..., None, None]
        )
        return self.shuffle(y) * F.pixel_shuffle(y, upscale_factor=2).mean()


FOLLOWED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: LayerNorm2d(3), "b c h/sp w"),
    (lambda: Code(lambda x: x.index_select(1, torch.tensor([2, 0, 0, 1]))), "b c h/sp w"),
    *(
        (lambda: Code(lambda x: x.flatten(2).mT), layout)
        for layout in ("b c h/sp w", "b c h/sizes(sp,3,5) w")
    ),
    (lambda: Code(lambda x: x.index_select(1, (x[0, 0, :, 0] > 0).long())), "b c h/sp w"),
    (lambda: Code(lambda x: x.view(2, 3, -1, 3)), "b c h/zigzag(sp) w"),
    (lambda: Code(lambda x: x.frexp().mantissa), "b c h/sp w"),
    *(
        (lambda: Code(_spectrum), layout)
        for layout in ("b c h/sp w", "b c h w/sizes(sp,5,1)", "b/sp c h w")
    ),
]


@on_two
def test_functions_that_keep_rows_are_followed() -> None:
    for layout in ("b c h/sp w", "b c h/sizes(sp,1,7) w", "b c h/zigzag(sp) w"):
        assert check_layer(Rows(), (2, 4, 8, 6), layout, PAIR).shape == (2, 3, 6, 8)

    torch.manual_seed(0)
    for make, layout in FOLLOWED:
        check_layer(make(), (2, 3, 8, 6), layout, PAIR)
    for layout in ("b c h/sp w", "b c h/sizes(sp,2,6) w", "b c h w/sizes(sp,5,1)", "b/sp c h w"):
        check_layer(Functions(), (2, 3, 8, 6), layout, PAIR)
    aligned = xt.nn.domain_parallel(
        Code(lambda x: F.avg_pool2d(x, 3, 2)), "b c h/sp w", PAIR, outputs="aligned"
    )
    module = xt.nn.domain_parallel(nn.AvgPool2d(3, 2), "b c h/sp w", PAIR, outputs="aligned")
    block = torch.ones(1, 2, 4, 6)
    assert xt.nn.sharding_of(aligned(block)) == xt.nn.sharding_of(module(block))
    x = torch.randn(5, 4).double()
    y = xt.nn.fft(
        scattered(x, "h/sp w", PAIR), "h/sp w", PAIR, "w h", kind="rfft", shape=(5, 4), norm="ortho"
    )
    assert str(xt.nn.sharding_of(y).layout) == "h/sp w" and xt.nn.sharding_of(y).shape == (3, 4)
    same(y, scattered(torch.fft.rfft2(x, dim=(1, 0), norm="ortho"), "h/sp w", PAIR), "a transform")
    thin = xt.nn.domain_parallel(Code(lambda x: x.squeeze()), "b c h/sp w", PAIR)
    y = thin(torch.ones(1, 2, 1, 6))  # one row of two
    assert y.shape == (2, 1, 6) and xt.nn.sharding_of(y).shape == (2, 2, 6)


def test_the_page_lists_what_is_followed() -> None:
    followed = runpy.run_path(str(ROOT / "docs/site/followed.py"))
    assert followed["PAGE"].read_text() == followed["page"]()  # python docs/site/followed.py


@on_two
def test_parts_of_a_model_run_one_by_one() -> None:
    """Parts that are called one by one, also by checkpoints, on blocks of one size and of several."""
    torch.manual_seed(0)
    for layout, rows in (("b c h/sp w", 8), ("b c h/sizes(sp,3,6) w", 9)):
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), Gate(4), nn.Conv2d(4, 2, 3, 2, 1)
        ).double()
        x = torch.randn(1, 2, rows, 6, dtype=torch.float64)
        wanted = whole_gradients(copy.deepcopy(model), x)
        parallel = xt.nn.domain_parallel(model, layout, PAIR, shape=x.shape)

        def one_by_one(block: Tensor, parallel: nn.Module = parallel) -> Tensor:
            norm = xt.nn.checkpoint(parallel[1], parallel[0](block))
            y = torch.utils.checkpoint.checkpoint(parallel[2], norm, use_reentrant=False)
            return parallel[3](y.clone())  # a block of which nothing is known

        for run in (one_by_one, parallel, lambda z, f=parallel: xt.nn.checkpoint(f, z)):
            model.zero_grad()
            block = scattered(x, layout, PAIR).requires_grad_()
            compare(run(block), block, layout, model, wanted)


@on_two
def test_inference_comes_before_training() -> None:
    """What is kept between calls serves a backward pass that comes later."""
    model = nn.Sequential(
        nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Upsample(scale_factor=2, mode="bilinear")
    )
    parallel = xt.nn.domain_parallel(model, "b c h/sp w", PAIR)
    with torch.inference_mode():
        parallel(torch.ones(1, 1, 2, 4, dtype=torch.float64))
    check_layer(model, (1, 1, 4, 4), "b c h/sp w", PAIR)


NO_LAYER: tuple[tuple[nn.Module, str], ...] = (
    (nn.ModuleDict({"rnn": nn.LSTM(2, 2)}), "1.rnn (LSTM) lacks an exact form"),
    (nn.Dropout2d(0.1), "1 (Dropout2d) lacks an exact form"),
    (nn.AdaptiveAvgPool2d(2), "1: output_size=2"),
    (nn.MaxPool2d(2, return_indices=True), "1: return_indices=True"),
    (type("Periodic", (nn.Conv2d,), {})(1, 1, 3), "1 (Periodic) is a subclass of Conv2d"),
)


NO_FUNCTION: tuple[tuple[Callable[[Tensor], Any], str], ...] = (
    (lambda x: x[:, :, ::2], "a slice needs dim 'h' whole"),
    (
        lambda x: x[:, :, :4],
        "a slice needs dim 'h' whole",
    ),  # half of the rows, as many as a block has
    (lambda x: x[:, :, 0], "a slice needs dim 'h' whole"),
    (lambda x: x[:, :, [0, 1]], "a block indexed by more than slices"),
    (lambda x: x.std((2, 3)), "std() needs dim 'h' whole"),
    (
        lambda x: F.interpolate(x, size=(16, 6)),
        "interpolate() to 16 rows of dim 'h/sp': of the block, or",
    ),
    (lambda x: F.interpolate(x, size=(16, 6), mode="area"), "of the block, or of the array?"),
    (lambda x: F.conv2d(x, x), "conv2d() with a weight that is sharded as 'b c h/sp w'"),
    (lambda x: F.adaptive_avg_pool2d(x, 2), "adaptive_avg_pool2d: output_size=2"),
    (
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        "max_pool2d_with_indices() of a block is not",
    ),
    (lambda x: F.adaptive_max_pool2d(x, 1), "of a block is not a block of"),
    (lambda x: x.cumsum(2), "cumsum() needs dim 'h' whole"),
    (lambda x: x.max(2), "max() needs dim 'h' whole"),
    (lambda x: x.flip(1, 2), "flip() needs dim 'h' whole"),
    (lambda x: x.view(-1), "view() needs dim 'h' whole"),
    # Groups of as many rows as a block has.
    (
        lambda x: x.view(1, 2, x.shape[2] // 4, 4, 6).mean(2),
        "view() puts a dim of length 1 beside 'h/sp'",
    ),
    (
        lambda x: x.view(1, 2, x.shape[2] // 4, 24).mean(2),
        "view() puts a dim of length 1 beside 'h/sp'",
    ),
    (lambda x: torch.cat([x, x], 2), "cat() needs dim 'h' whole"),
    (lambda x: torch.cat([x.mean(1, keepdim=True), x], -2), "cat() needs dim 'h' whole"),
    (lambda x: F.pad(x, (0, 0, 9, 0), "circular"), "circular padding (9, 0) of 8 rows"),
    (lambda x: F.layer_norm(x, (4, 6)), "layer_norm() needs dim 'h' whole"),
    (lambda x: x.mT @ torch.ones(4, 2), "matmul() needs dim 'h' whole"),
    (lambda x: torch.fft.fft(x, 3, 2), "fft() of 3 rows of dim 'h/sp'"),
    (lambda x: x @ x.mT, "of a block is not a block of"),
    (lambda x: torch.equal(x, x), "of a block is not a block of equal()"),
    (lambda x: x + torch.ones(4, 1), "4 rows without a recorded sharding meet dim 'h/sp'"),
)


@on_two
def test_what_has_no_exact_form_is_refused() -> None:
    x = torch.ones(1, 2, 4, 6)
    wrap = {"padding": (1, 7), "padding_mode": "circular"}

    def parallel(*layers: nn.Module, layout: str = "b c h/sp w") -> nn.Module:
        return xt.nn.domain_parallel(
            layers[0] if len(layers) == 1 else nn.Sequential(*layers), layout, PAIR
        )

    conv = nn.Conv2d(2, 2, 9)
    wide = nn.Conv2d(2, 2, 3, **wrap)
    cut = nn.Conv2d(4, 2, 3)
    lost = parallel(Code(lambda x: x.data), nn.Conv2d(2, 2, 3))
    assert_refused(
        *((partial(parallel, nn.ReLU(), layer), f"...{text}") for layer, text in NO_LAYER),
        *(
            (partial(parallel(Code(f), nn.ReLU()), x), f"...0: ...{text}")
            for f, text in NO_FUNCTION
        ),
        (
            lambda: parallel(conv)(x),
            "...Conv2d: no output: kernel (9, 9) over (8, 6) in 'b c h/sp w'",
        ),
        (lambda: parallel(conv)(torch.ones(1, 3, 8, 6)), "...Conv2d: 3 channels, the layer has 2"),
        (lambda: parallel(wide)(x), "...Conv2d: circular padding (7, 7) of 6 rows"),
        (
            lambda: parallel(cut, layout="b c/sp h w")(x),
            "...Conv2d: this layer needs dim 'c' whole",
        ),
        (lambda: lost(x), "...1: nothing is known of an input of shape (1, 2, 4, 6)"),
    )


@on_two
def test_gradients_are_summed_in_one_collective() -> None:
    """Gradients of all parameters in one collective; `verify`, the norm and the check take the model."""
    chain = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(10)))
    with Meter() as meter:
        xt.nn.domain_parallel(chain, "b c h/sp w", PAIR)(
            torch.ones(2, 4, 4, 4)
        ).square().sum().backward()
    torch.manual_seed(0)
    model = UNet().double()
    x = torch.randn(2, 2, 24, 12).double()
    time = torch.randn(2, 3).double()
    parallel = xt.nn.domain_parallel(model, "b c h/sp w", PAIR, shape=x.shape)
    weights = weights_of(torch.empty(2, 2, 48, 24))

    def loss(y: Tensor) -> Tensor:
        own = xt.redistribute(weights, "b c h w -> b c h/sp w", PAIR)
        return xt.redistribute((y * own).sum(), "() | sum(sp) -> ()", PAIR)

    block = scattered(x, "b c h/sp w", PAIR)
    xt.verify(parallel, (block, time), loss=loss)
    wrong = error_of(
        lambda: xt.verify(parallel, (block, time), loss=lambda y: loss(y) * y.shape[2])
    )
    assert wrong[0] == "EquivalenceError"  # its blocks have half of the rows
    loss(parallel(block, time)).backward()
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert torch.isclose(xt.grad_norm(parallel), whole) and "gradients, in buckets" in xt.explain(
        parallel
    )
    xt.check_replicas(parallel)
    assert len(list(chain.parameters())) == 20 and len(meter.received) == 1
