"""Convolutions that compute while rows travel, forward and backward.

Decides the order of work. Forward: the exchange begins, the interior is convolved, the exchange ends, the
borders are convolved. Backward: first the gradients of the borders; then, while those of rows travel back to
their owners, the gradients of the interior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_bridge.lower.executable import Executable
from torch_bridge.mesh.process_mesh import world
from torch_bridge.nn.conv import ConvGeometry, Convolution, conv, conv_geometry
from torch_bridge.nn.placed import Placement
from torch_bridge.planning import executable_of
from xshard.notation.parser import SEGMENTS

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """A box of outputs, and the rows they are made of: of the exchanged block, or of the device's own."""

    outputs: Slices
    rows: Slices


@dataclass(frozen=True)
class Regions:
    """All outputs of a device: the interior, made of its own rows, if any, and the borders around it."""

    interior: Region | None
    borders: tuple[Region, ...]


@dataclass(frozen=True)
class Job:
    """One convolution of one array, with the exchange that brings its rows."""

    convolution: Convolution
    placement: Placement
    geometry: ConvGeometry
    regions: Regions
    executable: Executable


def overlapped_conv(
    x: Tensor, placement: Placement, weight: Tensor, bias: Tensor | None, convolution: Convolution
) -> tuple[Tensor, Placement]:
    """`conv`, computing while rows travel; for orders with several runs of rows it is `conv` itself."""
    orders = {shard.order for dim in placement.layout.dims for shard in dim.shards}
    if orders & {"zigzag", "cyclic", SEGMENTS}:
        return conv(x, placement, weight, bias, convolution)
    geometry = conv_geometry(placement, convolution, weight.shape)
    expression = (placement.layout, geometry.windowed.source)
    executable = executable_of(
        expression, placement.processes, tuple(x.shape), x.dtype, x.device, placement.shape, world=world()
    )
    if x.requires_grad and torch.is_grad_enabled():
        executable.plan_gradient()
    weight_, bias_ = placement.copied(weight, bias)
    job = Job(convolution, placement, geometry, _regions(placement, convolution, geometry), executable)
    return OverlappedConv.apply(x, weight_, bias_, job), geometry.placement


class OverlappedConv(torch.autograd.Function):
    """`OverlappedConv.apply(x, weight, bias, job)`: this process's block of the outputs.

    Second derivatives are those of `conv`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
        convolution, placement, regions = job.convolution, job.placement, job.regions
        arrive = job.executable.begin(x)
        y = x.new_empty(job.geometry.placement.local_shape)
        if regions.interior is not None:
            own = convolution.padded(x[regions.interior.rows], placement)
            y[regions.interior.outputs] = convolution(own, weight, bias)
        block = arrive()
        for border in regions.borders:
            y[border.outputs] = convolution(convolution.padded(block[border.rows], placement), weight, bias)
        ctx.job = job
        ctx.save_for_backward(x, block, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        x, block, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return (*_plain_gradients(job, x, weight, bias, gradient, needs), None)
        regions = job.regions
        back = torch.zeros_like(block) if needs[0] else None
        parts = []
        for border in regions.borders:
            of_rows, *rest = _gradients(job, block[border.rows], weight, gradient[border.outputs], needs)
            parts.append(rest)
            if back is not None:
                back[border.rows] += of_rows
        arrive = None if back is None else job.executable.backward.begin(back)
        inner = None
        if regions.interior is not None:
            rows = x[regions.interior.rows]
            inner, *rest = _gradients(job, rows, weight, gradient[regions.interior.outputs], needs)
            parts.append(rest)
        of_x = None if arrive is None else arrive()
        if of_x is not None and inner is not None and regions.interior is not None:
            of_x[regions.interior.rows] += inner
        of_weight, of_bias = (
            sum((part[i] for part in parts), start=torch.zeros_like(p)) if p is not None and need else None
            for i, (p, need) in enumerate(zip((weight, bias), needs[1:], strict=True))
        )
        return of_x, of_weight, of_bias, None


def _gradients(job: Job, rows: Tensor, weight: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Any]:
    """The gradients of some rows, of the weight and of the bias, from the outputs made of these rows."""
    with torch.enable_grad():  # torch differentiates the padding of whole dims
        rows = rows.detach().requires_grad_()
        padded = job.convolution.padded(rows, job.placement)
    of_padded, *rest = _backward(job.convolution, gradient, padded.detach(), weight, needs)
    if padded is rows or not needs[0]:
        return [of_padded, *rest]
    return [torch.autograd.grad(padded, rows, of_padded)[0], *rest]


def _backward(
    convolution: Convolution, gradient: Tensor, padded: Tensor, weight: Tensor, needs: Sequence[bool]
) -> list[Any]:
    rank = len(convolution.kernel)
    batched = [x.reshape(-1, *x.shape[-rank - 1 :]) for x in (gradient, padded)]
    sizes = [weight.shape[0]] if needs[2] else None
    options = (convolution.stride, [0] * rank, convolution.dilation, False, [0] * rank, convolution.groups)
    of_padded, *rest = torch.ops.aten.convolution_backward(*batched, weight, sizes, *options, list(needs))
    return [of_padded.reshape(padded.shape) if needs[0] else None, *rest]


def _plain_gradients(
    job: Job, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients as functions that can be differentiated again.

    Weights are each device's own copies: nothing is summed here.
    """
    y = conv(x, replace(job.placement, copies=False), weight, bias, job.convolution)[0]
    inputs = (x, weight, bias)
    wanted = [v for v, need in zip(inputs, needs, strict=True) if need and v is not None]
    found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(found) if need else None for need in needs]


