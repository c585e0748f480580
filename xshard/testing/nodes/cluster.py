"""Functions of users on several nodes: torch ranks by torchrun, JAX processes by `jax.distributed`.

A framework is imported on the nodes and never here.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.backends import BACKENDS
from xshard.runtimes.processes import Process
from xshard.testing.nodes.network import LINK, Network
from xshard.testing.pickling import packed

_PATIENCE = 20  # a collective waits longer than ranks that make no progress are let live
_LOOK_S = 0.2


class NodesError(XshardError):
    """Ranks or nodes failed, or did not end.

    errors: the last words of each by its name, as in "rank 3" or "node 1".
    """

    def __init__(self, errors: Mapping[str, str]) -> None:
        self.errors = dict(errors)
        said = "\n".join(f"{name}: {error}" for name, error in errors.items())
        super().__init__(f"{', '.join(errors)} failed", hint=said)

    def __reduce__(self) -> tuple[object, ...]:
        return NodesError, (self.errors,)


class Cluster:
    """Nodes on this machine, numbered from 0, with as many ranks each; made by `nodes`."""

    def __init__(self, network: Network, ranks: int) -> None:
        self._network, self._ranks, self._n = network, ranks, len(network.nodes)
        self._processes: dict[str, list[Process]] = {}  # one per node, which stay as long as all goes well
        self._ports = count(29500)  # a run that has ended may still hold its own

    def run_torch(
        self,
        work: Callable[..., Any] | str | Path,
        *args: Any,
        timeout_s: float = 300.0,
        collective_timeout_s: float | None = None,
    ) -> list[Any]:
        """`work(*args)` on all ranks of a gloo world, started by torchrun's launcher -> the results, by rank.

        work: a function, closures too; or the path of a script, `args` its words, its results its own affair.
        timeout_s: the longest time without progress. collective_timeout_s: the limit of one collective.
        Raises NodesError when a rank fails, NoRuntimeError.
        """
        BACKENDS["torch"].check_installed()
        sent = packed(work, *args) if callable(work) else (str(work), *map(str, args))
        patience_s = collective_timeout_s or _PATIENCE * timeout_s
        self._start("torch", {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"})
        with tempfile.TemporaryDirectory() as folder:  # its owner's alone

            def answered() -> dict[int, str]:
                files = [file for file in Path(folder).iterdir() if file.suffix != ".part"]
                return {int(file.stem): file.read_text() if file.suffix == ".error" else "" for file in files}

            arguments = self._n, self._ranks, self._endpoint(), folder, patience_s, sent
            function = BACKENDS["torch"].function("torchrun.run")
            self._ask("torch", function, [arguments] * self._n, timeout_s, answered)
            files = [Path(folder, f"{rank}.result") for rank in sorted(answered())]
            return [pickle.loads(file.read_bytes()) for file in files]

    def run_jax(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """`function(*args)` in one JAX process per node, with a device per rank -> the results, by node.

        timeout_s: the longest time without progress. Raises NodesError when a node fails, NoRuntimeError.
        """
        backend = BACKENDS["jax"]
        backend.check_installed()
        sent = packed(function, *args)
        if "jax" not in self._processes:
            threads = {"PJRT_NPROC": str(max(16, 2 * self._ranks))}  # as many as two programs at once need
            self._start("jax", backend.environment(self._ranks) | threads)
            address = self._endpoint()
            join = [(address, self._n, i) for i in range(self._n)]
            self._ask("jax", backend.function("worker.join"), join, timeout_s)
        return self._ask("jax", backend.function("worker.call_packed"), [(sent,)] * self._n, timeout_s)

    def cut(self, node: int) -> None:
        """Pull a node's cable: messages to it and from it are lost silently until `restore`."""
        self._network.plug(node, "down")

    def restore(self, node: int) -> None:
        """Undo `cut`."""
        self._network.plug(node, "up")

    def slow(self, node: int, rate: str | None) -> None:
        """Give a node's link another rate, in both directions. rate: see `nodes`."""
        self._network.limit(node, rate)

    def kill(self, node: int) -> None:
        """End a node with all its processes, at once and for good."""
        self._network.nodes[node].end()

    def bytes(self, node: int) -> tuple[int, int]:
        """Bytes that a node has received and sent on its link so far, with all headers."""
        return self._network.counted(node)

    def close(self) -> None:
        """End what runs, and then the nodes."""
        for name in tuple(self._processes):
            self._end(name)
        self._network.close()

    def _start(self, name: str, environment: Mapping[str, str]) -> None:
        if name not in self._processes:
            prefixes = [node.prefix for node in self._network.nodes]  # all or none
            self._processes[name] = [Process(environment, prefix) for prefix in prefixes]

    def _end(self, name: str) -> None:
        for process in self._processes.pop(name):
            process.end()

    def _endpoint(self) -> str:
        return f"{self._network.address(0)}:{next(self._ports)}"

    def _ask(
        self,
        name: str,
        function: str,
        arguments: Sequence[tuple[Any, ...]],
        timeout_s: float,
        answered: Callable[[], Mapping[int, str]] = dict,
    ) -> list[Any]:
        """Ask all nodes together -> their answers. Raises NodesError.

        answered: the ranks that have said all, with their errors. After a failure their nodes are not waited
        for: torchrun would wait for the others.
        """
        processes = self._processes[name]

        def has_said_all(i: int) -> bool:
            return set(range(i * self._ranks, (i + 1) * self._ranks)) <= answered().keys()

        with ThreadPoolExecutor(self._n) as threads:
            asked = [
                threads.submit(process.ask, function, *values, timeout_s=timeout_s)
                for process, values in zip(processes, arguments, strict=True)
            ]
            try:
                while still := wait(asked, timeout=_LOOK_S).not_done:
                    failed = [i for i, each in enumerate(asked) if each.done() and each.exception()]
                    for i in failed:
                        if processes[i].is_alive:
                            processes[i].end()  # closes its connections, as the end of a program does
                    said_all = all(has_said_all(i) for i, each in enumerate(asked) if each in still)
                    if said_all and (failed or any(answered().values())):
                        break
            finally:  # also after Ctrl-C, when threads would wait on
                if not all(each.done() and not each.exception() for each in asked):
                    self._end(name)
        errors = {f"rank {rank}": error for rank, error in sorted(answered().items()) if error}
        errors |= {
            f"node {i}": str(each.exception())
            for i, each in enumerate(asked)
            if each.exception() and not has_said_all(i)
        }
        if errors:
            raise NodesError(errors)
        return [None if each.exception() else each.result() for each in asked]


@contextmanager
def nodes(n: int, ranks: int = 1, rate: str | None = None) -> Iterator[Cluster]:
    """`n` nodes of `ranks` ranks each: `with nodes(2, ranks=2, rate="200mbit") as cluster:`.

    They are Linux namespaces, which root can make, and users where the system lets them. Nothing outside of
    them changes. What runs there ends with the block, or with this process, however it ends.
    rate: bits per second of each node's link, as `tc` writes them; None for no limit.
    Raises NoNodesError, which says why, if the system makes no namespaces.
    """
    cluster = Cluster(Network(n, rate), ranks)
    try:
        yield cluster
    finally:
        cluster.close()
