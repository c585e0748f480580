"""The network in torch, on one device, or with its rows on four processes.

    python -m domain.with_torch {single,sharded} FOLDER STEPS

`UNet` is an ordinary model that knows no mesh. `domain_parallel` makes it a sharded one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # noqa: F401  which an optimiser needs: once here, not on every rank
import torch.distributed as dist
from support.runs import run_in_torch
from torch import Tensor, nn

import torch_bridge as xt
from domain import data
from xshard import reference


class UNet(nn.Module):
    """Down by a stride and a pool, up by a transposed convolution and by interpolation, with skips.

    height: rows of the image, to which the last stage interpolates.
    """

    def __init__(self, height: int = data.HEIGHT) -> None:
        super().__init__()
        self.ring = nn.CircularPad2d((1, 1, 0, 0))
        out = {name: shape[:2] for name, shape in data.KERNELS.items()}
        self.first, self.middle, self.merge, self.last = (
            nn.Conv2d(out[name][1], out[name][0], 3, padding=(1, 0))
            for name in ("first", "middle", "merge", "last")
        )
        self.down = nn.Conv2d(*out["down"][::-1], 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(*out["up"], 4, stride=2, padding=1)
        self.norm_first, self.norm_down, self.norm_middle = (
            nn.GroupNorm(data.GROUPS, features) for features in data.NORMS.values()
        )
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.whole = nn.Upsample((height, data.WIDTH), mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        full = torch.relu(self.norm_first(self.first(self.ring(x))))
        half = torch.relu(self.norm_down(self.down(full)))
        quarter = torch.relu(self.norm_middle(self.middle(self.ring(self.pool(half)))))
        half = self.merge(self.ring(torch.cat([self.up(quarter), half], dim=1)))
        return self.last(self.ring(torch.cat([self.whole(torch.relu(half)), full], dim=1)))


def initial(height: int = data.HEIGHT) -> UNet:
    """The network with the first weights."""
    model = UNet(height)
    model.load_state_dict(
        {name: torch.tensor(value) for name, value in data.initial_weights().items()}
    )
    return model


def train(
    model: nn.Module, x: Tensor, target: Tensor, total: Callable[[Tensor], Tensor], steps: int
) -> Iterator[dict[str, float]]:
    """Yield the losses of SGD on the mean square error. total: adds up devices' shares of a loss."""
    optimiser = torch.optim.SGD(model.parameters(), data.LEARNING_RATE, data.MOMENTUM)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = total((model(x) - target).square().sum() / (2 * 3 * data.HEIGHT * data.WIDTH))
        loss.backward()
        optimiser.step()
        yield {"loss": loss.item()}


def single(folder: str, steps: int) -> Iterator[dict[str, float]]:
    """Train on one device; save the untrained network's output on the photographs."""
    noisy, clean = map(torch.tensor, data.photographs())
    model = initial()
    with torch.no_grad():
        np.save(Path(folder, "whole.npy"), model(noisy).numpy())
    return train(model, noisy, clean, lambda share: share, steps)


def alone(block: Tensor) -> Tensor:
    """The ordinary network's output on a process's own rows, with zeros beyond them on every side.

    Blocks that are a row shorter are padded: the skips of the network fit no even number of rows.
    """
    rows = -(-data.HEIGHT // data.MESH.n_devices)
    filled = nn.functional.pad(block, (0, 0, 0, rows - block.shape[2]))
    return initial(rows)(filled)[:, :, : block.shape[2]]


def sharded(folder: str, steps: int) -> Iterator[dict[str, float]]:
    """Train on the processes of a world; every one of them calls this."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    noisy, clean = (
        torch.tensor(reference.scatter(a, data.LAYOUT, data.MESH)[rank]) for a in data.photographs()
    )
    shape = (2, 3, data.HEIGHT, data.WIDTH)
    model = initial()
    parallel = xt.nn.domain_parallel(model, data.LAYOUT, data.MESH, shape=shape)
    with torch.no_grad():
        for name, block in (("sharded", parallel(noisy)), ("alone", alone(noisy))):
            image = xt.redistribute(block, f"{data.LAYOUT} -> n c h w", data.MESH, shape=shape)
            if rank == 0:
                np.save(Path(folder, f"{name}.npy"), image.numpy())

    def total(share: Tensor) -> Tensor:
        return xt.redistribute(share, "() | sum(sp) -> ()", data.MESH)

    return train(parallel, noisy, clean, total, steps)


if __name__ == "__main__":
    run_in_torch(single, sharded, data.MESH.n_devices)
