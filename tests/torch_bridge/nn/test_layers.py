"""Layers on ranks beside torch on one device; the table of windows and halos is `tests/nn/cases.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.nn import cases
from tests.nn.cases import CASES, GRID, HALOS, NATTEN, PAIR, PUBLISHED, ROW, Case
from tests.torch_bridge.helpers import SharedRanks, assert_refused, for_each, on_ranks
from tests.torch_bridge.nn.helpers import check_layer, same, scattered, sizes
from torch_bridge.nn.conv import Convolution, conv
from torch_bridge.nn.placed import placed_as
from torch_bridge.testing.byte_counter import Meter
from xshard import reference

MOST_RANKS = 9  # larger cases run in JAX
MODES = {"zero": "zeros", "periodic": "circular", "reflect": "reflect", "edge": "replicate"}
UPSAMPLE = {"nearest": ("nearest",) * 3, "linear": ("linear", "bilinear", "trilinear")}
UPSAMPLE |= {"cubic": ("", "bicubic", "")}
Layer = tuple[Callable[[], nn.Module], tuple[int, ...], str, xs.Mesh]

# Layers without windows, and options of torch's modules that the table of windows does not have.
MODULES: dict[str, Layer] = {
    "even kernel, same, no batch": (
        lambda: nn.Conv2d(2, 3, (3, 4), padding="same"), (2, 9, 7), "c h/x w/y", GRID,
    ),
    "average pool, divisor": (
        lambda: nn.AvgPool3d(3, 2, 1, divisor_override=5), (1, 2, 14, 5, 6), "b c d/x h w/y", GRID,
    ),
    "global average pool": (lambda: nn.AdaptiveAvgPool2d(1), (2, 4, 7, 9), "b c h/y w/x", GRID),
    "nearest-exact, one scale": (
        lambda: nn.Upsample(scale_factor=1.7, mode="nearest-exact"), (1, 2, 14, 9), "b c h/x w/y", GRID,
    ),
    "bicubic, scales": (
        lambda: nn.Upsample(scale_factor=(1.7, 0.6), mode="bicubic"), (1, 2, 14, 9), "b c h/x w/y", GRID,
    ),
    "group norm, two dims": (lambda: nn.GroupNorm(2, 4), (2, 4, 7, 9), "b c h/x w/y", GRID),
    "group norm, batch sharded": (lambda: nn.GroupNorm(2, 4), (3, 4, 7, 9), "b/x c h/y w", GRID),
    "layer norm over sharded dims": (lambda: nn.LayerNorm((7, 9)), (2, 4, 7, 9), "b/x c h/y w", GRID),
    "layer norm beside a sharded dim": (lambda: nn.LayerNorm(9), (2, 7, 9), "b s/sp c", ROW),
    "rms norm over sharded dims": (lambda: nn.RMSNorm((7, 9)), (2, 4, 7, 9), "b/x c h/y w", GRID),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 7), "b c h/sp", ROW),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 7, 9), "b/x c h/y w", GRID),
    "batch norm, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (2, 4, 7, 9), "b c h/y w/x", GRID),
    "batch norm, no statistics kept": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False), (2, 4, 7), "b c h/sp", ROW,
    ),
    "batch norm, eval": (lambda: nn.BatchNorm3d(4).eval(), (2, 4, 5, 3, 2), "b c d/x h/y w", GRID),
    "constant pad": (lambda: nn.ConstantPad2d((1, 2, 3, 2), 1.5), (2, 2, 7, 9), "b c h/x w/y", GRID),
    "reflection pad": (lambda: nn.ReflectionPad2d(2), (2, 2, 7, 9), "b/x c h/sizes(y,3,4) w", GRID),
    "replication pad, a crop": (lambda: nn.ReplicationPad2d((0, 1, -2, 3)), (2, 2, 7, 9), "b c h/sp w", ROW),
    "circular pad": (lambda: nn.CircularPad1d((3, 2)), (2, 2, 17), "b c h/zigzag(sp)", ROW),
    "linear": (lambda: nn.Linear(9, 5), (2, 4, 7, 9), "b/x c h/y w", GRID),
}  # fmt: skip


def module_of(case: Case) -> nn.Module:
    rank = len(case.shape) - 2
    channels = case.shape[1]
    one_pad = [before for before, _ in case.p]
    kind = {"transposed": "ConvTranspose", "max": "MaxPool", "avg": "AvgPool", "conv": "Conv"}.get(
        case.op
    )
    if case.op == "interpolate":
        corners = None if case.mode == "nearest" else case.align_corners
        return nn.Upsample(case.size, mode=UPSAMPLE[case.mode][rank - 1], align_corners=corners)
    make: Any = getattr(nn, f"{kind}{rank}d")
    if case.op == "max":
        return make(case.k, case.s, one_pad, case.d, ceil_mode=case.ceil)
    if case.op == "avg":
        return make(
            case.k, case.s, one_pad, ceil_mode=case.ceil, count_include_pad=case.include_pad
        )
    features = 2 * case.groups
    if case.op == "transposed":
        return make(
            channels, features, case.k, case.s, one_pad, case.extra, case.groups, dilation=case.d
        )
    padding = "same" if any(before != after for before, after in case.p) else one_pad
    options = {"groups": case.groups, "padding_mode": MODES[case.boundary]}
    return make(channels, features, case.k, case.s, padding, case.d, **options)


def check(case: Case, device: str = "cpu") -> None:
    if case.op == "conv" and any(before and not after for before, after in case.p):
        check_causal(case)
        return
    options = {"outputs": case.outputs} if case.op in ("conv", "max", "avg") else {}
    found = check_layer(
        module_of(case), case.shape, case.layout, case.mesh, device=device, **options
    )
    for d, expected in case.out_sizes.items():
        assert sizes(found, d) == expected, "how the outputs are sharded"


def check_causal(case: Case) -> None:
    """A convolution padded at one end, which no module has."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=case.shape)
    kernel = draw.normal(size=case.kernel_shape)
    y, of_x, of_kernel = cases.one_device(case, x, kernel, cosines)
    block = scattered(torch.from_numpy(x), case.layout, case.mesh).requires_grad_()
    weight = torch.from_numpy(kernel).requires_grad_()
    placement = placed_as(block, case.layout, case.mesh, case.shape)
    convolution = Convolution(case.k, case.s, case.p, case.d, case.groups)
    mine = conv(block, placement, weight, None, convolution)[0]
    mine.backward(scattered(torch.from_numpy(cosines(y.shape)), case.layout, case.mesh))
    same(mine, scattered(torch.from_numpy(y), case.layout, case.mesh), "outputs")
    same(
        block.grad,
        scattered(torch.from_numpy(of_x), case.layout, case.mesh),
        "gradient of the input",
    )
    same(weight.grad, torch.from_numpy(of_kernel), "gradient of the kernel")


