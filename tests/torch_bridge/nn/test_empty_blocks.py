"""Layers on ranks of which some have no rows, beside one device: outputs, and all gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.attention import GRID, ROW, Case, Mask
from tests.torch_bridge.helpers import on_threads
from tests.torch_bridge.nn.helpers import compare, same, scattered, whole_gradients
from tests.torch_bridge.nn.test_attention import difference
from torch_bridge.nn.domain_parallel import FOLLOWED
from torch_bridge.nn.layers import LAYERS
from xshard.nn.attention import METHODS

LINE = xs.Mesh(sp=4)
PLANE = xs.Mesh(x=2, y=2)
# Layouts of images, and their shapes: some device has no part of each.
IMAGES = (
    ("b c h/sp w", LINE, (2, 4, 6, 5)),
    ("b c h/sizes(sp,0,3,0,3) w", LINE, (1, 4, 6, 3)),
    ("b/sp c h w", LINE, (2, 4, 6, 5)),
    ("b c h/x w/y", PLANE, (2, 4, 6, 1)),
)
# Arguments of torch's classes of layers and modules, for images; others take none.
ARGUMENTS: dict[str, Any] = {
    "Conv2d": (4, 3, 3, 2, 1), "ConvTranspose2d": (4, 3, 3, 2, 1), "AvgPool2d": (3, 2, 1),
    "MaxPool2d": (3, 1, 1), "AdaptiveAvgPool2d": 1, "BatchNorm2d": 4, "InstanceNorm2d": 4,
    "GroupNorm": (2, 4), "LayerNorm": "last", "RMSNorm": "last", "Upsample": (None, 2),
    "UpsamplingNearest2d": (None, 2), "UpsamplingBilinear2d": (None, 2), "Flatten": 2,
    "Unflatten": (1, (2, 2)), "Linear": "row", "Dropout": 0.0, "AlphaDropout": 0.0, "Softmax": 1,
    "Softmin": 1, "LogSoftmax": 1, "GLU": 1, "LocalResponseNorm": 2, "ChannelShuffle": 2,
    "Threshold": (0.1, 0.5), "ConstantPad2d": ((1, 2, 3, 2), 1.5), "ZeroPad2d": 1, "CircularPad2d": 1,
    "ReplicationPad2d": 2, "ReflectionPad2d": (1, 0, 2, 2), "PReLU": 4,
    "PixelShuffle": 2,
}  # fmt: skip
# Modules without elements of images: those of other dims have the code of the ones for two.
NOT_OF_IMAGES = ("1d", "3d", "Sequential", "List", "Dict", "Embedding")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fft2": lambda x: torch.fft.fft2(x).real,
    "rfft2": lambda x: torch.fft.rfft2(x).abs(),
    "fftn": lambda x: torch.fft.fftn(x, dim=(1, 2, 3)).imag,
    "irfft": lambda x: torch.fft.irfft(x + 0j, dim=2),
    "hfft": lambda x: torch.fft.hfft(x + 0j, dim=1),
    "ihfft": lambda x: torch.fft.ihfft(x, dim=2).abs(),
    "views": lambda x: x[:, 1:3].mT.unsqueeze(1).movedim(1, 0) * 2,
    "along": lambda x: x.cumsum(1).sort(1)[0].logsumexp(1),
    "mean": lambda x: x * x.mean((2, 3), keepdim=True) + x.sum(3, keepdim=True),
    "cat": lambda x: torch.cat([x, torch.where(x > 0, x, 0.1 * x)], 1),
}  # fmt: skip


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def modules(shape: tuple[int, ...]) -> dict[str, Callable[[], nn.Module]]:
    """Every layer, every module that is followed, and functions, for images of a shape."""
    made: dict[str, Callable[[], nn.Module]] = {
        name: partial(Function, function) for name, function in FUNCTIONS.items()
    }
    of_last = {"last": (shape[-2:],), "row": (shape[-1], 5)}
    for kind in (*LAYERS, *FOLLOWED):
        name = kind.__name__
        if any(word in name for word in NOT_OF_IMAGES):
            continue
        arguments = ARGUMENTS.get(name, ())
        if isinstance(arguments, str):
            arguments = of_last[arguments]
        elif not isinstance(arguments, tuple) or name in ("ZeroPad2d", "ReflectionPad2d"):
            arguments = (arguments,)
        made[name] = partial(kind, *arguments)
    return made


def is_possible(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> bool:
    """Whether torch itself takes this image: not each pads one row by two."""
    try:
        make()(torch.zeros(shape))
    except (RuntimeError, ValueError):
        return False
    return True


def check(
    make: Callable[[], nn.Module], shape: tuple[int, ...], layout: str, mesh: xs.Mesh
) -> None:
    """A module on blocks is that of one device, with its gradients and statistics."""
    draw = torch.Generator().manual_seed(0)  # threads share torch's own
    x = torch.randn(shape, dtype=torch.float64, generator=draw)
    module = make().double()
    for parameter in module.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=draw) - 0.5)
    alone = copy.deepcopy(module)
    wanted = whole_gradients(alone, x)
    parallel = xt.nn.domain_parallel(module, layout, mesh, shape=shape)
    block = scattered(x, layout, mesh).requires_grad_()
    compare(parallel(block), block, layout, module, wanted)
    for mine, buffer in zip(module.buffers(), alone.buffers(), strict=True):
        same(mine, buffer, "statistics")


def test_every_layer_has_blocks_of_no_rows() -> None:
    on_threads(4, check_layers)


def check_layers() -> None:
    n_checked = 0
    for i, (layout, mesh, shape) in enumerate(IMAGES):
        for name, make in modules(shape).items():
            has_options = name in ARGUMENTS or name in FUNCTIONS
            needs_whole_row = name in ("Linear", "Flatten") and i == 3
            if needs_whole_row or (i and not has_options) or not is_possible(make, shape):
                continue
            try:
                check(make, shape, layout, mesh)
            except Exception as error:
                error.add_note(f"{name} of {layout} {shape}")
                raise
            n_checked += 1
    assert n_checked > 130, n_checked


def test_attention_has_blocks_of_no_rows_heads_and_batches() -> None:
    on_threads(4, check_attentions)


def check_attentions(n: int = 36, seed: int = 0) -> None:
    """Random lengths, layouts, methods and masks, with gradients; queries, keys, heads or batches are few."""
    draw = random.Random(seed)
    for _ in range(n):
        case = draw.choice(FEW)._replace(
            length=draw.choice((1, 2, 3, 6)), batch=draw.choice((1, 2, 3))
        )
        if case.kv_layout is not None:
            case = case._replace(kv_length=draw.choice((1, 2, 5)))
        mask = Mask(
            draw.random() < 0.5,
            draw.choice((None, 2, (1, None))),
            draw.random() < 0.3,
            draw.choice((0, 1, -2)),
            draw.choice((None, 2.0)),
            draw.random() < 0.3,
            draw.choice((0.0, 0.5)),
            draw.random() < 0.5,
        )
        how = draw.choice((*METHODS, "auto"))
        assert difference(case, mask, how) < 1e-11, (case, mask, how)


FEW = (
    Case(ROW, "b s/cp h k", (2, 2)),
    Case(ROW, "b s/zigzag(cp) h k", (4, 2)),
    Case(ROW, "b s/cp h k", (2, 1), "b t/balanced(cp) h k"),
    Case(ROW, "b s h k", (2, 2), "b t/cp h k"),
    Case(ROW, "b s h/cp k", (2, 2)),
    Case(ROW, "b s h/balanced(cp) k", (3, 3)),
    Case(ROW, "b/cp s h k", (2, 1)),
    Case(GRID, "b/tp s/cyclic(cp) h k", (2, 1)),
    Case(GRID, "h/tp b s/cp k", (1, 1)),
)


def test_losses_have_blocks_of_no_tokens_and_of_no_classes() -> None:
    on_threads(4, check_losses)


def check_losses() -> None:
    mesh = xs.Mesh(dp=2, tp=2)
    for i, (layout, shape) in enumerate(LOGITS):
        draw = torch.Generator().manual_seed(i)
        logits = torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_()
        dims = xs.Layout.parse(layout).dims
        d = [dim.name for dim in dims].index("v")
        labels = torch.randint(shape[d], (*shape[:d], *shape[d + 1 :]), generator=draw)
        wanted = nn.functional.cross_entropy(
            logits.movedim(d, -1).reshape(-1, shape[d]), labels.reshape(-1), label_smoothing=0.1
        )
        wanted.backward()
        block = scattered(logits, layout, mesh).requires_grad_()
        own = scattered(labels, " ".join(str(dim) for dim in dims if dim.name != "v"), mesh)
        loss = xt.nn.cross_entropy(block, own, layout, mesh, shape=shape, label_smoothing=0.1)
        loss.backward()
        same(loss, wanted.detach(), layout)
        same(block.grad, scattered(logits.grad, layout, mesh), f"gradient of {layout}")


LOGITS = (
    ("b/dp s v/tp", (1, 3, 4)),
    ("b/(dp,tp) v", (3, 5)),
    ("b v/tp s/dp", (2, 1, 1)),
    ("b/dp v/sizes(tp,0,5)", (1, 5)),
    ("v/(dp,tp) b", (3, 2)),
)
