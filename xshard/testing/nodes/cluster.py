"""Nodes on one machine, as Linux namespaces with links of a chosen rate, for torch ranks and JAX."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from xshard.errors import XshardError
from xshard.runtimes.backends import BACKENDS
from xshard.runtimes.processes import Process
from xshard.testing.pickling import packed

LINK = "eth0"  # the name of every node's link
_MTU = 9000  # jumbo frames, as clusters have: headers are 1 % of what is sent
# Bytes that a link lets pass at once. A real one has none; here a longer frame would never pass, and what a
# timer is late by, the rate would lose.
_BURST = 4 * _MTU // 3
_LATE_S = 160e-6
_TOOLS = ("ip", "tc", "unshare", "nsenter", "hostname")
_ENDED_S = 10.0  # after which all that ran in a namespace has ended
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class NoNodesError(XshardError):
    """Namespaces cannot be had here, or have ended; the text says why."""


class Namespace:
    """A network of its own; with a host name, also processes of its own. An open pipe holds it; the system
    closes it when this process ends, even by SIGKILL: then `cat`, its first process, ends, and the others.
    """

    def __init__(self, new: Sequence[str], inside: Sequence[str] = (), host: str = "") -> None:
        self._own = ("--uts", "--pid", "--fork") if host else ()
        script = f"{f'hostname {host} && ' if host else ''}ip link set lo up && echo && exec cat"
        command = [*inside, "unshare", *new, "--net", *self._own, "sh", "-c", script]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # Ctrl-C is for the parent, which ends it in order.
        self._holder = subprocess.Popen(command, **pipes, start_new_session=True)
        assert self._holder.stdin and self._holder.stdout and self._holder.stderr
        self._pipes = self._holder.stdin, self._holder.stdout, self._holder.stderr
        self.pid = self._holder.pid
        if not self._holder.stdout.readline():
            raise NoNodesError(
                "no namespaces here", hint=self._holder.stderr.read().decode().strip()
            )

    @property
    def prefix(self) -> list[str]:
        """What stands before a command that runs in it. Raises NoNodesError when it has ended."""
        if self._pipes[0].closed or self._holder.poll() is not None:
            raise NoNodesError("this node has been killed", hint="make new ones with `nodes`")
        user = () if _is_root() else ("--user", "--preserve-credentials")
        own = ("--uts", f"--pid=/proc/{self.pid}/ns/pid_for_children") if self._own else ()
        return ["nsenter", f"--target={self.pid}", *user, "--net", *own]

    def call(self, *commands: str) -> None:
        """Run commands of a shell in it. Raises NoNodesError."""
        script = [*self.prefix, "sh", "-ec", "\n".join(commands)]
        if (done := subprocess.run(script, capture_output=True, text=True)).returncode:
            raise NoNodesError(f"no such network here: {done.stderr.strip()}")

    def end(self) -> None:
        """End all that runs in it, at once."""
        self._pipes[0].close()
        with suppress(subprocess.TimeoutExpired):  # only an unreaped zombie can keep it
            self._holder.wait(_ENDED_S)
        for pipe in self._pipes:
            pipe.close()


class Network:
    """Nodes at one switch. rate: limit of every link, in both directions; None for no limit."""

    def __init__(self, n: int, rate: str | None) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if sys.platform != "linux" or missing:
            why = (
                f"{', '.join(missing)} not installed"
                if sys.platform == "linux"
                else "they need Linux"
            )
            raise NoNodesError(f"no namespaces here: {why}")
        with ExitStack() as stack:
            self.switch = Namespace(() if _is_root() else ("--user", "--map-root-user"))
            stack.callback(self.switch.end)
            self.switch.call("ip link add switch type bridge", "ip link set switch up")
            self.nodes: list[Namespace] = []
            for i in range(n):
                # The host's name is its address: whoever looks it up needs no name service.
                node = Namespace((), () if _is_root() else self.switch.prefix, self.address(i))
                stack.callback(node.end)
                self.switch.call(
                    f"ip link add port{i} type veth peer name {LINK} netns {node.pid}",
                    f"ip link set port{i} mtu {_MTU} addrgenmode none master switch up",
                )
                node.call(
                    f"ip link set {LINK} mtu {_MTU} addrgenmode none up",
                    f"ip addr add {self.address(i)}/24 dev {LINK}",
                )
                self.nodes.append(node)
                self.limit(i, rate)
            self.close = stack.pop_all().close

    @staticmethod
    def address(node: int) -> str:
        """Three digits each: torchrun numbers ranks in the order of these texts."""
        return f"10.77.0.{101 + node}"

    def limit(self, i: int, rate: str | None) -> None:
        """Limit what a node sends, and what it receives. Raises XshardError for what is no rate."""
        command = "tc qdisc del dev {} root || true"
        if rate is not None:
            if (written := _RATE.fullmatch(rate)) is None:
                why = f"a link cannot have the rate {rate!r}"
                raise XshardError(why, hint='bits per second, as in "200mbit"')
            bytes_per_s = float(written[1]) * _UNITS[written[2]] / 8
            burst = max(_BURST, round(bytes_per_s * _LATE_S))
            command = f"tc qdisc replace dev {{}} root tbf rate {rate} burst {burst}b latency 50ms"
        for namespace, device in ((self.nodes[i], LINK), (self.switch, f"port{i}")):
            namespace.call(command.format(device))


def _is_root() -> bool:
    return os.geteuid() == 0


Work = Callable[..., Any] | str | Path  # a function, or the path of a script
Answered = Callable[[], Mapping[int, str]]
_PATIENCE = 20  # a collective waits longer than ranks that make no progress are let live
_LOOK_S = 0.2


class NodesError(XshardError):
    """Ranks or nodes failed, or did not end. errors: the last words of each, as of "rank 3" or "node 1"."""

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
        self._processes: dict[
            str, list[Process]
        ] = {}  # one per node, which stay as long as all goes well
        self._ports = count(29500)  # a run that has ended may still hold its own

    def run_torch(
        self,
        work: Work,
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
                return {
                    int(file.stem): file.read_text() if file.suffix == ".error" else ""
                    for file in files
                }

            arguments = self._n, self._ranks, self._endpoint(), folder, patience_s, sent
            function = BACKENDS["torch"].function("launch.run_node")
            self._ask("torch", function, [arguments] * self._n, timeout_s, answered)
            return [
                pickle.loads(Path(folder, f"{rank}.result").read_bytes())
                for rank in sorted(answered())
            ]

    def run_jax(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0
    ) -> list[Any]:
        """`function(*args)` in one JAX process per node, with a device per rank -> the results, by node.

        timeout_s: the longest time without progress. Raises NodesError when a node fails, NoRuntimeError.
        """
        backend = BACKENDS["jax"]
        backend.check_installed()
        sent = packed(function, *args)
        if "jax" not in self._processes:
            threads = {
                "PJRT_NPROC": str(max(16, 2 * self._ranks))
            }  # as many as two programs at once need
            self._start("jax", backend.environment(self._ranks) | threads)
            address = self._endpoint()
            join = [(address, self._n, i) for i in range(self._n)]
            self._ask("jax", backend.function("worker.join"), join, timeout_s)
        return self._ask(
            "jax", backend.function("worker.call_packed"), [(sent,)] * self._n, timeout_s
        )

    def cut(self, node: int) -> None:
        """Pull a node's cable: messages to it and from it are lost silently until `restore`."""
        self._network.switch.call(
            f"ip link set port{node} down"
        )  # as if it were pulled at the switch

    def restore(self, node: int) -> None:
        """Undo `cut`."""
        self._network.switch.call(f"ip link set port{node} up")

    def slow(self, node: int, rate: str | None) -> None:
        """Give a node's link another rate, in both directions. rate: see `nodes`."""
        self._network.limit(node, rate)

    def kill(self, node: int) -> None:
        """End a node with all its processes, at once and for good."""
        self._network.nodes[node].end()

    def bytes(self, node: int) -> tuple[int, int]:
        """Bytes that a node has received and sent on its link so far, with all headers."""
        lines = Path(f"/proc/{self._network.nodes[node].pid}/net/dev").read_text().splitlines()
        counts = (
            next(line for line in lines if line.strip().startswith(LINK)).partition(":")[2].split()
        )
        return int(counts[0]), int(counts[8])

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
        self, name: str, function: str, arguments: Any, timeout_s: float, answered: Answered = dict
    ) -> list[Any]:
        """Ask all nodes together -> their answers. answered: the ranks that have ended, with their errors;
        after a failure their nodes may be late. Raises NodesError.
        """
        processes = self._processes[name]

        def has_said_all(i: int) -> bool:
            return set(range(i * self._ranks, (i + 1) * self._ranks)) <= answered().keys()

        with ThreadPoolExecutor(self._n) as threads:
            calls = zip(processes, arguments, strict=True)
            asked = [
                threads.submit(p.ask, function, *values, timeout_s=timeout_s) for p, values in calls
            ]
            try:
                while still := wait(asked, timeout=_LOOK_S).not_done:
                    failed = [i for i, each in enumerate(asked) if each.done() and each.exception()]
                    for i in failed:
                        if processes[i].is_alive:
                            processes[
                                i
                            ].end()  # closes its connections, as the end of a program does
                    said_all = all(has_said_all(i) for i, each in enumerate(asked) if each in still)
                    if said_all and (failed or any(answered().values())):
                        break
            finally:  # also after Ctrl-C, when threads would wait on
                if not all(each.done() and not each.exception() for each in asked):
                    self._end(name)
        errors = {f"rank {rank}": error for rank, error in sorted(answered().items()) if error}
        failed = [i for i, each in enumerate(asked) if each.exception() and not has_said_all(i)]
        errors |= {f"node {i}": str(asked[i].exception()) for i in failed}
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
    with closing(Cluster(Network(n, rate), ranks)) as cluster:
        yield cluster
