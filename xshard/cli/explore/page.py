"""The page as HTML: its fields, examples and notation, around what the server or a file shows."""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib import resources

from xshard.cost.machine import shipped

# The fields, with their first values; then the values of those that are choices.
FIELDS = {
    "expression": "n/(dp,tp) d -> n d/tp",
    "mesh": "dp=2,tp=2",
    "lengths": "n=64,d=32",
    "dtype": "float32",
    "profile": "h100",
    "memory_limit": "",
}
CHOICES = {
    "dtype": ("float32", "bfloat16", "float16", "float64", "int32", "uint8"),
    "profile": shipped(),
}
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
COPIED = ("torch", "JAX", "link")  # what a button copies


@cache
def live_page() -> str:
    """Make the HTML of the page: input fields, notation, examples, and a place for the answer.

    Scripts of the page send the fields to the server as one types, and show its answer there.
    """
    fields = "".join(_field(name, value) for name, value in FIELDS.items())
    rows = "".join(f"<dt>{escape(text)}</dt><dd>{escape(means)}</dd>" for text, means in NOTATION)
    examples = ""
    for title, *texts in EXAMPLES:
        # An example has the first fields; the others stay as they are.
        filled = json.dumps(dict(zip(FIELDS, texts, strict=False)))
        examples += _button(title, "fields", filled)
    copies = "".join(_button(f"Copy {name}", "copy", name.lower()) for name in COPIED)
    body = (
        f'<form id="fields" aria-label="What to plan">{fields}</form>'
        f"<details><summary>Notation</summary><dl>{rows}</dl></details>"
        f'<nav aria-label="Examples">{examples}</nav>'
        f'<div class="copies">{copies}<span id="copied" role="status"></span></div>'
        '<div id="shown" aria-live="polite"></div>'
    )
    return html_page("xshard explore", body, "steps.js", "live.js")


def _button(title: str, key: str, value: str) -> str:
    """Return a button, whose script reads `value` as `data-<key>`."""
    return f'<button type="button" data-{key}="{escape(value)}">{escape(title)}</button>'


def _field(name: str, value: str) -> str:
    """Make the HTML of one input field, with its label above and a hidden line for errors below.

    A name with a list of choices, such as "profile", becomes a menu, any other a line of text.
    `value` is what it shows at first.
    """
    attributes = f'id="{name}" name="{name}" aria-describedby="error-{name}"'
    if name in CHOICES:
        options = ""
        for text in CHOICES[name]:
            selected = " selected" if text == value else ""
            options += f"<option{selected}>{text}</option>"
        control = f"<select {attributes}>{options}</select>"
    else:
        limits = 'maxlength="400" autocomplete="off" spellcheck="false"'
        control = f'<input {attributes} value="{escape(value)}" {limits}>'
    label = f'<label for="{name}">{name.replace("_", " ").capitalize()}</label>'
    error = f'<pre class="error" id="error-{name}" role="alert" hidden></pre>'
    return f'<div class="field {name}">{label}{control}{error}</div>'


def html_page(title: str, body: str, *scripts: str) -> str:
    """Make a complete HTML page, with style and scripts inside, so that it needs no other file.

    Args:
        title: The title.
        body: HTML below the title.
        *scripts: Names of script files in this folder.
    """
    folder = resources.files("xshard.cli.explore")
    style = (folder / "page.css").read_text()
    script = "".join((folder / name).read_text() for name in scripts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body><header><h1>{escape(title)}</h1></header><main>{body}</main>"
        f"<script>{script}</script></body></html>"
    )
