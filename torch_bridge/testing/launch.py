"""Ranks on this machine: forked gloo processes, for tests and first steps; torchrun's, on one of several."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # a backward pass imports it: 0.4 s once, not on every rank
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from xshard import XshardError
from xshard.runtimes.processes import Watch, processor_time

_PATIENCE = 20  # a collective waits longer than ranks that make no progress are let live
_LOOK_S = 0.5  # how often torchrun's agent looks: more often it never seems to stand still


class RankError(XshardError):
    """A rank failed, or did not end; its own traceback is in the text."""


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300.0,
    start_method: str = "fork",
) -> list[Any]:
    """Run `function(*args)` in `n` new processes, a gloo world of their own -> their results, by rank.

    start_method: "fork" (0.2 s) from a process that has run no backward pass and has no threads
    of its own, as JAX does; else "forkserver", for functions that can be imported.
    timeout_s: the longest time in which no rank makes progress; a slow machine is no reason to give up.
    Raises RankError when one fails or they are given up; the others are ended first.

    >>> run_ranks(2, dist.get_rank)
    [0, 1]
    """
    with tempfile.TemporaryDirectory() as folder:
        work = n, folder, timeout_s, function, args
        context = start_processes(_rank, work, n, join=False, start_method=start_method)
        # Anybody may write to the files in the common folder of temporary ones that torch would unpickle.
        context.error_files = [str(Path(folder, "no file"))] * n
        pids = [process.pid for process in context.processes]
        watch = Watch(lambda: processor_time(pids), timeout_s)
        try:
            while not context.join(watch.pause_s, grace_period=1.0):
                if (why := watch.why_over()) is not None:
                    raise RankError(f"not all of {n} ranks ended: {why}")
        except ProcessExitedException as error:
            rank, why = _first_failure(context, Path(folder)) or (error.error_index, str(error))
            raise RankError(f"rank {rank} of {n} failed", hint=why.strip()) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(n)]


def _first_failure(context: ProcessContext, folder: Path) -> tuple[int, str] | None:
    """The rank that the others failed after, and why: their lost connections are not the cause."""
    for rank, process in enumerate(context.processes):
        code = process.exitcode or 0
        if code < 0 and -code != signal.SIGTERM:  # SIGTERM is how the others were ended
            name = signal.Signals(-code).name
            # gloo ends a process that receives more than it waits for.
            hint = (
                "\nif blocks differ in size, XSHARD_DEBUG=1 says whose" if name == "SIGABRT" else ""
            )
            return rank, f"terminated by signal {name}{hint}"
    failures = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("*.failure"))]
    return min(failures)[1:] if failures else None


def _rank(
    rank: int,
    n: int,
    folder: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # torch sends SIGINT to a rank when its launcher ends; jobs in the background of a shell ignore it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        # All ranks are on this machine: without this gloo listens where its host name leads others.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        # Measuring inside a rank measures these ranks, as after torchrun, and starts no others.
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "RANK": str(rank), "WORLD_SIZE": str(n)}
        _begin(_PATIENCE * timeout_s, init_method=f"file://{folder}/store", rank=rank, world_size=n)
        Path(folder, str(rank)).write_bytes(pickle.dumps(function(*args)))
        dist.barrier()  # no rank closes its connections while another still needs them
        dist.destroy_process_group()
    except BaseException:
        failure = time.monotonic(), rank, traceback.format_exc()  # one clock for all processes
        Path(folder, f"{rank}.failure").write_bytes(pickle.dumps(failure))
        sys.exit(1)


def _begin(timeout_s: float, **world: Any) -> None:
    gc.freeze()  # a collection would copy every page that the ranks share with their parent
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **world)


def run_node(
    n: int, ranks: int, endpoint: str, folder: str, collective_s: float, sent: Any, _: float
) -> None:
    """Be one of `n` nodes with `ranks` ranks until all end. sent: a packed function, or a script with words.
    folder: gets a file per rank, "3.result" or "3.error". Raises ChildFailedError.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # slow

    meeting: Any = {"run_id": endpoint, "rdzv_backend": "c10d", "rdzv_endpoint": endpoint}
    meeting |= {"local_addr": socket.gethostname(), "monitor_interval": _LOOK_S}
    config = LaunchConfig(n, n, ranks, max_restarts=0, start_method="fork", **meeting)
    if isinstance(sent, bytes):
        elastic_launch(config, _node_rank)(
            folder, collective_s, *pickle.loads(sent)
        )  # with its imports
    else:
        elastic_launch(config, sys.executable)(*sent)


def _node_rank(
    folder: str, timeout_s: float, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Leaves without an error: torchrun would end the other ranks of the node before they can say theirs."""
    _begin(timeout_s)
    file = Path(folder, f"{dist.get_rank()}.part")  # the function may make another world
    try:
        kind = "result"
        data = pickle.dumps(function(*arguments))
    except Exception:
        kind = "error"
        data = traceback.format_exc().strip().encode()
    file.write_bytes(data)
    file.rename(file.with_suffix(f".{kind}"))  # which others see whole, or not at all
    if kind == "result":
        with suppress(
            RuntimeError
        ):  # no rank closes its connections while another still needs them
            dist.barrier()
    dist.destroy_process_group()  # tells others of an error: this process lives as long as its node
