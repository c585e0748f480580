"""The block trained in torch, on the processes of a world."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

import torch_bridge as xt
from llama.data import LEARNING_RATE, Array, Run, initial_weights, windows
from llama.layouts import Scheme
from llama.model_torch import Llama
from torch_bridge.testing.byte_counter import Meter
from xshard import reference


def train(schemes: Sequence[Scheme], steps: int) -> list[Run]:
    """One training run per scheme, on one process per device."""
    n = schemes[0].mesh.n_devices
    by_rank = xt.testing.run_ranks(n, lambda: [_train(scheme, steps) for scheme in schemes])
    return [
        _whole(scheme, runs)
        for scheme, runs in zip(schemes, zip(*by_rank, strict=True), strict=True)
    ]


def _train(scheme: Scheme, steps: int) -> Run:
    """What every process calls; the gradients are its blocks."""

    def place(array: ArrayLike, layout: str) -> Tensor:
        return torch.tensor(reference.scatter(array, layout, scheme.mesh)[dist.get_rank()])

    weights = {
        name: place(value, scheme.stored(name)).requires_grad_()
        for name, value in initial_weights().items()
    }
    model = Llama(weights, scheme)
    losses = []
    for window in windows(steps):
        characters, following = (place(array, scheme.tokens) for array in window)
        with Meter() as meter:
            loss = model.loss(characters, following)
            gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= LEARNING_RATE * gradient
        losses.append(loss.item())
    blocks = {name: gradient.numpy() for name, gradient in zip(weights, gradients, strict=True)}
    return Run(losses, blocks, len(meter.received), sum(meter.received))


def _whole(scheme: Scheme, runs: Sequence[Run]) -> Run:
    """One run, with the gradients of all processes put together."""

    def gathered(name: str, shape: tuple[int, ...]) -> Array:
        blocks = [run.gradients[name] for run in runs]
        return reference.gather(blocks, scheme.stored(name), scheme.mesh, shape)

    gradients = {name: gathered(name, value.shape) for name, value in initial_weights().items()}
    return runs[0]._replace(
        gradients=gradients, received_bytes=max(run.received_bytes for run in runs)
    )
