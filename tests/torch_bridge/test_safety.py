"""What one process does wrong, or does not live to do, is told on all of them; nothing waits for ever."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected
from torch_bridge.compat.ksuit import all_gather_grad
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import check_device

MESH = xs.Mesh(a=4)
GOOD = "n/a d -> n d"


def _call(expression: Any = GOOD, mesh: Any = MESH, x: Any = None, **options: Any) -> Callable[[], Any]:
    block = torch.ones(2, 4) if x is None else x
    return lambda: xt.redistribute(block, expression, mesh, debug=True, **options)


def _different() -> list[tuple[str, str]]:
    """What rank 2 does otherwise, and what every rank then says."""
    odd = dist.get_rank() == 2
    wrong = [
        _call("n/a d -> n/zigzag(a) d"),
        _call("n/b d -> n d"),
        _call(mesh=xs.Mesh(b=4)),
        _call(mesh=None),
        _call(x=torch.ones(3, 4)),
        _call(x=torch.ones(3, 4), shape=(8, 4)),
        _call(x=torch.ones(2, 4, dtype=torch.float64)),
        _call(x=torch.ones(2, 4).requires_grad_()),
        _call(x=torch.ones(2, 4, device="meta")),
        _call(xs.plan("n/a d -> n d | copy(a)", MESH, (8, 4))),
        _call("n/a d -> n d/a", profile="no such machine"),
    ]
    right = [_call()] * 5 + [_call(shape=(8, 4))] + [_call()] * 4 + [_call("n/a d -> n d/a")]
    said = [error_of(bad if odd else good) for bad, good in zip(wrong, right, strict=True)]
    for both in (_call(), _call("n/a d -> n d/a", x=torch.ones(2, 4).requires_grad_())):
        both()
    assert still_connected()
    return said


def test_every_rank_says_what_one_does_otherwise() -> None:
    first, *others = on_ranks(4, _different)
    assert all(said == first for said in others), "the error is the same on all ranks"
    assert {kind for kind, _ in first} == {"DesyncError"}
    texts = iter(text for _, text in first)
    text = next(texts)
    assert "disagree about a redistribution: expression" in text
    assert "ranks 0, 1, 3: 'n/a d -> n d', block (2, 4), of (8, 4)" in text
    assert "rank 2: 'n/a d -> n/zigzag(a) d', block (2, 4), of (8, 4)" in text
    for part in (
        "unknown mesh axis 'b' in\n        'n/b d -> n d'",
        "unknown mesh axis 'a' in\n        'n/a d -> n d'",
        "a tensor needs a mesh",
    ):
        text = next(texts)
        assert "rank 2 cannot do what the others can\n  ranks 0, 1, 3: 'n/a d -> n d'\n  rank 2:" in text
        assert part in text
    text = next(texts)
    assert "redistribution: shape" in text and "rank 2: 'n/a d -> n d', block (3, 4), of (12, 4)" in text
    assert "ShapeError: the block of rank 2 has shape (3, 4), not (2, 4)" in next(texts)
    text = next(texts)
    assert "redistribution: dtype" in text and "dtype float64" in text and "dtype float32" in text
    assert "requires_grad True" in next(texts)
    text = next(texts)
    assert "redistribution: device" in text and "device meta" in text and "device cpu" in text
    text = next(texts)
    assert "expression" in text and "rank 2: 'n/a d -> n d | copy(a)'" in text
    text = next(texts)
    assert "rank 2 cannot do what the others can" in text and "no such machine" in text


def _alike() -> None:
    """Calls in which all ranks fail alike, or rightly differ."""
    rank = dist.get_rank()
    kind, text = error_of(_call("n/q d -> n d"))
    assert kind == "NotationError" and "unknown mesh axis 'q'" in text, "its own error where all have it"
    y = _call(x=torch.ones([2, 2, 2, 1][rank], 4, requires_grad=True), shape=(7, 4))()
    assert y.shape == (7, 4)
    # Along an axis that the expression does not name blocks may differ, also in size.
    block = torch.full((1 + rank // 2, 2), float(rank))
    y = _call("n/b d -> n d", xs.Mesh(a=2, b=2), block)()
    assert y.shape == (2 * len(block), 2)
    # Parts of the world meet by themselves, as often as they like.
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"))
    for _ in range(1 + rank // 2):
        _call("n/q d -> n d", whole["q"])()
    pair = DeviceMesh("cpu", [3, 0], mesh_dim_names=("q",))
    if rank in (1, 2):  # whom nobody waits for
        kind, text = error_of(_call("n/q d -> n d", pair))
        assert kind == "MeshError" and f"rank {rank} is not in" in text
    assert still_connected()


def test_what_may_differ() -> None:
    on_ranks(4, _alike)


def _always() -> list[tuple[str, str]]:
    """Operations that know no `debug=`, where the environment asks for it."""
    os.environ["XSHARD_DEBUG"] = "1"
    importlib.reload(desync)
    odd = dist.get_rank() == 0
    x = torch.ones(4, 4)
    said = [
        error_of(lambda: xt.ops.all_gather(x, 1 if odd else 0, "a", MESH, grad="sum")),
        error_of(lambda: xt.ops.all_reduce(x, "a", MESH, grad="sum" if odd else "replicated")),
        error_of(lambda: xt.ops.halo_exchange(x, 2 if odd else 1, 0, "a", MESH)),
    ]
    assert xt.ops.all_gather(x, 0, "a", MESH, grad="sum").shape == (16, 4)
    assert still_connected()
    return said


def test_the_environment_asks_for_all_calls() -> None:
    first, *others = on_ranks(4, _always)
    assert all(said == first for said in others)
    assert {kind for kind, _ in first} == {"DesyncError"}
    gather, reduce, halo = (text for _, text in first)
    assert "rank 0: 'd0 d1/a -> d0 d1 | copy(a)'" in gather
    assert "ranks 1 to 3: 'd0/a d1 -> d0 d1 | copy(a)'" in gather
    assert "rank 0: 'd0 d1 | sum(a) -> d0 d1 | copy(a)'" in reduce
    assert "halo(2,2)" in halo and "halo(1,1)" in halo


def test_a_device_that_no_backend_serves() -> None:
    for kind, text in on_ranks(2, _on_no_device):
        assert kind == "MeshError" and "cannot send a block that is on 'mps'" in text and "cpu:gloo" in text


def _on_no_device() -> tuple[str, str]:
    return error_of(lambda: check_device(torch.device("mps")))


def _placed_otherwise() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    placement = Replicate() if dist.get_rank() == 1 else Shard(0)
    shape = (8, 4) if dist.get_rank() == 1 else (2, 4)
    x = DTensor.from_local(torch.ones(*shape), mesh, [placement])
    said = error_of(lambda: xt.redistribute(x, GOOD, debug=True))
    assert still_connected()
    return said


def test_dtensors_that_are_placed_otherwise() -> None:
    (kind, text), *others = on_ranks(4, _placed_otherwise)
    assert all(said == (kind, text) for said in others)
    assert kind == "DesyncError" and "rank 1 cannot do what the others can" in text
    assert "NotationError: the DTensor is placed as 'n d' in\n        'n/a d -> n d'" in text


def _between_two_meshes() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    src, dst = (
        DeviceMesh("cpu", ranks, mesh_dim_names=(axis,)) for axis, ranks in (("a", [0, 1]), ("b", [2, 3]))
    )

    def move(expression: str = "n/a d -> n d/b", rows: int = 4, **options: Any) -> Callable[[], Any]:
        x = torch.ones(rows, 6) if rank < 2 else None
        arguments = {"shape": (8, 6), "dtype": torch.float32, **options}
        return lambda: xt.redistribute(x, expression, src_mesh=src, dst_mesh=dst, debug=True, **arguments)

    said = [
        error_of(move("n/a d -> n/b d") if rank == 3 else move()),
        error_of(move(rows=5) if rank == 1 else move()),
        error_of(move(requires_grad=True) if rank == 0 else move()),
        error_of(move(shape=(9, 6))),
    ]
    y = move()()
    assert (y is None) == (rank < 2)
    assert still_connected()
    return said


def test_between_two_meshes() -> None:
    first, *others = on_ranks(4, _between_two_meshes)
    assert all(said == first for said in others)
    assert [kind for kind, _ in first] == ["DesyncError"] * 4
    expression, block, gradient, shape = (text for _, text in first)
    assert "redistribution: expression" in expression and "rank 3: 'n/a d -> n/b d', block none" in expression
    assert "rank 1 cannot" in block and "has shape (5, 6), not (4, 6)" in block
    assert "redistribution: requires_grad" in gradient
    assert "rank 0 cannot" in shape and "has shape (4, 6), not (5, 6)" in shape


def _world_that_waits(folder: str, seconds: float) -> None:
    """The ranks again, in a world whose groups wait for so long."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # no rank closes its connections while another still makes them
    dist.destroy_process_group()
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size, timeout=timeout
    )


