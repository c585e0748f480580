"""Models of Hugging Face, small and with random weights: one row per way to be parallel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torch_bridge as xt
import xshard as xs

VOCABULARY, BATCH, SEQUENCE = 64, 4, 8
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options)).double()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    torch.manual_seed(0)
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**SIZES | options)).double()


class Case(NamedTuple):
    """data: how a batch of tokens is cut. prepare: what a model needs besides rules.

    counts: whether that counts what a process has of the model.
    """

    mesh: xs.Mesh
    rules: dict[str, Any]
    data: str
    build: Any = llama
    prepare: Any = None
    counts: bool = False


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
            "outputs": {
                "**.{self_attn,mlp}": "b s c | sum(tp) -> b s/tp c",
                "lm_head": "b s v/tp -> b s v",
            },
        },
        "b/dp s",
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
        "b s",
        prepare=one_group,
        counts=True,
    ),
    "parameters cut, gathered for use": Case(
        xs.Mesh(dp=4),
        {
            "parameters": {"**": "o/dp ... -> o ..."},
            "inputs": {"": "b s -> b/dp s", "model.layers.*": "b/dp s c"},
        },
        "b/dp s",
    ),
    "the same inside nodes, copies between": Case(
        xs.Mesh(dp=2, fsdp=2),
        {
            "parameters": {"**": "o/fsdp ... -> o ..."},
            "inputs": {"": "b s -> b/(dp,fsdp) s", "model.layers.*": "b/(dp,fsdp) s c"},
            "keep": True,
        },
        "b/(dp,fsdp) s",
    ),
    "data": Case(xs.Mesh(dp=4), {"parameters": {"**": "..."}, "inputs": {"": "b s -> b/dp s"}}, "b/dp s"),
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
        "b/(dp,ep) s",
        build=mixtral,
        prepare=own_experts,
        counts=True,
    ),
}  # fmt: skip


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))


def targets() -> Tensor:
    """The next token of each; the last has none."""
    return torch.cat([tokens()[:, 1:], torch.full((BATCH, 1), -100)], dim=1)


def loss_of(logits: Tensor, own: Tensor) -> Tensor:
    """This process's share of the mean over tokens that have a next one. own: its block of `targets()`."""
    shares = cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    return shares / (BATCH * (SEQUENCE - 1))


def batch() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "position_ids": torch.arange(SEQUENCE)[None]}


def call(model: Any) -> Tensor:
    """The logits of this process's part of the batch."""
    return model(**batch()).logits


def parallel(case: Case, **options: Any) -> nn.Module:
    model = xt.parallelize(case.build(), mesh=case.mesh, **case.rules, **options)
    if case.prepare is not None:
        case.prepare(model)
    return model


def whole_loss(logits: Tensor, case: Case) -> Tensor:
    """Logits of this process -> the loss of the whole batch."""
    own = xt.redistribute(targets(), f"b s -> {case.data}", case.mesh)
    axes = ",".join(xs.Layout.parse(case.data).axes)
    loss = loss_of(logits, own)
    return xt.redistribute(loss, f"() | sum({axes}) -> ()", case.mesh) if axes else loss


def step(model: Any, case: Case) -> Tensor:
    """One forward and backward pass -> the loss of the whole batch."""
    loss = whole_loss(call(model), case)
    loss.backward()
    return loss


def block_of_each(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, by the names of a parallel model's parameters -> this process's blocks."""
    from torch_bridge.models.parallel import parallel_of

    state = parallel_of(model)
    return {
        name: each.cut(values[name], state.context)
        for each in state.parameters
        for name in each.names
        if name in values
    }