def cosines(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape))).reshape(shape)


def check_halo(data: dict[str, Any]) -> None:
    """Every block is a piece of the padded array, and the gradient is the adjoint, in whole numbers."""
    mesh = cases.device_mesh(data)
    shape = tuple(data["global_shape"])
    rank = dist.get_rank()
    src = cases.sharded_layout(data)
    dst = cases.halo_layout(data)
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(float)
    expected = cases.halo_blocks(data, x)
    mine = scattered(torch.from_numpy(x), src, mesh).requires_grad_()
    y = xt.redistribute(mine, f"{src} -> {dst}", mesh, shape=shape)
    assert np.array_equal(y.detach().numpy(), expected[rank])
    ys = [
        np.random.default_rng(d).integers(-4, 5, b.shape).astype(float)
        for d, b in enumerate(expected)
    ]
    y.backward(torch.from_numpy(ys[rank]))
    gradients: list[Any] = [None] * mesh.n_devices
    dist.all_gather_object(gradients, mine.grad.numpy())
    assert not cases.adjoint_error(data, x, ys, reference.gather(gradients, src, mesh, shape))
    assert torch.equal(xt.redistribute(y.detach(), f"{dst} -> {src}", mesh, shape=shape), mine)
    whole_numbers = (torch.int32, torch.int64) if "1.234" not in data["boundary"] else ()
    for dtype in (torch.float32, *whole_numbers):
        moved = xt.redistribute(mine.detach().to(dtype), f"{src} -> {dst}", mesh, shape=shape)
        assert torch.equal(moved, y.detach().to(dtype))


