"""Every public case of halos and windows: outputs and gradients are those of one device.

On gloo, with as many processes as the case has devices, up to 9; larger meshes on the reference, in one.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import on_ranks
from tests.torch_bridge.nn_helpers import TOLERANCE, check_layer, scattered, sizes, weights_of
from torch_bridge.nn.conv import Convolution, conv
from torch_bridge.nn.placed import placed_as
from xshard import reference
from xshard.nn.windows import window_frame
from xshard.notation.overlap import Window

Case = dict[str, Any]

CASES: dict[str, Case] = {
    case["name"]: case for case in json.loads((Path(__file__).parents[1] / "data" / "halo.json").read_text())
}
BOUNDARIES = {"zero": "zeros", "circular": "circular"}
MOST_RANKS = 9


def n_devices(case: Case) -> int:
    return math.prod(case["mesh"])


def mesh_of(case: Case) -> xs.Mesh:
    return xs.Mesh({f"m{i}": n for i, n in enumerate(case["mesh"])})


def layout_of(case: Case, overlaps: list[str] | None = None) -> str:
    """The case's dims, those that are cut in balanced parts, or in the parts that it gives."""
    names = [f"d{d}" for d in range(len(case["global_shape"]))]
    for i, d in enumerate(case["sharded_dims"]):
        order = f"balanced(m{i})"
        given = (case.get("shard_sizes") or {i: None})[i]
        n, parts = case["global_shape"][d], case["mesh"][i]
        if given not in (None, [n // parts + (j < n % parts) for j in range(parts)]):
            order = f"sizes(m{i},{','.join(map(str, given))})"
        names[d] += f"/{order}" + (f":{overlaps[i]}" if overlaps else "")
    return " ".join(names)


def options_of(op: str) -> dict[str, Any]:
    """`k=[3] s=[1]` -> {"k": [3], "s": [1]}"""
    return {name: ast.literal_eval(text) for name, text in re.findall(r"(\w+)=(\[.*?\]|\d+)", op)}


def shape_of(case: Case) -> tuple[int, ...]:
    """Batch and channels decide nothing about halos: the largest are made smaller."""
    batch, channels, *spatial = case["global_shape"]
    small = (1, 2) if math.prod(spatial) > 100_000 else (2, 4)
    return (min(batch, small[0]), min(channels, small[1]), *spatial)


def module_of(case: Case) -> nn.Module:
    op, given = case["op"], options_of(case["op"])
    rank, channels = len(case["global_shape"]) - 2, shape_of(case)[1]
    if op.startswith("conv "):
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        mode = BOUNDARIES[case["boundary"]]
        return kind(channels, 3, given["k"], given["s"], given["p"], given["d"], padding_mode=mode)
    if op.startswith("conv_transpose"):
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
        return kind(channels, 3, given["k"], given["s"], given["p"], given["op"])
    if op.startswith("maxpool"):
        kind = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1]
        return kind(given["k"], given["s"], given["p"], given["d"])
    if op.startswith("avgpool"):
        return nn.AvgPool2d(given["k"], given["s"], given["p"])
    mode, align = re.findall(r"mode=(\w+) align_corners=(\w+)", op)[0]
    return nn.Upsample(given["size"], mode=mode, align_corners=ast.literal_eval(align))


def check_module(case: Case) -> None:
    module, mesh = module_of(case), mesh_of(case)
    options = {"outputs": case["out_rule"]} if case.get("out_rule") == "aligned" else {}
    found = check_layer(module, shape_of(case), layout_of(case), mesh, **options)
    for i, d in enumerate(case["sharded_dims"]):
        if "out_sizes" in case:
            assert sizes(found, d) == case["out_sizes"][i], f"{case['name']}: cut of the outputs"


def widened(x: Tensor, d: int, lo: int, hi: int, boundaries: tuple[str, str]) -> Tensor:
    """A whole array with rows beyond both its ends, on one device."""
    ends = []
    for n, kind, before in ((lo, boundaries[0], True), (hi, boundaries[1], False)):
        length = x.shape[d]
        rows = torch.arange(-n, 0) if before else torch.arange(length, length + n)
        if kind == "periodic":
            ends.append(x.index_select(d, rows % length))
        elif kind == "edge":
            ends.append(x.index_select(d, rows.clamp(0, length - 1)))
        elif kind.startswith("pole"):
            turned = x.roll(x.shape[d + 1] // 2, d + 1)
            near = turned.narrow(d, 0, n) if before else turned.narrow(d, length - n, n)
            ends.append(near.flip(d))
        else:
            value = float(kind.partition("(")[2].rstrip(")") or 0)
            ends.append(torch.full_like(x.narrow(d, 0, 1), value).repeat_interleave(n, d))
    return torch.cat([ends[0], x, ends[1]], d)


def boundaries_of(case: Case) -> tuple[str, str]:
    text = case["boundary"]
    if "replicate top" in text:
        return "edge", "constant(1)"
    for word, boundary in (("constant", "constant(1.234)"), ("circular", "periodic"), ("none", "none")):
        if text.startswith(word):
            return boundary, boundary
    return ("pole", "pole") if text.startswith("pole") else ("zero", "zero")


def check_halo(case: Case) -> None:
    """A plain halo: every block, and the gradient, which adds what overlaps at its owner."""
    mesh, shape, ends = mesh_of(case), tuple(case["global_shape"]), boundaries_of(case)
    halos = [
        f"halo([{','.join(map(str, lo))}],[{','.join(map(str, hi))}],{ends[0]},{ends[1]})"
        for lo, hi in zip(case["halo_before"], case["halo_after"], strict=True)
    ]
    src, dst = layout_of(case), layout_of(case, halos)
    x = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape).requires_grad_()
    blocks = [x.narrow(0, 0, shape[0])] * dist.get_world_size()
    whole = xs.Sharding(xs.Layout.parse(src), mesh, shape)
    for i, d in enumerate(case["sharded_dims"]):
        lo, hi = max(case["halo_before"][i]), max(case["halo_after"][i])
        for device in range(len(blocks)):
            part = whole.dim_device(d, device)
            start, rows = whole.owners(d)[part][0].start, whole.local_sizes[d][part]
            first, last = start - case["halo_before"][i][part], start + rows + case["halo_after"][i][part]
            if "none" in ends:  # no rows there are: none are held
                first, last = max(first, 0), min(last, shape[d])
            wide = widened(blocks[device], d, lo, hi, ends)
            blocks[device] = wide.narrow(d, first + lo, last - first)
    mine = scattered(x, src, mesh).requires_grad_()
    y = xt.redistribute(mine, f"{src} -> {dst}", mesh, shape=shape)
    assert torch.equal(y, blocks[dist.get_rank()])
    cotangents = [torch.arange(b.numel(), dtype=torch.float64).reshape(b.shape) % 7 for b in blocks]
    sum((b * c).sum() for b, c in zip(blocks, cotangents, strict=True)).backward()
    y.backward(cotangents[dist.get_rank()])
    assert torch.equal(mine.grad, scattered(x.grad, src, mesh))
    back = xt.redistribute(y.detach(), f"{dst} -> {src}", mesh, shape=shape)
    assert torch.equal(back, mine)
    whole_numbers = (torch.int32, torch.int64) if "1.234" not in case["boundary"] else ()
    for dtype in (torch.float32, *whole_numbers):
        moved = xt.redistribute(mine.detach().to(dtype), f"{src} -> {dst}", mesh, shape=shape)
        assert torch.equal(moved, y.detach().to(dtype))


def check_causal(case: Case) -> None:
    """A depthwise causal convolution; where documents are packed, each is one by itself."""
    mesh, shape = mesh_of(case), tuple(case["global_shape"])
    k = int(re.findall(r"k=(\d+)", case["op"])[0])
    layout = f"b c s/{'zigzag' if case['layout'] == 'zigzag' else 'block'}(m0)".replace("block(m0)", "m0")
    torch.manual_seed(0)
    weight = torch.randn(shape[1], 1, k, dtype=torch.float64).requires_grad_()
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    lengths = [1, 9] if "document" in case["note"] else [shape[2]]
    masks = torch.zeros(len(lengths), shape[2], dtype=torch.float64)
    for mask, (start, stop) in zip(
        masks, itertools.pairwise(itertools.accumulate(lengths, initial=0)), strict=True
    ):
        mask[start:stop] = 1
    y = sum(m * F.conv1d(F.pad(m * x, (k - 1, 0)), weight, groups=shape[1]) for m in masks)
    (y * weights_of(y)).sum().backward()
    block, mine = scattered(x, layout, mesh).requires_grad_(), weight.detach().clone().requires_grad_()
    placed = placed_as(block, layout, mesh, shape)
    causal = Convolution((k,), (1,), ((k - 1, 0),), (1,), groups=shape[1])
    parts = [scattered(m, layout.removeprefix("b c "), mesh) for m in masks]
    out = sum(m * conv(m * block, placed, mine, None, causal)[0] for m in parts)
    (out * scattered(weights_of(y), layout, mesh)).sum().backward()
    for found, wanted in (
        (out, scattered(y, layout, mesh)),
        (block.grad, scattered(x.grad, layout, mesh)),
        (mine.grad, weight.grad),
    ):
        assert (found - wanted).abs().max() <= TOLERANCE


def check_neighbourhood(case: Case) -> None:
    """Attention over a window that is shifted at the ends of the array: halos of q, k, v, then a trim."""
    mesh, shape, k = mesh_of(case), tuple(case["global_shape"]), 5
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64).requires_grad_()

    def attention(q: Tensor, keys: Tensor, v: Tensor) -> Tensor:
        h, w = q.shape[1:3]
        rows, columns = (
            (torch.arange(n) - k // 2).clamp(0, n - k)[:, None] + torch.arange(k) for n in (h, w)
        )
        near = [t[:, rows][:, :, :, columns] for t in (keys, v)]  # b h k w k heads d
        scores = torch.einsum("bhwnd,bhiwjnd->bhwnij", q, near[0]).flatten(-2).softmax(-1)
        return torch.einsum("bhwnij,bhiwjnd->bhwnd", scores.unflatten(-1, (k, k)), near[1])

    y = attention(*x)
    (y * weights_of(y)).sum().backward()
    src, dst = (f"b h/m0{overlap} w n d" for overlap in ("", ":halo(2,2,none)"))
    block = scattered(x, f"q {src}", mesh).requires_grad_()
    wide = [xt.redistribute(part, f"{src} -> {dst}", mesh, shape=shape) for part in block]
    out = xt.redistribute(attention(*wide), f"{dst} -> {src}", mesh, shape=shape)
    (out * scattered(weights_of(y), src, mesh)).sum().backward()
    assert (out - scattered(y, src, mesh)).abs().max() <= TOLERANCE
    assert (block.grad - scattered(x.grad, f"q {src}", mesh)).abs().max() <= TOLERANCE


def check(case: Case) -> None:
    kind = case["op"].split()[0]
    {"plain": check_halo, "causal": check_causal, "na2d": check_neighbourhood}.get(kind, check_module)(case)


def check_all(names: list[str]) -> int:
    for name in names:
        try:
            check(CASES[name])
        except Exception as error:
            error.add_note(f"in case {name}")
            raise
    return len(names)


@pytest.mark.parametrize("n", sorted({n for c in CASES.values() if (n := n_devices(c)) <= MOST_RANKS}))
def test_cases_on_ranks(n: int) -> None:
    names = [name for name, case in CASES.items() if n_devices(case) == n]
    assert on_ranks(n, check_all, names) == [len(names)] * n


@pytest.mark.parametrize("name", [name for name, c in CASES.items() if n_devices(c) > MOST_RANKS])
def test_larger_cases_on_the_reference(name: str) -> None:
    """Blocks of the reference, convolved one by one; gradients by the plan's adjoint."""
    case = CASES[name]
    mesh, shape, given = mesh_of(case), shape_of(case), options_of(case["op"])
    torch.manual_seed(0)
    module = module_of(case).double()
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    y = module(x)
    (y * weights_of(y)).sum().backward()
    sharding = xs.Sharding(xs.Layout.parse(layout_of(case)), mesh, shape)
    options = zip(given["k"], given["s"], given["d"], given["p"], strict=True)
    dims, results = [*sharding.layout.dims], [*sharding.layout.dims]
    for d, numbers in enumerate(options, 2):
        frame = window_frame(dims[d], shape[d], mesh.sizes_of(dims[d].axes), Window(*numbers))
        dims[d], results[d] = frame.source, frame.result
    plan = xs.plan((sharding.layout, xs.Layout(tuple(dims))), mesh, shape, "float64")
    made = xs.Sharding(xs.Layout(tuple(results)), mesh, tuple(y.shape))
    blocks = reference.run(plan, reference.scatter(x.detach().numpy(), sharding.layout, mesh))
    outputs = reference.scatter(y.detach().numpy(), made.layout, mesh)
    cotangents = reference.scatter(weights_of(y).numpy(), made.layout, mesh)
    of_weight, of_blocks = torch.zeros_like(module.weight), []
    convolve = F.conv2d if len(shape) == 4 else F.conv3d
    for block, output, cotangent in zip(blocks, outputs, cotangents, strict=True):
        rows = torch.from_numpy(block.copy()).requires_grad_()
        weight = module.weight.detach().clone().requires_grad_()
        mine = convolve(rows, weight, module.bias.detach(), given["s"], 0, given["d"])
        assert (mine.detach() - torch.from_numpy(output)).abs().max() <= TOLERANCE
        mine.backward(torch.from_numpy(cotangent.copy()))
        of_weight += weight.grad
        of_blocks.append(rows.grad.numpy())
    of_x = reference.gather(reference.run(plan.backward, of_blocks), sharding.layout, mesh, shape)
    assert (torch.from_numpy(of_x) - x.grad).abs().max() <= TOLERANCE
    assert (of_weight - module.weight.grad).abs().max() <= TOLERANCE
    for i, d in enumerate(case["sharded_dims"]):
        assert sizes(made, d) == case["out_sizes"][i]
