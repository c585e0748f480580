"""`profile="auto"`, the default in torch: found once, agreed by all ranks, overridden where asked for."""

from __future__ import annotations

import functools
import inspect
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import block_of, numbers, on_ranks
from torch_bridge.calls.move import MoveCall, _executable, links_along
from torch_bridge.mesh import machine as rooms
from torch_bridge.mesh.machine import machine_profile
from torch_bridge.mesh.process_mesh import mesh_of_ranks
from xshard.cost.machine import LAUNCHERS

MESH = xs.Mesh(a=2)
CPU = torch.device("cpu")


def _named() -> str:
    """The store is asked once a world, not per call, and all ranks get the same."""
    rank = dist.get_rank()
    with mock.patch.object(rooms, "default_store", side_effect=rooms.default_store) as asked:
        for rows in range(2, 12):
            xt.redistribute(torch.ones(rows, 4), "n/a d -> n d/a", MESH)
    assert (asked.call_count, rooms._agreed_profile.cache_info().misses) == (1, 1)
    found = str(machine_profile("auto", CPU).name)
    rooms._agreed_profile.cache_clear()
    rooms._detect = lambda *_: (("NVIDIA A100", "NVIDIA H200")[rank], 4)
    agreed = machine_profile("auto", torch.device("cuda")).name
    x = block_of(numbers(4, 4), "n/a d", MESH, torch.float32).requires_grad_()
    y = xt.redistribute(x, "n/a d -> n d/a", MESH)
    assert torch.equal(y, xt.redistribute(x, "n/a d -> n d/a", MESH, profile="tpu_v5e"))
    assert torch.equal(xt.einsum("n/a d, d e -> n/a e", x, torch.eye(4), mesh=MESH), x)
    move = functools.partial(xt.redistribute, layouts="n/a d -> n d/a", mesh=MESH)
    assert torch.equal(torch.compile(lambda x: move(x), backend="aot_eager")(x), y)
    call = MoveCall("n/a d -> n d/a", MESH)
    before = _executable.cache_info().misses
    with xs.use_profile("tpu_v5e"):
        xt.redistribute(x.detach(), "n/a d -> n d/a", MESH)
    planned = call.executable(((2, 4), torch.float32, CPU)).plan.profile.name
    assert (found, planned) == ("gloo", "gloo") and agreed in ("a100:4", "h200:4")
    assert _executable.cache_info().misses - before <= 2, (
        "another machine is another entry of the cache"
    )
    return str(agreed)


def test_all_ranks_plan_for_what_the_first_has_found() -> None:
    first, second = on_ranks(2, _named)
    assert first == second


def _plans_for_nodes_of_two() -> None:
    """The links of four ranks on two nodes, by axis; also of a part of them, and in another order."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    plan = MoveCall("n/(a,b) d -> n d", xs.Mesh(a=2, b=2)).executable_for(torch.ones(2, 4)).plan
    profile = plan.profile
    rank = dist.get_rank()
    assert "priced for gloo:2" in str(plan) and xs.Plan.from_json(plan.to_json()) == plan
    assert (
        profile.link("a", plan.mesh) == profile.across
        and profile.link("b", plan.mesh) == profile.default
    )
    whole = mesh_of_ranks(xs.Mesh(a=2, b=2), (0, 2, 1, 3))
    half = (rank % 2, rank % 2 + 2)
    turned = links_along("gloo:2", "ab", whole)
    across = mesh_of_ranks(xs.Mesh(c=2), half)
    assert (
        turned.link("a", whole.mesh) == profile.default
        and turned.link("b", whole.mesh) == profile.across
    )
    assert links_along("gloo:2", "c", across).link("c", across.mesh) == profile.across


def test_nodes_are_runs_of_ranks_wherever_those_are_in_a_mesh() -> None:
    on_ranks(4, _plans_for_nodes_of_two)


@pytest.mark.parametrize(
    ("given", "processes", "wanted"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "8"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 6, 2),  # and so where it is 2
        ({"LOCAL_WORLD_SIZE": "many"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "0"}, 8, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, 2),
        ({"LOCAL_SIZE": "4"}, 8, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}, 10, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, 4, None),  # which the one task of a step has forked
        ({"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "4"}, 4, 1),
        ({"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2", "LOCAL_WORLD_SIZE": "4"}, 8, 4),
        ({"PET_NPROC_PER_NODE": "2", "PET_NNODES": "1:4"}, 8, None),  # as elastic jobs have it
        ({}, 8, None),
    ],
)
def test_the_launcher_tells_how_large_nodes_are(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], processes: int, wanted: int | None
) -> None:
    for name in (*LAUNCHERS, "SLURM_STEP_TASKS_PER_NODE", "PET_NPROC_PER_NODE", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert rooms._detect("cpu", processes) == ("gloo", wanted)


def test_the_machine_that_is_found_is_the_default_everywhere() -> None:
    functions = {name: getattr(xt, name) for name in xt.__all__} | {"live": xt.live.Publisher}
    defaults = {
        name: parameters["profile"].default
        for name, f in functions.items()
        if callable(f) and "profile" in (parameters := inspect.signature(f).parameters)
    }
    assert set(defaults.values()) == {"auto"} and {"redistribute", "parallelize", "live"} <= set(
        defaults
    )
