"""Functions of users on several nodes: torch ranks by torchrun's launcher, and JAX processes.

Decides which process runs where, when a run is over, and what is said of ranks that fail. A
framework is imported on the nodes, never here.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.backends import BACKENDS
from xshard.runtimes.processes import Process
from xshard.testing.nodes.network import LINK, Network, NoNodesError
from xshard.testing.pickling import packed

Work = Callable[..., Any] | str | Path  # a function, or the path of a script
# A collective gives up after so many times the longest time without progress: ranks that hang are
# ended before that, so that the error is theirs.
_COLLECTIVE_TIMEOUT_FACTOR = 20
_LOOK_S = 0.2
_FIRST_PORT = 29500
# JAX needs a thread for each device of two programs that run at once, and some to spare.
_MIN_JAX_THREADS = 16


class NodesError(XshardError):
    """Ranks or nodes failed, or did not end.

    Attributes:
        errors: The last words of each, by name: "rank 3" or "node 1".
    """

    def __init__(self, errors: Mapping[str, str]) -> None:
        self.errors = dict(errors)
        details = "\n".join(f"{name}: {error}" for name, error in errors.items())
        super().__init__(f"{', '.join(errors)} failed", hint=details)

    def __reduce__(self) -> tuple[object, ...]:
        return NodesError, (self.errors,)


class _RankReports:
    """The files that torch ranks write when they end: `3.result`, or `3.error` with the last words."""

    def __init__(self, folder: Path | None, ranks_per_node: int) -> None:
        """folder: None if no rank writes a file, as for JAX."""
        self._folder = folder
        self._ranks_per_node = ranks_per_node

    def errors(self) -> dict[int, str]:
        """Return the errors of the ranks that have ended, "" for success, in the order of ranks."""
        if self._folder is None:
            return {}
        errors: dict[int, str] = {}
        for file in self._folder.iterdir():
            if file.suffix == ".part":  # not yet written to its end
                continue
            errors[int(file.stem)] = file.read_text() if file.suffix == ".error" else ""
        return dict(sorted(errors.items()))

    def results(self) -> list[Any]:
        """Return what the ranks returned, in their order. All of them have ended without an error."""
        if self._folder is None:
            return []
        files = sorted(self._folder.glob("*.result"), key=lambda file: int(file.stem))
        # Unpickling is safe here, since only this user can write to the folder.
        return [pickle.loads(file.read_bytes()) for file in files]

    def has_all_of(self, node: int) -> bool:
        """Tell whether all ranks of a node have ended."""
        first = node * self._ranks_per_node
        return self.errors().keys() >= set(range(first, first + self._ranks_per_node))


class Cluster:
    """Nodes on this machine, numbered from 0, with as many ranks each; made by `nodes`."""

    def __init__(self, network: Network, ranks: int) -> None:
        self._network = network
        self._ranks = ranks
        self._n_nodes = len(network.nodes)
        # By framework, one per node: they stay as long as all goes well.
        self._processes: dict[str, list[Process]] = {}
        self._ports = count(_FIRST_PORT)  # a run that has ended may still hold its own

    def run_torch(
        self,
        work: Work,
        *args: Any,
        timeout_s: float = 300.0,
        collective_timeout_s: float | None = None,
    ) -> list[Any]:
        """Run a function or a script on all ranks of a gloo world, started by torchrun's launcher.

            cluster.run_torch(train, config)    # on 2 nodes of 2 ranks -> 4 results

        Args:
            work: A function, closures too; or the path of a script, which keeps its results itself.
            *args: The function's arguments, or those of the script on its command line.
            timeout_s: The longest time without progress.
            collective_timeout_s: The limit of one collective; by default longer than `timeout_s`.

        Returns:
            What the function returned, by rank.

        Raises:
            NodesError: A rank failed.
            NoRuntimeError: torch is not installed.
        """
        backend = BACKENDS["torch"]
        backend.check_installed()
        # A function travels as bytes, a script as its command line.
        sent: bytes | tuple[str, ...]
        if callable(work):
            sent = packed(work, *args)
        else:
            sent = (str(work), *map(str, args))
        if not collective_timeout_s:
            collective_timeout_s = _COLLECTIVE_TIMEOUT_FACTOR * timeout_s
        self._start("torch", {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"})
        with tempfile.TemporaryDirectory() as folder:
            reports = _RankReports(Path(folder), self._ranks)
            arguments = (
                self._n_nodes,
                self._ranks,
                self._new_endpoint(),
                folder,
                collective_timeout_s,
                sent,
            )
            self._ask(
                "torch",
                backend.function("launch.run_node"),
                [arguments] * self._n_nodes,
                timeout_s,
                reports,
            )
            return reports.results()

    def run_jax(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0
    ) -> list[Any]:
        """Run a function on all nodes at once, as a JAX program over several hosts.

        Each node has one JAX process, with a device for each rank.

            cluster.run_jax(train, config)      # on 2 nodes of 2 ranks -> 2 results, 4 devices

        Args:
            function: The function, closures too.
            *args: Its arguments.
            timeout_s: The longest time without progress.

        Returns:
            What the function returned, by node.

        Raises:
            NodesError: A node failed.
            NoRuntimeError: JAX is not installed.
        """
        backend = BACKENDS["jax"]
        backend.check_installed()
        sent = packed(function, *args)
        no_reports = _RankReports(None, self._ranks)  # ranks are devices of one process
        if "jax" not in self._processes:
            threads = {"PJRT_NPROC": str(max(_MIN_JAX_THREADS, 2 * self._ranks))}
            self._start("jax", backend.environment(self._ranks) | threads)
            # Once for the life of these processes: JAX cannot join a second time.
            endpoint = self._new_endpoint()
            join_arguments = [(endpoint, self._n_nodes, node) for node in range(self._n_nodes)]
            self._ask("jax", backend.function("worker.join"), join_arguments, timeout_s, no_reports)
        call = backend.function("worker.call_packed")
        return self._ask("jax", call, [(sent,)] * self._n_nodes, timeout_s, no_reports)

    def cut(self, node: int) -> None:
        """Pull a node's cable: messages to it and from it are lost silently until `restore`.

        Args:
            node: Its number, from 0.
        """
        # At the switch: the node does not see that its link is down.
        self._network.switch.call(f"ip link set port{node} down")

    def restore(self, node: int) -> None:
        """Undo `cut`.

        Args:
            node: Its number, from 0.
        """
        self._network.switch.call(f"ip link set port{node} up")

    def slow(self, node: int, rate: str | None) -> None:
        """Give a node's link another rate, in both directions.

            cluster.slow(1, "200mbit")

        Args:
            node: Its number, from 0.
            rate: Bits per second, as in `nodes`; None for no limit.

        Raises:
            XshardError: `rate` is no rate.
        """
        self._network.limit(node, rate)

    def kill(self, node: int) -> None:
        """End a node with all its processes, at once and for good.

        Args:
            node: Its number, from 0.
        """
        self._network.nodes[node].end()

    def bytes(self, node: int) -> tuple[int, int]:
        """Count the bytes that a node has received and sent on its link so far.

        Args:
            node: Its number, from 0.

        Returns:
            The bytes received, and the bytes sent, with all headers.
        """
        counters = Path(f"/proc/{self._network.nodes[node].pid}/net/dev").read_text()
        for line in counters.splitlines():
            device, _, numbers = line.strip().partition(":")
            if device == LINK:
                # Eight counters of what is received come first, bytes before packets.
                counts = numbers.split()
                return int(counts[0]), int(counts[8])
        raise NoNodesError(f"node {node} has no link {LINK}")

    def close(self) -> None:
        """End what runs, and then the nodes."""
        for framework in tuple(self._processes):
            self._end(framework)
        self._network.close()

    def _start(self, framework: str, environment: Mapping[str, str]) -> None:
        """Start a process on every node, unless they are there."""
        if framework not in self._processes:
            prefixes = [node.prefix for node in self._network.nodes]  # raises before one is started
            self._processes[framework] = [Process(environment, prefix) for prefix in prefixes]

    def _end(self, framework: str) -> None:
        for process in self._processes.pop(framework):
            process.end()

    def _new_endpoint(self) -> str:
        """Return an address at which processes can meet, on the first node."""
        return f"{self._network.address(0)}:{next(self._ports)}"

    def _ask(
        self,
        framework: str,
        function: str,
        arguments: Sequence[tuple[Any, ...]],
        timeout_s: float,
        reports: _RankReports,
    ) -> list[Any]:
        """Call a function on all nodes at once, in the process that each node has for a framework.

        Args:
            framework: "torch" or "jax".
            function: The function's name with its module.
            arguments: The arguments of the call on each node.
            timeout_s: The longest time without progress.
            reports: What ranks that these processes start have reported so far.

        Returns:
            The answers, None for a node that failed after all its ranks have succeeded.

        Raises:
            NodesError: Ranks failed, or nodes whose ranks have not reported.
        """
        processes = self._processes[framework]
        calls: list[Future[Any]] = []
        with ThreadPoolExecutor(self._n_nodes) as threads:
            for process, values in zip(processes, arguments, strict=True):
                calls.append(threads.submit(process.ask, function, *values, timeout_s=timeout_s))
            try:
                _wait_until_over(calls, processes, reports)
            finally:  # also after Ctrl-C, when the threads would wait on
                if not all(call.done() and not _has_failed(call) for call in calls):
                    self._end(framework)

        errors = {f"rank {rank}": error for rank, error in reports.errors().items() if error}
        for node, call in enumerate(calls):
            # If its ranks have reported, their errors say more than that the node failed.
            if _has_failed(call) and not reports.has_all_of(node):
                errors[f"node {node}"] = str(call.exception())
        if errors:
            raise NodesError(errors)
        return [None if _has_failed(call) else call.result() for call in calls]


def _wait_until_over(
    calls: Sequence[Future[Any]], processes: Sequence[Process], reports: _RankReports
) -> None:
    """Wait until all nodes have answered, and do not hang if some of them fail.

    Once a node or a rank has failed, the others may wait for it for ever. So the process of a failed
    node is ended, which closes its connections. The wait is then over when every rank of the other
    nodes has reported its result or its error. It looks every `_LOOK_S` seconds.

    Args:
        calls: The call that runs on each node.
        processes: The process of each node.
        reports: What ranks have reported so far, in files.
    """
    while True:
        pending = wait(calls, timeout=_LOOK_S).not_done
        if not pending:
            return
        failed_nodes = [node for node, call in enumerate(calls) if _has_failed(call)]
        for node in failed_nodes:
            # Ending it closes its connections, so that ranks that wait for it get an error.
            if processes[node].is_alive:
                processes[node].end()
        pending_nodes = [node for node, call in enumerate(calls) if call in pending]
        is_failure = bool(failed_nodes) or any(reports.errors().values())
        if is_failure and all(map(reports.has_all_of, pending_nodes)):
            return


def _has_failed(call: Future[Any]) -> bool:
    return call.done() and call.exception() is not None


@contextmanager
def nodes(n: int, ranks: int = 1, rate: str | None = None) -> Iterator[Cluster]:
    """Simulate a cluster of several nodes on this machine, for tests of programs on several hosts.

        with nodes(2, ranks=2, rate="200mbit") as cluster:

    Each node is a set of Linux namespaces with a network of its own. Root can make them, and users
    where the system lets them. Nothing outside of them changes. What runs there ends with the
    `with` block, or with this process, however it ends.

    Args:
        n: The number of nodes.
        ranks: The number of ranks on each node.
        rate: Bits per second of each node's link, as `tc` writes them; None for no limit.

    Raises:
        NoNodesError: The system makes no namespaces; the message says why.
        XshardError: `rate` is no rate.
    """
    with closing(Cluster(Network(n, rate), ranks)) as cluster:
        yield cluster
