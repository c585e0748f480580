"""A pipeline of two stages on meshes of different shape, in the order of a schedule of torch's.

    python examples/pipeline.py

`torch.distributed.pipelining` says in which order a stage computes: one forward and one backward pass by
turns (1F1B), or with gradients of weights in the gaps (zero bubble). Its own stages are single ranks, and
all have as many ranks. Here a stage is a mesh of any shape. A move between two meshes is planned, has a
gradient, and is called by their ranks alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import torch_bridge as xt

SCHEDULES = {"1F1B": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}
BATCHES, ROWS, WIDTH, INNER = 4, 2, 3, 6


@dataclass(frozen=True)
class Pipeline:
    """The axes of both stages, and the layouts of their products and of what moves between them."""

    first_axis: str
    first: str
    moved: str
    second_axis: str
    second: str


PIPELINES = {
    "tp=2, then tp=3": Pipeline(
        "tp", "b w, w h/tp -> b h/tp", "b h/tp -> b h/tp", "tp", "b h/tp, h/tp o -> b o"
    ),
    "dp=2, then tp=3": Pipeline(
        "dp", "b/dp w, w h -> b/dp h", "b/dp h -> b h/tp", "tp", "b h/tp, h/tp o -> b o"
    ),
}


@dataclass
class Stage:
    """What both stages have: the move between them, their weight, and what passes have left open."""

    pipeline: Pipeline
    meshes: tuple[DeviceMesh, DeviceMesh]
    weight: Tensor
    open: dict[int, Any] = field(default_factory=dict)

    def move(self, hidden: Tensor | None) -> Any:
        """Begin to send or to receive one micro-batch; its gradient comes back the same way."""
        src_mesh, dst_mesh = self.meshes
        return xt.redistribute(
            hidden,
            self.pipeline.moved,
            src_mesh=src_mesh,
            dst_mesh=dst_mesh,
            shape=(ROWS, INNER),
            dtype=torch.float64,
            requires_grad=True,
            async_op=True,
        )


class First(Stage):
    """relu(x w): forward sends, backward receives."""

    def forward(self, i: int, x: Tensor) -> None:
        """Compute a micro-batch, and send it."""
        y = xt.einsum(self.pipeline.first, x, self.weight, mesh=self.meshes[0]).relu()
        sent = y.detach().requires_grad_()
        self.open[i] = (y, sent, self.move(sent))

    def backward_input(self, i: int) -> None:
        """Receive the gradient of a micro-batch."""
        self.open[i][2].sum().backward()

    def backward_weight(self, i: int) -> None:
        """Add to the gradient of the weight."""
        y, sent, _ = self.open.pop(i)
        y.backward(sent.grad)


class Second(Stage):
    """The loss, the sum of (hidden w)^2: forward receives, backward sends."""

    def forward(self, i: int, x: Tensor) -> None:
        """Receive a micro-batch, and compute its loss."""
        arrived = self.move(None)
        hidden = arrived.detach().requires_grad_()
        y = xt.einsum(self.pipeline.second, hidden, self.weight, mesh=self.meshes[1])
        self.open[i] = (arrived, hidden, y.square().sum())

    def backward_input(self, i: int) -> None:
        """Send the gradient of a micro-batch."""
        arrived, hidden, loss = self.open[i]
        arrived.backward(*torch.autograd.grad(loss, hidden, retain_graph=True))

    def backward_weight(self, i: int) -> None:
        """Add to the gradient of the weight."""
        self.open.pop(i)[2].backward(inputs=[self.weight])


def order_of(name: str, number: int) -> list[tuple[str, int]]:
    """What a stage does in a step: F is forward, B backward, or I and W for inputs and weights alone."""
    # A schedule reads no more than this of a stage to find the order.
    place = SimpleNamespace(
        num_stages=2, group_size=2, group_rank=number, stage_index=number, submod=None
    )
    actions = SCHEDULES[name]([place], BATCHES).pipeline_order[number]
    return [
        (action.computation_type.value, action.microbatch_index)
        for action in actions
        if action is not None  # a bubble
    ]


def run(stage: Stage, number: int, name: str, x: Tensor) -> None:
    """Run all micro-batches of a step in the order of a schedule."""
    for kind, i in order_of(name, number):
        if kind == "F":
            stage.forward(i, x[i])
        if kind in ("I", "B"):
            stage.backward_input(i)
        if kind in ("W", "B"):
            stage.backward_weight(i)


def whole() -> tuple[Tensor, Tensor, Tensor]:
    """Micro-batches and the weights of both stages, in integers."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((BATCHES, ROWS, WIDTH), (WIDTH, INNER), (INNER, WIDTH))
    x, first, second = (torch.randint(-3, 4, size, generator=generator) for size in sizes)
    return x.double(), first.double().requires_grad_(), second.double().requires_grad_()


def train(pipeline: Pipeline, name: str) -> bool:
    """Whether this rank's gradient is its block of the gradient on one device."""
    first_mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(pipeline.first_axis,))
    second_mesh = DeviceMesh("cpu", [2, 3, 4], mesh_dim_names=(pipeline.second_axis,))
    meshes = (first_mesh, second_mesh)
    number = int(dist.get_rank() >= 2)
    x, *weights = whole()
    inputs, weight_layout = [pipeline.first, pipeline.second][number].split(" ->")[0].split(", ")

    def block(x: Tensor, layout: str) -> Tensor:
        """Cut this rank's block out of a whole tensor."""
        dims = " ".join(dim.split("/")[0] for dim in layout.split())
        return xt.redistribute(x.detach(), f"{dims} -> {layout}", meshes[number])

    weight = block(weights[number], weight_layout).requires_grad_()
    stage = [First, Second][number](pipeline, meshes, weight)
    if number == 0:
        x_here = torch.stack([block(batch, inputs) for batch in x])
    else:
        x_here = x  # it is not used
    run(stage, number, name, x_here)

    ((x @ weights[0]).relu() @ weights[1]).square().sum().backward()
    return torch.equal(weight.grad, block(weights[number].grad, weight_layout))


def main() -> dict[tuple[str, str], bool]:
    """Train one step of all pipelines by all schedules."""
    return {
        (shape, name): train(pipeline, name)
        for shape, pipeline in PIPELINES.items()
        for name in SCHEDULES
    }


if __name__ == "__main__":
    for name in SCHEDULES:
        for number in (0, 1):
            steps = [f"{kind}{i}" for kind, i in order_of(name, number)]
            print(f"{name}, stage {number}: {' '.join(steps)}")
    ranks = xt.testing.run_ranks(5, main)
    for shape, name in ranks[0]:
        are_equal = all(rank[shape, name] for rank in ranks)
        print(f"{shape}, {name}: gradients as on one device: {are_equal}")
