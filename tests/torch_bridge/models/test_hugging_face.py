"""Models of Hugging Face that nobody here wrote, one row per way to be parallel: as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import block_of_each, on_ranks
from torch_bridge.testing.byte_counter import Meter

STEPS, VOCABULARY, ROWS, LENGTH = 4, 64, 4, 8
TOKENS = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
TARGETS = torch.cat([TOKENS[:, 1:], torch.full((ROWS, 1), -100)], dim=1)  # the last token has none
BATCH = {"input_ids": TOKENS, "position_ids": torch.arange(LENGTH)[None]}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    torch.manual_seed(0)
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**SIZES | options)).double()


class Case(NamedTuple):
    """data: how a batch of tokens is cut. prepare: what a model needs besides rules. counts: whether that
    counts what a process has of the model. collectives: of a pass forward and one backward, as many as a
    program by hand has: activations that move, parameters gathered once per module, and again, gradients once
    per group of processes; those of attention are counted where attention is."""

    mesh: xs.Mesh
    rules: dict[str, Any]
    data: str
    build: Any = llama
    prepare: Any = None
    counts: bool = False
    collectives: tuple[int, int] | None = None


# One group of queries for each key-value head, on devices that have one head of either.
def one_group(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = 1


# Experts that live elsewhere are number n, which the model passes over.
def own_experts(model: nn.Module) -> None:
    for layer in model.model.layers:
        experts = layer.mlp.experts
        n = experts.num_experts = experts.down_proj.shape[0]
        first = n * (torch.distributed.get_rank() % 2)

        def renumber(_: nn.Module, args: tuple[Tensor, ...], n: int = n, first: int = first) -> Any:
            x, index, weights = args
            own = (index >= first) & (index < first + n)
            return x, torch.where(own, index - first, n), weights

        experts.register_forward_pre_hook(renumber)


def around_the_sequence(how: str) -> Any:
    def prepare(model: nn.Module) -> None:
        xt.nn.register_attention("b s/zigzag(cp) h k", xs.Mesh(dp=2, cp=2), name=f"xshard-{how}", how=how)
        model.set_attn_implementation(f"xshard-{how}")

    return prepare


# Tokens and their positions are cut on the way in; the attention of the model does the rest.
CONTEXT = {
    "parameters": {"**": "..."},
    "inputs": {"": {"input_ids": "b s -> b/dp s/zigzag(cp)", "position_ids": "one s -> one s/zigzag(cp)"}},
}

CASES = {
    "tensor, sequence and data": Case(
        xs.Mesh(dp=2, tp=2),
        {
            "parameters": {
                "**.{q,k,v,gate,up}_proj.weight|lm_head.weight": "o/tp i",
                "**.{o,down}_proj.weight": "o i/tp",
                "**": "...",
            },
            "inputs": {
                "": "b s -> b/dp s",
                "model.layers.0": "b s c -> b s/tp c",
                "model.layers.*|model.norm": "b s/tp c",
                "**.{self_attn,mlp}|lm_head": "b s/tp c -> b s c | copy(tp)",
            },
            "outputs": {"**.{self_attn,mlp}": "b s c | sum(tp) -> b s/tp c", "lm_head": "b s v/tp -> b s v"},
        },
        "b/dp s", collectives=(10, 12),
    ),
    "two key-value heads on four devices": Case(
        xs.Mesh(kv=2, rep=2),
        {
            "parameters": {
                "**.{k,v}_proj.weight": "o/kv i",
                "**.{q,gate,up}_proj.weight|lm_head.weight": "o/(kv,rep) i",
                "**.{o,down}_proj.weight": "o i/(kv,rep)",
                "**": "...",
            },
            "inputs": {"": "b s", "**.{self_attn,mlp}|lm_head": "b s c -> b s c | copy(kv,rep)"},
            "outputs": {
                "**.{self_attn,mlp}": "b s c | sum(kv,rep) -> b s c",
                "lm_head": "b s v/(kv,rep) -> b s v",
            },
        },
        "b s", prepare=one_group, counts=True, collectives=(5, 6),
    ),
    "parameters cut, gathered for use": Case(
        xs.Mesh(dp=4),
        {
            "parameters": {"**": "o/dp ... -> o ..."},
            "inputs": {"": "b s -> b/dp s", "model.layers.*": "b/dp s c"},
        },
        "b/dp s", collectives=(3, 5),
    ),
    "the same inside nodes, copies between": Case(
        xs.Mesh(dp=2, fsdp=2),
        {
            "parameters": {"**": "o/fsdp ... -> o ..."},
            "inputs": {"": "b s -> b/(dp,fsdp) s", "model.layers.*": "b/(dp,fsdp) s c"},
            "keep": True,
        },
        "b/(dp,fsdp) s", collectives=(3, 4),
    ),
    "data": Case(
        xs.Mesh(dp=4), {"parameters": {"**": "..."}, "inputs": {"": "b s -> b/dp s"}}, "b/dp s",
        collectives=(0, 1),
    ),
    **{
        f"context and data, {how}": Case(
            xs.Mesh(dp=2, cp=2), CONTEXT, "b/dp s/zigzag(cp)", prepare=around_the_sequence(how)
        )
        for how in ("gather", "ulysses", "ring")
    },
    "experts": Case(
        xs.Mesh(dp=2, ep=2),
        {
            "parameters": {"**.experts.*": "e/ep ...", "**": "..."},
            "inputs": {
                "": "b s -> b/(dp,ep) s",
                "**.mlp": "b/(dp,ep) s c -> b/dp s c",
                "**.experts": ("t c -> t c | copy(ep)", None, "t k -> t k | copy(ep)"),
            },
            "outputs": {"**.experts": "t c | sum(ep) -> t c", "**.mlp": "b/dp s c -> b/(dp,ep) s c"},
        },
        "b/(dp,ep) s", mixtral, own_experts, counts=True, collectives=(4, 8),
    ),
}  # fmt: skip


def loss_of(logits: Tensor, own: Tensor) -> Tensor:
    """This process's share of the mean over tokens that have a next one. own: its block of `TARGETS`."""
    return cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / (ROWS * (LENGTH - 1))


