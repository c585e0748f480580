"""One node of several under torchrun's launcher: its agent, its rendezvous, and ranks that it forks.

Runs in a process that has imported torch and done nothing else. Decides how results and errors of ranks come
back. Which nodes there are is in `xshard.testing.nodes`.
"""

from __future__ import annotations

import pickle
import socket
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run(
    n: int,
    ranks: int,
    endpoint: str,
    folder: str,
    collective_timeout_s: float,
    sent: bytes | tuple[str, ...],
    _timeout_s: float,
) -> None:
    """Be one of `n` nodes with `ranks` ranks, and wait for the end of all.

    sent: a packed function, or a script and its words. folder: a file per rank gets (error, result).
    Raises ChildFailedError.
    """
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
    )
    if isinstance(sent, bytes):
        elastic_launch(config, _rank)(folder, collective_timeout_s, sent)
    else:
        elastic_launch(config, sys.executable)(*sent)


def _rank(folder: str, collective_timeout_s: float, packed: bytes) -> None:
    """Leaves without an error: torchrun would end the other ranks of the node before they can say theirs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=collective_timeout_s))
    answer: tuple[str, Any]
    try:
        function, arguments = pickle.loads(packed)
        answer = "", function(*arguments)
        data = pickle.dumps(answer)
    except Exception:
        data = pickle.dumps((traceback.format_exc().strip(), None))
    file = Path(folder, str(dist.get_rank()))
    file.with_suffix(".part").write_bytes(data)
    file.with_suffix(".part").rename(file)
    with suppress(RuntimeError):  # no rank closes its connections while another still needs them
        dist.barrier()
