"""Published models of transformers in small: two layers of little width, with their ratios of heads.

Each is trained by the tensor parallel plan that it declares, read as rules, and on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import torch_bridge as xt
import xshard as xs
from torch_bridge.models.parallel import parallel_of

STEPS = 3
IDS = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
COMMON = {
    "vocab_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


def small(
    kind: str, heads: int, kv_heads: int, *, width: int = 64, **options: Any
) -> tuple[str, dict[str, Any]]:
    """The classes' prefix, and the config."""
    numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": width}
    return kind, {**COMMON, **numbers, **options}


EXPERTS = {
    "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "experts_implementation": "eager",
}  # fmt: skip
MLA = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "first_k_dense_replace": 1, "topk_group": 1, "n_group": 1, "n_shared_experts": 2,
}  # fmt: skip
SMALL = {
    "Llama-3.1-8B": small("Llama", 16, 4),
    "Llama-3.2-1B": small("Llama", 16, 4, tie_word_embeddings=True),
    "Llama-4-Scout": small(
        "Llama4", 20, 4, width=80, head_dim=8, intermediate_size_mlp=96, **EXPERTS
    ),
    "Mistral-7B": small("Mistral", 16, 4, sliding_window=4),
    "Mixtral-8x7B": small("Mixtral", 16, 4, **EXPERTS),
    "Qwen2-7B": small("Qwen2", 28, 4, width=112),
    "Qwen3-8B": small("Qwen3", 16, 4, head_dim=8),
    "Qwen3-30B-A3B": small("Qwen3Moe", 32, 4, head_dim=8, **EXPERTS),
    "Phi-3-mini": small("Phi3", 8, 8),
    "Gemma-2-9B": small("Gemma2", 8, 4, head_dim=16),
    "Gemma-3-4B": small("Gemma3", 8, 4, head_dim=16),
    "GLM-4-9B": small("Glm4", 16, 4, head_dim=8),
    "GLM-4.5-Air": small(
        "Glm4Moe", 48, 4, width=96, head_dim=8, **EXPERTS | {"n_routed_experts": 8}
    ),
    "Pythia": small("GPTNeoX", 8, 8),
    "Command-R": small("Cohere", 8, 8),
    "OLMo-2-7B": small("Olmo2", 8, 8),
    "OLMoE-1B-7B": small("Olmoe", 8, 8, **EXPERTS),
    "Granite-3-8B": small("Granite", 16, 4),
    "StarCoder2-7B": small("Starcoder2", 36, 4, width=144),
    "SmolLM3-3B": small("SmolLM3", 16, 4),
    "DeepSeek-V2-Lite": small("DeepseekV2", 8, 8, topk_method="greedy", **EXPERTS | MLA),
    "DeepSeek-V3": small("DeepseekV3", 8, 8, **EXPERTS | MLA | {"n_group": 4, "topk_group": 2}),
    "MiniMax-M2": small("MiniMaxM2", 48, 8, width=96, head_dim=8, **EXPERTS),
    "Nemotron-4": small("Nemotron", 24, 4, width=96),
    "EXAONE-4-32B": small("Exaone4", 40, 8, width=80),
    "Granite-SWA": small("GraniteSWA", 20, 4, width=80, sliding_window=4),
    "GLM-4.7-Flash": small("Glm4MoeLite", 20, 20, width=80, **EXPERTS | MLA),
    "MiniCPM3-4B": small("MiniCPM3", 8, 8, **MLA),
    "MiMo-V2-Flash": small(
        "MiMoV2Flash",
        64,
        4,
        width=96,
        head_dim=8,
        v_head_dim=8,
        **EXPERTS | {"n_routed_experts": 8},
    ),
    "LongCat-Flash": small(
        "LongcatFlash",
        8,
        8,
        num_layers=1,
        ffn_hidden_size=96,
        head_dim=8,
        moe_topk=3,
        zero_expert_num=4,
        expert_ffn_hidden_size=32,
        **EXPERTS | MLA,
    ),
}


class Same(NamedTuple):
    """The largest relative difference of losses and of parameters after training, and the share that each
    process holds. rules: their number.
    """

    loss: float
    parameters: float
    held: float
    rules: int

    @property
    def worst(self) -> float:
        return max(self.loss, self.parameters)


def built(name: str) -> Any:
    kind, options = SMALL[name]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(
        transformers, f"{kind}Config"
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config(**options)).double()


def losses_of(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        losses.append(
            cross_entropy(model(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        )
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


def same_as_on_one_device(name: str) -> Same:
    """Train a model of `SMALL` by its plan and alone, in float64. All processes call it."""
    whole = built(name)
    model = built(name)
    rules = xs.Rules.from_transformers(model, "tp")
    xt.parallelize(model, mesh=xs.Mesh(tp=dist.get_world_size()), **rules)
    want = losses_of(whole)
    found = losses_of(model)
    state = parallel_of(model)
    values = dict(whole.named_parameters())
    pairs = [(p, values[p.name].detach()) for p in state.parameters if p.name in values]
    differ = [
        ((p.tensor - p.block_of(x, state.context)).abs().max() / x.abs().max()).item()
        for p, x in pairs
    ]
    held = sum(p.tensor.numel() for p, _ in pairs) / sum(x.numel() for _, x in pairs)
    return Same(
        ((found - want).abs() / want).max().item(), max(differ), held, sum(map(len, rules.values()))
    )


def trained(names: Sequence[str]) -> list[Same]:
    return [same_as_on_one_device(name) for name in names]
