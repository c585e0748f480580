"""Muon on ZeRO-3 storage: every matrix is whole on one device while it is made orthogonal.

    python examples/muon.py

Momenta are cut into rows over `fsdp`. A step moves all of them to their owners in one exchange, makes each
orthogonal there, and moves the updates back in another. The updates are those of one device.
"""

import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs

MESH = xs.Mesh(fsdp=4)
LAYER = {"qkv": (96, 32), "up": (64, 32), "down": (32, 64)}
SHAPES = {f"{i}.{name}": shape for i in range(6) for name, shape in LAYER.items()}
OWNED = xs.owned(SHAPES, MESH, "fsdp")
THERE = {name: f"o/fsdp i -> {OWNED.find(name)}" for name in SHAPES}
BACK = {name: f"{OWNED.find(name)} -> o/fsdp i" for name in SHAPES}


def newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """A matrix with the same singular vectors, and singular values near 1: Jordan's quintic, five times."""
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def step(momenta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of the momenta -> rows of the updates."""
    whole = xt.redistribute(momenta, THERE, MESH, shape=SHAPES)
    updates = {name: newton_schulz(g) if len(g) else g for name, g in whole.items()}
    return xt.redistribute(updates, BACK, MESH, shape=SHAPES)


def train() -> float:
    """The largest difference between the updates of this rank's rows and one device's."""
    torch.manual_seed(0)
    momenta = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    rank = dist.get_rank()
    updates = step({name: g.chunk(4)[rank] for name, g in momenta.items()})
    return max(
        float((updates[n] - newton_schulz(g).chunk(4)[rank]).abs().max())
        for n, g in momenta.items()
    )


if __name__ == "__main__":
    difference = max(xt.testing.run_ranks(4, train))
    plans = [xs.plan(THERE[name], MESH, shape) for name, shape in SHAPES.items()]
    load = [
        sum(plan.target.local_shape(device)[0] * plan.shape[1] for plan in plans)
        for device in range(4)
    ]
    print(f"{len(SHAPES)} matrices, elements per device {load}, largest difference {difference}")
