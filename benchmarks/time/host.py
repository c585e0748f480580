"""Processor time of a module's calls on two ranks, with and without prefetch.

    python -m benchmarks.time.host

Waiting is not counted: it is the time of Python, torch and this package. Prints a table.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import torch_bridge as xt
from benchmarks import record
from xshard import Mesh

LAYERS = 16
WIDTH = 8
PARAMETERS = 1, 4, 9
ROUNDS = 150
PARTS = "forward, no_grad", "forward", "backward"


class Layer(nn.Module):
    """Reads each of its parameters once, so that little else takes time."""

    def __init__(self, n_parameters: int) -> None:
        super().__init__()
        parameters = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(n_parameters)]
        self.parameters_of_layer = nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters_of_layer:
            x = x + parameter
        return x


def made(n_parameters: int, prefetch: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(*[Layer(n_parameters) for _ in range(LAYERS)])
    rules = {"**": "o/dp i -> o i"}
    mesh = Mesh(dp=2)
    return xt.parallelize(layers, rules, {"": "b/dp s c"}, mesh, gathers="*", prefetch=prefetch)


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def one_round(model: nn.Module, x: Tensor) -> list[float]:
    """The seconds of each of `PARTS`."""
    with torch.no_grad():
        without_graph, _ = seconds_of(lambda: model(x))
    forward, y = seconds_of(lambda: model(x))
    loss = y.sum()
    backward, _ = seconds_of(loss.backward)
    return [without_graph, forward, backward]


def measured() -> dict[tuple[int, int], list[float]]:
    """Microseconds of a module in each of `PARTS`, by the number of parameters and `prefetch`."""
    torch.set_num_threads(1)
    x = torch.randn(2, WIDTH, WIDTH)
    found = {}
    for n_parameters in PARAMETERS:
        models = {prefetch: made(n_parameters, prefetch) for prefetch in (0, 1)}
        rounds: dict[int, list[list[float]]] = {0: [], 1: []}
        for _ in range(ROUNDS):
            for prefetch, model in models.items():
                rounds[prefetch].append(one_round(model, x))
        for prefetch, seconds in rounds.items():
            medians = map(statistics.median, zip(*seconds[10:], strict=True))
            found[n_parameters, prefetch] = [median / LAYERS * 1e6 for median in medians]
    return found


def shown(found: dict[tuple[int, int], list[float]]) -> Table:
    lines = []
    for n_parameters in PARAMETERS:
        pairs = zip(found[n_parameters, 0], found[n_parameters, 1], strict=True)
        cells = [
            f"{waiting:.0f} -> {ahead:.0f} ({ahead - waiting:+.0f})" for waiting, ahead in pairs
        ]
        lines.append((str(n_parameters), *cells))
    title = "Microseconds of a module: prefetch=0 -> prefetch=1"
    return record.table(title, ("parameters", *PARTS), lines, n_left=1)


if __name__ == "__main__":
    record.console().print(shown(xt.testing.run_ranks(2, measured)[0]))
