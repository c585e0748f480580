"""Docstrings as pages show them: their examples are code.

Finds the beginning and the end of each example, and marks the arguments that a docstring explains. The prose
of docstrings is markdown already.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# An example with what it prints, up to the next line of prose: a blank line ends it.
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Fences the examples of every docstring, so that brackets in them are no links, and marks arguments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring:
            return
        prose, mark, rest = obj.docstring.value.partition(">>> ")
        if isinstance(obj, griffe.Function) and (names := "|".join(p.name for p in obj.parameters)):
            # As in "src, dst: the layouts. dtype: the dtype of both", which explains three arguments.
            prose = re.sub(rf"(?<![\w`.\"])({names})(?=(?:, \w+)*:\s)", r"**`\1`**", prose)
        obj.docstring.value = EXAMPLE.sub(lambda found: f"\n```pycon\n{found[0]}\n```\n", prose + mark + rest)
