"""A trainer and a server as two programs: versions arrive whole or not at all, and the server goes on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import PRELOADED, error_of, on_ranks
from torch_bridge.live import versions
from torch_bridge.mesh.desync import compare_ranks
from torch_bridge.state import leaves
from xshard import Mesh

assert PRELOADED  # the server of forks has torch_bridge already

SHAPES = {"w": (6, 8), "b": (6,), "e": (4, 8)}
RULES = {"b": "o", "**": "o/dp i -> o i/tp"}
MESHES = {"src_mesh": Mesh(dp=3), "dst_mesh": Mesh(tp=2)}
TIMEOUT_S = 300.0  # of what comes; far more than it takes


def arrays(version: int) -> dict[str, np.ndarray]:
    return {name: np.arange(np.prod(s)).reshape(s) + 1000.0 * version for name, s in SHAPES.items()}


def blocks(version: int, end: str) -> dict[str, torch.Tensor]:
    """Those of this rank, of the trainer or of the server."""
    layouts = {"src_mesh": ("o/dp i", "o"), "dst_mesh": ("o i/tp", "o")}[end]
    return {
        name: torch.from_numpy(
            xs.reference.scatter(x, layouts[x.ndim == 1], MESHES[end])[dist.get_rank()].copy()
        )
        for name, x in arrays(version).items()
    }


def start(role: Callable[..., Any], n: int, folder: Path, *args: Any) -> list[Any]:
    """The processes of a program, a world of their own."""
    name = f"{role.__name__}{len(list(folder.iterdir()))}"
    (folder / name).mkdir()
    context = multiprocessing.get_context("forkserver")
    found = [context.Process(target=_rank, args=(role, rank, n, folder / name, *args)) for rank in range(n)]
    for process in found:
        process.start()
    return found


def _rank(role: Callable[..., Any], rank: int, n: int, folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=n)
    store = dist.FileStore(str(folder.parent / "store"), -1)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(role(store, *args)))
    os._exit(0)  # the others may be gone


def results(folder: Path, role: str) -> list[Any]:
    found = sorted(folder.glob(f"{role}*/*.result"))
    return [pickle.loads(file.read_bytes()) for file in found]


def trainer(store: Any, dies: bool) -> list[Any]:
    """Publishes a version; then it dies in the middle of another, or plans another transfer."""
    options = {**MESHES, "bucket_bytes": 64, "timeout_s": TIMEOUT_S, "silent_s": TIMEOUT_S}
    publisher = xt.live.Publisher(store=store, rules=RULES, **options)
    found: list[Any] = [publisher.publish(blocks(1 if dies else 3, "src_mesh"), SHAPES)]

    def die(done: int, total: int) -> None:
        if dies and dist.get_rank() == 1 and 0 < done < total:
            os.kill(os.getpid(), signal.SIGKILL)

    if not dies:
        publisher = xt.live.Publisher(store=store, rules=RULES | {"b": "n"}, **options)
    found.append(error_of(lambda: publisher.publish(blocks(2, "src_mesh"), SHAPES, progress=die)))
    return found


def server(store: Any, restart: Any) -> list[Any]:
    options = {**MESHES, "bucket_bytes": 64, "timeout_s": TIMEOUT_S, "silent_s": TIMEOUT_S}
    subscriber = xt.live.Subscriber(store=store, rules=RULES, **options)
    found: list[Any] = [subscriber.receive()]
    held: list[Any] = []

    def check(version: int) -> None:
        expected = blocks(version, "dst_mesh")
        assert all(torch.equal(subscriber.tree[name], x) for name, x in expected.items())
        assert subscriber.tree.keys() == expected.keys()
        held.append(subscriber.version)

    restart.wait()
    found.append(subscriber.receive(TIMEOUT_S))
    check(1)
    found.append(error_of(lambda: subscriber.receive(TIMEOUT_S)))
    check(1)
    restart.wait()
    # The next version comes in a thread, while this one serves the old version, with collectives too.
    arrived: list[bool] = []
    receiving = threading.Thread(target=lambda: arrived.append(subscriber.receive(TIMEOUT_S)))
    receiving.start()
    served = 0
    while True:
        total = torch.ones(1)
        dist.all_reduce(total)
        served += int(total.item()) == 2
        tree, first = subscriber.tree, None
        for name, x in tree.items():
            first = float(x.min()) // 1000 if first is None else first
            assert float(x.min()) // 1000 == first, name  # no half of two versions
        still = torch.tensor([float(receiving.is_alive())])
        dist.all_reduce(still, dist.ReduceOp.MAX)  # both ranks leave the loop together
        if not still.item():
            break
    receiving.join()
    found.append(arrived == [True] and served > 0)
    check(3)
    found.append(error_of(lambda: subscriber.receive(TIMEOUT_S)))
    check(3)
    return [*found, held]


def test_a_version_is_whole_or_invisible(tmp_path: Path) -> None:
    """v1 arrives; its trainer is killed in v2; a new one brings v3, and then disagrees about the plan."""
    context = multiprocessing.get_context("forkserver")
    restart = context.Barrier(3)
    everyone = start(server, 2, tmp_path, restart)
    try:
        restart.wait()  # the server looked for a version before there was a trainer
        first = start(trainer, 3, tmp_path, True)
        everyone = everyone + first
        first[1].join()
        for process in first:
            process.kill()  # as torchrun does when one of them has ended
        restart.wait()
        everyone = everyone + start(trainer, 3, tmp_path, False)
        for process in everyone:
            process.join()
    finally:
        for process in everyone:
            process.kill()
    assert [process.exitcode for process in everyone] == [0, 0] + [-signal.SIGKILL] * 3 + [0, 0, 0]
    for found in results(tmp_path, "server"):
        before, came, lost, served, disagreed, held = found
        assert (before, came, served, held) == (False, True, True, [1, 1, 3, 3])
        assert lost[0] == "LostVersionError"
        assert "version 2 did not arrive whole; version 1 stays" in lost[1]
        assert disagreed[0] == "DesyncError" and "the two programs plan different transfers" in disagreed[1]
    published = results(tmp_path, "trainer")
    assert [number for number, _ in published] == [3, 3, 3]
    for _, (kind, text) in published:
        assert kind == "DesyncError"
        here, there = (repr(f"{rules}\n") for rules in (RULES | {"b": "n"}, RULES))
        assert text.splitlines()[1:] == [f"  here:  {here}", f"  there: {there}"]


def test_texts_that_differ_in_a_last_break_differ() -> None:
    assert str(versions._differing("a\nb\n", "a\nb")).endswith("  here:  'b\\n'\n  there: 'b'")


def test_all_ranks_of_a_trainer_hear_that_nobody_serves(tmp_path: Path) -> None:
    """The first waits for the server, and the others for it, for longer than that."""
    for kind, text in on_ranks(3, _nobody_serves, tmp_path):
        assert kind == "LostVersionError" and "no server took version 1 within 0.5 s" in text


def _nobody_serves(folder: Path) -> tuple[str, str]:
    store, waited = dist.FileStore(str(folder / "store"), -1), []

    def meet(ranks: Any, asked: str, prepare: Any, timeout: timedelta | None = None) -> Any:
        waited.append(timeout)
        return compare_ranks(ranks, asked, prepare, timedelta(seconds=TIMEOUT_S))

    with mock.patch.object(leaves, "compare_ranks", meet):
        publisher = xt.live.Publisher(store=store, rules=RULES, **MESHES, timeout_s=0.5)
        found = error_of(lambda: publisher.publish(blocks(1, "src_mesh"), SHAPES))
    assert waited[-1] == timedelta(seconds=1)
    return found
