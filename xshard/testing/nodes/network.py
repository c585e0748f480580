"""Nodes of one machine as Linux namespaces, at one switch, with links of a chosen rate.

Knows nothing of frameworks: what runs on nodes is decided in `cluster`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from xshard.errors import XshardError

LINK = "eth0"  # the name of every node's link
_MTU_BYTES = 9000  # jumbo frames, as clusters have: headers are 1 % of what is sent
# A link lets a burst pass at once. A real one has none; but here a frame longer than the burst would
# never pass, and the rate would lose what the kernel's timer is late by.
_MIN_BURST_BYTES = 4 * _MTU_BYTES // 3
_TIMER_LATE_S = 160e-6
_TOOLS = ("ip", "tc", "unshare", "nsenter", "hostname")
_END_TIMEOUT_S = 10.0  # after which all that ran in a namespace has ended
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class NoNodesError(XshardError):
    """Namespaces cannot be had here, or have ended; the text says why."""


class Namespace:
    """A network of its own; with a host name, also processes of its own.

    An open pipe holds it. The system closes the pipe when this process ends, even by SIGKILL: then
    `cat`, the first process in the namespace, ends, and with it all others.
    """

    def __init__(self, new: Sequence[str], inside: Sequence[str] = (), host: str = "") -> None:
        """Make a Linux network namespace, and a process in it that keeps it alive.

        Args:
            new: More options of `unshare`, such as those for a user namespace.
            inside: The words of a command such as `nsenter`, to make it inside of another
                namespace.
            host: The host name of a node, which also gets processes of its own. "": a network
                alone.

        Raises:
            NoNodesError: The system does not let this user make one.
        """
        self._has_processes = bool(host)
        own_processes: tuple[str, ...] = ()
        # The script prints an empty line when all is made. Then `cat` waits until its input is
        # closed, which ends the namespace.
        script = "ip link set lo up && echo && exec cat"
        if host:
            own_processes = ("--uts", "--pid", "--fork")
            script = f"hostname {host} && {script}"
        self._holder = subprocess.Popen(
            [*inside, "unshare", *new, "--net", *own_processes, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        assert self._holder.stdin and self._holder.stdout and self._holder.stderr
        self._pipes = (self._holder.stdin, self._holder.stdout, self._holder.stderr)
        self.pid = self._holder.pid
        # Output that ends without that line: one of the commands has failed.
        if not self._holder.stdout.readline():
            raise NoNodesError(
                "no namespaces here", hint=self._holder.stderr.read().decode().strip()
            )

    @property
    def prefix(self) -> list[str]:
        """The words before a command that is to run in it. Raises NoNodesError when it has ended."""
        if self._pipes[0].closed or self._holder.poll() is not None:
            raise NoNodesError("this node has been killed", hint="make new ones with `nodes`")
        command = ["nsenter", f"--target={self.pid}"]
        if not is_root():
            command += ["--user", "--preserve-credentials"]
        command.append("--net")
        if self._has_processes:
            # Not the holder's own one: `unshare` itself has stayed outside.
            command += ["--uts", f"--pid=/proc/{self.pid}/ns/pid_for_children"]
        return command

    def call(self, *commands: str) -> None:
        """Run commands of a shell in it. Raises NoNodesError if one fails."""
        script = [*self.prefix, "sh", "-ec", "\n".join(commands)]
        done = subprocess.run(script, capture_output=True, text=True)
        if done.returncode:
            raise NoNodesError(f"no such network here: {done.stderr.strip()}")

    def end(self) -> None:
        """End all that runs in it, at once."""
        self._pipes[0].close()  # `cat` reads the end of its input
        with suppress(subprocess.TimeoutExpired):  # only an unreaped zombie can keep it
            self._holder.wait(_END_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.close()


class Network:
    """Nodes at one switch, each with a link to it.

    Attributes:
        switch: The namespace of the switch.
        nodes: The namespaces of the nodes.
        close: A function that ends all of them.
    """

    def __init__(self, n_nodes: int, rate: str | None) -> None:
        """Make nodes. rate: the limit of every link, in both directions; None for no limit."""
        _check_tools()
        self.nodes: list[Namespace] = []
        with ExitStack() as stack:  # if one cannot be made, those before it end
            self.switch = Namespace(() if is_root() else ("--user", "--map-root-user"))
            stack.callback(self.switch.end)
            self.switch.call("ip link add switch type bridge", "ip link set switch up")
            for i in range(n_nodes):
                self._add_node(i, stack)
                self.limit(i, rate)
            # All are made: from here on they live until `close`.
            self.close = stack.pop_all().close

    def _add_node(self, i: int, stack: ExitStack) -> None:
        """Make a node, and connect it with the switch. stack: gets the function that ends the node."""
        prefix = () if is_root() else self.switch.prefix
        # The host's name is its address: whoever looks it up needs no name service.
        node = Namespace((), prefix, self.address(i))
        stack.callback(node.end)
        self.switch.call(
            f"ip link add port{i} type veth peer name {LINK} netns {node.pid}",
            f"ip link set port{i} mtu {_MTU_BYTES} addrgenmode none master switch up",
        )
        node.call(
            f"ip link set {LINK} mtu {_MTU_BYTES} addrgenmode none up",
            f"ip addr add {self.address(i)}/24 dev {LINK}",
        )
        self.nodes.append(node)

    @staticmethod
    def address(node: int) -> str:
        """Return a node's address. It ends in three digits: torchrun numbers ranks in the order of texts."""
        return f"10.77.0.{101 + node}"

    def limit(self, i: int, rate: str | None) -> None:
        """Limit what a node sends, and what it receives. Raises XshardError for what is no rate."""
        # Traffic control limits what a device sends: what a node receives, its port at the switch sends.
        for namespace, device in ((self.nodes[i], LINK), (self.switch, f"port{i}")):
            if rate is None:
                namespace.call(f"tc qdisc del dev {device} root || true")
            else:
                limit = f"rate {rate} burst {_burst_bytes(rate)}b latency 50ms"
                namespace.call(f"tc qdisc replace dev {device} root tbf {limit}")


def _burst_bytes(rate: str) -> int:
    """Return the bytes that may pass at once at a rate such as "200mbit". Raises XshardError."""
    match = _RATE.fullmatch(rate)
    if match is None:
        raise XshardError(
            f"a link cannot have the rate {rate!r}", hint='bits per second, as in "200mbit"'
        )
    number, unit = match.groups()
    # The kernel refills the burst when its timer fires: at high rates, a late one needs more of it.
    bytes_per_s = float(number) * _UNITS[unit] / 8
    return max(_MIN_BURST_BYTES, round(bytes_per_s * _TIMER_LATE_S))


def _check_tools() -> None:
    """Raise NoNodesError where there are no namespaces, or no commands to make them."""
    if sys.platform != "linux":
        raise NoNodesError("no namespaces here: they need Linux")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoNodesError(f"no namespaces here: {', '.join(missing)} not installed")


def is_root() -> bool:
    """Tell whether this process may make namespaces without one of its user."""
    return os.geteuid() == 0
