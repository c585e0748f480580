"""The network in torch: on one process, without anything of xshard, and on a process per part."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
from sphere.mesh import Rows
from sphere.network import HALO, NODES, Array, Arrays, Parts, Problem, Run, network
from torch_bridge.testing.byte_counter import Meter

Weights = dict[str, Tensor]

# Each device uses the weights for its own rows, so that their gradients are summed.
COPIES = "i o -> i o | copy(gp)"


def alone(problem: Problem) -> Run:
    """One step, forward and backward, on one device."""
    graph = problem.senders, problem.receivers
    call = _step, problem, problem.arrays, graph, lambda x: x, lambda w: w, lambda e: e
    ((output, gradients),) = xt.testing.run_ranks(1, *call)
    return Run(output, gradients, received_bytes=0)


def run(parts: Parts) -> Run:
    """The same on a device per part."""
    steps, received = zip(*xt.testing.run_ranks(parts.mesh.n_devices, _part, parts), strict=True)
    output, gradients = zip(*steps, strict=True)
    nodes, edges = ([found.pop(name) for found in gradients] for name in ("nodes", "edges"))
    return parts.joined(output, nodes, edges, gradients[0], max(received))


def _part(parts: Parts) -> tuple[tuple[Array, dict[str, Array]], int]:
    """What every process calls: its rows of the output and its gradients; bytes before a layer."""
    rank = dist.get_rank()
    mesh = parts.mesh
    received = []

    def read(nodes: Tensor) -> Tensor:
        with Meter() as meter:
            wide = xt.redistribute(nodes, f"{NODES} -> {HALO}", mesh, maps=parts.maps)
        received.append(sum(meter.received))
        return wide

    def copied(weights: Weights) -> Weights:
        return xt.redistribute(weights, dict.fromkeys(weights, COPIES), mesh)

    def total(share: Tensor) -> Tensor:
        return xt.redistribute(share, "() | sum(gp) -> ()", mesh)

    found = _step(parts.problem, parts.blocks()[rank], parts.local[rank][1:], read, copied, total)
    return found, max(received)


def _step(
    problem: Problem,
    block: Arrays,
    graph: tuple[Rows, Rows],
    read: Callable[[Tensor], Tensor],
    copied: Callable[[Weights], Weights],
    total: Callable[[Tensor], Tensor],
) -> tuple[Array, dict[str, Array]]:
    nodes, expected, edges = map(torch.tensor, block)
    weights = {name: torch.tensor(array) for name, array in problem.weights.items()}
    asked = {**weights, "nodes": nodes, "edges": edges}
    for tensor in asked.values():
        tensor.requires_grad_()
    output = network(
        copied(weights),
        nodes,
        edges,
        *map(torch.tensor, graph),
        read=read,
        take=lambda x, rows: x[rows],
        add=lambda x, rows, y: torch.zeros_like(x).index_add(0, rows, y),
        join=partial(torch.cat, dim=-1),
        silu=torch.nn.functional.silu,
    )
    share = (output - expected).square().sum() / np.prod(problem.arrays.nodes.shape)
    gradients = torch.autograd.grad(total(share), [*asked.values()])
    return output.detach().numpy(), {
        name: g.numpy() for name, g in zip(asked, gradients, strict=True)
    }
