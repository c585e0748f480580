"""Every public verb refuses wrong arguments by name, on all ranks alike, before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_bridge as xt
import xshard as xs
from tests.misuse import WRONG, Call, Calls, faults, verbs_of
from tests.torch_bridge.helpers import on_ranks

MESH = xs.Mesh(tp=2)
ROOMS = (xt, xt.nn, xt.ops, xt.dtensor)
# Verbs that no wrong argument reaches, by the reason.
LEFT = {
    "PendingTensor": "calls make it",
    "Precision": "its dtypes are tried in tests of precision",
    "nn.checkpoint": "all its arguments are the function's",
}
COMPAT = {
    "credit": ("initialize_domain_parallel", "shard_tensor", "gather_tensor", "shard_batch"),
    "ksuit": (
        "all_gather_grad",
        "all_gather_grad_autograd",
        "all_gather_grad_overwrite",
        "all_gather_nograd",
        "all_reduce_sum_grad",
        "all_reduce_mean_grad",
        "all_reduce_sum_nograd",
        "all_reduce_mean_nograd",
    ),
    "poptorch": (
        "all_gather_cross_replica",
        "all_gather_cross_replica_identical_grads_in",
        "all_reduce_cross_replica_sum",
        "all_to_all_single_cross_replica",
    ),
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, to: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def parallel() -> nn.Module:
    rules = {"**": "..."}
    model = xt.parallelize(mlp(), rules, {"": "b c -> b/tp c"}, MESH, outputs={"": "b/tp c -> b c"})
    model(torch.ones(4, 4)).sum().backward()
    return model


def no_sync(model: Any) -> None:
    with xt.no_sync(model):
        pass


@wraps(xt.async_save)
def async_save(*args: Any, **kwargs: Any) -> None:
    xt.async_save(*args, **kwargs).wait()


def calls(path: str) -> dict[str, Callable[[], Call]]:
    """A right call of each verb, made anew for each wrong one."""
    made = Calls()
    add = made.add

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.ones(4, 4)
    labels = torch.zeros(4, dtype=torch.long)
    queries = torch.ones(2, 4, 2, 8)
    model = parallel()
    halo = xt.nn.HaloExchange(1, 0, axis="tp", mesh=MESH)
    routed = xt.route(x, labels, "tp", MESH)
    xt.save({"a": x}, path)
    for verb in ("check_replicas", "explain", "grad_norm", "state_dict"):
        add(verb, getattr(xt, verb), model=model)
    add("no_sync", no_sync, model=model)
    add("clip_grad_norm_", xt.clip_grad_norm_, model=model, max_norm=1.0)
    add("load_state_dict", xt.load_state_dict, model=model, state=mlp().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    optimizer.step()
    add("optimizer_state_dict", xt.optimizer_state_dict, model=model, optimizer=optimizer)
    state = {"state": xt.optimizer_state_dict(model, optimizer)}
    loaded = {"model": model, "optimizer": optimizer} | state
    add("load_optimizer_state_dict", xt.load_optimizer_state_dict, **loaded)
    add("verify", xt.verify, model=model, batch=x, loss=torch.sum)
    add("einsum", xt.einsum, expression="a/tp b, b c -> a/tp c", operands=[x, x], mesh=MESH)
    add("load", xt.load, path=path, rules={"**": "..."}, mesh=MESH)
    folder = f"{path} meanwhile"
    add("async_save", async_save, tree={"a": x}, path=folder, rules={"**": "..."}, mesh=MESH)
    add("save", xt.save, tree={"a": x}, path=path, rules={"**": "..."}, mesh=MESH)
    made["halves"] = lambda: Call(xt.halves, {"model": parallel()})
    made["own_experts"] = lambda: Call(
        xt.own_experts, {"module": Experts(), "axis": "tp", "mesh": MESH}
    )
    made["parallelize"] = lambda: Call(
        xt.parallelize,
        {"model": mlp(), "parameters": {"**": "..."}, "inputs": {"": "b c"}, "mesh": MESH},
        {"profile": "text"},  # read where blocks move
    )
    add("positions", xt.positions, layout="a/tp b", mesh=MESH, shape=(4, 4), dim=0)
    add("redistribute", xt.redistribute, x={"a": x}, layouts="a/tp b -> a b", mesh=MESH)
    add("route", xt.route, x=x, to=labels, axis="tp", mesh=MESH)
    add("route(...).back", routed.back, y=routed.rows)
    add("suggest", xt.suggest, model=mlp(), batch=x, mesh=MESH)
    rules = ({"**": "a/tp ..."}, {"**": "..."})
    add("transfer", xt.transfer, tree={"a": x}, rules=rules, dst_mesh=MESH, src_mesh=MESH)
    add(
        "dtensor.from_placements",
        xt.dtensor.from_placements,
        placements=[Shard(0)],
        mesh=MESH,
        ndim=2,
    )
    add("dtensor.to_placements", xt.dtensor.to_placements, layout="a/tp b", mesh=MESH)
    dtensor = DTensor.from_local(x, mesh, [Shard(0)])
    add("dtensor.redistribute", xt.dtensor.redistribute, dtensor=dtensor, placements=[Replicate()])
    later = {"axis": "text", "halo_width": "a number below 0"}  # the call of the module reads it
    add("nn.HaloExchange", xt.nn.HaloExchange, later, halo_width=1, dim=0, axis="tp", mesh=MESH)
    add("nn.HaloExchange.forward", halo.forward, x=x)
    add("nn.HaloExchange.trim", halo.trim, x=halo(x))
    arrays = {"q": queries, "k": queries, "v": queries}
    unused = {"seed": ", ".join(WRONG)}  # without dropout
    add("nn.attention", xt.nn.attention, unused, **arrays, layout="b s/tp h k", mesh=MESH)
    arrays |= {f"text_{name}": x for name, x in arrays.items()}
    add("nn.joint_attention", xt.nn.joint_attention, **arrays, layout="b s/tp h k", mesh=MESH)
    add(
        "nn.cross_entropy", xt.nn.cross_entropy, logits=x, labels=labels, layout="b v/tp", mesh=MESH
    )
    convolution = nn.Conv2d(1, 1, 3)
    add(
        "nn.domain_parallel",
        xt.nn.domain_parallel,
        model=convolution,
        layout="n c h/tp w",
        mesh=MESH,
    )
    add("nn.fft", xt.nn.fft, x=x, layout="a/tp b", mesh=MESH, dims="a")
    later = {"how": "text", "name": "text"}
    add("nn.register_attention", xt.nn.register_attention, later, layout="b s/tp h k", mesh=MESH)
    add("nn.sharding_of", xt.nn.sharding_of, x=x)
    widths = {"width": "a number below 0"}  # drops rows
    for verb, also, options in (
        ("all_gather", {}, {"dim": 0, "grad": "sum"}),
        ("all_reduce", {}, {"grad": "sum"}),
        ("all_to_all", {}, {"split_dim": 0, "concat_dim": 1}),
        ("copy_to", {}, {}),
        ("halo_exchange", widths, {"width": 1, "dim": 0}),
        ("reduce_scatter", {}, {"dim": 0}),
        ("shard", {}, {"dim": 0, "grad": "sum"}),
        ("trim_halo", widths, {"width": 1, "dim": 0}),
    ):
        add(f"ops.{verb}", getattr(xt.ops, verb), also, x=x, axis="tp", mesh=MESH, **options)
    return made | calls_of_compat(x, mesh.get_group())


def calls_of_compat(x: torch.Tensor, group: dist.ProcessGroup) -> dict[str, Callable[[], Call]]:
    xt.compat.credit.initialize_domain_parallel(2, 2)
    given = SimpleNamespace(
        credit={"x": x, "batch": {"x": x}, "world_size": 2, "domain_parallel_size": 2},
        ksuit={"x": x},
        poptorch={"x": x, "replication_factor": 2},
    )
    made: dict[str, Callable[[], Call]] = {}
    for room, verbs in COMPAT.items():
        for verb in verbs:
            function = getattr(getattr(xt.compat, room), verb)
            names = function.__wrapped__.__code__.co_varnames
            arguments = {k: v for k, v in getattr(given, room).items() if k in names}
            made[f"{room}.{verb}"] = lambda f=function, a=arguments: Call(f, a)  # type: ignore[misc]
    old = xt.compat.nvsubquadratic
    made["all_to_all_single_fn"] = lambda: Call(
        old.all_to_all_single_fn,
        {"group": group, "type": "split_to_full", "input": torch.ones(2, 4, 4)},
    )
    return made


def wrong_calls(path: str) -> tuple[list[str], set[str]]:
    warnings.simplefilter("ignore")  # a model that has run is parallelized, for one
    made = calls(path)
    return faults(made), set(made)


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    (first, verbs), (second, _) = on_ranks(2, wrong_calls, str(tmp_path / "checkpoint"))
    assert first == second
    assert first[:-1] == []
    assert int(first[-1].split()[0]) > 1_500
    assert verbs_of(ROOMS, ["", "nn.", "ops.", "dtensor."]) - verbs == LEFT.keys()