def check_neighbourhood() -> None:
    """Halos of queries, keys and values, then a trim of the result."""
    mesh = cases.device_mesh(NATTEN)
    shape = tuple(NATTEN["global_shape"])
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64).requires_grad_()
    y = cases.neighbourhood(torch, *x)
    weights = torch.from_numpy(cosines(y.shape))
    y.backward(weights)
    src, dst = (f"b h/m0{overlap} w n d" for overlap in ("", ":halo(2,2,none)"))
    block = scattered(x, f"q {src}", mesh).requires_grad_()
    wide = [xt.redistribute(part, f"{src} -> {dst}", mesh, shape=shape) for part in block]
    out = xt.redistribute(cases.neighbourhood(torch, *wide), f"{dst} -> {src}", mesh, shape=shape)
    out.backward(scattered(weights, src, mesh))
    same(out, scattered(y, src, mesh), "outputs")
    same(block.grad, scattered(x.grad, f"q {src}", mesh), "gradients")


def check_all(n: int, device: str = "cpu") -> int:
    """Every case on `n` devices -> their number."""
    checks: dict[str, tuple[xs.Mesh, Callable[[], Any]]] = {
        name: (case.mesh, partial(check, case, device))
        for name, case in {**CASES, **PUBLISHED}.items()
    }
    for name, (make, *layer) in MODULES.items():
        checks[name] = (
            layer[-1],
            lambda m=make, layer=layer: check_layer(m(), *layer, device=device),
        )
    if device == "cpu":
        checks |= {
            name: (cases.device_mesh(data), partial(check_halo, data))
            for name, data in HALOS.items()
        }
    here = {name: run for name, (mesh, run) in checks.items() if mesh.n_devices == n}
    for_each([*here], lambda name: here[name]())
    return len(here)


ALL_MESHES = [case.mesh for case in (*CASES.values(), *PUBLISHED.values())]
ALL_MESHES += [cases.device_mesh(data) for data in HALOS.values()]


@pytest.mark.parametrize(
    "n", sorted({mesh.n_devices for mesh in ALL_MESHES if mesh.n_devices <= MOST_RANKS})
)
def test_every_case_is_that_of_one_device(n: int) -> None:
    numbers = on_ranks(n, check_all, n)
    assert numbers[0] >= sum(mesh.n_devices == n for mesh in ALL_MESHES) and len(set(numbers)) == 1


on_two = SharedRanks(2)


@on_two
def test_neighbourhood_attention() -> None:
    check_neighbourhood()


@on_two
def test_second_derivatives_of_a_convolution() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    convolution = Convolution((3, 3), (1, 1), ((1, 1),) * 2, (1, 1), padding_mode="circular")

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        """Unsharded in and out, so that every rank differentiates the same function."""
        block = xt.redistribute(x, "b c h w -> b c h/sp w", PAIR)
        y = conv(block, placed_as(block, "b c h/sp w", PAIR), weight, None, convolution)[0]
        return xt.redistribute(y, "b c h/sp w -> b c h w", PAIR).square()

    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


def check_adjoint(layout: str, source: str, shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.tensor(shape).prod()).reshape(shape) % 11 - 5.0
    block = scattered(x.double(), layout, ROW).requires_grad_()
    y = xt.redistribute(block, f"{layout} -> {source}", ROW, shape=shape)
    z = (torch.arange(y.numel()).reshape(y.shape) * (dist.get_rank() + 3)) % 7 - 3.0
    y.backward(z.double())
    inner = torch.stack([(y.detach() * z).sum(), (block.detach() * block.grad).sum()])
    dist.all_reduce(inner)
    assert inner[0] == inner[1], source


