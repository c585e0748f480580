"""The page as HTML, live or one plan in a file, and its answers: pictures, tables, lines to copy."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from xshard.cli.options import parse_shape, parse_sizes
from xshard.contractions.expression import is_contraction
from xshard.contractions.plan import ContractionPlan
from xshard.errors import MeshError, ShapeError, XshardError
from xshard.layout import Mesh
from xshard.layout.layout import parse_expression
from xshard.notation.parser import ARROW
from xshard.pictures.html import html
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan

# The fields, with their first values.
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
_LOOK_S = 0.1  # processor seconds between two looks at the limit
MAX_CHARS, MAX_DEVICES, MAX_LENGTH, MAX_DIMS = 400, 1024, 1 << 20, 12


def limited_view(fields: Mapping[str, str], limit_s: float) -> dict[str, str]:
    """`view` in a process of its own, which ends after so many processor seconds, or after its parent."""
    parent, start_s = os.getppid(), time.process_time()

    def look(*_: Any) -> None:
        if time.process_time() - start_s > limit_s or os.getppid() != parent:
            os._exit(1)  # an exception might be caught, and what it left be cached

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _LOOK_S, _LOOK_S)
    try:
        return view(fields)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def view(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields of the page -> `html`, `torch` and `jax`, or `error`."""
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
    options = lengths_for(expression, fields["lengths"])
    options |= {
        "profile": _shipped(fields["profile"]),
        "memory_limit": fields["memory_limit"].strip() or None,
    }
    plan = make_plan(expression, mesh, dtype=fields["dtype"], **options)
    cuda = f'init_device_mesh("cuda", {plan.mesh.sizes}, mesh_dim_names={plan.mesh.axes})'
    host = f"jax.make_mesh({plan.mesh.sizes}, {plan.mesh.axes})  # inside jax.shard_map on it:"
    torch = f"import torch_bridge as xt\n\nmesh = {cuda}\n{_call('xt', plan, ', mesh')}"
    jax = f"import jax_bridge as xj\n\nmesh = {host}\n{_call('xj', plan, '')}"
    return {"html": sections(plan), "torch": torch, "jax": jax}


def lengths_for(expression: str, text: str) -> dict[str, Any]:
    """The lengths of dims, by name or in order -> the argument of `plan` that has them."""
    summed = is_contraction(expression, named="=" in text)
    if "=" not in text and not summed:
        return {"shape": _small(parse_shape(text))}
    _small(tuple((sizes := parse_sizes(text)).values()))
    if summed:
        return {"sizes": sizes}
    names = parse_expression(expression)[0].names
    if missing := [name for name in names if name not in sizes]:
        raise ShapeError(f"no length for {', '.join(missing)}", text=text, hint=f"as in {missing[0]}=64")
    return {"shape": tuple(sizes[name] for name in names)}


def sections(plan: Plan | ContractionPlan) -> str:
    """A plan, and its gradient's plan."""
    parts = [("Forward", html(plan))]
    if isinstance(plan, Plan) and plan.src.is_linear and plan.dst.is_linear:
        parts.append(("Backward", html(plan.backward)))
    return "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in parts)


def _call(bridge: str, plan: Plan | ContractionPlan, mesh: str) -> str:
    if isinstance(plan, ContractionPlan):
        names = ", ".join(f"x{i}" for i in range(len(plan.shapes)))
        return f'y = {bridge}.einsum("{plan.text.strip()}", {names}{mesh})'
    uneven = "" if plan.source.is_even and plan.target.is_even else f", shape={plan.shape}"
    return f'y = {bridge}.redistribute(x, "{plan.src} {ARROW} {plan.dst}"{mesh}{uneven})'


def _small(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if len(lengths) > MAX_DIMS or any(n > MAX_LENGTH for n in lengths):
        why = f"lengths {lengths[:MAX_DIMS]}, the page shows {MAX_DIMS} dims up to {MAX_LENGTH}"
        raise ShapeError(why, hint="a shorter dim with as many blocks looks the same")
    return lengths


def _shipped(profile: str) -> str:
    if not profile.isidentifier():  # a path would be read
        raise XshardError(f"profile {profile!r} is not shipped", hint="as in h100, gloo, bandwidth")
    return profile


@cache
def live_page() -> str:
    """The page with fields; the server sends the rest."""
    fields = "".join(
        f'<label class="{name}"><span>{label}</span><input name="{name}" value="{escape(value)}" '
        f'maxlength="400" autocomplete="off" spellcheck="false"></label>'
        for name, value in FIELDS.items()
        for label in [name.replace("_", " ").capitalize()]
    )
    names = ("expression", "mesh", "lengths")
    texts = ((title, json.dumps(dict(zip(names, fields, strict=True)))) for title, *fields in EXAMPLES)
    button = '<button type="button" data-fields="{}">{}</button>'
    examples = "".join(button.format(escape(fields), escape(title)) for title, fields in texts)
    copies = "".join(
        f'<button type="button" data-copy="{key}">Copy {name}</button>'
        for key, name in (("torch", "torch"), ("jax", "JAX"), ("link", "link"))
    )
    body = (
        f'<form id="fields" aria-label="What to plan">{fields}</form>'
        f'<nav aria-label="Examples">{examples}</nav>'
        f'<div class="copies">{copies}'
        '<span id="copied" role="status"></span></div>'
        '<pre id="error" role="alert" hidden></pre><main id="shown" aria-live="polite"></main>'
    )
    return _page("xshard explore", body, ("steps.js", "live.js"))


def plan_page(plan: Plan | ContractionPlan) -> str:
    """A plan as a file."""
    text = plan.text.strip() if isinstance(plan, ContractionPlan) else f"{plan.src} {ARROW} {plan.dst}"
    return _page(f"xshard: {text}", f'<main id="shown">{sections(plan)}</main>', ("steps.js",))


def _page(title: str, body: str, scripts: tuple[str, ...]) -> str:
    files = resources.files("xshard.cli.explore")
    style = (files / "page.css").read_text()
    script = "".join((files / name).read_text() for name in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>' + escape(title) + "</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body><header><h1>{escape(title)}</h1></header>{body}<script>{script}</script></body></html>"
    )
