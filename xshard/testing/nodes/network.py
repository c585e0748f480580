"""Nodes as Linux namespaces: addresses and processes of their own, joined by links of a chosen rate.

Decides how they are made, that nothing outside them changes, and that they end with the process that made
them, however it ends. Knows nothing of what runs in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from xshard.errors import XshardError

LINK = "eth0"  # the name of every node's link
_TOOLS = ("ip", "tc", "unshare", "nsenter", "hostname")


class NoNodesError(XshardError):
    """Namespaces cannot be had here; the text says why."""


class Namespace:
    """A network of its own; on a node also a host name, and processes that end with it.

    An open pipe holds it. The system closes that when this process ends, even by SIGKILL: then `cat` ends, and
    as the first process of its namespace takes all others with it.
    """

    def __init__(self, user: Sequence[str], inside: Sequence[str] = (), host: str = "") -> None:
        own = ("--uts", "--pid", "--fork") if host else ()
        name = f"hostname {host} && " if host else ""
        self._inside = inside
        self._holder = subprocess.Popen(
            [
                *inside,
                "unshare",
                *user,
                "--net",
                *own,
                "sh",
                "-c",
                f"{name}ip link set lo up && echo && exec cat",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        self.pid, self._own = self._holder.pid, own
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if not self._holder.stdout.readline():
            raise NoNodesError("no namespaces here", hint=self._holder.stderr.read().decode().strip())

    @property
    def prefix(self) -> list[str]:
        """What stands before a command that runs in it."""
        own = ("--uts", f"--pid=/proc/{self.pid}/ns/pid_for_children") if self._own else ()
        user = () if _is_root() else ("--user", "--preserve-credentials")
        return ["nsenter", f"--target={self.pid}", *user, "--net", *own]

    def call(self, *commands: str) -> None:
        """Run commands of a shell in it. Raises NoNodesError."""
        done = subprocess.run(
            [*self.prefix, "sh", "-ec", "\n".join(commands)], capture_output=True, text=True
        )
        if done.returncode:
            raise NoNodesError(f"a network cannot be made here: {done.stderr.strip()}")

    def end(self) -> None:
        """End all that runs in it, at once."""
        assert self._holder.stdin and self._holder.stdout and self._holder.stderr
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()
        self._holder.stderr.close()


class Network:
    """Nodes at one switch. rate: of every link in both directions, as `tc` has it ("200mbit"); None: no limit."""

    def __init__(self, n: int, rate: str | None) -> None:
        if missing := "it is no Linux" if sys.platform != "linux" else _missing():
            raise NoNodesError(f"no namespaces here: {missing}")
        with ExitStack() as ends:
            user = () if _is_root() else ("--user", "--map-root-user")
            self._switch = Namespace(user)
            ends.callback(self._switch.end)
            self._switch.call("ip link add switch type bridge", "ip link set switch up")
            self.nodes: list[Namespace] = []
            for i in range(n):
                # The host's name is its address: whoever looks it up needs no name service.
                self.nodes.append(Namespace((), () if _is_root() else self._switch.prefix, self.address(i)))
                ends.callback(self.nodes[i].end)
                self._connect(i)
                self.limit(i, rate)
            self.close = ends.pop_all().close

    @staticmethod
    def address(node: int) -> str:
        """Three digits each: torchrun numbers ranks in the order of these texts."""
        return f"10.77.0.{101 + node}"

    def _connect(self, i: int) -> None:
        self._switch.call(
            f"ip link add port{i} type veth peer name {LINK} netns {self.nodes[i].pid}",
            f"ip link set port{i} addrgenmode none master switch up",
        )
        self.nodes[i].call(
            f"ip link set {LINK} addrgenmode none up", f"ip addr add {self.address(i)}/24 dev {LINK}"
        )

    def limit(self, i: int, rate: str | None) -> None:
        """Limit what a node sends, and what it receives."""
        for namespace, device in ((self.nodes[i], LINK), (self._switch, f"port{i}")):
            namespace.call(
                f"tc qdisc replace dev {device} root tbf rate {rate} burst 256kbit latency 50ms"
                if rate
                else f"tc qdisc del dev {device} root 2>/dev/null || true"
            )

    def plug(self, i: int, state: str) -> None:
        """state: "up" or "down", as if the cable were pulled at the switch."""
        self._switch.call(f"ip link set port{i} {state}")

    def counted(self, i: int) -> tuple[int, int]:
        """Bytes that a node has received and sent, with all headers."""
        for line in Path(f"/proc/{self.nodes[i].pid}/net/dev").read_text().splitlines():
            name, _, counts = line.strip().partition(":")
            if name == LINK:
                return int(counts.split()[0]), int(counts.split()[8])
        raise AssertionError(f"no {LINK} on node {i}")


def _is_root() -> bool:
    return os.geteuid() == 0


def _missing() -> str:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else ""
