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
    """Compute what the page shows, and end this whole process if it takes too long.

    It runs in a worker process of the server. A timer looks regularly whether `limit_s` seconds of
    processor time are used up, or whether the server has ended; either ends the process.
    """
    parent = os.getppid()
    start_s = time.process_time()

    def look(*_: Any) -> None:
        if time.process_time() - start_s > limit_s or os.getppid() != parent:
            # An exception could be caught on its way, or leave a half-made result in a cache.
            os._exit(1)

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _LOOK_S, _LOOK_S)
    try:
        return view(fields)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def view(fields: Mapping[str, str]) -> dict[str, str]:
    """Compute what the page shows for the texts in its fields: the plan as pictures, and programs.

    Args:
        fields: The texts by name of the field, such as {"expression": "n/dp -> n", "mesh": "dp=2"}.
            Other fields have their first values.

    Returns:
        `html`, `torch` and `jax`; or `error` and the `field` that it is about.
    """
    try:
        shown = _planned({**FIELDS, **fields})
        return {"html": plan_or_layout_html(shown), **programs(shown)}
    except XshardError as error:
        message = f"{type(error).__name__}: {error}"
        return {"error": message, "field": _field_of(error, fields)}


def _field_of(error: XshardError, fields: Mapping[str, str]) -> str:
    """Return the field that an error is about: the one whose text it marks, else by its type."""
    for name, text in fields.items():
        if text and text == error.text:
            return name
    if type(error) in _ABOUT:
        return _ABOUT[type(error)]
    if fields.get("memory_limit") and not isinstance(error, NotationError):
        return "memory_limit"
    return "expression"


def _planned(fields: dict[str, str]) -> Shown:
    """Plan what the fields of the page ask for: a move, a contraction, or a layout alone.

    The texts come from anywhere: XshardError is raised for unknown fields, for too many devices,
    and for profiles that are files, which a page must not read.
    """
    for name, text in fields.items():
        if name not in FIELDS or len(text) > MAX_CHARS:
            raise XshardError(f"field {name[:20]!r} is unknown, or longer than {MAX_CHARS} letters")
    expression = fields["expression"]
    mesh = Mesh.parse(fields["mesh"])
    profile = fields["profile"]
    if mesh.n_devices > MAX_DEVICES:
        raise MeshError(
            f"{mesh.n_devices} devices, the page shows up to {MAX_DEVICES}",
            text=fields["mesh"],
            hint="a smaller mesh",
        )
    if profile not in CHOICES["profile"]:  # a path would be read
        raise ProfileError(
            f"profile {profile!r} is not shipped",
            hint=f"shipped are: {', '.join(CHOICES['profile'])}",
        )
    lengths = lengths_for(expression, fields["lengths"])
    if "sizes" in lengths or ARROW in expression:
        plan: Shown = make_plan(
            expression,
            mesh,
            dtype=fields["dtype"],
            profile=profile,
            memory_limit=fields["memory_limit"].strip() or None,
            **lengths,
        )
        return plan
    layout = Layout.parse(expression)
    check_axes(layout, mesh, expression)
    return Sharding(layout, mesh, lengths["shape"])


def lengths_for(expression: str, text: str) -> dict[str, Any]:
    """Parse the lengths of dims that a user typed into the argument of `plan` that takes them.

    "n/dp c" with "8,4" or "n=8,c=4" -> {"shape": (8, 4)}. A contraction, which has several arrays,
    needs lengths by name: "n k, k m -> n m" with "n=8,k=4,m=2" ->
    {"sizes": {"n": 8, "k": 4, "m": 2}}.
    """
    is_named = "=" in text
    is_einsum = is_contraction(expression, named=is_named)
    if not is_named and not is_einsum:
        return {"shape": _checked_lengths(parse_shape(text))}
    sizes = parse_sizes(text)
    _checked_lengths(tuple(sizes.values()))
    if is_einsum:
        return {"sizes": sizes}
    layout = parse_expression(expression)[0] if ARROW in expression else Layout.parse(expression)
    missing = [name for name in layout.names if name not in sizes]
    if missing:
        raise ShapeError(
            f"no length for {', '.join(missing)}", text=text, hint=f"as in {missing[0]}=64"
        )
    return {"shape": tuple(sizes[name] for name in layout.names)}


def _checked_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return lengths of dims as they are. Raises ShapeError for more than a page can show."""
    if len(lengths) > MAX_DIMS or any(length > MAX_LENGTH for length in lengths):
        raise ShapeError(
            f"lengths {lengths[:MAX_DIMS]}, the page shows {MAX_DIMS} dims up to {MAX_LENGTH}",
            hint="a shorter dim with as many blocks looks the same",
        )
    return lengths


def plan_or_layout_html(shown: Shown) -> str:
    """Make the HTML that the page shows of a plan: sections "Forward", "Backward" and "Code".

    The backward is left out for a move with a max or min, whose gradient depends on the values. A
    layout alone is one picture.
    """
    if isinstance(shown, Sharding):
        return _titled_sections({"Layout": html(shown)})
    body_by_title = {"Forward": html(shown)}
    if isinstance(shown, ContractionPlan):
        body_by_title["Backward"] = gradients_html(shown)
    elif shown.src.is_linear and shown.dst.is_linear:
        body_by_title["Backward"] = html(shown.backward)
    titles = {"torch": "PyTorch", "jax": "JAX"}
    code = ""
    for framework, text in programs(shown).items():
        code += f"<h3>{titles[framework]}</h3>{preformatted(text)}"
    if code:
        body_by_title["Code"] = code
    return _titled_sections(body_by_title)


def _titled_sections(body_by_title: Mapping[str, str]) -> str:
    """Join sections of HTML: {"Code": "x"} -> "<section><h2>Code</h2>x</section>"."""
    text = ""
    for title, body in body_by_title.items():
        text += f"<section><h2>{escape(title)}</h2>{body}</section>"
    return text


def plan_page(plan: Plan | ContractionPlan) -> str:
    """Return a plan as a page without a server."""
    text = f"{plan.src} {ARROW} {plan.dst}" if isinstance(plan, Plan) else plan.text.strip()
    return html_page(
        f"xshard: {text}", f'<div id="shown">{plan_or_layout_html(plan)}</div>', "steps.js"
    )


def suggestion_page(suggestion: Suggestion) -> str:
    """Return a suggestion as a page without a server."""
    return html_page("xshard suggest", f'<div id="shown">{html(suggestion)}</div>')
