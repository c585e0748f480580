"""`profile="auto"` in torch: found once, agreed by all ranks, overridden where asked for."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import block_of, numbers, on_ranks
from torch_bridge.mesh import machine as rooms
from torch_bridge.mesh.machine import machine
from torch_bridge.planning import executable_of

MESH = xs.Mesh(a=2)
CPU = torch.device("cpu")


def _named() -> tuple[str, str, str, int]:
    rank = dist.get_rank()
    found = str(machine("auto", CPU).name)
    rooms._agreed.cache_clear()
    rooms._found = lambda device_type: (("NVIDIA A100", "NVIDIA H200")[rank], 4)
    agreed = machine("auto", torch.device("cuda")).name
    x = block_of(numbers(4, 4), "n/a d", MESH, torch.float32).requires_grad_()
    y = xt.redistribute(x, "n/a d -> n d/a", MESH, profile="auto")
    assert torch.equal(y, xt.redistribute(x, "n/a d -> n d/a", MESH))
    product = xt.einsum("n/a d, d e -> n/a e", x, torch.eye(4), mesh=MESH, profile="auto")
    assert torch.equal(product, x)
    move = functools.partial(xt.redistribute, expression="n/a d -> n d/a", mesh=MESH, profile="auto")
    assert torch.equal(torch.compile(lambda x: move(x), backend="aot_eager")(x), y)
    asked = "n/a d -> n d/a", MESH, (2, 4), torch.float32, CPU, None, "auto"
    before = executable_of.cache_info().misses
    with xs.use_profile("tpu_v5e"):
        xt.redistribute(x.detach(), "n/a d -> n d/a", MESH, profile="auto")
    return found, agreed, executable_of(*asked).plan.profile.name, executable_of.cache_info().misses - before


def test_all_ranks_plan_for_what_the_first_has_found() -> None:
    first, second = on_ranks(2, _named)
    assert first == second
    found, agreed, planned, misses = first
    assert (found, planned) == ("gloo", "gloo") and agreed in ("a100:4", "h200:4")
    assert misses <= 2, "another machine is another entry of the cache"


def test_the_launcher_tells_how_large_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, wanted in (("4", 4), ("", None), ("0", None), ("many", None)):
        monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", given)
        assert rooms._found("cpu") == ("gloo", wanted)
