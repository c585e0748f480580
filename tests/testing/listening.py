"""The addresses at which a process listens, as the system sees it."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path


def addresses(pids: list[int] | None = None) -> list[str]:
    """The addresses at which processes, by default this one, wait for connections of others."""
    sockets = set()
    for pid in pids or [os.getpid()]:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed
                sockets.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            is_waiting = state == "0A" or table.startswith("udp")
            if is_waiting and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                network = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(str(ipaddress.ip_address(network)))
    return found
