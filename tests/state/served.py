"""Published models as Megatron or FSDP trains them and as vLLM serves them: names, shapes and layouts.

`MODELS` has the numbers of configurations of transformers. Names and cuts are those of Megatron core
(`linear_qkv` by groups of heads, `linear_fc1` with gate and up cut one by one, experts over ep x
etp, a padded vocabulary, layers on stages) and of vLLM's loaders (`qkv_proj` with heads of keys that are
copied if devices are more, `gate_up_proj`, `w13_weight`, `w2_weight`, a vocabulary padded to 64 rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xshard import Mesh
from xshard.rules import match_stars, spellings
from xshard.state import Names, concat, rename, split

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """Layers, hidden size, heads, heads of keys, rows of a head, of the vocabulary, of the dense MLP; then
    experts, rows of each, of the shared ones, dense layers before them. mla: the lengths of latent queries,
    of latent keys, and of a head without rotation, with rotation, and of values."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    mlp: int
    experts: int = 0
    expert: int = 0
    shared: int = 0
    dense: int = 0
    mla: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    tied: bool = False
    bias: bool = False  # of q, k and v


MLA = (1536, 512, 128, 64, 128)
MODELS = {
    "Llama-2-7B": Model(32, 4096, 32, 32, 128, 32000, 11008),
    "Llama-2-70B": Model(80, 8192, 64, 8, 128, 32000, 28672),
    "Llama-3.1-8B": Model(32, 4096, 32, 8, 128, 128256, 14336),
    "Llama-3.1-70B": Model(80, 8192, 64, 8, 128, 128256, 28672),
    "Llama-3.1-405B": Model(126, 16384, 128, 8, 128, 128256, 53248),
    "Llama-3.2-1B": Model(16, 2048, 32, 8, 64, 128256, 8192, tied=True),
    "Llama-3.2-3B": Model(28, 3072, 24, 8, 128, 128256, 8192, tied=True),
    "Mistral-7B": Model(32, 4096, 32, 8, 128, 32000, 14336),
    "Ministral-8B": Model(36, 4096, 32, 8, 128, 131072, 12288),
    "Mistral-Large-123B": Model(88, 12288, 96, 8, 128, 32768, 28672),
    "Qwen2.5-0.5B": Model(24, 896, 14, 2, 64, 151936, 4864, tied=True, bias=True),
    "Qwen2.5-1.5B": Model(28, 1536, 12, 2, 128, 151936, 8960, tied=True, bias=True),
    "Qwen2.5-7B": Model(28, 3584, 28, 4, 128, 152064, 18944, bias=True),
    "Qwen2.5-14B": Model(48, 5120, 40, 8, 128, 152064, 13824, bias=True),
    "Qwen2.5-72B": Model(80, 8192, 64, 8, 128, 152064, 29568, bias=True),
    "Qwen3-0.6B": Model(28, 1024, 16, 8, 128, 151936, 3072, tied=True),
    "Qwen3-4B": Model(36, 2560, 32, 8, 128, 151936, 9728, tied=True),
    "Qwen3-8B": Model(36, 4096, 32, 8, 128, 151936, 12288),
    "Qwen3-14B": Model(40, 5120, 40, 8, 128, 151936, 17408),
    "Qwen3-32B": Model(64, 5120, 64, 8, 128, 151936, 25600),
    "Gemma-2B": Model(18, 2048, 8, 1, 256, 256000, 16384, tied=True),
    "Gemma-7B": Model(28, 3072, 16, 16, 256, 256000, 24576, tied=True),
    "GLM-4-9B": Model(40, 4096, 32, 2, 128, 151552, 13696, bias=True),
    "InternLM3-8B": Model(48, 4096, 32, 2, 128, 128512, 10240),
    "OLMo-2-7B": Model(32, 4096, 32, 32, 128, 100352, 11008),
    "SmolLM3-3B": Model(36, 2048, 16, 4, 128, 128256, 11008, tied=True),
    "Seed-OSS-36B": Model(64, 5120, 80, 8, 128, 155136, 27648, bias=True),
    "Yi-34B": Model(60, 7168, 56, 8, 128, 64000, 20480),
    "Mixtral-8x7B": Model(32, 4096, 32, 8, 128, 32000, 0, 8, 14336),
    "Mixtral-8x22B": Model(56, 6144, 48, 8, 128, 32768, 0, 8, 16384),
    "Phi-3.5-MoE": Model(32, 4096, 32, 8, 128, 32064, 0, 16, 6400),
    "OLMoE-1B-7B": Model(16, 2048, 16, 16, 128, 50304, 0, 64, 1024),
    "Qwen1.5-MoE": Model(24, 2048, 16, 16, 128, 151936, 0, 60, 1408, 5632, bias=True),
    "Qwen3-30B-A3B": Model(48, 2048, 32, 4, 128, 151936, 0, 128, 768),
    "Qwen3-235B-A22B": Model(94, 4096, 64, 4, 128, 151936, 0, 128, 1536),
    "GLM-4.5": Model(92, 5120, 96, 8, 128, 151552, 12288, 160, 1536, 1536, 3, bias=True),
    "MiniMax-M2": Model(62, 3072, 48, 8, 128, 200064, 0, 256, 1536),
    "Moonlight-16B": Model(27, 2048, 16, 16, 128, 163840, 11264, 64, 1408, 2816, 1, (0, *MLA[1:])),
    "DeepSeek-V3": Model(61, 7168, 128, 128, 128, 129280, 18432, 256, 2048, 2048, 3, MLA),
    "Kimi-K2": Model(61, 7168, 64, 64, 128, 163840, 18432, 384, 2048, 2048, 1, MLA),
}  # fmt: skip


