"""One node of several under torchrun's launcher: its agent, its rendezvous, and ranks that it forks."""

from __future__ import annotations

import gc
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_LOOK_S = 0.5  # how often the agent looks: more often it never seems to stand still


def run(
    n: int,
    ranks: int,
    endpoint: str,
    folder: str,
    collective_timeout_s: float,
    sent: bytes | tuple[str, ...],
    _timeout_s: float,
) -> None:
    """Be one of `n` nodes with `ranks` ranks until all end. sent: a packed function, or a script with words.
    folder: gets a file per rank, "3.result" or "3.error". Raises ChildFailedError."""
    config = LaunchConfig(
        min_nodes=n,
        max_nodes=n,
        nproc_per_node=ranks,
        run_id=endpoint,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        local_addr=socket.gethostname(),
        max_restarts=0,
        start_method="fork",
        monitor_interval=_LOOK_S,
    )
    if isinstance(sent, bytes):
        elastic_launch(config, _rank)(folder, collective_timeout_s, *pickle.loads(sent))  # with its imports
    else:
        elastic_launch(config, sys.executable)(*sent)


def _rank(folder: str, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Leaves without an error: torchrun would end the other ranks of the node before they can say theirs."""
    gc.freeze()  # a collection would copy every page that the ranks share with the agent
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    try:
        kind, data = "result", pickle.dumps(function(*arguments))
    except Exception:
        kind, data = "error", traceback.format_exc().strip().encode()
    file = Path(folder, f"{rank}.part")
    file.write_bytes(data)
    file.rename(file.with_suffix(f".{kind}"))  # which others see whole, or not at all
    if kind == "result":
        with suppress(RuntimeError):  # no rank closes its connections while another still needs them
            dist.barrier()
    dist.destroy_process_group()  # tells others of an error: this process lives as long as its node
