"""One training script, three ways to be parallel: DDP, FSDP2 and DTensor tensor parallelism, on a 2x2 mesh.

    python examples/mixed_parallel.py             # four gloo processes beside one

The batch is cut over `dp`, layers over `tp`. The encoder is replicated by DistributedDataParallel and cut
over `tp` by layouts alone; the decoder is cut over `tp` by DTensor and over `dp` by FSDP2. Both call
redistribute in the middle of their forward pass. Characters of Python's own documentation are the data.
The exit status is 1 if a loss or a gradient differs from one process.
"""

from __future__ import annotations

import copy
from pydoc_data.topics import topics

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from support.runs import options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel

import torch_bridge as xt

BATCH = 4
LENGTH = 32
CHANNELS = 16
HIDDEN = 32
LETTERS = 128
RATE = 0.5
TOLERANCE = 1e-10  # relative, of float64

Run = tuple[list[float], dict[str, Tensor]]


class Encoder(nn.Module):
    """Characters -> channels, with a mean over all characters before; layouts cut its layers over `tp`."""

    def __init__(self, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.letters = nn.Embedding(LETTERS, CHANNELS)
        self.up = nn.Parameter(torch.randn(CHANNELS, HIDDEN) / CHANNELS**0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN, CHANNELS) / HIDDEN**0.5)

    def cut(self, tp: DeviceMesh) -> Encoder:
        """The same with this process's parts of `up` and `down`."""
        part = copy.deepcopy(self)
        part.tp = tp
        for name, layout in (("up", "c f/tp"), ("down", "f/tp c")):
            full = getattr(self, name).detach()
            expression = f"{layout.replace('/tp', '')} -> {layout}"
            setattr(part, name, nn.Parameter(xt.redistribute(full, expression, tp)))
        return part

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text)
        partial = relu(self.move(x, "b s c -> b s c | copy(tp)") @ self.up) @ self.down
        x = x + self.move(partial, "b s c | sum(tp) -> b s c")
        # Every process has all positions of some channels, as after an all-to-all.
        some = self.move(x, "b s c -> b s c/tp")
        means = some.cumsum(1) / torch.arange(1, LENGTH + 1).view(-1, 1)
        return x + self.move(means, "b s c/tp -> b s c")

    def move(self, x: Tensor, expression: str) -> Tensor:
        return x if self.tp is None else xt.redistribute(x, expression, self.tp)


class Decoder(nn.Module):
    """Channels -> a score for every character that may come next; DTensor and FSDP2 cut it as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, HIDDEN), nn.Linear(HIDDEN, CHANNELS)
        self.scores = nn.Linear(CHANNELS, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(relu(self.up(self.norm(x))))
        scores = self.scores(x)
        if isinstance(scores, DTensor):  # each process has the scores of some characters
            scores = whole(scores).clone()  # FSDP2 warns of views
        return scores


def whole(x: DTensor) -> Tensor:
    return xt.dtensor.redistribute(x, [Replicate()] * x.device_mesh.ndim).to_local()


def models() -> tuple[Encoder, Decoder]:
    torch.manual_seed(0)
    return Encoder().double(), Decoder().double()


def batches(steps: int) -> Tensor:
    text = " ".join(topics.values()).encode("ascii", "replace")
    n = BATCH * (LENGTH + 1)
    characters = torch.frombuffer(bytearray(text[: steps * n]), dtype=torch.uint8).long()
    return characters.view(steps, BATCH, LENGTH + 1)


def train(encoder: nn.Module, decoder: nn.Module, text: Tensor) -> list[float]:
    """The losses of this process's part of every batch; gradients stay from the last one."""
    parameters = [*encoder.parameters(), *decoder.parameters()]
    losses = []
    for batch in text:
        for parameter in parameters:
            parameter.grad = None
        scores = decoder(encoder(batch[:, :-1]))
        loss = cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= RATE * parameter.grad
        losses.append(loss.item())
    return losses


def alone(steps: int) -> Run:
    """Losses and last gradients on one process."""
    encoder, decoder = models()
    losses = train(encoder, decoder, batches(steps))
    named = [
        *encoder.named_parameters(prefix="encoder"),
        *decoder.named_parameters(prefix="decoder"),
    ]
    return losses, {name: p.grad for name, p in named}


def together(steps: int) -> Run:
    """Losses and last gradients on a mesh of 2x2 processes, gathered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    tp = mesh["tp"]
    encoder, decoder = models()
    encoder = encoder.cut(tp)
    replicated = DistributedDataParallel(encoder, process_group=dp.get_group())
    ways = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "scores": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(decoder, tp, ways)
    fully_shard(decoder, mesh=dp)
    text = xt.redistribute(batches(steps), "n b s -> n b/dp s", dp)
    losses = torch.tensor(train(replicated, decoder, text), dtype=torch.float64)
    losses = xt.ops.all_reduce(losses, "dp", dp, op="mean", grad="replicated")
    gradients = {f"decoder.{name}": whole(p.grad) for name, p in decoder.named_parameters()}
    gradients["encoder.letters.weight"] = encoder.letters.weight.grad
    gradients["encoder.up"] = xt.redistribute(encoder.up.grad, "c f/tp -> c f", tp)
    gradients["encoder.down"] = xt.redistribute(encoder.down.grad, "f/tp c -> f c", tp)
    return losses.tolist(), gradients


def judge(one: Run, four: Run, console: Console) -> int:
    """Print both, and what is wrong; 0 if nothing is."""
    table = Table("step", "one process", "2x2 processes", box=SIMPLE)
    for step, (a, b) in enumerate(zip(one[0], four[0], strict=True)):
        table.add_row(str(step), f"{a:.12f}", f"{b:.12f}")
    console.print(table)
    loss = max(abs(a - b) / a for a, b in zip(one[0], four[0], strict=True))
    gradient = max(
        float((g - four[1][name]).abs().max() / g.abs().max()) for name, g in one[1].items()
    )
    console.print(f"largest relative difference: losses {loss:.1e}, gradients {gradient:.1e}")
    if loss <= TOLERANCE and gradient <= TOLERANCE:
        return 0
    console.print(f"They differ by more than {TOLERANCE:.0e}.")
    return 1


def main() -> int:
    steps = options(__doc__, steps=8).parse_args().steps
    # Before the first backward pass here: the ranks are forked.
    four = xt.testing.run_ranks(4, together, steps)
    return max(judge(alone(steps), run, Console(quiet=rank > 0)) for rank, run in enumerate(four))


if __name__ == "__main__":
    raise SystemExit(main())