def whole_loss(logits: Tensor, case: Case) -> Tensor:
    """Logits of this process -> the loss of the whole batch."""
    loss = loss_of(logits, xt.redistribute(TARGETS, f"b s -> {case.data}", case.mesh))
    axes = ",".join(xs.Layout.parse(case.data).axes)
    return xt.redistribute(loss, f"() | sum({axes}) -> ()", case.mesh) if axes else loss


@functools.cache
def alone(build: Callable[[], nn.Module]) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """A training on one device -> losses, the first gradients, the last parameters."""
    model, losses, first = build(), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        losses.append(loss_of(model(**BATCH).logits, TARGETS))
        losses[-1].backward()
        first = first or {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def checked(case: Case, tol: float) -> nn.Module:
    """The model in parallel, when `verify` has compared it."""
    model = xt.parallelize(case.build(), mesh=case.mesh, **case.rules)
    if case.prepare is not None:
        case.prepare(model)
    original = case.build() if case.counts else None
    xt.verify(model, BATCH, loss=lambda y: whole_loss(y.logits, case), original=original, tol=tol)
    return model


def _as_on_one_device() -> None:
    for name, case in CASES.items():
        (losses, gradients, parameters), model = alone(case.build), checked(case, 1e-12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number, want in enumerate(losses):
            loss = whole_loss(model(**BATCH).logits, case)
            loss.backward()
            assert abs(loss - want) < 1e-12 * loss, (name, number)
            if number == 0:
                blocks = block_of_each(model, gradients)
                for n, p in model.named_parameters():
                    worst = (p.grad - blocks[n]).abs().max()
                    assert worst < 1e-12 * gradients[n].abs().max(), (name, n)
                norm = torch.nn.utils.get_total_norm(gradients.values())
                assert abs(xt.grad_norm(model) - norm) < 1e-12 * norm, name
            optimizer.step()
            optimizer.zero_grad()
        blocks = block_of_each(model, parameters)
        assert max((p - blocks[n]).abs().max() for n, p in model.named_parameters()) < 1e-9, name
        with Meter() as forward:
            logits = model(**BATCH).logits
        with Meter() as backward:
            logits.sum().backward()
        assert case.collectives in (None, (len(forward.received), len(backward.received))), name
    checked(CASES["tensor, sequence and data"]._replace(build=lambda: llama().float()), 1e-5)


def test_losses_gradients_and_steps() -> None:
    on_ranks(4, _as_on_one_device)
    for name, case in CASES.items():
        assert sum(len(case.rules.get(kind, ())) for kind in ("parameters", "inputs", "outputs")) <= 12, name
