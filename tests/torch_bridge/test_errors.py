"""Errors of the verbs of torch end at the user's own line."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as xt
import xshard as xs
from xshard.errors import XshardError

MESH = xs.Mesh(a=2)
X = torch.ones(4, 6)

WRONG = {
    "redistribute": lambda: xt.redistribute(X, "n/b d -> n d", MESH),
    "redistribute, debug": lambda: xt.redistribute([X], "n/b d -> n d", MESH),
    "redistribute, maps": lambda: xt.redistribute(X, "n/by(a,m) d -> n d", MESH, maps={}),
    "einsum": lambda: xt.einsum("n/b d, d e -> n/b e", X, X.T, mesh=MESH),
    "einsum, save": lambda: xt.einsum("n d, d e -> n e", X, X.T, mesh=MESH, save="all"),
    "ops": lambda: xt.ops.all_gather(X, 0, "b", MESH, grad="sum"),
    "route": lambda: xt.route(X, torch.zeros(4, 1, dtype=torch.int64), "b", MESH),
    "positions": lambda: xt.positions("n/b", MESH, shape=(4,), dim="n"),
    "parallelize": lambda: xt.parallelize(nn.Linear(2, 2), MESH, {"wight": "o/a i"}),
    "parallelize, arguments": lambda: xt.parallelize(nn.Linear(2, 2), MESH, rule={}),
    "grad_norm, under no_grad": lambda: xt.grad_norm(nn.Linear(2, 2)),
    "verify": lambda: xt.verify(nn.Linear(2, 2), X),
    "explain": lambda: xt.explain(nn.Linear(2, 2)),
    "suggest": lambda: xt.suggest(nn.Linear(6, 2), X, "a mesh"),
    "save": lambda: xt.save({"x": X}, "folder", "n/b d", MESH),
    "attention": lambda: xt.nn.attention(X, X, X, "n/b d", MESH),
    "cross_entropy": lambda: xt.nn.cross_entropy(X, X, "n/b d", MESH),
    "HaloExchange": lambda: xt.nn.HaloExchange(1, 0, axis=("a", "b")),
    "sharding_of": lambda: xt.nn.sharding_of(X),
    "to_placements": lambda: xt.dtensor.to_placements("n/b d", MESH),
    "dtensor.redistribute": lambda: xt.dtensor.redistribute(X, []),
    "compat": lambda: xt.compat.poptorch.all_gather_cross_replica(X, 3),
}


@pytest.fixture(scope="module", autouse=True)
def _world():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def frames(call):
    """The functions in the traceback of a call's error, outermost first."""
    with pytest.raises(XshardError) as caught:
        call()
    return [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_traceback_ends_at_the_users_own_line(call, monkeypatch):
    assert len(frames(call)) > 2, "XSHARD_TRACEBACK=full is set in the tests"
    monkeypatch.delenv("XSHARD_TRACEBACK")
    assert frames(call) == ["frames", "<lambda>"]
