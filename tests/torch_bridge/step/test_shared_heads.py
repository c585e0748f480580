"""Suggested plans in which processes share heads of keys train as one device does."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import on_ranks
from tests.torch_bridge.step.test_suggest import a_machine_for_small_models

MESH = xs.Mesh(tp=4)
STEPS = 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
}
LAYER = "model.layers.*.self_attn"
RESULT = {f"{LAYER}:view_5": "b s h/tp"}  # heads of queries are sharded
KEYS = {f"{LAYER}.k_proj": "b s (g 8)/spread(tp) | copy(tp)"}
FIXED = {
    # Keys are computed in blocks of half a head, and gathered.
    "Llama": RESULT,
    # Each process computes its whole head, with a bias.
    "Qwen2": RESULT | KEYS | {f"{LAYER}.k_proj.weight": "(g 8)/spread(tp) i"},
    # A norm of each head, whose gradients are summed over all.
    "Qwen3": RESULT | KEYS,
}
TOLERANCES = {"Qwen3": 1e-6}  # its norms of heads are in float32


def build(kind):
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids}


def losses_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def trained(model, batch, mean):
    """Return the losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels = batch["input_ids"].roll(-1, 1)
    losses = []
    for _ in range(STEPS):
        loss = mean(losses_of, model(**batch).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def suggested(kind):
    model, batch = build(kind)
    fixed = {"input_ids": "b s", **FIXED[kind]}
    return xt.suggest(
        model,
        batch,
        MESH,
        fixed=fixed,
        profile=a_machine_for_small_models(),
        micro_batches=1,
        recompute=False,
        batch_parts=1,
        overlap=0.8,
        gap=0.05,
    )


def _train(plans):
    for kind, plan in plans.items():
        model, batch = build(kind)
        xt.parallelize(
            model,
            plan.parameters,
            plan.inputs,
            MESH,
            outputs=plan.outputs,
            gathers=plan.gathers,
            keep=plan.once,
            prefetch=plan.prefetch,
        )
        labels = batch["input_ids"].roll(-1, 1)
        xt.verify(
            model,
            batch,
            loss=lambda y, plan=plan, labels=labels: plan.mean(losses_of, y.logits, labels),
            tol=TOLERANCES.get(kind, 1e-10),
        )
        whole, _ = build(kind)
        alone = trained(whole, batch, lambda loss, *rows: loss(*rows).mean())
        losses = trained(model, batch, plan.mean)
        assert losses == pytest.approx(alone, rel=TOLERANCES.get(kind, 1e-10)), kind
        assert alone[-1] < alone[0]


def test_shared_heads_train_as_on_one_device():
    """One process suggests for all, which is the slower half: all suggest the same, as another test shows."""
    plans = {kind: suggested(kind) for kind in FIXED}
    for kind, plan in plans.items():
        assert "(" in str(plan) and "spread(tp)" in str(plan.parameters) + str(plan.outputs), kind
        assert plan.estimate().seconds == pytest.approx(plan.seconds), kind
    on_ranks(4, _train, plans)