def _wait_for(files: list[Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.05)


def _misses(folder: str) -> tuple[str, str]:
    """Rank 3 is busy with something else until the others have given up."""
    _world_that_waits(folder, 3)
    if dist.get_rank() == 3:
        _wait_for([Path(folder, f"{rank}.txt") for rank in range(3)])
        return "DesyncError", ""
    found = error_of(_call())
    Path(folder, f"{dist.get_rank()}.txt").touch()
    return found


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    for kind, text in on_ranks(4, _misses, str(tmp_path))[:3]:
        assert kind == "DesyncError"
        assert "rank 3 did not come to 'n/a d -> n d' within 3 s" in text
        assert "ranks 0 to 3 of the mesh all call it" in text


# A killed rank is noticed at once, whatever the timeout; one that does not come, after it.
WAITS_S = {"killed": 500, "absent": 3}


def _alone(folder: str, how: str, requires_grad: bool) -> None:
    """Rank 1 is killed or does not come; the others write down what they get, and must live to do so."""
    rank = dist.get_rank()
    _world_that_waits(folder, WAITS_S[how])
    x = torch.ones(2, 4, requires_grad=requires_grad)
    y = xt.redistribute(x, "n/a d -> n d/a", MESH)
    gather = functools.partial(xt.redistribute, x, GOOD, MESH, profile="h100")
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        _wait_for([Path(folder, f"{other}.txt") for other in (0, 2, 3)])
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the others are told to end by
    start = time.monotonic()
    kind, text = error_of((lambda: y.sum().backward()) if requires_grad else gather)
    Path(folder, f"{rank}.txt").write_text(f"{time.monotonic() - start}\n{kind}\n{text}")


@pytest.mark.parametrize("how", WAITS_S)
@pytest.mark.parametrize(
    ("requires_grad", "failed"),
    [
        (False, "step 1 of 1, 'all_gather n/a', of 'n/a d -> n d'"),
        (True, "step 1 of 1, 'all_to_all d/a -> n/a', of 'n d/a -> n/a d'"),
    ],
)
def test_a_lost_peer_is_an_error_on_the_others(
    tmp_path: Path, requires_grad: bool, failed: str, how: str
) -> None:
    with pytest.raises(xt.testing.RankError, match=r"SIGKILL|failed"):
        on_ranks(4, _alone, str(tmp_path), how, requires_grad)
    for rank in (0, 2, 3):
        seconds, kind, *text = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert how == "absent" or float(seconds) < WAITS_S[how]
        assert kind == "CollectiveError" and text[0] == f"{failed} failed on rank {rank}"
        assert "one of the ranks 0, 1, 2, 3 has ended" in text[1] and f"within {WAITS_S[how]} s" in text[1]
        assert "the backend says" in text[2] and "XSHARD_DEBUG=1" in text[3]


class Failing(TorchDispatchMode):
    """Copies raise an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone, torch.ops.aten.copy_):
            raise self.error
        return func(*args, **(kwargs or {}))


def _errors_of_python() -> None:
    """In packing, which all ranks fail in alike, and in putting together what has arrived."""
    x, pair = torch.ones(2, 4), xs.Mesh(a=2)

    def across() -> Any:
        ends = {"src_mesh": pair, "dst_mesh": xs.Mesh(b=2), "dst_devices": (1, 0)}
        return xt.redistribute(x, xs.plan("n/a d -> n d/b", shape=(4, 4), **ends))

    calls = {
        "step 1 of 1, 'all_gather d/a', of 'n d/a -> n d'": [
            lambda: xt.redistribute(x, "n d/a -> n d", pair),
            lambda: xt.redistribute(x, "n d/a -> n d", pair, async_op=True).wait(),
            lambda: xt.redistribute([x, x], "n d/a -> n d", pair),
        ],
        "step 1 of 1, 'all_to_all n/a -> d/a', of 'n/a d -> n d/a'": [
            lambda: xt.redistribute(x, "n/a d -> n d/a", pair)
        ],
        "step 1 of 1, 'slice d/a', of 'n d -> n d/a'": [lambda: xt.redistribute(x, "n d -> n d/a", pair)],
        "the messages between the meshes": [across],
    }
    for place, call in ((place, call) for place, some in calls.items() for call in some):
        with xs.use_profile("h100"):
            for error in (
                RuntimeError("a mistake"),
                TypeError("a mistake"),
                torch.OutOfMemoryError("none left"),
            ):
                with pytest.raises(type(error)) as raised, Failing(error):
                    call()
                assert raised.value is error and place in error.__notes__[0], error.__notes__
    assert still_connected()


def test_an_error_of_python_is_no_lost_peer() -> None:
    on_ranks(2, _errors_of_python)


def _of_another_size(folder: str) -> None:
    """Rank 0 has more rows than the others: gloo ends a process that gets more than it waits for."""
    rank = dist.get_rank()
    _world_that_waits(folder, 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with xs.use_profile("h100"):
        kind, text = error_of(lambda: all_gather_grad(torch.ones(3 if rank == 0 else 2, 4)))
    Path(folder, f"{rank}.txt").write_text(f"{kind}\n{text}")


def test_who_survives_a_block_of_another_size_is_told_how_to_find_it(tmp_path: Path) -> None:
    with pytest.raises(xt.testing.RankError, match=r"(?s)SIGABRT.*XSHARD_DEBUG=1"):
        on_ranks(3, _of_another_size, str(tmp_path))
    told = [file.read_text() for file in tmp_path.glob("*.txt")]
    assert told and all(text.startswith("CollectiveError") and "XSHARD_DEBUG=1" in text for text in told)
