"""Answers of the page: the plan of its fields as pictures, tables and programs, or an error by its field."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from xshard.cli.explore.code import programs
from xshard.cli.explore.page import CHOICES, FIELDS, html_page
from xshard.cli.options import parse_shape, parse_sizes
from xshard.contractions.expression import is_contraction
from xshard.contractions.plan import ContractionPlan
from xshard.errors import (
    DtypeError,
    MeshError,
    NotationError,
    ProfileError,
    ShapeError,
    XshardError,
)
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes, parse_expression
from xshard.notation.parser import ARROW
from xshard.pictures.html import gradients_html, html, preformatted
from xshard.planner import plan as make_plan
from xshard.plans.plan import Plan
from xshard.step.say.suggestion import Suggestion

# The field that an error is about, if it does not mark the text of one.
_ABOUT = {MeshError: "mesh", ShapeError: "lengths", DtypeError: "dtype", ProfileError: "profile"}
Shown = Plan | ContractionPlan | Sharding
_LOOK_S = 0.1  # processor seconds between two looks at the limit
MAX_CHARS = 400
MAX_DEVICES = 1024
MAX_LENGTH = 1 << 20
MAX_DIMS = 12


def limited_view(fields: Mapping[str, str], limit_s: float) -> dict[str, str]:
    """`view` in a process of its own, which ends after so many processor seconds, or after its parent."""
    parent = os.getppid()
    start_s = time.process_time()

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
        shown = _planned({**FIELDS, **fields})
        return {"html": sections(shown), **programs(shown)}
    except XshardError as error:
        marked = (name for name, text in fields.items() if text and text == error.text)
        is_limit = fields.get("memory_limit") and not isinstance(error, NotationError)
        about = _ABOUT.get(type(error), "memory_limit" if is_limit else "expression")
        return {"error": f"{type(error).__name__}: {error}", "field": next(marked, about)}


def _planned(fields: dict[str, str]) -> Shown:
    """The plan of an expression, or the layout that it is. Raises XshardError for too large ones, too."""
    for name, text in fields.items():
        if name not in FIELDS or len(text) > MAX_CHARS:
            raise XshardError(f"field {name[:20]!r} is unknown, or longer than {MAX_CHARS} letters")
    expression = fields["expression"]
    mesh = Mesh.parse(fields["mesh"])
    profile = fields["profile"]
    if mesh.n_devices > MAX_DEVICES:
        why = f"{mesh.n_devices} devices, the page shows up to {MAX_DEVICES}"
        raise MeshError(why, text=fields["mesh"], hint="a smaller mesh")
    if profile not in CHOICES["profile"]:  # a path would be read
        hint = f"shipped are: {', '.join(CHOICES['profile'])}"
        raise ProfileError(f"profile {profile!r} is not shipped", hint=hint)
    options = lengths_for(expression, fields["lengths"])
    if "sizes" in options or ARROW in expression:
        options |= {"profile": profile, "memory_limit": fields["memory_limit"].strip() or None}
        plan: Shown = make_plan(expression, mesh, dtype=fields["dtype"], **options)
        return plan
    check_axes(layout := Layout.parse(expression), mesh, expression)
    return Sharding(layout, mesh, options["shape"])


def lengths_for(expression: str, text: str) -> dict[str, Any]:
    """The lengths of dims, by name or in order -> the argument of `plan` that has them."""
    is_named = "=" in text
    is_einsum = is_contraction(expression, named=is_named)
    sizes = parse_sizes(text) if is_named or is_einsum else {}
    lengths = tuple(sizes.values()) if sizes else parse_shape(text)
    if len(lengths) > MAX_DIMS or any(n > MAX_LENGTH for n in lengths):
        why = f"lengths {lengths[:MAX_DIMS]}, the page shows {MAX_DIMS} dims up to {MAX_LENGTH}"
        raise ShapeError(why, hint="a shorter dim with as many blocks looks the same")
    if is_einsum or not is_named:
        return {"sizes": sizes} if is_einsum else {"shape": lengths}
    names = (
        parse_expression(expression)[0] if ARROW in expression else Layout.parse(expression)
    ).names
    if missing := [name for name in names if name not in sizes]:
        raise ShapeError(
            f"no length for {', '.join(missing)}", text=text, hint=f"as in {missing[0]}=64"
        )
    return {"shape": tuple(sizes[name] for name in names)}


def sections(shown: Shown) -> str:
    """A plan, the plans of its gradient, and its programs; or a layout."""
    parts = [("Layout" if isinstance(shown, Sharding) else "Forward", html(shown))]
    if isinstance(shown, ContractionPlan):
        parts.append(("Backward", gradients_html(shown)))
    elif isinstance(shown, Plan) and shown.src.is_linear and shown.dst.is_linear:
        parts.append(("Backward", html(shown.backward)))
    titles = {"torch": "PyTorch", "jax": "JAX"}
    code = [f"<h3>{titles[key]}</h3>{preformatted(text)}" for key, text in programs(shown).items()]
    if code and not isinstance(shown, Sharding):
        parts.append(("Code", "".join(code)))
    return "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in parts)


def plan_page(plan: Plan | ContractionPlan) -> str:
    """A plan as a file."""
    text = (
        plan.text.strip() if isinstance(plan, ContractionPlan) else f"{plan.src} {ARROW} {plan.dst}"
    )
    return html_page(f"xshard: {text}", f'<div id="shown">{sections(plan)}</div>', "steps.js")


def suggestion_page(suggestion: Suggestion) -> str:
    """A suggestion as a file."""
    return html_page("xshard suggest", f'<div id="shown">{html(suggestion)}</div>')
