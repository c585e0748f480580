"""A trainer and a server as two programs: the server answers while its weights are renewed.

    python examples/train_and_serve.py            # four ranks train and publish, two ranks serve
    python examples/train_and_serve.py --kill     # one of the four is killed in the middle of a version

The trainer cuts every weight over its four ranks, the server the hidden layer over its two
(serving/model.py). With a version comes the loss that the trainer knows of it. Every answer of the server has
that loss, so it was computed from one version, whole. When the trainer is killed, the server goes on with the
version that it has, and says so; the next trainer brings the next version.

The exit status is 1 if an answer has another loss, or a program fails that is not to be killed.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any

import torch.distributed as dist
from rich.console import Console
from serving.model import ENDS, KILLED, SHAPES_SENT
from support.runs import EXAMPLES, options

from xshard.formatting import format_bytes
from xshard.state import plan_transfer

TOLERANCE = 1e-9  # of a loss, in float64; two versions differ by far more


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--kill", action="store_true", help="a rank of the trainer, amid a version")
    chosen = parser.parse_args()
    console = Console()
    last = chosen.versions
    endpoints = {name: value for name, value in ENDS.items() if name != "timeout_s"}
    plan = plan_transfer(SHAPES_SENT, dtypes=dict.fromkeys(SHAPES_SENT, "float64"), **endpoints)
    received = format_bytes(plan.bytes_received)
    least = format_bytes(plan.bytes_lower_bound)
    console.print(
        f"A rank of the server receives {received} of a version's weights; the least is {least}."
    )
    with closing(rows(last, last // 2 + 1 if chosen.kill else 0)) as lines:
        return judge(lines, last, console)


def rows(last: int, killed: int) -> Generator[dict[str, Any], None, None]:
    """The lines of the server, as they come. killed: the version that the first trainer dies in, or 0."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # both programs meet here
    started = []

    def start(program: str, *arguments: int) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            f"serving.{program}",
            *map(str, (store.port, last, *arguments)),
        ]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES))
        return started[-1]

    def train(first: int, killed: int) -> None:
        if start("trainer", first, killed).wait() not in (0, KILLED):
            server.kill()  # there is nothing to wait for

    server = start("server")
    try:
        threading.Thread(target=train, args=(1, killed), daemon=True).start()
        for line in server.stdout or ():
            if line.startswith("{"):
                yield (row := json.loads(line))
                if "lost" in row:
                    threading.Thread(target=train, args=(killed, 0), daemon=True).start()
    finally:
        for program in started:
            program.kill()
            program.communicate()


def judge(lines: Iterable[dict[str, Any]], last: int, console: Console) -> int:
    """Print the server's answers, and what is wrong with them; 0 if nothing is."""
    version = 0
    apart = 0.0
    for row in lines:
        version = row["version"]
        apart = max(apart, row["apart"])
        size = f"{format_bytes(row['bytes'])} moved a version"
        console.print(
            f"version {version}: {row['answers']} answers, losses apart {row['apart']:.1e}, {size}"
        )
        if "lost" in row:
            console.print(row["lost"], markup=False)
            console.print(
                f"The server goes on: the last of these answers, by version {version}, is later."
            )
    if version < last:
        console.print(f"The server ended with version {version} of {last}.")
    if not apart <= TOLERANCE:
        console.print(f"An answer was not that of its version: its loss is {apart:.1e} apart.")
    return int(version < last or not apart <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
