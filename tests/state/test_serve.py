"""Weights from trainers to vLLM: 40 published models at the bound, and every element in its place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import xshard as xs
from tests.state.served import MODELS, Model, Transfer, transfer
from tests.two_meshes import run_tree
from xshard import Mesh
from xshard.state import TreePlan, plan_transfer

Arrays = dict[str, NDArray[np.int32]]


def meshes(m: Model, trainer: str, ranks: int) -> tuple[Mesh, Mesh]:
    """A trainer's mesh and a server's, of so many ranks each. Megatron's tp divides the heads of keys."""
    most = max(tp for tp in (1, 2, 4, 8, 16, 32) if m.heads % tp == 0 and tp <= ranks // 2)
    keys = (
        most
        if m.mla[1]
        else max(tp for tp in (1, 2, 4, 8, 16, 32) if m.kv_heads % tp == 0 and tp <= most)
    )
    tp = min(keys, 8)
    stages = 2 if ranks >= 16 and m.layers >= 4 else 1
    left = ranks // tp // stages
    twice = 2 - left % 2
    train = {"pp": stages, "dp": left // twice, "ed": twice, "t": max(1, tp // 2), "et": min(tp, 2)}
    if trainer == "fsdp":
        train = {"fsdp": ranks // tp, "tp": tp}
    return Mesh(train), Mesh(dp=ranks // most, kv=keys, rep=most // keys)


def planned(t: Transfer, apart: bool) -> TreePlan:
    n = t.src_mesh.n_devices * apart
    devices = {"dst_devices": range(n, n + t.dst_mesh.n_devices)}
    ends = {"src_mesh": t.src_mesh, "dst_mesh": t.dst_mesh} | devices
    return plan_transfer(
        t.shapes, t.rules, names=t.names, dtypes=dict.fromkeys(t.shapes, "bfloat16"), **ends
    )


def test_published_models_arrive_at_the_bound() -> None:
    """Two layers of each: all others are as these. A rank of the server receives its block, and no more."""
    assert len(MODELS) == 40
    for i, (name, model) in enumerate(MODELS.items()):
        trainer = ("megatron", "fsdp")[i % 2]
        few = replace(model, layers=2, dense=min(model.dense, 1))
        t = transfer(few, trainer, *meshes(few, trainer, 8))
        plan = planned(t, apart=True)
        blocks = [sum(np.prod(a.sharding.local_shape(d)) for a in plan.arrays) for d in range(8)]
        assert plan.bytes_received == plan.bytes_lower_bound == 2 * max(blocks), name
        assert plan.bytes_moved == 2 * sum(blocks), name


def test_a_trillion_parameters_on_1024_ranks() -> None:
    """A layer for each of eight stages: 512 ranks train, 512 others serve."""
    few = replace(MODELS["Kimi-K2"], layers=8)
    t = transfer(few, "megatron", Mesh(pp=8, dp=2, ed=4, t=4, et=2), Mesh(dp=16, kv=32, rep=1))
    plan = planned(t, apart=True)
    needed = sum(array.sharding.block_sizes for array in plan.arrays)
    assert plan.bytes_received == plan.bytes_lower_bound == 2 * needed.max()


# In small: copied heads of keys, biases, experts after a dense layer, MLA, and vocabularies that are padded.
SMALL = {
    "grouped": Model(2, 8, 8, 2, 3, 301, 12, bias=True),
    "tied": Model(2, 8, 8, 8, 2, 70, 12, tied=True),
    "experts": Model(3, 8, 8, 4, 2, 129, 12, 6, 4, 8, 1),
    "latent": Model(3, 8, 8, 8, 2, 129, 12, 6, 4, 8, 1, (6, 4, 2, 2, 3)),
    "latent, plain queries": Model(2, 8, 8, 8, 2, 65, 8, 4, 4, 8, 1, (0, 4, 2, 2, 3)),
}


def to_megatron(m: Model, weights: Arrays) -> Arrays:
    """The arrays of transformers by the names and in the orders of Megatron core."""
    names = {
        "model.embed_tokens": "embedding.word_embeddings",
        "model.norm": "decoder.final_layernorm",
        "lm_head": "output_layer",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "mlp.gate": "mlp.router",
    } | ({"self_attn.q_proj": "self_attention.linear_q_proj"} if m.mla[1] else {})
    norms = {"q_a_layernorm": "linear_q_up_proj", "kv_a_layernorm": "linear_kv_up_proj"}
    found: Arrays = {}
    for name, x in weights.items():
        layer, part = split_name(name)
        there = layer.replace("model", "decoder")
        routed = m.experts and int(layer.split(".")[2] or 0) >= m.dense if layer else 0
        attention = f"{there}self_attention."
        if (stem := part.removesuffix(".weight")) in names:
            found[f"{there}{names[stem]}.weight"] = x
        elif stem == "input_layernorm":
            found[
                f"{there}{stem}.weight" if m.mla[1] else f"{attention}linear_qkv.layer_norm_weight"
            ] = x
        elif stem == "post_attention_layernorm":
            found[
                f"{there}pre_mlp_layernorm.weight"
                if routed
                else f"{there}mlp.linear_fc1.layer_norm_weight"
            ] = x
        elif stem.split(".")[-1] in norms:
            found[f"{attention}{norms[stem.split('.')[-1]]}.layer_norm_weight"] = x
        elif "q_proj" in part:  # each group: its queries, its keys, its values
            q, k, v = (weights[name.replace("q_proj", f"{y}_proj")] for y in "qkv")
            each = m.heads // m.kv_heads * m.head
            groups = [
                (q[g * each :][:each], k[g * m.head :][: m.head], v[g * m.head :][: m.head])
                for g in range(m.kv_heads)
            ]
            found[f"{attention}linear_qkv.{part.split('.')[-1]}"] = np.concatenate(
                [*itertools.chain(*groups)]
            )
        elif "experts.gate_up" in part or ("experts.down" in part and "shared" not in part):
            found[f"{there}mlp.experts.linear_{'fc2' if 'down' in part else 'fc1'}.weight"] = x
        elif "gate_proj" in part:
            up = weights[name.replace("gate", "up")]
            found[there + part.replace("gate_proj", "linear_fc1")] = np.concatenate([x, up])
        elif "down_proj" in part:
            found[there + part.replace("down_proj", "linear_fc2")] = x
    return found


def split_name(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.gate.weight` -> `model.layers.3.` and `mlp.gate.weight`; else "" and the name."""
    parts = name.split(".")
    return (".".join(parts[:3]) + ".", ".".join(parts[3:])) if parts[1] == "layers" else ("", name)


def served(m: Model, weights: Arrays, mesh: Mesh, rank: int) -> Arrays:
    """vLLM's parameters of a rank, as its loaders fill them: they narrow whole arrays, segment by segment."""
    tp = mesh.size("kv", "rep")
    keys = mesh.size("kv")
    me = rank % tp
    vocab = slice(me * (each := -(-m.vocab // 64) * 64 // tp), (me + 1) * each)
    mine = np.array_split(np.arange(m.experts), mesh.n_devices)[rank]
    found: Arrays = {}
    for name, x in weights.items():
        layer, part = split_name(name)
        kind = part.split(".")[-2] if "." in part else part
        narrow = lambda x, d=0, n=tp, i=me: np.split(x, n, d)[i]  # noqa: E731
        if kind in ("embed_tokens", "lm_head"):
            found[name] = x[vocab]
        elif kind in ("k_proj", "v_proj"):
            copied = narrow(x, 0, keys, me * keys // tp)
            found[f"{layer}self_attn.qkv_proj.{part.split('.')[-1]}.{kind[0]}"] = copied
        elif kind == "q_proj" and not m.mla[1]:
            found[f"{layer}self_attn.qkv_proj.{part.split('.')[-1]}.q"] = narrow(x)
        elif kind in ("q_proj", "q_b_proj", "kv_b_proj"):
            found[name] = narrow(x)
        elif kind == "q_a_proj":
            down = weights[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
            found[f"{layer}self_attn.fused_qkv_a_proj.weight"] = np.concatenate([x, down])
        elif kind == "experts":
            found[f"{layer}mlp.experts.{'w2' if 'down' in part else 'w13'}_weight"] = x[mine]
        elif kind == "gate_proj":
            halves = narrow(x), narrow(weights[name.replace("gate", "up")])
            found[name.replace("gate", "gate_up")] = np.concatenate(halves)
        elif kind in ("o_proj", "down_proj"):
            found[name] = narrow(x, 1)
        elif kind != "up_proj" and not (kind == "kv_a_proj_with_mqa" and m.mla[0]):
            found[name] = x
    return found


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
@pytest.mark.parametrize("name", SMALL)
def test_every_element_arrives_in_its_place(name: str, trainer: str) -> None:
    """The server on the devices of the trainer: a rank receives what the trainer's block there has not."""
    m = SMALL[name]
    keys = min(SMALL[name].kv_heads, 4)
    dst_mesh = Mesh(dp=2, kv=keys, rep=4 // keys)
    src_mesh = Mesh(fsdp=4, tp=2) if trainer == "fsdp" else Mesh(pp=2, dp=1, ed=2, t=1, et=2)
    shapes = transfer(m, "fsdp", Mesh(fsdp=4, tp=2), dst_mesh).shapes
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    weights = {
        key: np.arange(end - np.prod(shape), end, dtype=np.int32).reshape(shape)
        for (key, shape), end in zip(shapes.items(), ends, strict=True)
    }
    t = transfer(m, trainer, src_mesh, dst_mesh)
    trained = to_megatron(m, weights) if trainer == "megatron" else weights
    assert {key: x.shape for key, x in trained.items()} == t.shapes
    ends = {"src_mesh": src_mesh, "dst_mesh": dst_mesh, "names": t.names, "profile": "bandwidth"}
    plan = plan_transfer(t.shapes, t.rules, dtypes=dict.fromkeys(t.shapes, "int32"), **ends)
    blocks = {
        key: xs.reference.scatter(trained[key], a.sharding.layout, src_mesh)
        for key, a in plan.sources.items()
    }
    found = run_tree(plan, blocks)
    lacking = []
    for rank in range(8):
        expected = served(m, weights, dst_mesh, rank)
        assert found.keys() == expected.keys()
        for key, right in expected.items():
            np.testing.assert_array_equal(found[key][rank], right, err_msg=f"{key} on rank {rank}")
        held, needed = (
            np.concatenate([x.ravel() for x in some])
            for some in ([x[rank] for x in blocks.values()], expected.values())
        )
        lacking.append(4 * len(np.setdiff1d(needed, held)))
    assert plan.bytes_received == plan.bytes_lower_bound == max(lacking)
