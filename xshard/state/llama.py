"""Names of Llama-like models, from Hugging Face's to those in other systems; `.inverse` maps back."""

from __future__ import annotations

from collections.abc import Callable

from xshard.errors import XshardError
from xshard.signatures import did_you_mean
from xshard.state.names import Names, concat, rename, split
from xshard.state.relations import Relation

_LAYER = "model.layers.*."
_QKV = [f"{_LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
_GATE_UP = [f"{_LAYER}mlp.{x}_proj.weight" for x in ("gate", "up")]


def to_flax() -> Names:
    """Map names to those of the Flax model in transformers: kernels are [in, out]."""
    return Names(
        rename(
            "**.{self_attn,mlp}.*_proj.weight", "**.{self_attn,mlp}.*_proj.kernel", "o i -> i o"
        ),
        rename("lm_head.weight", "lm_head.kernel", "o i -> i o", optional=True),
        rename("model.embed_tokens.weight", "model.embed_tokens.embedding"),
        rename("**", "**"),
    )


def to_fused(heads: int, kv_heads: int, head: int) -> Names:
    """Map names to vLLM's: q, k and v in `qkv_proj`, gate and up in `gate_up_proj`.

    Args:
        heads: The number of query heads.
        kv_heads: The number of key and value heads.
        head: Rows of one head.
    """
    rows = (heads * head, kv_heads * head, kv_heads * head)
    return Names(
        concat(_QKV, f"{_LAYER}self_attn.qkv_proj.weight", rows=rows),
        _fused_gate_up(f"{_LAYER}mlp.gate_up_proj.weight"),
        rename("**", "**"),
    )


def to_megatron(heads: int, kv_heads: int, head: int) -> Names:
    """Map the arrays of a Hugging Face Llama to those of Megatron core, which fuses some of them.

    q, k and v become one `linear_qkv`, in which the rows of each group of query heads are followed
    by those of its key head and of its value head. gate and up become one `linear_fc1`.

    Args:
        heads: The number of query heads.
        kv_heads: The number of key and value heads.
        head: Rows of one head, such as 128.
    """
    layer = "decoder.layers.*."
    # For 32 heads, 8 key heads and 128 rows: 512 rows of q, 128 of k, 128 of v, and so on in turn.
    rows = (heads // kv_heads * head, head, head)
    qkv = f"{layer}self_attention.linear_qkv"
    fc1 = f"{layer}mlp.linear_fc1"
    return Names(
        concat(_QKV, f"{qkv}.weight", rows=rows),
        _fused_gate_up(f"{fc1}.weight"),
        rename(f"{_LAYER}self_attn.o_proj.weight", f"{layer}self_attention.linear_proj.weight"),
        rename(f"{_LAYER}mlp.down_proj.weight", f"{layer}mlp.linear_fc2.weight"),
        # Megatron keeps a norm's weight with the linear layer that follows it.
        rename(f"{_LAYER}input_layernorm.weight", f"{qkv}.layer_norm_weight"),
        rename(f"{_LAYER}post_attention_layernorm.weight", f"{fc1}.layer_norm_weight"),
        rename("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        rename("model.norm.weight", "decoder.final_layernorm.weight"),
        rename("lm_head.weight", "output_layer.weight", optional=True),
        rename("**", "**"),
    )


def _fused_gate_up(fused_pattern: str) -> tuple[Relation, ...]:
    """Join gate and up in one array, which its inverse splits in two equal parts."""
    return Names(split(fused_pattern, _GATE_UP)).inverse.relations


_MAKERS: dict[str, Callable[..., Names]] = {
    "flax": to_flax,
    "fused": to_fused,
    "megatron": to_megatron,
}
_N_SIZES = {"flax": 0, "fused": 3, "megatron": 3}


def names_from_text(text: str) -> Names:
    """Find a mapping between the names of two systems' Llama parameters by its text.

    "llama-to-flax", "llama-to-megatron:32,8,128" (heads, key heads, rows per head), or back, as in
    "flax-to-llama", which is the inverse.

    Raises:
        XshardError: The text names none of them.
    """
    name, _, sizes_text = text.partition(":")
    sizes = [int(n) for n in sizes_text.split(",") if n.strip().isdecimal()]
    for system, make_names in _MAKERS.items():
        if len(sizes) != _N_SIZES[system]:
            continue
        if name == f"llama-to-{system}":
            return make_names(*sizes)
        if name == f"{system}-to-llama":
            return make_names(*sizes).inverse
    mapping_names = [f"llama-to-{system}" for system in _MAKERS]
    suggestion = did_you_mean(name, mapping_names)
    hint = (
        f"{suggestion}a JSON file of relations, or {', '.join(mapping_names)}, or back to llama; "
    )
    hint += "for fused and megatron with heads, key heads, and rows per head, as in llama-to-fused:32,8,128"
    raise XshardError(f"{text!r} does not name names", hint=hint)
