"""A trainer and a server as two programs: versions arrive whole while the server serves, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import torch_bridge as xt
from tests.torch_bridge.helpers import block_of, error_of, on_ranks
from torch_bridge.live import versions
from torch_bridge.mesh.desync import compare_ranks
from torch_bridge.state import leaves
from xshard import Mesh

SHAPES = {"w": (6, 8), "b": (6,), "e": (4, 8)}
RULES = {"b": "o", "**": "o/dp i -> o i/tp"}
MESHES = {"src_mesh": Mesh(dp=3), "dst_mesh": Mesh(tp=2)}
TIMEOUT_S = 300.0  # of what comes; far more than it takes


def blocks(version: int, end: str) -> dict[str, torch.Tensor]:
    """Those of this rank, of the trainer or of the server."""
    layouts = {"src_mesh": ("o/dp i", "o"), "dst_mesh": ("o i/tp", "o")}[end]
    whole = {
        name: np.arange(np.prod(s)).reshape(s) + 1000.0 * version for name, s in SHAPES.items()
    }
    return {name: block_of(x, layouts[x.ndim == 1], MESHES[end]) for name, x in whole.items()}


def endpoint(kind: Callable[..., Any], folder: Path, rules: dict[str, str], **options: Any) -> Any:
    return kind(store=dist.FileStore(str(folder / "store"), -1), rules=rules, **MESHES, **options)


PATIENT = {"bucket_bytes": 64, "timeout_s": TIMEOUT_S, "silent_s": TIMEOUT_S}


def _trainer(folder: Path) -> list[Any]:
    """Publishes two versions; then it plans another transfer."""
    publisher = endpoint(xt.live.Publisher, folder, RULES, **PATIENT)
    publisher.store.wait(["looked"])
    numbers = [publisher.publish(blocks(version, "src_mesh"), SHAPES) for version in (1, 2)]
    other = endpoint(xt.live.Publisher, folder, RULES | {"b": "n"}, **PATIENT)
    return [*numbers, *error_of(lambda: other.publish(blocks(3, "src_mesh"), SHAPES))]


def _server(folder: Path) -> tuple[str, str]:
    subscriber = endpoint(xt.live.Subscriber, folder, RULES, **PATIENT)

    def check(version: int) -> None:
        expected = blocks(version, "dst_mesh")
        assert subscriber.version == version and subscriber.tree.keys() == expected.keys()
        assert all(torch.equal(subscriber.tree[name], x) for name, x in expected.items())

    assert not subscriber.receive()  # there is no trainer yet
    subscriber.store.set("looked", "")
    assert subscriber.receive(TIMEOUT_S)
    check(1)
    # The next version comes in a thread, while this one serves the old version, with collectives too.
    arrived: list[bool] = []
    receiving = threading.Thread(target=lambda: arrived.append(subscriber.receive(TIMEOUT_S)))
    receiving.start()
    still = torch.ones(1)
    while still.item():
        still = torch.tensor([float(receiving.is_alive())])
        dist.all_reduce(still, dist.ReduceOp.MAX)  # both ranks leave the loop together
        assert (
            len({float(x.min()) // 1000 for x in subscriber.tree.values()}) == 1
        )  # no half of two versions
    receiving.join()
    assert arrived == [True]
    check(2)
    disagreed = error_of(lambda: subscriber.receive(TIMEOUT_S))
    check(2)
    return disagreed


def test_a_version_is_whole_or_invisible(tmp_path: Path) -> None:
    """Two versions arrive, the second while the first is served; then both disagree about the plan."""
    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(on_ranks, 2, _server, tmp_path)
        training = pool.submit(on_ranks, 3, _trainer, tmp_path)
    for kind, text in serving.result():
        assert kind == "DesyncError" and "the two programs plan different transfers" in text
    for one, two, kind, text in training.result():
        assert (one, two, kind) == (1, 2, "DesyncError")
        here, there = (repr(f"{rules}\n") for rules in (RULES | {"b": "n"}, RULES))
        assert text.splitlines()[1:] == [f"  here:  {here}", f"  there: {there}"]


def test_texts_that_differ_in_a_last_break_differ() -> None:
    assert str(versions._differing("a\nb\n", "a\nb")).endswith("  here:  'b\\n'\n  there: 'b'")


def test_all_ranks_of_a_trainer_hear_that_nobody_serves(tmp_path: Path) -> None:
    """The first waits for the server, and the others for it, for longer than that."""
    for kind, text in on_ranks(3, _nobody_serves, tmp_path):
        assert kind == "LostVersionError" and "no server took version 1 within 0.5 s" in text


def _nobody_serves(folder: Path) -> tuple[str, str]:
    waited = []

    def meet(ranks: Any, asked: str, prepare: Any, timeout: timedelta | None = None) -> Any:
        waited.append(timeout)
        return compare_ranks(ranks, asked, prepare, timedelta(seconds=TIMEOUT_S))

    with mock.patch.object(leaves, "compare_ranks", meet):
        publisher = endpoint(xt.live.Publisher, folder, RULES, timeout_s=0.5)
        found = error_of(lambda: publisher.publish(blocks(1, "src_mesh"), SHAPES))
    assert waited[-1] == timedelta(seconds=1)
    return found
