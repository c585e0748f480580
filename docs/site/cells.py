"""Cells of code, run as a notebook runs them.

Runs each cell and lays out its outputs on the page. All cells run in one kernel, which starts with the first;
a page begins without the names of the page before.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

TIMEOUT_S = 300


class CellError(Exception):
    """A cell that raised: its code and its traceback."""


def outputs_of(code: str) -> list[tuple[str, str]]:
    """Run a cell -> its outputs, each as ("html" or "text", content). Raises CellError if the cell raises."""
    messages: list[dict[str, Any]] = []
    _, client = _kernel()
    client.execute_interactive(
        code, timeout=TIMEOUT_S, output_hook=messages.append, store_history=False
    )
    return [output for message in messages if (output := _output(message, code))]


def as_markdown(outputs: list[tuple[str, str]]) -> str:
    """Outputs of a cell as a page shows them."""
    forms = {"html": "\n{}\n", "text": "\n``` {{.text .shown}}\n{}\n```\n"}
    return "".join(forms[kind].format(text) for kind, text in outputs)


def forget() -> None:
    """Leave no name of the cells before."""
    if _kernel.cache_info().currsize:
        outputs_of("%reset_selective -f .")


def stop() -> None:
    """End the kernel, if one was started."""
    if _kernel.cache_info().currsize:
        manager, client = _kernel()
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        shutil.rmtree(Path(manager.ip).parent)
        _kernel.cache_clear()


@functools.cache
def _kernel() -> tuple[Any, Any]:
    folder = tempfile.mkdtemp(prefix="xshard-site-")  # of this user alone: no other user can listen
    manager = KernelManager(transport="ipc", ip=str(Path(folder) / "kernel"))
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=TIMEOUT_S)
    return manager, client


def _output(message: dict[str, Any], code: str) -> tuple[str, str] | None:
    content = message["content"]
    if message["msg_type"] == "error":
        raise CellError("\n".join([code, *content["traceback"]]))
    if message["msg_type"] == "stream" and content["name"] == "stdout":
        return "text", content["text"].rstrip()
    if message["msg_type"] in ("display_data", "execute_result"):
        data = content["data"]
        return (
            ("html", data["text/html"])
            if "text/html" in data
            else ("text", data["text/plain"].rstrip())
        )
    return None
