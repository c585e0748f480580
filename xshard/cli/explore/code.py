"""A plan as programs for torch and JAX, to be copied as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xshard.contractions.plan import ContractionPlan
from xshard.layout import Layout, Sharding
from xshard.notation.parser import ARROW
from xshard.plans.max_min import with_kind
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
COMPOSED = re.compile(r"\(\w+ ")  # two dims as one, which `redistribute` of the program cannot make


def programs(plan: Plan | ContractionPlan | Sharding) -> dict[str, str]:
    """Write Python programs that run a plan, to copy from the page: {"torch": text, "jax": text}.

    For a layout alone, the program draws it. There are no programs, {}, for a plan between two
    meshes, and for a contraction that groups dims, such as `(h d)`.
    """
    if isinstance(plan, Sharding):
        drawn = f'import xshard as xs\n\nxs.show("{plan.layout}", xs.{plan.mesh!r}, {plan.shape})\n'
        return dict.fromkeys(("torch", "jax"), drawn)
    if isinstance(plan, Plan):
        if plan.transfer:
            return {}
        return _programs_of_call(
            plan,
            arrays=(plan.source, plan.target),
            names=["x"],
            call=f'redistribute(x, "{plan.src} {ARROW} {plan.dst}"',
            shape=plan.shape,
        )
    if COMPOSED.search(plan.text):
        return {}
    names = [f"x{i}" for i in range(len(plan.arrays) - 1)]
    return _programs_of_call(
        plan,
        arrays=plan.arrays,
        names=names,
        call=f'einsum("{plan.text.strip()}", {", ".join(names)}',
        shape=plan.shapes,
    )


def _programs_of_call(
    plan: Plan | ContractionPlan,
    *,
    arrays: Sequence[Sharding],
    names: Sequence[str],
    call: str,
    shape: object,
) -> dict[str, str]:
    """Write a torch and a JAX program that make input arrays of ones and call xshard on them.

    Args:
        plan: The plan.
        arrays: The shardings of the operands, then of the result.
        names: The operands' names in the program, such as "x0".
        call: The call without its last options and parenthesis, such as
            'redistribute(x, "n/dp -> n"'.
        shape: The value of `shape=`, which both bridges need if blocks differ in size.
    """
    is_even = all(array.is_even for array in arrays)
    shape_option = "" if is_even else f", shape={shape}"
    blocks = []  # torch's arrays are blocks, JAX's are whole
    wholes = []
    for name, array in zip(names, arrays[:-1], strict=True):
        blocks.append(f"{name} = torch.ones({_block(array)}, dtype=torch.{plan.dtype})")
        wholes.append(f'{name} = jnp.ones({array.shape}, "{plan.dtype}")')
    mesh = plan.mesh
    torch_program = TORCH.format(
        devices=mesh.n_devices,
        sizes=mesh.sizes,
        axes=mesh.axes,
        made="\n".join(blocks),
        call=f"xt.{call}, mesh=mesh{shape_option})",
    )
    jax_program = JAX.format(
        devices=mesh.n_devices,
        sizes=mesh.sizes,
        axes=mesh.axes,
        n_axes=len(mesh.axes),
        made="\n".join(wholes),
        names=", ".join(names),
        signature=_signature(arrays, is_even=is_even),
        call=f"xj.{call}{shape_option})",
    )
    return {"torch": torch_program, "jax": jax_program}


def _signature(arrays: Sequence[Sharding], *, is_even: bool) -> str:
    """Write as Python code the layouts that `xj.shard_map` is given for its inputs and output.

    Such as '"n/dp, c -> n/dp c"', with quotes. JAX's arrays have equal blocks. So if some blocks
    are uneven, arrays are whole outside, and the code is a tuple of moves from whole arrays and to
    one.
    """
    # A max of global arrays is not defined: it begins as copies.
    operands = [with_kind(array.layout, "copy") for array in arrays[:-1]]
    result = arrays[-1].layout
    if is_even:
        return f'"{", ".join(map(str, operands))} {ARROW} {result}"'
    moves = tuple(f"{_whole(layout)} {ARROW} {layout}" for layout in operands)
    return f'({moves}, "{result} {ARROW} {_whole(result)}")'


def _whole(layout: Layout) -> str:
    """Return a layout of the same dims without shards: "n/a d" -> "n d"."""
    return " ".join(layout.names) or "()"


def _block(array: Sharding) -> str:
    """Return the shape of this process's block as code."""
    if array.is_even:
        return str(array.max_local_shape)
    return f'xs.Sharding("{array.layout}", xs.{array.mesh!r}, {array.shape}).local_shape(rank)'
