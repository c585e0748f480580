"""Domain-parallel layers and models on ranks, beside torch on one device.

Long because every layer has its values, adjoints and refusals here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import on_ranks
from tests.torch_bridge.nn_helpers import check_layer, scattered, sizes
from torch_bridge.nn.conv import Convolution, conv
from torch_bridge.nn.placed import placed_as
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
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 8, 6), "b c h/sp w", PAIR),
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
    "batch cut too": (lambda: nn.Conv2d(2, 3, (3, 4), 2, (1, 2)), (3, 2, 17, 12), "b/x c h/y w", GRID),
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
    "transposed 3-D": (lambda: nn.ConvTranspose3d(2, 2, 3, 2, 1), (1, 2, 5, 4, 3), "b c d/x h w/y", GRID),
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
    "rms norm over cut dims": (lambda: nn.RMSNorm((7, 9)), (2, 4, 7, 9), "b/x c h/y w", GRID),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 7), "b c h/sp", ROW),
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


def _second_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    convolution = Convolution((3, 3), (1, 1), ((1, 1),) * 2, (1, 1), padding_mode="circular")

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        """Whole in, whole out, so that every rank differentiates the same function."""
        block = xt.redistribute(x, "b c h w -> b c h/sp w", PAIR)
        placed = placed_as(block, "b c h/sp w", PAIR)
        y = conv(block, placed, weight, None, convolution)[0]
        return xt.redistribute(y, "b c h/sp w -> b c h w", PAIR).square()

    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


def test_second_derivatives_of_a_convolution() -> None:
    on_ranks(2, _second_order)


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


def _overlap(draw: random.Random) -> tuple[str, str, tuple[int, ...]]:
    boundary = draw.choice(["zero", "periodic", "reflect", "edge", "none", "pole", "pole(w,-1)"])
    length, order = draw.randint(1, 14), draw.choice(["sp", "balanced(sp)"])
    if draw.random() < 0.5:
        overlap = f"halo({draw.randint(-2, 6)},{draw.randint(-2, 6)},{boundary})"
    else:
        k, s, d = (draw.randint(1, most) for most in (4, 3, 2))
        overlap = f"window(k={k},s={s},d={d},p={draw.randint(0, d * (k - 1))},{boundary})"
    return f"h/{order} w", f"h/{order}:{overlap} w", (length, 4)


def test_gradients_are_exact_adjoints() -> None:
    draw = random.Random(0)
    on_ranks(4, _adjoints, [_overlap(draw) for _ in range(48)])


def _halo_exchange() -> None:
    rank = dist.get_rank()
    x = torch.arange(16.0).reshape(8, 2)
    block = x.chunk(4)[rank].clone().requires_grad_()
    y = xt.ops.halo_exchange(block, (1, 2), 0, "sp", ROW, boundary="periodic")
    rows = torch.arange(2 * rank - 1, 2 * rank + 4) % 8
    assert torch.equal(y, x[rows])
    y.sum().backward()
    assert block.grad.tolist() == [[2, 2], [3, 3]]  # its own, as one of two after, as the one before
    layer = xt.nn.HaloExchange(halo_width=1, dim=-2, axis="sp", mesh=ROW, boundary="reflect", shape=(7, 2))
    part = reference.scatter(x[:7].numpy(), "h/sp w", ROW)[rank]
    wide = layer(torch.from_numpy(part))
    assert torch.equal(layer.trim(wide), torch.from_numpy(part))
    if rank == 0:
        assert torch.equal(wide, x[[1, 0, 1, 2]])


def test_halo_exchange() -> None:
    on_ranks(4, _halo_exchange)


def _outputs() -> None:
    for rule, wanted in (("", [2, 2, 1, 0]), ("balanced", [2, 1, 1, 1]), ("aligned", [2, 1, 2, 0])):
        found = check_layer(nn.Conv1d(2, 3, 3, 2, 1), (1, 2, 10), "b c h/sp", ROW, outputs=rule)
        assert sizes(found, 2) == wanted, rule


def test_the_cut_of_the_outputs_is_told() -> None:
    on_ranks(4, _outputs)
