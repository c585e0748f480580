"""Functions of users on several nodes: torch ranks by torchrun, JAX processes by `jax.distributed`.

Decides which process runs where, when a run is over, and what is said of ranks that fail. What a node is, is in
`network`; a framework is imported on the nodes and never here.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.backends import BACKENDS, QUICK_XLA_FLAGS
from xshard.runtimes.processes import FunctionError, Process
from xshard.testing.nodes.network import LINK, Network
from xshard.testing.pickling import packed

_PATIENCE = 20  # as `run_ranks` has it


class NodesError(XshardError):
    """Ranks failed, or did not end. errors: of each rank or node that could still say so, by its name."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__(f"{', '.join(errors)} failed", hint="\n".join(errors.values()))
        self.errors = dict(errors)


class Cluster:
    """Nodes on this machine, numbered from 0, with as many ranks each; made by `nodes`."""

    def __init__(self, network: Network, ranks: int) -> None:
        self.network, self.ranks = network, ranks
        self._processes: dict[str, list[Process]] = {}
        self._ports = count(29500)  # a run that has ended may still hold its own

    def run_torch(
        self,
        work: Callable[..., Any] | str | Path,
        *args: Any,
        timeout_s: float = 300.0,
        collective_timeout_s: float | None = None,
    ) -> list[Any]:
        """`work(*args)` on every rank of a gloo world, as torchrun starts it -> the results, by rank.

        work: a function, closures too; or the path of a script, `args` its words, its results its own affair.
        timeout_s: the longest time without progress. collective_timeout_s: what one collective may take.
        Raises NodesError when a rank fails, NoRuntimeError.
        """
        BACKENDS["torch"].check_installed()
        sent = packed(work, *args) if callable(work) else (str(work), *map(str, args))
        patience_s = collective_timeout_s or _PATIENCE * timeout_s
        processes = self._running("torch", {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"})
        with tempfile.TemporaryDirectory() as folder:  # readable by its owner alone

            def answered() -> set[int]:
                return {int(file.name) for file in Path(folder).iterdir() if file.name.isdecimal()}

            failed, _ = self._ask(
                processes,
                "torch_bridge.testing.torchrun.run",
                (len(processes), self.ranks, self._endpoint(), folder, patience_s, sent),
                timeout_s,
                answered,
            )
            answers = {
                rank: pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in sorted(answered())
            }
        errors = {f"rank {rank}": error for rank, (error, _) in answers.items() if error}
        if errors or failed:
            raise NodesError(errors | failed)
        return [result for _, result in answers.values()]

    def run_jax(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """`function(*args)` in one JAX process per node, with a device per rank -> the results, by node.

        timeout_s: the longest time without progress. Raises NodesError when a node fails, NoRuntimeError.
        """
        backend = BACKENDS["jax"]
        backend.check_installed()
        sent = packed(function, *args)
        is_new = "jax" not in self._processes
        settings = {
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PJRT_NPROC": "16",
            "XLA_FLAGS": QUICK_XLA_FLAGS,
        }
        processes = self._running("jax", backend.environment(self.ranks) | settings)
        failed: dict[str, str] = {}
        if is_new:
            failed, _ = self._ask(
                processes,
                "jax_bridge.testing.worker.join_nodes",
                (self._endpoint(), len(processes)),
                timeout_s,
            )
        if not failed:
            failed, answers = self._ask(
                processes, "jax_bridge.testing.equivalence.call_packed", (sent,), timeout_s
            )
        if failed:
            raise NodesError(failed)
        return answers

    def cut(self, node: int) -> None:
        """Pull a node's cable: what is sent to it or by it is lost until `restore`, and nobody is told."""
        self.network.plug(node, "down")

    def restore(self, node: int) -> None:
        """Undo `cut`."""
        self.network.plug(node, "up")

    def slow(self, node: int, rate: str | None) -> None:
        """Limit a node's link anew, in both directions. rate: see `nodes`."""
        self.network.limit(node, rate)

    def kill(self, node: int) -> None:
        """End a node for good, with all its processes."""
        self.network.nodes[node].end()

    def bytes(self, node: int) -> tuple[int, int]:
        """What a node has received and sent on its link so far, in bytes, with all headers."""
        return self.network.counted(node)

    def close(self) -> None:
        """End what still runs."""
        for name in tuple(self._processes):
            self._end(name)

    def _running(self, name: str, environment: Mapping[str, str]) -> list[Process]:
        """A process per node, from the run before where that went well."""
        if name not in self._processes:
            self._processes[name] = [Process(environment, node.prefix) for node in self.network.nodes]
        return self._processes[name]

    def _end(self, name: str) -> None:
        for process in self._processes.pop(name):
            process.end()

    def _endpoint(self) -> str:
        return f"{self.network.address(0)}:{next(self._ports)}"

    def _ask(
        self,
        processes: Sequence[Process],
        function: str,
        arguments: Sequence[Any],
        timeout_s: float,
        answered: Callable[[], Collection[int]] = tuple,
    ) -> tuple[dict[str, str], list[Any]]:
        """Ask all nodes together -> the errors of those that failed, and the answers.

        answered: ranks that need not be waited for, once a node has failed.
        """
        errors: dict[str, str] = {}

        def ask(i: int) -> Any:
            try:
                return processes[i].ask(function, *arguments, timeout_s=timeout_s)
            except FunctionError as error:
                errors[f"node {i}"] = str(error)
                processes[i].end()  # closes its connections, as the end of a program does

        with ThreadPoolExecutor(len(processes)) as threads:
            asked = [threads.submit(ask, i) for i in range(len(processes))]
            while wait(asked, timeout=0.2).not_done:
                ranks = answered() if errors else ()
                for i, each in enumerate(asked):
                    mine = range(i * self.ranks, (i + 1) * self.ranks)
                    if not each.done() and ranks and all(rank in ranks for rank in mine):
                        processes[i].end()  # torchrun would wait for the others
        if errors:
            self._end(next(name for name, found in self._processes.items() if found is processes))
        return errors, [each.result() for each in asked]


@contextmanager
def nodes(n: int, ranks: int = 1, rate: str | None = None) -> Iterator[Cluster]:
    """`n` nodes of `ranks` ranks each, whose links run at `rate`; as root, or where users may make namespaces.

    rate: bits per second as `tc` writes them, "200mbit"; None for no limit. Raises NoNodesError, which says why,
    where there are no namespaces. What is on them ends with the block, or with this process, however it ends.
    """
    network = Network(n, rate)
    cluster = Cluster(network, ranks)
    try:
        yield cluster
    finally:
        cluster.close()
        network.close()
