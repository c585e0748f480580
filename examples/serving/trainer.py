"""The trainer: `python -m serving.trainer PORT LAST FIRST KILL` publishes versions from four ranks."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
from serving.model import ENDS, KILLED, SHAPES, SHAPES_SENT, TRAINER, initial, loss, window
from xshard import reference

RATE = 2.0
STEPS = 5  # of a version


def train(port: int, last: int, first: int, kill: int) -> None:
    """Publish versions of the weights; a rank is killed in the middle of number `kill`."""
    weights = {
        name: torch.from_numpy(
            reference.scatter(x.numpy(), "o/fsdp i", TRAINER)[dist.get_rank()].copy()
        )
        for name, x in initial().items()
    }
    publisher = xt.live.Publisher(store=dist.TCPStore("127.0.0.1", port), **ENDS)
    for number in range(1, last + 1):
        for step in range(STEPS):
            weights = trained(weights, window(number * STEPS + step))
        if number < first:  # trained again, as after a checkpoint
            continue

        def stop(done: int, total: int, number: int = number) -> None:
            if number == kill and dist.get_rank() == 1 and 0 < done < total:
                os.kill(os.getpid(), signal.SIGKILL)

        with torch.no_grad():
            known = loss(gathered(weights), window(0))
        tree = {"weights": weights, "number": torch.tensor(number), "loss": known}
        publisher.publish(tree, SHAPES_SENT, progress=stop)


def gathered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights; their gradients are summed over the ranks, and each gets its part."""
    return {
        name: xt.redistribute(x, "o/fsdp i -> o i | copy(fsdp)", TRAINER, shape=SHAPES[name])
        for name, x in weights.items()
    }


def trained(weights: dict[str, Tensor], characters: Tensor) -> dict[str, Tensor]:
    """A step down the gradient of the mean over all ranks' parts of the characters."""
    own = characters.chunk(TRAINER.n_devices)[dist.get_rank()]
    leaves = [x.requires_grad_() for x in weights.values()]
    gradients = torch.autograd.grad(loss(gathered(weights), own) / TRAINER.n_devices, leaves)
    return {
        name: x.detach() - RATE * g for (name, x), g in zip(weights.items(), gradients, strict=True)
    }


if __name__ == "__main__":
    try:
        xt.testing.run_ranks(TRAINER.n_devices, train, *map(int, sys.argv[1:]))
    except xt.testing.RankError as error:
        if "SIGKILL" not in str(error):
            raise
        sys.exit(KILLED)
