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

from xshard.cli.explore.code import programs
from xshard.cli.options import parse_shape, parse_sizes
from xshard.contractions.expression import is_contraction
from xshard.contractions.plan import ContractionPlan
from xshard.cost.machine import shipped
from xshard.errors import DtypeError, MeshError, NotationError, ProfileError, ShapeError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes, parse_expression
from xshard.notation.parser import ARROW
from xshard.pictures.html import gradients_html, html, preformatted
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.step.suggestion import Suggestion

# The fields, with their first values, and those that are choices.
FIELDS = {
    "expression": "n/(dp,tp) d -> n d/tp",
    "mesh": "dp=2,tp=2",
    "lengths": "n=64,d=32",
    "dtype": "float32",
    "profile": "h100",
    "memory_limit": "",
}
CHOICES = {"dtype": ("float32", "bfloat16", "float16", "float64", "int32", "uint8"), "profile": shipped()}
# The field that an error is about, if it does not mark the text of one.
_ABOUT = {MeshError: "mesh", ShapeError: "lengths", DtypeError: "dtype", ProfileError: "profile"}
EXAMPLES = (
    ("Several steps", "n/(dp,tp) d -> n d/tp", "dp=2,tp=2", "n=64,d=32"),
    ("A sum on the way", "b s/dp c | sum(tp) -> b s c/(tp,dp)", "dp=2,tp=2", "b=2,s=64,c=32"),
    ("Tensor parallel layer", "b s/tp d, d f/tp -> b s f/tp", "tp=4", "b=8,s=64,d=32,f=128"),
    ("ZeRO-3", "b/dp d, d/dp f -> b/dp f", "dp=4", "b=32,d=64,f=64"),
    ("Across nodes", "n/(node,gpu) d -> n d/(gpu,node)", "node=2,gpu=2", "n=256,d=256"),
    ("Sequence to heads (Ulysses)", "b s/cp h k -> b s h/cp k", "cp=4", "b=2,s=64,h=8,k=16"),
    ("Zigzag to contiguous", "b s/zigzag(cp) c -> b s/cp c", "cp=4", "b=2,s=64,c=32"),
    ("A halo", "b h/sp w -> b h/sp:halo(1,1) w", "sp=4", "b=1,h=16,w=16"),
    ("Gather, with gradients that add up", "n/dp d -> n d | copy(dp)", "dp=4", "n=16,d=8"),
    ("Reduce-scatter", "n d | sum(tp) -> n/tp d", "tp=4", "n=16,d=8"),
    ("Uneven blocks", "n/sizes(a,1,2,0,5) -> n/a", "a=4", "n=8"),
    ("A layout alone", "s/zigzag(cp) c/tp", "cp=2,tp=2", "s=16,c=8"),
)
NOTATION = (
    ("b s c", "dims that are whole: every device holds all of them (replicas)"),
    ("s/cp", "s is sharded over the mesh axis cp"),
    ("s/a/b   s/(a,b)", "over two axes, one inside the other; over both as one"),
    ("s/zigzag(cp)", "in another order; also cyclic(cp), sizes(cp,1,2,5), intervals"),
    ("h/sp:halo(1,1)", "each block with a row of both neighbours; also window(k=3,p=1)"),
    ("n d | sum(tp)", "each device holds an addend; also mean, max, min"),
    ("n d | copy(tp)", "each device uses its copy in its own way: gradients are added"),
    ("a -> b", "a move from one layout to another"),
    ("a, b -> c", "a contraction: dims that c lacks are summed"),
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
    """The fields of the page -> `html`, `torch` and `jax`, or `error` and the `field` that it is about."""
    try:
        return _shown({**FIELDS, **fields})
    except XshardError as error:
        marked = (name for name, text in fields.items() if text and text == error.text)
        is_limit = fields.get("memory_limit") and not isinstance(error, NotationError)
        about = _ABOUT.get(type(error), "memory_limit" if is_limit else "expression")
        field = next(marked, about)
        return {"error": f"{type(error).__name__}: {error}", "field": field}


def _shown(fields: dict[str, str]) -> dict[str, str]:
    for name, text in fields.items():
        if name not in FIELDS or len(text) > MAX_CHARS:
            raise XshardError(f"field {name[:20]!r} is unknown, or longer than {MAX_CHARS} letters")
    expression, mesh = fields["expression"], Mesh.parse(fields["mesh"])
    if mesh.n_devices > MAX_DEVICES:
        why = f"{mesh.n_devices} devices, the page shows up to {MAX_DEVICES}"
        raise MeshError(why, text=fields["mesh"], hint="a smaller mesh")
    if fields["profile"] not in CHOICES["profile"]:  # a path would be read
        reason = f"profile {fields['profile']!r} is not shipped"
        raise ProfileError(reason, hint=f"shipped are: {', '.join(CHOICES['profile'])}")
    options = lengths_for(expression, fields["lengths"])
    shown: Plan | ContractionPlan | Sharding
    if "sizes" not in options and ARROW not in expression:
        check_axes(Layout.parse(expression), mesh, expression)
        shown = Sharding(Layout.parse(expression), mesh, options["shape"])
    else:
        options |= {"profile": fields["profile"], "memory_limit": fields["memory_limit"].strip() or None}
        shown = make_plan(expression, mesh, dtype=fields["dtype"], **options)
    return {"html": sections(shown), **programs(shown)}


def lengths_for(expression: str, text: str) -> dict[str, Any]:
    """The lengths of dims, by name or in order -> the argument of `plan` that has them."""
    summed = is_contraction(expression, named="=" in text)
    if "=" not in text and not summed:
        return {"shape": _small(parse_shape(text))}
    _small(tuple((sizes := parse_sizes(text)).values()))
    if summed:
        return {"sizes": sizes}
    is_move = ARROW in expression
    names = (parse_expression(expression)[0] if is_move else Layout.parse(expression)).names
    if missing := [name for name in names if name not in sizes]:
        raise ShapeError(f"no length for {', '.join(missing)}", text=text, hint=f"as in {missing[0]}=64")
    return {"shape": tuple(sizes[name] for name in names)}


def sections(shown: Plan | ContractionPlan | Sharding) -> str:
    """A plan, the plans of its gradient, and its programs; or a layout."""
    parts = [("Layout" if isinstance(shown, Sharding) else "Forward", html(shown))]
    if isinstance(shown, ContractionPlan):
        parts.append(("Backward", gradients_html(shown)))
    elif isinstance(shown, Plan) and shown.src.is_linear and shown.dst.is_linear:
        parts.append(("Backward", html(shown.backward)))
    titles = {"torch": "PyTorch", "jax": "JAX"}
    code = [f"<h3>{titles[key]}</h3>{preformatted(text)}" for key, text in programs(shown).items()]
    parts += [("Code", "".join(code))] if code and not isinstance(shown, Sharding) else []
    return "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in parts)


def _small(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if len(lengths) > MAX_DIMS or any(n > MAX_LENGTH for n in lengths):
        why = f"lengths {lengths[:MAX_DIMS]}, the page shows {MAX_DIMS} dims up to {MAX_LENGTH}"
        raise ShapeError(why, hint="a shorter dim with as many blocks looks the same")
    return lengths


@cache
def live_page() -> str:
    """The page with fields; the server sends the rest."""
    fields = "".join(_field(name, value) for name, value in FIELDS.items())
    names = ("expression", "mesh", "lengths")
    texts = ((title, json.dumps(dict(zip(names, fields, strict=True)))) for title, *fields in EXAMPLES)
    button = '<button type="button" data-fields="{}">{}</button>'
    examples = "".join(button.format(escape(fields), escape(title)) for title, fields in texts)
    copies = "".join(
        f'<button type="button" data-copy="{key}">Copy {name}</button>'
        for key, name in (("torch", "torch"), ("jax", "JAX"), ("link", "link"))
    )
    rows = "".join(f"<dt>{escape(text)}</dt><dd>{escape(means)}</dd>" for text, means in NOTATION)
    body = (
        f'<form id="fields" aria-label="What to plan">{fields}</form>'
        f"<details><summary>Notation</summary><dl>{rows}</dl></details>"
        f'<nav aria-label="Examples">{examples}</nav>'
        f'<div class="copies">{copies}'
        '<span id="copied" role="status"></span></div>'
        '<main id="shown" aria-live="polite"></main>'
    )
    return _page("xshard explore", body, ("steps.js", "live.js"))


def _field(name: str, value: str) -> str:
    """A field with its label and, below it, the place of its errors."""
    names = f'id="{name}" name="{name}" aria-describedby="error-{name}"'
    if name in CHOICES:
        options = (f"<option{' selected' * (text == value)}>{text}</option>" for text in CHOICES[name])
        control = f"<select {names}>{''.join(options)}</select>"
    else:
        quiet = 'maxlength="400" autocomplete="off" spellcheck="false"'
        control = f'<input {names} value="{escape(value)}" {quiet}>'
    label = f'<label for="{name}">{name.replace("_", " ").capitalize()}</label>'
    error = f'<pre class="error" id="error-{name}" role="alert" hidden></pre>'
    return f'<div class="field {name}">{label}{control}{error}</div>'


def plan_page(plan: Plan | ContractionPlan) -> str:
    """A plan as a file."""
    text = plan.text.strip() if isinstance(plan, ContractionPlan) else f"{plan.src} {ARROW} {plan.dst}"
    return _page(f"xshard: {text}", f'<main id="shown">{sections(plan)}</main>', ("steps.js",))


def suggestion_page(suggestion: Suggestion) -> str:
    """A suggestion as a file."""
    return _page("xshard suggest", f'<main id="shown">{html(suggestion)}</main>', ())


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
