"""What a process that runs the documents' code is asked for.

Decides how a script is run and what it printed. A process of JAX has as many host devices as its environment
says.
"""

from __future__ import annotations

import contextlib
import io
import runpy


def printed(path: str, _timeout_s: float = 0.0) -> str:
    """What the script prints, run as `python path` would."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()