@lru_cache(maxsize=4096)
def _regions(placement: Placement, convolution: Convolution, geometry: ConvGeometry) -> Regions:
    """The interior, of outputs made of own rows along every cut dim, and the borders as slabs."""
    if not geometry.computes:
        return Regions(None, ())
    sharding, device, ndim = placement.sharding, placement.processes.device, len(placement.shape)
    cut = [(d, w) for d, w in convolution.windows(placement) if placement.cuts(d)]
    made = geometry.placement.sharding
    full, inner, own = {}, {}, {}
    for d, w in cut:
        at = sharding.dim_device(d, device)
        first = _start(made.owners(d), at) * w.s - w.padding[0]  # the row where the exchanged block begins
        mine = _start(sharding.owners(d), at)
        rows, n, span = sharding.local_shape(device)[d], made.local_shape(device)[d], w.d * (w.k - 1) + 1
        begin = min(max(-((first - mine) // w.s), 0), n)
        end = min(max((mine + rows - first - span) // w.s + 1, 0), n)
        full[d], inner[d] = (0, n), (begin, end)
        shift = first - mine
        own[d] = slice(begin * w.s + shift, (end - 1) * w.s + span + shift)
    windows = dict(cut)

    def box(found: dict[int, Any]) -> Slices:
        return tuple(found.get(d, slice(None)) for d in range(ndim))

    def region(outputs: dict[int, tuple[int, int]]) -> Region:
        rows = {
            d: slice(a * (w := windows[d]).s, (b - 1) * w.s + w.d * (w.k - 1) + 1)
            for d, (a, b) in outputs.items()
        }
        return Region(box({d: slice(*ends) for d, ends in outputs.items()}), box(rows))

    if any(begin >= end for begin, end in inner.values()):
        return Regions(None, (region(full),))
    borders = [region(slab) for slab in _slabs(full, inner)]
    outputs = box({d: slice(*ends) for d, ends in inner.items()})
    return Regions(Region(outputs, box(own)), tuple(borders))


def _slabs(
    full: dict[int, tuple[int, int]], inner: dict[int, tuple[int, int]]
) -> Iterator[dict[int, tuple[int, int]]]:
    """A box minus an inner box, as boxes before and after the inner one along every dim."""
    for j, d in enumerate(full):
        around = {e: (inner if i < j else full)[e] for i, e in enumerate(full)}
        for ends in ((full[d][0], inner[d][0]), (inner[d][1], full[d][1])):
            if ends[0] < ends[1]:
                yield around | {d: ends}


def _start(parts: tuple[Any, ...], at: int) -> int:
    """Where an interval of a dim begins; 0 for an empty one."""
    runs = parts[at]
    return int(runs[0].start) if runs else 0
