"""Ranks that make different calls: what every one of them gets, with `debug=True`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests.torch_bridge.helpers  # noqa: F401  the server that ranks are forked from has their modules
import torch_bridge as xt
from tests.torch_bridge.faults.operations import BARE, WAYS, bare, own_mesh
from tests.torch_bridge.faults.ranks import Act, N, Ranks, act, ends_of, say
from tests.torch_bridge.faults.table import check_column
from torch_bridge.mesh import desync

TIMEOUT_S = 5.0
ODD = 1  # the rank that does otherwise
GATHER = "n/{a} d -> n d"
TURN = "n/{a} d -> n d/{a}"
BACK = "n d/{a} -> n/{a} d"
SHORT = f"short {GATHER}"  # of a block with fewer rows
# What the odd rank calls in turn, and what the others call.
DIFFERENCES = {
    "the step": ([TURN], [GATHER]),
    "the dim": ([BACK], [TURN]),  # messages of the same sizes
    "the shape": ([SHORT], [GATHER]),
    "the order of calls": ([GATHER, TURN], [TURN, GATHER]),
}


def _contracted(x: Tensor, mesh: Any, text: str, debug: bool) -> Tensor:
    with mock.patch.object(desync, "ALWAYS", debug):  # as XSHARD_DEBUG=1
        return xt.einsum(text, x, mesh=mesh)


def _parallel(mesh: Any, rule: str) -> Tensor:
    model = xt.parallelize(nn.Linear(8, 8, bias=False), {"weight": rule}, {"": "..."}, mesh)
    return model.weight.detach()


def _disagree(folder: Path, rank: int, _: dist.Store) -> None:
    x = torch.arange(64.0).view(8, 8) + dist.get_rank()
    acts = [Act(BARE, "forward", partial(bare(dist.group.WORLD), x), None)]
    for row, calls in DIFFERENCES.items():
        for way in (*WAYS.values(), _contracted):
            mesh, axis = own_mesh("{a}", TIMEOUT_S)
            both = [
                partial(_results, way, x, [text.format(a=axis) for text in texts], mesh)
                for texts in calls
            ]
            expected = [run(False) for run in both]  # where all ranks make the same calls
            mine = int(dist.get_rank() != ODD)
            acts.append(Act(row, "forward", partial(both[mine], True), expected[mine]))
    mesh, axis = own_mesh("{a}", TIMEOUT_S)
    rule = f"o/{axis} i" if dist.get_rank() == ODD else f"o i/{axis}"
    acts.append(Act("the rules of `parallelize`", "forward", partial(_parallel, mesh, rule), None))
    act(folder, rank, [], acts)


def _results(
    way: Callable[..., Tensor], x: Tensor, texts: Sequence[str], mesh: Any, debug: bool
) -> Tensor:
    rows = (x[:4] if text.startswith("short") else x for text in texts)
    called = zip(rows, (text.removeprefix("short ") for text in texts), strict=True)
    return torch.cat([way(block, mesh, text, debug=debug).flatten() for block, text in called])


def test_ranks_differ(tmp_path: Path) -> None:
    with Ranks(tmp_path, range(N), TIMEOUT_S, _disagree) as running:
        running.wait_for(*(f"ready{rank}" for rank in range(N)))
        say(tmp_path, "go")
        running.wait_for(*(f"ends{rank}" for rank in range(N)))
        say(tmp_path, "over")
        assert running.exit_codes() == [0] * N
    check_column("with `debug=True`", ends_of(tmp_path, range(N)), TIMEOUT_S)
