"""xshard in a minute: the bytes of a move, the right gradient, and one model trained in torch and in JAX.

    python examples/demo.py

The picture comes from the planner alone, which needs numpy. Meanwhile torch (four processes) and JAX (four
devices) start, each in a process of its own. The exit status is 1 if a gradient or a loss is wrong.
"""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import xshard as xs

MOVE = "s/zigzag(cp) c -> s c/cp"  # context parallel: from a part of the sequence to a part of the channels
GATHERS = {"n/dp -> n": 1.0, "n/dp -> n | copy(dp)": 4.0}  # with the gradient that each must have
MESH = xs.Mesh(dp=2, tp=2)
UP = "b/dp i, i h/tp -> b/dp h/tp"
DOWN = "b/dp h/tp, h/tp o -> b/dp o"
STEPS = 20
RATE = 0.3
TOLERANCE = 1e-5  # relative, for losses in float32


def data() -> tuple[np.ndarray, ...]:
    """Inputs [64, 8], targets [64, 4] and the weights [8, 32], [32, 4] of a network that learns them."""
    rng = np.random.default_rng(0)
    x, hidden, out = (rng.normal(size=shape).astype("f4") for shape in ((64, 8), (8, 32), (32, 4)))
    return x, np.tanh(x[:, :4] * x[:, 4:]), hidden / 4, out / 8


def blocks(layout: str, value: np.ndarray) -> list[np.ndarray]:
    """The block of every device of MESH."""
    return xs.reference.scatter(value, xs.Layout.parse(layout), MESH)


def in_torch() -> dict[str, Any]:
    """Gradients of four all-gathers, and the losses on one device and on four processes."""
    import torch
    import torch._dynamo  # noqa: F401  DTensor needs it: imported once, before there are four processes
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_single_autograd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import torch_bridge as xt

    def gradients() -> dict[str, float]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        gathers = {
            "torch functional collectives": lambda x: all_gather_single_autograd(x, 0, mesh),
            "torch DTensor": lambda x: DTensor.from_local(x, mesh, [Shard(0)]).full_tensor(),
        }
        gathers |= {
            f"xshard in torch: {text}": lambda x, t=text: xt.redistribute(x, t, mesh)
            for text in GATHERS
        }
        measured = {}
        for name, gather in gathers.items():
            x = torch.ones(2, requires_grad=True)
            gather(x).sum().backward()  # every process computes the same loss
            measured[name] = x.grad[0].item()
        return measured

    def losses(x, target, up, down, linear) -> list[float]:
        curve = []
        for _ in range(STEPS):
            loss = ((linear(DOWN, torch.tanh(linear(UP, x, up)), down) - target) ** 2).sum() / 64
            loss.backward()
            with torch.no_grad():
                for weight in (up, down):
                    weight -= RATE * weight.grad
                    weight.grad = None
            curve.append(loss.item())
        return curve

    def single() -> list[float]:
        x, target, up, down = map(torch.tensor, data())
        return losses(x, target, up.requires_grad_(), down.requires_grad_(), lambda _, a, b: a @ b)

    def sharded() -> list[float]:
        layouts = ("b/dp i", "b/dp o", "i h/tp", "h/tp o")
        x, target, up, down = (
            torch.tensor(blocks(layout, value)[dist.get_rank()])
            for layout, value in zip(layouts, data(), strict=True)
        )
        linear = lambda text, a, b: xt.einsum(text, a, b, mesh=MESH)  # noqa: E731
        parts = losses(x, target, up.requires_grad_(), down.requires_grad_(), linear)
        return xt.redistribute(torch.tensor(parts), "n | sum(dp) -> n", MESH).tolist()

    ranks = xt.testing.run_ranks(4, lambda: (gradients(), sharded()))
    return {
        "gradients": ranks[0][0],
        "losses": {"torch, 1 device": single(), "torch, 4 processes": ranks[0][1]},
    }


def in_jax() -> dict[str, Any]:
    """Gradients of three all-gathers, and the losses on four devices."""
    import jax
    import jax.numpy as jnp

    import jax_bridge as xj

    gathers = {"jax.lax.all_gather": lambda x: jax.lax.all_gather(x, "dp", tiled=True)}
    gathers |= {
        f"xshard in JAX: {text}": lambda x, t=text: xj.redistribute(x, t) for text in GATHERS
    }
    gradients = {
        name: float(
            jax.pmap(jax.grad(lambda x, f=gather: f(x).sum()), "dp")(jnp.ones((4, 2)))[0, 0]
        )
        for name, gather in gathers.items()
    }
    mesh = jax.make_mesh(MESH.sizes, MESH.axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, target, up, down = map(jnp.asarray, data())

    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(xj.einsum(UP, x, weights[0], mesh=mesh))
        return ((xj.einsum(DOWN, hidden, weights[1], mesh=mesh) - target) ** 2).sum() / 64

    step = jax.jit(jax.value_and_grad(loss))
    weights = (up, down)
    curve = []
    for _ in range(STEPS):
        value, gradient = step(weights)
        weights = jax.tree.map(lambda w, g: w - RATE * g, weights, gradient)
        curve.append(float(value))
    return {"gradients": gradients, "losses": {"JAX, 4 devices": curve}}


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The line of JSON that a process prints last. Exits where it fails, after its own message."""
    lines = process.communicate()[0].splitlines()
    return json.loads(lines[-1]) if process.returncode == 0 else sys.exit(process.returncode)


def draw(console: Console) -> None:
    plan = xs.plan(MOVE, xs.Mesh(cp=4), shape=(16, 8))
    console.rule(f"1. A move: {MOVE}")
    for layout in (plan.src, plan.dst):
        xs.show(layout, plan.mesh, plan.shape)
    xs.show(plan)


def compare_gradients(console: Console, gradients: dict[str, float]) -> bool:
    console.rule(
        "2. One all-gather on four devices; every device then computes the same loss, the sum"
    )
    table = Table(box=SIMPLE)
    table.add_column("all-gather")
    table.add_column("gradient of x[0]", justify="right")
    right = True
    for name, value in gradients.items():
        wanted = GATHERS.get(name.partition(": ")[2])
        right &= wanted in (None, value)
        table.add_row(name, f"{value:g}", style="green" if wanted == value else "")
    console.print(table)
    console.print(
        "1 is right for one shared loss, 4 if each device has a loss of its own. xshard writes down which.\n"
    )
    return right


def compare_losses(console: Console, losses: dict[str, list[float]]) -> bool:
    console.rule(f"3. One network, trained for {STEPS} steps: {UP}; {DOWN}")
    table = Table(box=SIMPLE)
    for name in ("step", *losses):
        table.add_column(name, justify="right")
    for step in range(0, STEPS, 4):
        table.add_row(str(step + 1), *(f"{curve[step]:.6f}" for curve in losses.values()))
    console.print(table)
    curves = np.array(list(losses.values()))
    difference = float((np.ptp(curves, axis=0) / curves.min(axis=0)).max())
    console.print(f"largest relative difference of any loss: {difference:.0e}")
    return difference < TOLERANCE


def main() -> int:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [
        subprocess.Popen([sys.executable, __file__, name], **options) for name in ("torch", "jax")
    ]
    console = Console()
    draw(console)
    results = [finished(process) for process in processes]
    gradients, losses = (
        {k: v for r in results for k, v in r[part].items()} for part in ("gradients", "losses")
    )
    right = [compare_gradients(console, gradients), compare_losses(console, losses)]
    return 0 if all(right) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps({"torch": in_torch, "jax": in_jax}[sys.argv[1]]()))
    else:
        sys.exit(main())
