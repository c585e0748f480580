"""Ranks on this machine: forked gloo processes, for tests and first steps.

Torchrun's, on one of several.
"""

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
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

# A backward pass imports it: 0.4 s once, not on every rank.
import torch.fx.experimental.symbolic_shapes  # noqa: F401
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from xshard import XshardError
from xshard.errors import api_boundary
from xshard.runtimes.processes import Watch, processor_time
from xshard.signatures import Count, NonNegative

_PATIENCE = 20  # a collective waits longer than ranks that make no progress are let live
_LOOK_S = 0.5  # how often torchrun's agent looks: more often it never seems to stand still


class RankError(XshardError):
    """A rank failed, or did not end; its own traceback is in the text."""


R = TypeVar("R")


@api_boundary
def run_ranks(
    n: Count,
    function: Callable[..., R],
    *args: Any,
    timeout_s: NonNegative = 300.0,
    start_method: str = "fork",
) -> list[R]:
    """Run a function on n ranks: new processes on this machine, with gloo for collectives.

        results = xt.testing.run_ranks(4, train, config)     # by rank

    Args:
        n: The number of processes.
        function: Every process calls `function(*args)`.
        *args: Its arguments.
        timeout_s: The longest time in which no rank makes progress; a slow machine is no reason to
            give up.
        start_method: "fork" (0.2 s) from a process that has run no backward pass and has no threads
            of its own, as JAX does; else "forkserver", for functions that can be imported.

    Returns:
        What the function returns on each rank, by rank.

    Raises:
        RankError: A rank failed, or they were given up; the others are ended first.

    Examples:
        >>> run_ranks(2, dist.get_rank)
        [0, 1]
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (n, folder, timeout_s, function, args)
        context = start_processes(_rank, work, n, join=False, start_method=start_method)
        # torch would unpickle errors from files in the common temporary folder, where anybody may
        # write: it gets names of files that do not exist.
        context.error_files = [str(Path(folder, "no file"))] * n
        try:
            _wait(context, n, timeout_s)
        except ProcessExitedException as error:
            failure = _first_failure(context, Path(folder))
            if failure is None:
                failure = _Failure(error.error_index, str(error))
            reason = f"rank {failure.rank} of {n} failed"
            raise RankError(reason, hint=failure.reason.strip()) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(n)]


def _wait(context: ProcessContext, n: int, timeout_s: float) -> None:
    """Wait for all ranks.

    Raises RankError if none of them makes progress, as torch does if one fails.
    """
    # Progress is processor time, so a slow machine is not taken for a standstill.
    pids = [process.pid for process in context.processes]
    watch = Watch(lambda: processor_time(pids), timeout_s)
    while not context.join(watch.pause_s, grace_period=1.0):
        why_over = watch.why_over()
        if why_over is not None:
            raise RankError(f"not all of {n} ranks ended: {why_over}")


class _Failure(NamedTuple):
    """The rank that failed first, and why."""

    rank: int
    reason: str


def _first_failure(context: ProcessContext, folder: Path) -> _Failure | None:
    """Find the rank that failed first, and why; None if no rank has left a reason.

    When one rank fails, the others lose their connections to it and fail too: their errors are not
    the cause. A rank that a signal has killed comes before all others; among ranks with an
    exception, which wrote it to a file in `folder` with its time, the earliest.
    """
    for rank, process in enumerate(context.processes):
        code = process.exitcode or 0
        if code < 0 and -code != signal.SIGTERM:  # SIGTERM is how the others were ended
            name = signal.Signals(-code).name
            reason = f"terminated by signal {name}"
            if name == "SIGABRT":
                # gloo ends a process that receives more than it waits for.
                reason += "\nif blocks differ in size, XSHARD_DEBUG=1 says whose"
            return _Failure(rank, reason)
    failures = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("*.failure"))]
    if not failures:
        return None
    _, rank, reason = min(failures)  # the time comes first
    return _Failure(rank, reason)


def _rank(
    rank: int,
    n: int,
    folder: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run a test function as one rank of `n`, in a process of its own.

    The result is pickled to the file "<rank>" in `folder`. After a failure, "<rank>.failure" gets
    the time, the rank and the traceback, and the process exits with 1.
    """
    # torch sends SIGINT to a rank when its launcher ends; jobs in the background of a shell ignore
    # it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        # As after torchrun: whoever measures inside a rank measures these ranks, and starts no
        # others.
        os.environ |= {"GLOO_SOCKET_IFNAME": _loopback(), "RANK": str(rank), "WORLD_SIZE": str(n)}
        _begin(_PATIENCE * timeout_s, init_method=f"file://{folder}/store", rank=rank, world_size=n)
        Path(folder, str(rank)).write_bytes(pickle.dumps(function(*args)))
        dist.barrier()  # no rank closes its connections while another still needs them
        dist.destroy_process_group()
    except BaseException:
        failure = (time.monotonic(), rank, traceback.format_exc())  # one clock for all processes
        Path(folder, f"{rank}.failure").write_bytes(pickle.dumps(failure))
        sys.exit(1)


def _loopback() -> str:
    """Return the network interface of this machine alone, "lo" or "lo0".

    All ranks are here: without it gloo listens where its host name leads others.
    """
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    return "lo"


def _begin(timeout_s: float, **world: Any) -> None:
    """Join a gloo world.

    world: arguments of `init_process_group`; none if the environment has them.
    """
    gc.freeze()  # a collection would copy every page that the ranks share with their parent
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **world)


def run_node(
    n_machines: int,
    n_ranks: int,
    endpoint: str,
    folder: str,
    collective_s: float,
    program: Any,
    _timeout_s: float,
) -> None:
    """Start this machine's ranks of a job on several machines, as torchrun does; wait for them.

    Args:
        n_machines: The number of machines, which all call this.
        n_ranks: The number of ranks of each machine.
        endpoint: "host:port", where the machines find each other.
        folder: For a function, where each rank writes a file: "3.result" or "3.error" for rank 3.
        collective_s: The timeout of collectives.
        program: Bytes, a pickled function and its arguments; or a list, a script and its arguments.

    Raises:
        ChildFailedError: A rank failed.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # slow

    config = LaunchConfig(
        n_machines,
        n_machines,
        n_ranks,
        max_restarts=0,
        start_method="fork",
        run_id=endpoint,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        local_addr=socket.gethostname(),
        monitor_interval=_LOOK_S,
    )
    if isinstance(program, bytes):
        # Unpickling imports the function's modules here, once: forked ranks have them already.
        function, arguments = pickle.loads(program)
        elastic_launch(config, _node_rank)(folder, collective_s, function, arguments)
    else:
        elastic_launch(config, sys.executable)(*program)


def _node_rank(
    folder: str, timeout_s: float, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Run a function as one rank of a job on several machines, and write its result to a file.

    The file in `folder` is "3.result", pickled, or "3.error", the traceback. After an error this
    process ends normally: torchrun would otherwise kill the machine's other ranks before they can
    write theirs.
    """
    _begin(timeout_s)
    file = Path(folder, f"{dist.get_rank()}.part")  # the function may make another world
    try:
        data = pickle.dumps(function(*arguments))
        kind = "result"
    except Exception:
        data = traceback.format_exc().strip().encode()
        kind = "error"
    file.write_bytes(data)
    # Renaming is atomic: whoever waits for this name sees the whole file, or none.
    file.rename(file.with_suffix(f".{kind}"))
    if kind == "result":
        # No rank closes its connections while another still needs them.
        with suppress(RuntimeError):
            dist.barrier()
    # After an error, closed connections tell the other ranks: this process does not end before its
    # node does.
    dist.destroy_process_group()
