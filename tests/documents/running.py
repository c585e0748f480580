"""Scripts of the documents, run in a process that has imported a framework."""

from __future__ import annotations

import contextlib
import io
import runpy


def printed(path: str, _timeout_s: float = 0.0) -> str:
    """The output of the script, run as `python path` would."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()
