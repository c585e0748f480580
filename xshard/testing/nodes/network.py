"""Nodes as Linux namespaces: addresses and processes of their own, joined by links of a chosen rate.

Nothing outside them changes, and they end with the process that made them, however it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from xshard.errors import XshardError

LINK = "eth0"  # the name of every node's link
_MTU = 9000  # jumbo frames, as clusters have: headers are 1 % of what is sent
# Bytes that a link lets pass at once. A real one has none; here a longer frame would never pass, and what a
# timer is late by, the rate would lose.
_BURST, _LATE_S = 4 * _MTU // 3, 160e-6
_TOOLS = ("ip", "tc", "unshare", "nsenter", "hostname")
_ENDED_S = 10.0  # after which all that ran in a namespace has ended
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class NoNodesError(XshardError):
    """Namespaces cannot be had here, or have ended; the text says why."""


class Namespace:
    """A network of its own; with a host name, also processes of its own.

    An open pipe holds it, which the system closes when this process ends, even by SIGKILL. Then `cat` ends,
    and takes all other processes with it, as the first of their namespace.
    """

    def __init__(self, new: Sequence[str], inside: Sequence[str] = (), host: str = "") -> None:
        self._own = ("--uts", "--pid") if host else ()
        own = (*self._own, "--fork") if host else ()
        script = f"{f'hostname {host} && ' if host else ''}ip link set lo up && echo && exec cat"
        self._holder = subprocess.Popen(
            [*inside, "unshare", *new, "--net", *own, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        assert self._holder.stdin and self._holder.stdout and self._holder.stderr
        self._pipes, self.pid = (
            (self._holder.stdin, self._holder.stdout, self._holder.stderr),
            self._holder.pid,
        )
        if not self._holder.stdout.readline():
            raise NoNodesError("no namespaces here", hint=self._holder.stderr.read().decode().strip())

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
            why = f"{', '.join(missing)} not installed" if sys.platform == "linux" else "they need Linux"
            raise NoNodesError(f"no namespaces here: {why}")
        with ExitStack() as stack:
            self._switch = Namespace(() if _is_root() else ("--user", "--map-root-user"))
            stack.callback(self._switch.end)
            self._switch.call("ip link add switch type bridge", "ip link set switch up")
            self.nodes: list[Namespace] = []
            for i in range(n):
                # The host's name is its address: whoever looks it up needs no name service.
                node = Namespace((), () if _is_root() else self._switch.prefix, self.address(i))
                stack.callback(node.end)
                self._switch.call(
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
                raise XshardError(
                    f"a link cannot have the rate {rate!r}", hint='bits per second, as in "200mbit"'
                )
            bytes_per_s = float(written[1]) * _UNITS[written[2]] / 8
            burst = max(_BURST, round(bytes_per_s * _LATE_S))
            command = f"tc qdisc replace dev {{}} root tbf rate {rate} burst {burst}b latency 50ms"
        for namespace, device in ((self.nodes[i], LINK), (self._switch, f"port{i}")):
            namespace.call(command.format(device))

    def plug(self, i: int, state: str) -> None:
        """state: "up" or "down", as if the cable were pulled at the switch."""
        self._switch.call(f"ip link set port{i} {state}")

    def counted(self, i: int) -> tuple[int, int]:
        """Bytes that a node has received and sent, with all headers."""
        lines = Path(f"/proc/{self.nodes[i].pid}/net/dev").read_text().splitlines()
        counts = next(line for line in lines if line.strip().startswith(LINK)).partition(":")[2].split()
        return int(counts[0]), int(counts[8])


def _is_root() -> bool:
    return os.geteuid() == 0
