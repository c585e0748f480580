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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import check_error, error_of, on_ranks, still_connected
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh import desync
from torch_bridge.mesh.process_mesh import check_device

MESH = xs.Mesh(a=4)
GOOD = "n/a d -> n d"


def _call(
    expression: Any = GOOD, mesh: Any = MESH, x: Any = None, **options: Any
) -> Callable[[], Any]:
    block = torch.ones(2, 4) if x is None else x
    return lambda: xt.redistribute(block, expression, mesh, **{"debug": True, **options})


def _different() -> list[str]:
    """What rank 2 does otherwise, and what every rank then says."""
    turn = "n/a d -> n d/a"
    zigzag = "n/a d -> n/zigzag(a) d"
    copies = "n/a d -> n d | copy(a)"
    cannot = "rank 2 cannot do what the others can\n  ranks 0, 1, 3: 'n/a d -> n d'\n  rank 2:"
    others = "ranks 0, 1, 3: 'n/a d -> n d', block (2, 4), of (8, 4)"
    block = ", block (2, 4), of (8, 4)"
    leaf = torch.ones(2, 4, requires_grad=True)
    longer = torch.ones(3, 4)
    shape = {"shape": (8, 4)}
    good = _call()
    length = "the block of rank 2 has shape (3, 4), not (2, 4)"
    said = []
    for wrong, right, *words in (
        (_call(zigzag), good, "redistribution: expression", others, f"rank 2: '{zigzag}'{block}"),
        (_call("n/b d -> n d"), good, cannot, "unknown mesh axis 'b' in\n        'n/b d -> n d'"),
        (
            _call(mesh=xs.Mesh(b=4)),
            good,
            cannot,
            "unknown mesh axis 'a' in\n        'n/a d -> n d'",
        ),
        (_call(mesh=None), good, cannot, "a tensor needs a mesh"),
        (
            _call(x=longer),
            good,
            "redistribution: shape",
            "rank 2: 'n/a d -> n d', block (3, 4), of (12, 4)",
        ),
        (_call(x=longer, **shape), _call(**shape), f"ShapeError: {length}"),
        (_call(xs.plan(copies, MESH, (8, 4))), good, "expression", f"rank 2: '{copies}'"),
        (_call(turn, profile="no such machine"), _call(turn), "rank 2 cannot", "no such machine"),
    ):
        said.append(check_error(wrong if dist.get_rank() == 2 else right, "DesyncError", *words))
    for both in (good, _call(turn, x=leaf)):
        both()
    assert still_connected()
    return said


def _flipped() -> list[str]:
    """Every fact of the list of what changes messages, otherwise on rank 2."""
    turn = "n/a d -> n d/a"
    text = "b/a d, d f/a -> b f/a"
    said: list[str] = []
    flipped: set[str] = set()
    x = torch.ones(2, 4)
    leaf = torch.ones(2, 4, requires_grad=True)
    w = torch.ones(4, 1)
    wide = torch.ones(2, 4, dtype=torch.float64)
    meta = torch.ones(2, 4, device="meta")
    tree = [x, x]
    two, three = (functools.partial(torch.func.vmap(_each), torch.ones(n, 2, 4)) for n in (2, 3))
    good = _call()
    plain = _einsum(text, leaf, w)
    fast = {"profile": "h100"}
    for name, wrong, right, *words in (
        ("shape", _call(x=torch.ones(3, 4)), good, "shape (12, 4)", "shape (8, 4)"),
        ("dtype", _call(x=wide), good, "dtype float64", "dtype float32"),
        ("device", _call(x=meta), good, "device meta", "device cpu"),
        ("comm_dtype", _call(comm_dtype=torch.bfloat16), good, "comm_dtype torch.bfloat16"),
        ("profile", _call(turn, profile="h100"), _call(turn, profile="tpu_v5p"), "profile h100 ("),
        ("requires_grad", _call(x=leaf), good, "requires_grad True"),
        (
            "requires_grad",
            plain,
            _einsum(text, x, w.clone().requires_grad_()),
            "True, False",
            "False, True",
        ),
        ("check_replicated", _call(check_replicated=True), good, "check_replicated True"),
        ("async_op", _call(async_op=True), good, "async_op True"),
        ("async_op", _einsum(text, leaf, w, async_op=True), plain, "async_op True"),
        (
            "plan",
            _einsum(text, leaf, w, overlap="always", **fast),
            _einsum(text, leaf, w, **fast),
            "rounds",
        ),
        ("save", _einsum(text, leaf, w, save="given"), plain, "save given", "save used"),
        (
            "bucket_bytes",
            _call(turn, x=tree, bucket_bytes=8),
            _call(turn, x=tree),
            "bucket_bytes 8",
        ),
        ("transforms", two, three, "vmap of 2", "vmap of 3"),
    ):
        call = wrong if dist.get_rank() == 2 else right
        said.append(check_error(call, "DesyncError", f"redistribution: {name}", *words))
        flipped.add(name)
    assert flipped == {*desync.Sent._fields}
    return said