class Transfer(NamedTuple):
    """What `plan_transfer` takes."""

    shapes: Shapes
    rules: tuple[dict[str, str], dict[str, str]]
    names: Names
    src_mesh: Mesh
    dst_mesh: Mesh

    @property
    def devices(self) -> dict[str, range]:
        """Trainers come first, servers after them."""
        n = self.src_mesh.n_devices
        return {"src_devices": range(n), "dst_devices": range(n, n + self.dst_mesh.n_devices)}


class Weight(NamedTuple):
    """An array of a layer, or of the model if its name has no star, at the trainer."""

    name: str
    shape: tuple[int, ...]
    layout: str


def padded(length: int, multiple: int, axes: str, parts: int) -> str:
    """The shard of a dim that is padded to a multiple, cut evenly, and of which the pad holds nothing."""
    each = -(-length // multiple) * multiple // parts
    rows = (max(0, min(each, length - i * each)) for i in range(parts))
    return f"/sizes({axes},{','.join(map(str, rows))})"


def to_vllm(m: Model, trainer: str) -> Names:
    """From a trainer's names to vLLM's. Segments of `qkv_proj` have vLLM's `shard_id` at the end."""
    layer = {"megatron": "decoder.layers.*.", "fsdp": "model.layers.*."}[trainer]
    served = "model.layers.*."
    relations = []
    qkv = [served + f"self_attn.qkv_proj.{kind}.{{}}" for kind in ("weight", "bias")[: 1 + m.bias]]
    if trainer == "fsdp":
        fused = {"mlp": m.dense or not m.experts, "mlp.shared_experts": m.shared}
        for part in (part for part, there in fused.items() if there):
            gate_up = [f"{layer}{part}.{x}_proj.weight" for x in ("gate", "up")]
            relations.append(concat(gate_up, f"{served}{part}.gate_up_proj.weight"))
        for text in () if m.mla[1] else qkv:
            kind = text.split(".")[-2]
            relations += [
                rename(f"{layer}self_attn.{x}_proj.{kind}", text.format(x)) for x in "qkv"
            ]
        if m.mla[0]:
            down = [f"{layer}self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
            relations.append(concat(down, f"{served}self_attn.fused_qkv_a_proj.weight"))
        if m.experts:
            left = "{gate_up_proj,down_proj}"
            right = "{w13_weight,w2_weight}"
            relations.append(rename(f"{layer}mlp.experts.{left}", f"{served}mlp.experts.{right}"))
        return Names(*relations, rename("**", "**"))
    attention = f"{layer}self_attention."
    rows = (m.heads // m.kv_heads * m.head, m.head, m.head)
    for text in () if m.mla[1] else qkv:
        kind = text.split(".")[-2]
        relations.append(
            split(f"{attention}linear_qkv.{kind}", [text.format(x) for x in "qkv"], rows=rows)
        )
    if m.mla[0]:
        down = [f"{attention}linear_{x}_down_proj.weight" for x in ("q", "kv")]
        relations.append(concat(down, f"{served}self_attn.fused_qkv_a_proj.weight"))
    there = f"{served}self_attn."
    norm = f"{served}post_attention_layernorm.weight"
    pairs = {
        f"{attention}linear_proj.weight": f"{there}o_proj.weight",
        f"{attention}linear_q_proj.weight": f"{there}q_proj.weight",
        f"{attention}linear_kv_down_proj.weight": f"{there}kv_a_proj_with_mqa.weight",
        f"{attention}linear_{{q,kv}}_up_proj.weight": f"{there}{{q,kv}}_b_proj.weight",
        f"{attention}linear_{{q,kv}}_up_proj.layer_norm_weight": f"{there}{{q,kv}}_a_layernorm.weight",
        f"{attention}linear_qkv.layer_norm_weight": f"{served}input_layernorm.weight",
        f"{layer}input_layernorm.weight": f"{served}input_layernorm.weight",
        f"{layer}mlp.linear_fc1.layer_norm_weight": norm,
        f"{layer}pre_mlp_layernorm.weight": norm,
        f"{layer}mlp.router.weight": f"{served}mlp.gate.weight",
        f"{layer}mlp.experts.linear_{{fc1,fc2}}.weight": f"{served}mlp.experts.{{w13,w2}}_weight",
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for part in ("mlp", "mlp.shared_experts"):
        pairs[f"{layer}{part}.linear_{{fc1,fc2}}.weight"] = (
            f"{served}{part}.{{gate_up,down}}_proj.weight"
        )
    return Names(*relations, *(rename(a, b, optional=True) for a, b in pairs.items()))


def megatron(m: Model, tp: str, ep: str, etp: str, vocab: str) -> Iterator[Weight]:
    """Megatron core's arrays; axes by the names of its groups. vocab: the shard of the vocabulary."""
    h, (q, kv, nope, rope, v), layer = m.hidden, m.mla, "decoder.layers.*."
    a = f"{layer}self_attention."
    qkv = (m.heads + 2 * m.kv_heads) * m.head
    width = m.heads * m.head
    yield Weight("embedding.word_embeddings.weight", (m.vocab, h), f"o{vocab} i")
    if kv:
        width = m.heads * v
        yield Weight(f"{layer}input_layernorm.weight", (h,), "o")
        if q:
            yield Weight(f"{a}linear_q_down_proj.weight", (q, h), "o i")
            yield Weight(f"{a}linear_q_up_proj.layer_norm_weight", (q,), "o")
        up = "q_up" if q else "q"
        yield Weight(f"{a}linear_{up}_proj.weight", (m.heads * (nope + rope), q or h), f"o/{tp} i")
        yield Weight(f"{a}linear_kv_down_proj.weight", (kv + rope, h), "o i")
        yield Weight(f"{a}linear_kv_up_proj.layer_norm_weight", (kv,), "o")
        yield Weight(f"{a}linear_kv_up_proj.weight", (m.heads * (nope + v), kv), f"o/{tp} i")
    else:
        yield Weight(f"{a}linear_qkv.layer_norm_weight", (h,), "o")
        yield Weight(f"{a}linear_qkv.weight", (qkv, h), f"o/{tp} i")
        if m.bias:
            yield Weight(f"{a}linear_qkv.bias", (qkv,), f"o/{tp}")
    yield Weight(f"{a}linear_proj.weight", (h, width), f"o i/{tp}")
    if m.dense or not m.experts:
        yield Weight(f"{layer}mlp.linear_fc1.layer_norm_weight", (h,), "o")
        yield Weight(f"{layer}mlp.linear_fc1.weight", (2 * m.mlp, h), f"o/{fused(tp, m.mlp)} i")
        yield Weight(f"{layer}mlp.linear_fc2.weight", (h, m.mlp), f"o i/{tp}")
    if m.experts:
        yield Weight(f"{layer}pre_mlp_layernorm.weight", (h,), "o")
        yield Weight(f"{layer}mlp.router.weight", (m.experts, h), "o i")
        fc1 = f"e/{ep} o/{fused(etp, m.expert)} i"
        n = m.experts
        yield Weight(f"{layer}mlp.experts.linear_fc1.weight", (n, 2 * m.expert, h), fc1)
        yield Weight(f"{layer}mlp.experts.linear_fc2.weight", (n, h, m.expert), f"e/{ep} o i/{etp}")
    if m.shared:
        one = f"{layer}mlp.shared_experts.linear_"
        yield Weight(f"{one}fc1.weight", (2 * m.shared, h), f"o/{fused(tp, m.shared)} i")
        yield Weight(f"{one}fc2.weight", (h, m.shared), f"o i/{tp}")
    yield Weight("decoder.final_layernorm.weight", (h,), "o")
    if not m.tied:
        yield Weight("output_layer.weight", (m.vocab, h), f"o{vocab} i")


def fused(axes: str, each: int) -> str:
    """Two segments, as gate and up, each cut over the axes."""
    return f"block({axes.strip('()')},{each},{each})"


def fsdp(m: Model) -> Iterator[Weight]:
    """The arrays of transformers, cut over `tp` by tensor parallelism, and then over `fsdp`."""
    h, (q, kv, nope, rope, v), layer = m.hidden, m.mla, "model.layers.*."
    a = f"{layer}self_attn."
    width = m.heads * m.head
    rows = "o/tp/fsdp i"
    cols = "o/fsdp i/tp"
    whole = "o/fsdp"
    yield Weight("model.embed_tokens.weight", (m.vocab, h), rows)
    yield Weight(f"{layer}input_layernorm.weight", (h,), whole)
    yield Weight(f"{layer}post_attention_layernorm.weight", (h,), whole)
    if kv:
        width = m.heads * v
        if q:
            yield Weight(f"{a}q_a_proj.weight", (q, h), f"{whole} i")
            yield Weight(f"{a}q_a_layernorm.weight", (q,), whole)
        one = "q_b_proj" if q else "q_proj"
        yield Weight(f"{a}{one}.weight", (m.heads * (nope + rope), q or h), rows)
        yield Weight(f"{a}kv_a_proj_with_mqa.weight", (kv + rope, h), f"{whole} i")
        yield Weight(f"{a}kv_a_layernorm.weight", (kv,), whole)
        yield Weight(f"{a}kv_b_proj.weight", (m.heads * (nope + v), kv), rows)
    else:
        for x, n in (("q", m.heads), ("k", m.kv_heads), ("v", m.kv_heads)):
            yield Weight(f"{a}{x}_proj.weight", (n * m.head, h), rows)
            if m.bias:
                yield Weight(f"{a}{x}_proj.bias", (n * m.head,), "o/tp/fsdp")
    yield Weight(f"{a}o_proj.weight", (h, width), cols)
    for part, n in (
        ("mlp", 0 if m.experts and not m.dense else m.mlp),
        ("mlp.shared_experts", m.shared),
    ):
        if n:
            for x in ("gate", "up"):
                yield Weight(f"{layer}{part}.{x}_proj.weight", (n, h), rows)
            yield Weight(f"{layer}{part}.down_proj.weight", (h, n), cols)
    if m.experts:
        yield Weight(f"{layer}mlp.gate.weight", (m.experts, h), f"{whole} i")
        yield Weight(
            f"{layer}mlp.experts.gate_up_proj", (m.experts, 2 * m.expert, h), "e/tp o/fsdp i"
        )
        yield Weight(f"{layer}mlp.experts.down_proj", (m.experts, h, m.expert), "e/tp o/fsdp i")
    yield Weight("model.norm.weight", (h,), whole)
    if not m.tied:
        yield Weight("lm_head.weight", (m.vocab, h), rows)


def has(m: Model, name: str, i: int) -> bool:
    """Whether layer i has an array: dense layers come before those with experts."""
    if not m.experts or (".mlp." not in name and "pre_mlp" not in name):
        return True
    routed = any(part in name for part in ("expert", "router", "mlp.gate.", "pre_mlp"))
    return routed == (i >= m.dense)


def transfer(m: Model, trainer: str, src_mesh: Mesh, dst_mesh: Mesh) -> Transfer:
    """The transfer of a model.

    src_mesh: fsdp, tp; or pp, dp, ed, t, et, of which t x et is tp, ed x t is ep, and et is etp.
    dst_mesh: dp, kv, rep, of which kv x rep is tp; experts are over all three.
    """
    n_layers = m.layers
    found = Shapes()
    here: dict[str, str] = {}
    stages = src_mesh.size("pp") if trainer == "megatron" else 1
    if trainer == "megatron":
        tp = src_mesh.size("t", "et")
        weights = [*megatron(m, "(t,et)", "(ed,t)", "et", padded(m.vocab, 128 * tp, "t,et", tp))]
    else:
        weights = [*fsdp(m)]
    for weight in weights:
        if "*" not in weight.name:
            found[weight.name] = weight.shape
            stage = stages - 1 if weight.name[:6] in ("output", "decode") else 0
            here[weight.name] = on_stage(weight, stage, stages)
            continue
        for stage in range(stages):
            layers = range(stage * n_layers // stages, (stage + 1) * n_layers // stages)
            some = [i for i in layers if has(m, weight.name, i)]
            found |= {weight.name.replace("*", str(i)): weight.shape for i in some}
            if some:
                each = ",".join(map(str, some))
                here[weight.name.replace("*", f"{{{each}}}")] = on_stage(weight, stage, stages)
    every = "dp,kv,rep"
    vocab = padded(m.vocab, 64, "kv,rep", dst_mesh.size("kv", "rep"))
    there = {
        "model.embed_tokens.weight": f"o{vocab} i",
        "lm_head.weight": f"o{vocab} i",
        "**.qkv_proj.weight.q": "o/(kv,rep) i",
        "**.qkv_proj.bias.q": "o/(kv,rep)",
        "**.qkv_proj.weight.{k,v}": "o/kv i",
        "**.qkv_proj.bias.{k,v}": "o/kv",
        **dict.fromkeys(
            ("**.q_proj.weight", "**.q_b_proj.weight", "**.kv_b_proj.weight"), "o/(kv,rep) i"
        ),
        **dict.fromkeys(("**.o_proj.weight", "**.down_proj.weight"), "o i/(kv,rep)"),
        "**.shared_experts.gate_up_proj.weight": f"o/block(kv,rep,{m.shared},{m.shared}) i",
        "**.mlp.gate_up_proj.weight": f"o/block(kv,rep,{m.mlp},{m.mlp}) i",
        "**.experts.*": f"e/balanced({every}) o i",
    }
    names = to_vllm(m, trainer)
    used = {
        p
        for p in there
        if any(
            match_stars(one, name) is not None
            for one in spellings(p)
            for name in names.resolve(found)
        )
    }
    there = {pattern: layout for pattern, layout in there.items() if pattern in used} | {
        "**": "..."
    }
    return Transfer(found, (here, there), names, src_mesh, dst_mesh)


def on_stage(weight: Weight, stage: int, stages: int) -> str:
    """The layout, held by one stage of the pipeline: by a dim that is not cut otherwise, or before it is."""
    if stages == 1:
        return weight.layout
    dims = weight.layout.split()
    d = next((d for d, dim in enumerate(dims) if "/" not in dim), 0)
    rows = ",".join(str(weight.shape[d] if i == stage else 0) for i in range(stages))
    name, cut, others = dims[d].partition("/")
    dims[d] = f"{name}/sizes(pp,{rows}){cut}{others}"
    return " ".join(dims)
