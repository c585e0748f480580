"""The page as HTML: live, with fields, or one plan in a file that needs nothing else.

Decides what stands on the page. Its looks are in `page.css`, what moves in `steps.js` and `live.js`.
"""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib import resources

from xshard.cli.explore.views import EXAMPLES, FIELDS, sections
from xshard.contractions.plan import ContractionPlan
from xshard.notation.parser import ARROW
from xshard.plans.plan import Plan


@cache
def live_page() -> str:
    """The page with fields; what it shows comes from the server."""
    fields = "".join(
        f'<label class="{name}"><span>{label}</span><input name="{name}" value="{escape(value)}" '
        f'maxlength="400" autocomplete="off" spellcheck="false"></label>'
        for name, value in FIELDS.items()
        for label in [name.replace("_", " ").capitalize()]
    )
    examples = "".join(
        f'<button type="button" data-fields="{escape(_fields(example))}">{escape(example[0])}</button>'
        for example in EXAMPLES
    )
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


def plan_page(made: Plan | ContractionPlan) -> str:
    """A plan as a file."""
    text = made.text.strip() if isinstance(made, ContractionPlan) else f"{made.src} {ARROW} {made.dst}"
    return _page(f"xshard: {text}", f'<main id="shown">{sections(made)}</main>', ("steps.js",))


def _fields(example: tuple[str, str, str, str]) -> str:
    return json.dumps(dict(zip(("expression", "mesh", "lengths"), example[1:], strict=True)))


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
