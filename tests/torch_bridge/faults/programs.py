"""A trainer and a server beside the world of all other operations: a version that is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

import torch_bridge as xt
from tests.torch_bridge.faults.operations import ROWS, Begun
from xshard import Mesh

TRAINER, SERVER = "trainer", "server"
LONG_S = 600.0


def interrupted(kind: str, store: Store, width: int, timeout_s: float) -> tuple[Begun, Tensor | None]:
    """The next version of a stream, amid whose messages its ranks wait -> that, and what the last one was.

    timeout_s: of two waits one after the other, by which all ranks know.
    """
    make: Any = xt.live.Publisher if kind == TRAINER else xt.live.Subscriber
    times = {"timeout_s": LONG_S, "silent_s": LONG_S}
    meshes = {"src_mesh": Mesh(a=2), "dst_mesh": Mesh(b=2)}
    end = make(store=store, rules={"*": "n/a d -> n d/b"}, bucket_bytes=1, **meshes, **times)
    block = torch.arange(float(ROWS * width)).view(ROWS, width) + dist.get_rank()
    operation = Begun("`publish`, `receive`", partial(_versions[kind], end), block)
    expected = operation.forward()()
    end.timeout_s, end.silent_s = timeout_s / 2, timeout_s / 5
    return operation, expected


def _published(end: Any, x: Tensor, wait: Callable[[], None]) -> None:
    end.publish({"first": x[:1], "second": x}, progress=lambda done, total: wait())


def _received(end: Any, x: Tensor, wait: Callable[[], None]) -> Tensor:
    end.receive(LONG_S, progress=lambda done, total: wait())
    found: Tensor = end.tree["second"]
    return found


_versions = {TRAINER: _published, SERVER: _received}
