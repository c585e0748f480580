"""A user's program, in which type checkers find no mistake, and the types that they infer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import jax_bridge as xj
import torch_bridge as xt
import xshard as xs
from jax_bridge.torch_interop import to_jax, to_torch
from torch_bridge.autodiff.pending import PendingTensor
from xshard.state import TreePlan

MESH = xs.Mesh(dp=2, tp=2)
RULES = {"**.weight": "o/tp i", "**": "..."}


class Network(nn.Module):
    """A model with an attribute of its own."""

    width: int = 8


def of_plans(step: xs.TrainingStep) -> None:
    move = xs.plan("n/dp d -> n d/dp", MESH, (8, 4))
    assert_type(move, xs.Plan)
    assert_type(
        xs.plan((xs.Layout("n/dp"), "n"), MESH, (8,), objective="forward+backward"), xs.Plan
    )
    assert_type(
        xs.plan("b d, d f -> b f", MESH, sizes={"b": 8, "d": 4, "f": 8}), xs.ContractionPlan
    )
    assert_type(xs.suggest(step, MESH, memory="80GiB", micro_batches=2), xs.Suggestion)
    blocks = xs.reference.scatter(np.ones((8, 4)), "n/dp d", MESH)
    gradients = xs.reference.pullback(move, blocks, xs.reference.run(move, blocks))
    print(gradients[0].shape, xs.Rules(RULES).find("up.weight"))


def of_moves_in_torch(x: Tensor, is_async: bool) -> None:
    assert_type(xt.redistribute(x, "n/dp d -> n d", MESH, profile="h100"), Tensor)
    assert_type(xt.redistribute(x, "n/dp -> n", MESH, comm_dtype=torch.bfloat16), Tensor)
    pending = xt.redistribute(x, ("n/dp", xs.Layout("n")), MESH, async_op=True)
    assert_type(pending, PendingTensor)
    assert_type(2 * pending.wait(), Tensor)
    xt.ops.all_gather(pending, 0, "dp", MESH, grad="sum")  # a tensor to all functions
    assert_type(xt.redistribute(x, "n/dp -> n", MESH, async_op=is_async), Tensor)
    tree = {"w": x, "b": x}
    assert_type(
        xt.redistribute(tree, {"w": "n/dp -> n", "b": "n -> n/dp"}, MESH), dict[str, Tensor]
    )
    assert_type(xt.redistribute([x, x], ["n/dp -> n", "n -> n/dp"], MESH), list[Tensor])
    xt.redistribute(tree, xs.Rules({"**": "n/dp -> n"}), MESH, shape={"w": (8, 4), "b": (8,)})
    between = xt.redistribute(None, "n/dp -> n", src_mesh=MESH, dst_mesh=MESH, shape=(8,))
    assert_type(between, Tensor | None)
    assert_type(xt.einsum("b d/tp, d/tp f -> b f", x, x, mesh=MESH, overlap="auto"), Tensor)
    assert_type(xt.einsum("b d, d f -> b f", x, x, mesh=MESH, async_op=True), PendingTensor)


def of_layers_in_torch(x: Tensor, has_lse: bool) -> None:
    assert_type(xt.nn.attention(x, x, x, "b s/cp h k", MESH, causal=True, how="ring"), Tensor)
    joint = xt.nn.joint_attention(x, x, x, "b s/cp h k", MESH, text_q=x, text_k=x, text_v=x)
    assert_type(joint, tuple[Tensor, Tensor])
    both = xt.nn.attention(x, x, x, "b s/cp h k", MESH, documents=x, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    xt.nn.attention(x, x, x, "b s/cp h k", MESH, return_lse=has_lse)
    loss = xt.nn.cross_entropy(x, x, "b v/tp", MESH, reduction="sum")
    assert_type(loss, Tensor)
    assert_type(xt.ops.halo_exchange(x, (1, 2), 0, "sp", MESH, boundary="edge"), Tensor)
    routed = xt.route(x, x, "ep", MESH, groups=4)
    assert_type(routed.back(routed.rows), Tensor)
    xt.nn.domain_parallel(nn.Conv2d(1, 1, 3), "b c h/sp w", MESH)


def of_models_in_torch(batch: Tensor) -> None:
    plan = xt.suggest(Network(), {"x": batch}, MESH, memory="80GiB", recompute=True)
    model = xt.parallelize(Network(), plan.parameters, plan.inputs, MESH, bucket_bytes="1MiB")
    low = xt.Precision(torch.bfloat16, reduce_dtype=torch.float32)
    xt.parallelize(Network(), RULES, RULES, MESH, precision=low)
    by_name = {"**.norm": xt.Precision(torch.float32, output_dtype=torch.bfloat16), "": low}
    xt.own_experts(Network(), "ep", MESH, precision=by_name)
    xt.suggest(Network(), torch.ones(2), MESH, precision=low, memory="80GiB")
    assert_type(model, Network)
    print(model.width, plan.seconds)
    assert_type(xt.halves(model, 3, module="body", dims={"x": 0, 1: None}), Network)
    assert_type(xt.own_experts(Network(), "ep", MESH, device="cuda", keep=True), Network)
    with xt.no_sync(model):
        assert_type(xt.grad_norm(model), Tensor)
    xt.verify(model, batch, loss=torch.sum)
    xt.save(xt.state_dict(model), Path("step_1"), shard_bytes="1GiB")
    assert_type(xt.load("step_1", like=model, strict=False), Network)
    assert_type(xt.load("step_1", RULES, MESH, dtype=torch.bfloat16), dict[str, Any])
    state = {"w": batch}
    assert_type(xt.transfer(state, RULES, MESH, src_mesh=MESH, donate=True), dict[str, Tensor])
    assert_type(xt.transfer(state, RULES, MESH, src_mesh=MESH, dry_run=True), TreePlan)
    assert_type(xt.testing.run_ranks(2, xt.grad_norm, model, timeout_s=60), list[Tensor])


def of_arrays_in_jax(
    x: jax.Array, mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec
) -> None:
    assert_type(xj.redistribute(x, "n/dp d -> n d", check_replicated=True), jax.Array)
    tree = {"w": x, "b": x}
    assert_type(xj.redistribute(tree, xs.Rules({"**": "n/dp -> n"})), dict[str, jax.Array])
    assert_type(xj.reshard(x, "n/dp d -> n d/dp", donate=True), jax.Array)
    assert_type(xj.reshard(tree, {"w": "n/dp -> n", "b": "n -> n"}), dict[str, jax.Array])
    assert_type(xj.reshard(x, (spec, "n d")), jax.Array)
    assert_type(xj.place(np.ones((4, 4)), "n/dp d", mesh), jax.Array)
    assert_type(xj.place(tree, RULES, mesh), dict[str, jax.Array])
    assert_type(xj.einsum("b d/tp, d/tp f -> b f", x, x, overlap="always"), jax.Array)
    assert_type(xj.stored_as(x, "s/zigzag(cp) d"), jax.Array)
    both = xj.nn.attention(x, x, x, "b s/cp h k", return_lse=True)
    assert_type(both, tuple[jax.Array, jax.Array])
    assert_type(xj.load("step_1", RULES, mesh, like=tree), dict[str, jax.Array])
    assert_type(xj.load("step_1", None, mesh), dict[str, Any])
    assert_type(xj.transfer(tree, RULES, mesh), dict[str, jax.Array])
    assert_type(xj.transfer(tree, RULES, mesh, dry_run=True), TreePlan)


def of_functions_in_jax(x: jax.Array, mesh: jax.sharding.Mesh) -> None:
    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    assert_type(xj.shard_map(matmul, "n d, d f/tp -> n f/tp", mesh)(x, x), jax.Array)

    @xj.shard_map(layouts=(("n d", {"w": "d f/tp"}, None), "n f/tp"), mesh=mesh)
    def of_tree(x: jax.Array, tree: dict[str, jax.Array], power: int) -> jax.Array:
        return x @ tree["w"] ** power

    assert_type(of_tree(x, {"w": x}, 2), jax.Array)
    plan = xj.suggest(lambda p, x: (x @ p).sum(), (x, x), MESH, memory="80GiB", gap=0.01)
    print(plan.specs, plan.seconds)


def of_hand_overs(block: Tensor, mesh: jax.sharding.Mesh) -> None:
    array = to_jax(block, "n/dp c", mesh, shape=(8, 4), copy=False)
    assert_type(array, jax.Array)
    parameters = dict(Network().named_parameters())
    assert_type(to_jax(parameters, RULES, mesh), dict[str, jax.Array])
    assert_type(to_torch(array, "n/dp c", dtensor=True), DTensor)
    print(to_torch(array, "n/dp c").sum(), to_torch({"w": array}, RULES, via="jax")["w"])
