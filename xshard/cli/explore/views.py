"""What the page shows for what stands in its fields: pictures, tables and lines to copy, or an error.

Decides which fields there are and how large a question may be. Runs in a process that can be ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from xshard.cli.options import parse_shape, parse_sizes
from xshard.contractions.expression import is_contraction
from xshard.contractions.plan import ContractionPlan
from xshard.errors import MeshError, ShapeError, XshardError
from xshard.layout import Mesh
from xshard.layout.layout import parse_expression
from xshard.notation.parser import ARROW
from xshard.pictures.html import html
from xshard.planner import plan
from xshard.plans.plan import Plan

# The fields, and what stands in them at first.
FIELDS = {
    "expression": "b s/cp c -> b s c/cp",
    "mesh": "dp=2,cp=4",
    "lengths": "b=2,s=64,c=32",
    "dtype": "float32",
    "profile": "h100",
    "memory_limit": "",
}
EXAMPLES = (
    ("Sequence to heads (Ulysses)", "b s/cp h k -> b s h/cp k", "cp=4", "b=2,s=64,h=8,k=16"),
    ("Zigzag to contiguous", "b s/zigzag(cp) c -> b s/cp c", "cp=4", "b=2,s=64,c=32"),
    ("A halo", "b h/sp w -> b h/sp:halo(1,1) w", "sp=4", "b=1,h=16,w=16"),
    ("Gather, with gradients that add up", "n/dp d -> n d | copy(dp)", "dp=4", "n=16,d=8"),
    ("Reduce-scatter", "n d | sum(tp) -> n/tp d", "tp=4", "n=16,d=8"),
    ("From one cut to another", "n/(dp,tp) d -> n/tp d/dp", "dp=2,tp=4", "n=64,d=32"),
    ("Uneven blocks", "n/sizes(a,1,2,5) -> n/a", "a=3", "n=8"),
    ("Tensor parallel layer", "b s/tp d, d f/tp -> b s f/tp", "tp=4", "b=8,s=64,d=32,f=128"),
    ("ZeRO-3", "b/dp d, d/dp f -> b/dp f", "dp=4", "b=32,d=64,f=64"),
    ("Across nodes", "n/(node,gpu) d -> n d/(gpu,node)", "node=2,gpu=8", "n=256,d=256"),
)
MAX_CHARS, MAX_DEVICES, MAX_LENGTH, MAX_DIMS = 400, 1024, 1 << 20, 12


def view(fields: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """The fields of the page -> `html`, `torch` and `jax`, or `error`. timeout_s: kept by who asks."""
    try:
        return _shown({**FIELDS, **fields})
    except XshardError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _shown(fields: dict[str, str]) -> dict[str, str]:
    for name, text in fields.items():
        if name not in FIELDS or len(text) > MAX_CHARS:
            raise XshardError(f"field {name[:20]!r} is unknown, or longer than {MAX_CHARS} letters")
    expression, mesh = fields["expression"], Mesh.parse(fields["mesh"])
    if mesh.n_devices > MAX_DEVICES:
        why = f"{mesh.n_devices} devices, the page shows up to {MAX_DEVICES}"
        raise MeshError(why, text=fields["mesh"], hint="a smaller mesh")
    made = plan(
        *(expression, mesh),
        **lengths_for(expression, fields["lengths"]),
        dtype=fields["dtype"],
        profile=_shipped(fields["profile"]),
        memory_limit=fields["memory_limit"].strip() or None,
    )
    return {"html": sections(made), "torch": torch_lines(made), "jax": jax_lines(made)}


def lengths_for(expression: str, text: str) -> dict[str, Any]:
    """The lengths of dims, by name or in order -> the argument of `plan` that has them."""
    if "=" not in text and not is_contraction(expression):
        return {"shape": _small(parse_shape(text))}
    sizes = parse_sizes(text)
    _small(tuple(sizes.values()))
    if is_contraction(expression):
        return {"sizes": sizes}
    names = parse_expression(expression)[0].names
    if missing := [name for name in names if name not in sizes]:
        raise ShapeError(f"no length for {', '.join(missing)}", text=text, hint=f"as in {missing[0]}=64")
    return {"shape": tuple(sizes[name] for name in names)}


def sections(made: Plan | ContractionPlan) -> str:
    """A plan, and that of its gradient."""
    parts = [("Forward", html(made))]
    if isinstance(made, Plan) and made.src.is_linear and made.dst.is_linear:
        parts.append(("Backward", html(made.backward)))
    return "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in parts)


def torch_lines(made: Plan | ContractionPlan) -> str:
    """The plan as a call in torch."""
    mesh = f'mesh = init_device_mesh("cuda", {made.mesh.sizes}, mesh_dim_names={made.mesh.axes})'
    return f"import torch_bridge as xt\n\n{mesh}\n{_call('xt', made, ', mesh')}"


def jax_lines(made: Plan | ContractionPlan) -> str:
    """The plan as a call in JAX."""
    mesh = f"mesh = jax.make_mesh({made.mesh.sizes}, {made.mesh.axes})  # inside jax.shard_map on it:"
    return f"import jax_bridge as xj\n\n{mesh}\n{_call('xj', made, '')}"


def _call(bridge: str, made: Plan | ContractionPlan, mesh: str) -> str:
    if isinstance(made, ContractionPlan):
        names = ", ".join(f"x{i}" for i in range(len(made.shapes)))
        return f'y = {bridge}.einsum("{made.text.strip()}", {names}{mesh})'
    uneven = "" if made.source.is_even and made.target.is_even else f", shape={made.shape}"
    return f'y = {bridge}.redistribute(x, "{made.src} {ARROW} {made.dst}"{mesh}{uneven})'


def _small(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if len(lengths) > MAX_DIMS or any(n > MAX_LENGTH for n in lengths):
        raise ShapeError(
            f"lengths {lengths[:MAX_DIMS]}, the page shows {MAX_DIMS} dims up to {MAX_LENGTH}",
            hint="a shorter dim with as many blocks looks the same",
        )
    return lengths


def _shipped(profile: str) -> str:
    if not profile.isidentifier():  # a path would be read
        raise XshardError(f"profile {profile!r} is no shipped one", hint="as in h100, gloo, bandwidth")
    return profile