def _overlap(draw: random.Random) -> tuple[str, str, tuple[int, ...]]:
    boundary = draw.choice(["zero", "periodic", "reflect", "edge", "none", "pole", "pole(w,-1)"])
    length = draw.randint(1, 14)
    order = draw.choice(["sp", "balanced(sp)"])
    if draw.random() < 0.5:
        overlap = f"halo({draw.randint(-2, 6)},{draw.randint(-2, 6)},{boundary})"
    else:
        k, s, d = (draw.randint(1, most) for most in (4, 3, 2))
        overlap = f"window(k={k},s={s},d={d},p={draw.randint(0, d * (k - 1))},{boundary})"
    return f"h/{order} w", f"h/{order}:{overlap} w", (length, 4)


# Layouts of logits, and their shapes.
LOGITS = {
    "b/dp s v/tp": (4, 3, 8), "b s/zigzag(dp) v/cyclic(tp,2)": (2, 8, 7), "v/(dp,tp) b": (5, 3),
    "b v/tp s/dp": (3, 2, 5), "b/dp v": (5, 3), "... v/tp": (3, 1),
}  # fmt: skip


def check_cross_entropies() -> None:
    """Losses, and gradients of logits, for every layout and reduction; a label in four is ignored."""
    mesh = xs.Mesh(dp=2, tp=2)
    draw = torch.Generator().manual_seed(0)
    for i, (text, shape) in enumerate(LOGITS.items()):
        layout = xs.Layout(text).resolved(len(shape))
        d = layout.names.index("v")
        tokens = (*shape[:d], *shape[d + 1 :])
        logits = torch.randn(shape, generator=draw, dtype=torch.float64)
        if not i % 2:  # a class that cannot be, the only one of a process in v/(dp,tp)
            logits.select(d, shape[d] - 1).fill_(-torch.inf)
        logits.requires_grad_()
        labels = torch.randint(max(shape[d] - 1, 1), tokens, generator=draw)
        labels[torch.rand(tokens, generator=draw) < 0.25] = -7
        of_tokens = " ".join(str(dim) for dim in layout.dims if dim.name != "v")
        for reduction in ("mean", "sum", "none"):
            options: Any = {
                "reduction": reduction,
                "ignore_index": -7,
                "label_smoothing": 0.25 * (i % 2),
            }
            want = nn.functional.cross_entropy(
                logits.movedim(d, -1).reshape(-1, shape[d]), labels.reshape(-1), **options
            )
            if reduction == "none":
                want = want.view(tokens)
            cotangent = torch.randn(want.shape, generator=draw, dtype=torch.float64)
            (gradient,) = torch.autograd.grad((want * cotangent).sum(), logits)
            block = scattered(logits.detach(), text, mesh).requires_grad_()
            mine = scattered(labels, of_tokens, mesh).long()
            y = xt.nn.cross_entropy(block, mine, text, mesh, shape=shape, **options)
            if reduction == "none":
                want, cotangent = (
                    scattered(x.detach(), of_tokens, mesh) for x in (want, cotangent)
                )
            (y * cotangent).sum().backward()
            found = block.grad - scattered(gradient, text, mesh)
            assert y.shape == want.shape and torch.allclose(y, want, 0, 1e-12), (text, reduction)
            assert not found.numel() or found.abs().max() < 1e-12, (text, reduction)
    for dtype in (torch.bfloat16, torch.float16):
        # The first call also compares the logits of all processes.
        xt.nn.cross_entropy(torch.ones(3, 32, dtype=dtype), torch.zeros(3).long(), "b v/tp", mesh)
        with Meter() as meter:
            block = torch.ones(3, 32, dtype=dtype, requires_grad=True)
            y = xt.nn.cross_entropy(block, torch.zeros(3).long(), "b v/tp", mesh)
            y.backward()
        assert y.dtype == torch.float32 and abs(y - np.log(64)) < 1e-6
        assert sum(meter.received) == 3 * 3 * 4  # three numbers per token
    x = torch.ones(3, 2)
    own = torch.zeros(3).long()
    loss = partial(xt.nn.cross_entropy, layout="b v/tp", mesh=mesh)
    assert_refused(
        (lambda: loss(x, own[:2]), "ShapeError: ...labels of shape (2,), logits of shape (3, 2)"),
        (lambda: loss(x, own.float()), "DtypeError: ...labels are numbers of classes"),
        (
            lambda: loss(x, own, reduction="all"),
            "XshardError: ...reduction is 'all', not Literal...",
        ),
        (lambda: loss(x, own, classes="c"), "ShapeError: ...no dim 'c' in 'b v/tp'"),
        (lambda: loss(x, own + 4), "ShapeError: labels from 4 to 4, 4 classes"),
        (lambda: loss(x, own - 1), "ShapeError: labels from -1 to -1, 4 classes"),
        is_alike=False,
    )
    _check_whole_logits(mesh)


