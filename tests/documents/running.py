"""What a process that runs the documents' code is asked for.

Decides how a script is run and what it printed. The process of torch forks ranks, so it imports torch and
does nothing else; a process of JAX has as many host devices as its environment says.
"""

from __future__ import annotations

import contextlib
import io
import runpy
from importlib import import_module
from pathlib import Path


def printed(path: str, _timeout_s: float = 0.0) -> str:
    """What the script prints, run as `python path` would."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def on_ranks(n: int, path: str, timeout_s: float) -> None:
    """The script on `n` forked gloo ranks."""
    import torch_bridge as xt

    needed = ["torch._dynamo", "torch.distributed.tensor"]  # once here, not in every rank that needs it
    if "transformers" in Path(path).read_text():
        needed.append("transformers.models.llama.modeling_llama")
    for module in needed:
        import_module(module)
    xt.run_ranks(n, printed, path, timeout_s=timeout_s)
