"""Names of Llama-like models, from Hugging Face's to those in other systems; `.inverse` maps back."""

from __future__ import annotations

from collections.abc import Callable

from xshard.arguments import did_you_mean
from xshard.errors import XshardError
from xshard.state.names import Names, concat, rename, split

_LAYER = "model.layers.*."
_QKV = [f"{_LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
_GATE_UP = [f"{_LAYER}mlp.{x}_proj.weight" for x in ("gate", "up")]


def to_flax() -> Names:
    """Names to the Flax model in transformers: kernels are [in, out]."""
    return Names(
        rename(
            "**.{self_attn,mlp}.*_proj.weight", "**.{self_attn,mlp}.*_proj.kernel", "o i -> i o"
        ),
        rename("lm_head.weight", "lm_head.kernel", "o i -> i o", optional=True),
        rename("model.embed_tokens.weight", "model.embed_tokens.embedding"),
        rename("**", "**"),
    )


def to_fused(heads: int, kv_heads: int, head: int) -> Names:
    """Names to vLLM's: q, k and v in `qkv_proj`, gate and up in `gate_up_proj`. head: rows of one head."""
    rows = heads * head, kv_heads * head, kv_heads * head
    return Names(
        concat(_QKV, f"{_LAYER}self_attn.qkv_proj.weight", rows=rows),
        Names(split(f"{_LAYER}mlp.gate_up_proj.weight", _GATE_UP)).inverse.relations,
        rename("**", "**"),
    )


def to_megatron(heads: int, kv_heads: int, head: int) -> Names:
    """Names to Megatron core's: q, k and v by groups of heads; gate and up in `linear_fc1`."""
    layer = "decoder.layers.*."
    rows = (heads // kv_heads * head, head, head)
    qkv = f"{layer}self_attention.linear_qkv"
    fc1 = f"{layer}mlp.linear_fc1"
    return Names(
        concat(_QKV, f"{qkv}.weight", rows=rows),
        Names(split(f"{fc1}.weight", _GATE_UP)).inverse.relations,
        rename(f"{_LAYER}self_attn.o_proj.weight", f"{layer}self_attention.linear_proj.weight"),
        rename(f"{_LAYER}mlp.down_proj.weight", f"{layer}mlp.linear_fc2.weight"),
        rename(f"{_LAYER}input_layernorm.weight", f"{qkv}.layer_norm_weight"),
        rename(f"{_LAYER}post_attention_layernorm.weight", f"{fc1}.layer_norm_weight"),
        rename("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        rename("model.norm.weight", "decoder.final_layernorm.weight"),
        rename("lm_head.weight", "output_layer.weight", optional=True),
        rename("**", "**"),
    )


def named(text: str) -> Names:
    """The names `"llama-to-flax"`, `"llama-to-megatron:32,8,128"`, or to Llama. Raises XshardError."""
    makers: dict[str, Callable[..., Names]] = {
        "flax": to_flax,
        "fused": to_fused,
        "megatron": to_megatron,
    }
    name, _, numbers = text.partition(":")
    sizes = [int(n) for n in numbers.split(",") if n.strip().isdecimal()]
    for other, maker in makers.items():
        if name in (f"llama-to-{other}", f"{other}-to-llama") and len(sizes) == (
            0 if other == "flax" else 3
        ):
            return maker(*sizes) if name.startswith("llama") else maker(*sizes).inverse
    known = [f"llama-to-{other}" for other in makers]
    hint = f"{did_you_mean(name, known)}a JSON file of relations, or {', '.join(known)}, or back to llama; "
    hint += "for fused and megatron with heads, key heads, and rows per head, as in llama-to-fused:32,8,128"
    raise XshardError(f"{text!r} does not name names", hint=hint)
