"""The server: `python -m serving.server PORT LAST` answers on two ranks, and receives versions in a thread.

The newest version that all ranks have answers, since they get it at different moments.
"""

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from support.runs import report

import torch_bridge as xt
from serving.model import ENDS, SERVER, loss, window

PAUSE_S = 0.01  # between two requests


class Versions:
    """The versions that this rank has, by their numbers, and the error of one that was lost."""

    def __init__(self, port: int) -> None:
        self.subscriber = xt.live.Subscriber(store=dist.TCPStore("127.0.0.1", port), **ENDS)
        self.arrived: dict[int, Any] = {}
        self.bytes = 0
        self.lost = ""

    def receive(self, last: int) -> None:
        """Until the last version; when a trainer is lost, from the next one."""
        while last not in self.arrived:
            try:
                if self.subscriber.receive(wait_s=1.0, progress=self.count):
                    tree = self.subscriber.tree
                    self.arrived[int(tree["number"])] = tree
            except xt.live.LostVersionError as error:
                self.lost = str(error)

    def count(self, done: int, total: int) -> None:
        self.bytes = total

    def common(self) -> int:
        """The newest version that all ranks have, or 0; older ones are forgotten."""
        newest = torch.tensor(max(list(self.arrived), default=0))
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        for number in [number for number in [*self.arrived] if number < newest]:
            del self.arrived[number]
        return int(newest)


def serve(port: int, last: int) -> None:
    """Answer until the last version does; tell how far losses are from the one that came with a version."""
    versions = Versions(port)
    receiving = threading.Thread(target=versions.receive, args=(last,))
    receiving.start()
    number = 0
    answers = 0
    apart = 0.0

    def tell(**more: Any) -> None:
        if answers and dist.get_rank() == 0:
            report(version=number, answers=answers, apart=apart, bytes=versions.bytes, **more)

    while number < last:
        time.sleep(PAUSE_S)
        lost = versions.lost
        newest = versions.common()
        if not newest:
            continue
        if newest != number:
            tell()
            number = newest
            answers = 0
            apart = 0.0
        tree = versions.arrived[number]
        with torch.no_grad():
            answer = loss(tree["weights"], window(0), cut=True)
        answers = answers + 1
        apart = max(apart, abs(answer.item() - tree["loss"].item()))
        if lost:
            tell(lost=lost)
            answers = 0
            apart = 0.0
            versions.lost = ""
    tell()
    receiving.join()


if __name__ == "__main__":
    xt.testing.run_ranks(SERVER.n_devices, serve, *map(int, sys.argv[1:]))
