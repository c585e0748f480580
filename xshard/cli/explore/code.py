"""A plan as programs for torch and JAX, to be copied as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from xshard.contractions.plan import ContractionPlan
from xshard.layout import Sharding
from xshard.layout.layout import NONLINEAR
from xshard.notation.parser import ARROW
from xshard.plans.plan import Plan

TORCH = """\
# torchrun --nproc-per-node {devices} FILE
import torch
import torch_bridge as xt
import xshard as xs
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", {sizes}, mesh_dim_names={axes})  # or "cuda"
rank = torch.distributed.get_rank()
{made}
y = {call}
print(f"rank {{rank}}: {{tuple(y.shape)}}")
torch.distributed.barrier()  # keep every rank alive until all are done
"""
JAX = """\
# JAX_NUM_CPU_DEVICES={devices} python FILE
import jax
import jax.numpy as jnp
import jax_bridge as xj

mesh = jax.make_mesh({sizes}, {axes}, axis_types=(jax.sharding.AxisType.Auto,) * {n_axes})
{made}
f = xj.shard_map(lambda {names}: {call}, {signature}, mesh)
print(f({names}).sharding)
"""
COMPOSED = re.compile(r"\(\w+ ")


def programs(plan: Plan | ContractionPlan | Sharding) -> dict[str, str]:
    """A plan -> what runs it, by framework; a layout is drawn. None between two meshes, or with `(h d)`."""
    if isinstance(plan, Sharding):
        drawn = f'import xshard as xs\n\nxs.show("{plan.layout}", xs.{plan.mesh!r}, {plan.shape})\n'
        return {"torch": drawn, "jax": drawn}
    if plan.transfer if isinstance(plan, Plan) else COMPOSED.search(plan.text):
        return {}
    if isinstance(plan, Plan):
        arrays: tuple[Sharding, ...] = plan.source, plan.target
        names = ["x"]
        lengths = str(plan.shape)
        call = f'redistribute(x, "{plan.src} {ARROW} {plan.dst}"'
    else:
        arrays = plan.arrays
        lengths = str(plan.shapes)
        names = [f"x{i}" for i in range(len(arrays) - 1)]
        call = f'einsum("{plan.text.strip()}", {", ".join(names)}'
    uneven = "" if all(array.is_even for array in arrays) else f", shape={lengths}"
    mesh = plan.mesh
    operands = list(zip(names, arrays, strict=False))
    fields = {
        "devices": mesh.n_devices,
        "sizes": mesh.sizes,
        "axes": mesh.axes,
        "n_axes": len(mesh.axes),
    }
    fields |= {"names": ", ".join(names), "signature": _signature(arrays, is_even=not uneven)}
    blocks = [
        f"{name} = torch.ones({_block(array)}, dtype=torch.{plan.dtype})"
        for name, array in operands
    ]
    wholes = [f'{name} = jnp.ones({array.shape}, "{plan.dtype}")' for name, array in operands]
    return {
        "torch": TORCH.format(
            **fields, made="\n".join(blocks), call=f"xt.{call}, mesh=mesh{uneven})"
        ),
        "jax": JAX.format(**fields, made="\n".join(wholes), call=f"xj.{call}{uneven})"),
    }


def _signature(arrays: Sequence[Sharding], *, is_even: bool) -> str:
    """The layouts at the border of `xj.shard_map` as code; uneven arrays are moved from and to whole ones."""
    *operands, result = (array.layout for array in arrays)
    for i, layout in enumerate(operands):  # a max begins as copies
        tags = (("copy" if kind in NONLINEAR else kind, axes) for kind, axes in layout.tags)
        operands[i] = replace(layout, tags=tuple(tags))
    if is_even:
        return f'"{", ".join(map(str, operands))} {ARROW} {result}"'
    names = [" ".join(layout.names) or "()" for layout in (*operands, result)]
    moves = tuple(
        f"{whole} {ARROW} {layout}" for whole, layout in zip(names, operands, strict=False)
    )
    return f'({moves}, "{result} {ARROW} {names[-1]}")'


def _block(array: Sharding) -> str:
    """The shape of this process's block as code."""
    if array.is_even:
        return str(array.max_local_shape)
    return f'xs.Sharding("{array.layout}", xs.{array.mesh!r}, {array.shape}).local_shape(rank)'
