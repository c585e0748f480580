"""34 mistakes of users, one a line: a checker that misses one says that its comment ignores nothing."""

from __future__ import annotations

import jax
from torch import Tensor, nn

import jax_bridge as xj
import torch_bridge as xt
import xshard as xs
from jax_bridge.torch_interop import to_jax

MESH = xs.Mesh(dp=2)
RULES = {"**": "..."}


class Network(nn.Module):
    """A model that is no `nn.Linear`."""


def in_plans(step: xs.TrainingStep) -> None:
    xs.plan("n/dp -> n", "dp=2", (8,))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    xs.plan("n/dp -> n", MESH, (8,), objektive="forward")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    xs.plan("n/dp -> n", MESH, (8,), objective="backward")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    xs.suggest(step, MESH, memroy="80GiB")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def in_torch(x: Tensor) -> None:
    xt.redistribute(x, "n/dp -> n", MESH, proflie="h100")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    xt.redistribute(x, 3.5, MESH)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    xt.redistribute({"w": x}, {"w": 3.5}, MESH)  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    xt.redistribute(x, "n/dp -> n", MESH, comm_dtype="bfloat16")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    xt.einsum("b d/dp, d/dp f -> b f", x, x, mesh=MESH).wait()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    xt.einsum("b d/dp, d/dp f -> b f", x, x, mesh=MESH, overlap="alwyas")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    xt.ops.all_gather(x, 0, "dp", MESH)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    xt.ops.all_reduce(x, "dp", MESH, op="prod", grad="sum")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    xt.nn.attention(x, x, x, "b s/dp h k", MESH, how="rign")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    print(xt.nn.attention(x, x, x, "b s/dp h k", MESH, return_lse=True).shape)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def of_models(x: Tensor, network: Network) -> None:
    xt.suggest(network, x, MESH, memroy="80GiB")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    xt.parallelize(network, RULES, RULES, MESH, precision=xt.Precision("bfloat16"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    xt.parallelize(network, RULES, RULES, MESH, precision={"**": "bfloat16"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    xt.own_experts(network, "ep", MESH, gahters="layers.*")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    linear: nn.Linear = xt.parallelize(network, RULES, RULES, MESH)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    linear = xt.load("step_1", like=network)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(linear, xt.load("step_1", like=x).shpae)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    print(xt.transfer({"w": x}, RULES, MESH, dry_run=True)["w"])  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    xt.save({"w": x})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    xt.nn.domain_parallel(network, 4, MESH)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def in_jax(x: jax.Array, mesh: jax.sharding.Mesh) -> None:
    xj.redistribute(x, 3.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    print(xj.reshard(x, "n/dp -> n").shpae)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    print(xj.place({"w": x}, "n/dp", mesh)["w"].shpae)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    xj.einsum("b d/dp, d/dp f -> b f", x, x, overlap="alwyas")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    xj.suggest(lambda p, x: (x @ p).sum(), (x, x), MESH, memroy="80GiB")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    xj.transfer({"w": x}, RULES, "dp=2")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    xj.nn.attention(x, x, x, "b s/dp h k", how="rign")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    xj.shard_map(lambda x: x, "n/dp -> n", mesh, check_vam=False)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def of_hand_overs(x: Tensor, mesh: jax.sharding.Mesh) -> None:
    print(to_jax(x, "n/dp c", mesh).shpae)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    to_jax(x, "n/dp c", mesh, vai="jax")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