def _check_whole_logits(mesh: xs.Mesh) -> None:
    """Whole logits in the place of blocks are refused, and what only looks a little like them is not."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(1)
    for layout, shape in (("b s v/tp", (2, 3, 5)), ("b/dp v/tp", (3, 4)), ("v/(dp,tp) b", (2, 5))):
        whole = torch.randn(shape, generator=draw)
        d = layout.split().index(next(name for name in layout.split() if name[0] == "v"))
        labels = torch.zeros(whole.select(d, 0).shape, dtype=torch.long)
        axes = xs.Layout.parse(layout).dims[d].axes
        loss = partial(xt.nn.cross_entropy, layout=layout, mesh=mesh)
        refused = f"ShapeError: the same logits on all devices along {', '.join(axes)}"
        for _ in range(2):  # also when it is tried again
            assert_refused((partial(loss, whole, labels), refused), is_alike=True)
        right = (
            (whole + rank, labels),  # devices have different logits
            (torch.zeros_like(whole), labels),  # a new layer
            (whole, labels + shape[d]),  # a label that no whole logits have
        )
        for i, (logits, classes) in enumerate(right):
            # More tokens: logits of this shape have not been compared before.
            more = [x.unsqueeze(-1).expand(*x.shape, i + 2) for x in (logits, classes)]
            assert loss(*more, layout=f"{layout} t").isfinite()


on_four = SharedRanks(4)


@on_four
def test_adjoints_of_overlaps_are_exact() -> None:
    draw = random.Random(0)
    for _ in range(48):
        check_adjoint(*_overlap(draw))


@on_four
def test_cross_entropies_are_those_of_one_device() -> None:
    check_cross_entropies()


@on_four
def test_halos_are_exchanged() -> None:
    rank = dist.get_rank()
    x = torch.arange(16.0).reshape(8, 2)
    block = x.chunk(4)[rank].clone().requires_grad_()
    y = xt.ops.halo_exchange(block, (1, 2), 0, "sp", ROW, boundary="periodic")
    rows = torch.arange(2 * rank - 1, 2 * rank + 4) % 8
    assert torch.equal(y, x[rows])
    y.sum().backward()
    assert block.grad.tolist() == [
        [2, 2],
        [3, 3],
    ]  # its own, as one of two after, as the one before


@on_four
def test_a_layer_exchanges_halos() -> None:
    rank = dist.get_rank()
    x = torch.arange(16.0).reshape(8, 2)
    layer = xt.nn.HaloExchange(
        halo_width=1, dim=-2, axis="sp", mesh=ROW, boundary="reflect", shape=(7, 2)
    )
    part = reference.scatter(x[:7].numpy(), "h/sp w", ROW)[rank]
    wide = layer(torch.from_numpy(part))
    assert torch.equal(layer.trim(wide), torch.from_numpy(part))
    if rank == 0:
        assert torch.equal(wide, x[[1, 0, 1, 2]])