def _einsum(text: str, *operands: torch.Tensor, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        with mock.patch.object(desync, "ALWAYS", True):
            return xt.einsum(text, *operands, mesh=MESH, **options)

    return call


def _each(x: torch.Tensor) -> Any:
    return xt.redistribute(x, GOOD, MESH, debug=True)


def _backward() -> list[str]:
    """Rank 2 does not use the result that the others use, and takes the gradient of another one."""
    x = torch.ones(2, 4, requires_grad=True)
    w = torch.ones(4, 1, requires_grad=True)
    odd = dist.get_rank() == 2
    turn = "n/a d -> n d/a"
    said: list[str] = []
    ways = [_call(turn, x=x), _call(turn, x=[x, 2 * x]), _call(turn, x=x, async_op=True)]
    ways += [_call("n d | max(a) -> n d", x=x), _call(turn, x=x, check_replicated=True)]
    ways += [_einsum("b/a d, d f/a -> b f/a", x, w, save=save) for save in ("used", "given")]
    for way in ways:
        used, unused, later = (
            y[0] if isinstance(y, list) else y * 1 for y in (way(), way(), way())
        )
        loss = (unused if odd else used).sum()
        said.append(
            check_error(loss.backward, "DesyncError", "redistribution: gradient\n", "of call")
        )
        later.sum().backward()
    assert still_connected()
    return said


def _missed() -> None:
    """Rank 2 comes too late to a call, and goes on to the next one; the second time to two."""
    store = c10d._get_default_store()
    ranks = tuple(range(4))
    wait = timedelta(seconds=1)
    meet = functools.partial(desync.compare_ranks, ranks, "it", lambda: None, wait)
    for missed in (1, 2):
        if dist.get_rank() == 2:
            store.wait([f"missed {missed} {rank}" for rank in (0, 1, 3)])
        else:
            for _ in range(missed):
                check_error(meet, "DesyncError", "did not come to 'it' within 1 s")
            store.set(f"missed {missed} {dist.get_rank()}", "")
        assert _call()().shape == (8, 4)


def _first_used() -> list[str]:
    """What rank 2 does otherwise without `debug`, in plans that no rank has used before."""
    turn = "n/a d -> n d/a"
    back = "n d/a -> n/a d"
    text = "b/a d, d f -> b f"
    said: list[str] = []
    plain = functools.partial(_call, debug=False)
    x, y, z, u, v, w = (torch.ones(4, 4 * n) for n in range(1, 7))
    for wrong, right, *words in (
        (
            plain(x=x[1:]),
            plain(x=x),
            "redistribution: shape",
            "rank 2: 'n/a d -> n d', shape (12, 4)",
        ),
        (plain(x=y.int()), plain(x=y), "redistribution: dtype", "dtype int32", "dtype float32"),
        (plain(turn, x=x), plain(back, x=x), "redistribution: shape", f"rank 2: '{turn}'"),
        (
            plain(turn, x=z, shape=(16, 12)),
            plain(back, x=z.mT, shape=(12, 16)),
            f"rank 2: '{turn}'",
        ),
        (plain([turn, GOOD], x=[u, u]), plain([GOOD, turn], x=[u, u]), "redistribution: plan"),
        (
            plain(x=v, async_op=True),
            plain("n d/a -> n d", x=v, async_op=True),
            "redistribution: shape",
        ),
        (_product(text, w[:2], w.mT), _product(text, w, w.mT), "redistribution: shape"),
    ):
        said.append(check_error(wrong if dist.get_rank() == 2 else right, "DesyncError", *words))
        right()
    x = torch.ones(4, 12, requires_grad=True)
    first, second = (plain(move, x=x)() for move in (turn, "n/a d -> n d/cyclic(a)"))
    loss = (first if dist.get_rank() == 2 else second).sum()
    said.append(check_error(loss.backward, "DesyncError", "redistribution: "))
    assert still_connected()
    return said


def _product(text: str, *operands: torch.Tensor) -> Callable[[], Any]:
    return lambda: xt.einsum(text, *operands, mesh=MESH)


def _alike() -> None:
    """Calls in which all ranks fail alike, or rightly differ."""
    rank = dist.get_rank()
    check_error(_call("n/q d -> n d"), "NotationError", "unknown mesh axis 'q'")
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
        check_error(_call("n/q d -> n d", pair), "MeshError", f"rank {rank} is not in")
    words = "cannot send a block that is on 'mps'", "cpu:gloo"
    check_error(lambda: check_device(torch.device("mps")), "MeshError", *words)
    assert still_connected()


def _always() -> list[str]:
    """Operations that know no `debug=`, where the environment asks for it."""
    for value, is_on in (("0", False), ("1", True)):
        os.environ["XSHARD_DEBUG"] = value
        importlib.reload(desync)
        assert desync.NEW is desync.ALWAYS is is_on
    odd = dist.get_rank() == 0
    gathered = "d0 d1 | copy(a)"
    x = torch.ones(4, 4)
    said = [
        check_error(call, "DesyncError", *words)
        for call, *words in (
            (
                lambda: xt.ops.all_gather(x, 1 if odd else 0, "a", MESH, grad="sum"),
                f"rank 0: 'd0 d1/a -> {gathered}'",
                f"ranks 1 to 3: 'd0/a d1 -> {gathered}'",
            ),
            (
                lambda: xt.ops.all_reduce(x, "a", MESH, grad="sum" if odd else "replicated"),
                f"rank 0: 'd0 d1 | sum(a) -> {gathered}'",
            ),
            (
                lambda: xt.ops.halo_exchange(x, 2 if odd else 1, 0, "a", MESH),
                "halo(2,2)",
                "halo(1,1)",
            ),
        )
    ]
    assert xt.ops.all_gather(x, 0, "a", MESH, grad="sum").shape == (16, 4)
    assert still_connected()
    return said


def _placed_otherwise() -> list[str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    odd = dist.get_rank() == 1
    block = torch.ones(8 if odd else 2, 4)
    placement = Replicate() if odd else Shard(0)
    move = functools.partial(
        xt.redistribute, DTensor.from_local(block, mesh, [placement]), GOOD, debug=True
    )
    cause = "NotationError: the DTensor is placed as 'n d' in\n        'n/a d -> n d'"
    said = check_error(move, "DesyncError", "rank 1 cannot do what the others can", cause)
    assert still_connected()
    return [said]


def _between_two_meshes() -> list[str]:
    rank = dist.get_rank()
    src, dst = (
        DeviceMesh("cpu", ranks, mesh_dim_names=(axis,))
        for axis, ranks in (("a", [0, 1]), ("b", [2, 3]))
    )

    def move(
        expression: str = "n/a d -> n d/b", rows: int = 4, **options: Any
    ) -> Callable[[], Any]:
        x = torch.ones(rows, 6) if rank < 2 else None
        arguments = {"shape": (8, 6), "dtype": torch.float32, **options}
        return lambda: xt.redistribute(
            x, expression, src_mesh=src, dst_mesh=dst, debug=True, **arguments
        )

    other = "rank 3: 'n/a d -> n/b d', block none"
    said = [
        check_error(call, "DesyncError", *words)
        for call, *words in (
            (move("n/a d -> n/b d") if rank == 3 else move(), "redistribution: expression", other),
            (
                move(rows=5) if rank == 1 else move(),
                "rank 1 cannot",
                "has shape (5, 6), not (4, 6)",
            ),
            (move(requires_grad=True) if rank == 0 else move(), "redistribution: requires_grad"),
            (move(shape=(9, 6)), "rank 0 cannot", "has shape (4, 6), not (5, 6)"),
        )
    ]
    y = move()()
    assert (y is None) == (rank < 2)
    assert still_connected()
    return said


def _compared() -> list[str]:
    said = _first_used()
    _alike()
    _missed()
    said += [*_different(), *_flipped(), *_backward(), *_placed_otherwise(), *_between_two_meshes()]
    return said + _always()


def test_every_rank_says_what_one_does_otherwise() -> None:
    first, *others = on_ranks(4, _compared)
    assert all(said == first for said in others), "the error is the same on all ranks"


def _world_that_waits(folder: str, seconds: float) -> None:
    """The ranks again, in a world whose groups wait for so long."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    dist.barrier()  # no rank closes its connections while another still makes them
    dist.destroy_process_group()
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size, timeout=timeout
    )


def _alone(folder: str) -> None:
    """Rank 1 is killed; the others write down what they get, and must live to do so."""
    rank = dist.get_rank()
    _world_that_waits(folder, 500)
    y = xt.redistribute(torch.ones(2, 4, requires_grad=True), "n/a d -> n d/a", MESH)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the others are told to end by
    start = time.monotonic()
    kind, text = error_of(lambda: y.sum().backward())
    Path(folder, f"{rank}.txt").write_text(f"{time.monotonic() - start}\n{kind}\n{text}")


def test_a_killed_peer_is_noticed_at_once_whatever_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(xt.testing.RankError, match=r"SIGKILL|failed"):
        on_ranks(4, _alone, str(tmp_path))
    place = "step 1 of 1, 'all_to_all d/a -> n/a', of 'n d/a -> n/a d'"
    for rank in (0, 2, 3):
        seconds, kind, *text = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert float(seconds) < 500
        assert (kind, text[0]) == ("CollectiveError", f"{place} failed on rank {rank}")
        assert "one of the ranks 0, 1, 2, 3 has ended" in text[1] and "within 500 s" in text[1]
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
    x = torch.ones(2, 4)
    pair = xs.Mesh(a=2)

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
        "step 1 of 1, 'slice d/a', of 'n d -> n d/a'": [
            lambda: xt.redistribute(x, "n d -> n d/a", pair)
        ],
        "the messages between the meshes": [across],
    }
    for place, call in ((place, call) for place, some in calls.items() for call in some):
        with xs.use_profile("h100"):
            for of in (RuntimeError, TypeError, torch.OutOfMemoryError):
                error = of("a mistake")
                with pytest.raises(of) as raised, Failing(error):
                    call()
                assert raised.value is error and place in error.__notes__[0], error.__notes__
    assert still_connected()


def test_an_error_of_python_is_no_lost_peer() -> None:
    on_ranks(2, _errors_of_python)


def _of_another_size(folder: str) -> None:
    """Rank 0 has more rows than the others, and plans are not compared: gloo ends a process that gets more
    than it waits for."""
    rank = dist.get_rank()
    _world_that_waits(folder, 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    move = _call(mesh=xs.Mesh(a=3), x=torch.ones(3 if rank == 0 else 2, 4), debug=False)
    with (
        xs.use_profile("h100"),
        mock.patch.object(Executable, "is_new", False),
    ):  # as XSHARD_DEBUG=0
        said = error_of(move)
    Path(folder, f"{rank}.txt").write_text("\n".join(said))


def test_who_survives_a_block_of_another_size_is_told_how_to_find_it(tmp_path: Path) -> None:
    with pytest.raises(xt.testing.RankError, match=r"(?s)SIGABRT.*XSHARD_DEBUG=1"):
        on_ranks(3, _of_another_size, str(tmp_path))
    told = [file.read_text() for file in tmp_path.glob("*.txt")]
    assert told and all(
        text.startswith("CollectiveError") and "XSHARD_DEBUG=1" in text for text in told
    )
