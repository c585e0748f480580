"""A model of transformers whose sequence is cut, by the name of an attention, beside one device."""

from __future__ import annotations

import copy
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import error_of, on_ranks, still_connected

LENGTH = 19
MESH = xs.Mesh(cp=4)
LAYOUT = "b s/zigzag(cp) h k"
EXPERTS: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 31,
    "head_dim": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager",
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def test_a_llama_is_that_of_one_device_in_all_ways() -> None:
    on_ranks(4, _trained)


def _trained() -> None:
    torch.manual_seed(0)
    one = _model("sdpa")
    tokens = torch.randint(0, 31, (2, LENGTH))
    places = torch.arange(LENGTH)
    padding = torch.stack([places < LENGTH, places < 15])
    documents = (places + torch.tensor([[0], [3]])) // 8
    rows = xt.positions(LAYOUT.removesuffix(" h k"), MESH, shape=tokens.shape, dim="s")
    together = documents[:, None, :, None] == documents[:, None, None]
    causal = together & (places[:, None] >= places)
    for how, whole, cut, keep in (
        (
            "gather",
            {"attention_mask": padding.long()},
            {"attention_mask": padding.long()[:, rows]},
            padding,
        ),
        ("ulysses", {"attention_mask": causal}, {"documents": documents[:, rows]}, padding | True),
        ("ring", {}, {}, padding | True),
    ):
        xt.nn.register_attention(LAYOUT, MESH, how=how, shape=(None, LENGTH, None, None))
        mine = _model("xshard")
        mine.load_state_dict(one.state_dict())
        position_ids = places[None]
        y = one(tokens, position_ids=position_ids, use_cache=False, **whole).logits
        block = mine(
            tokens[:, rows], position_ids=position_ids[:, rows], use_cache=False, **cut
        ).logits
        assert torch.allclose(block[keep[:, rows]], y[:, rows][keep[:, rows]], atol=1e-12)
        weights = torch.cos(torch.arange(y.numel()).double()).reshape(y.shape) * keep[..., None]
        one.zero_grad()
        (y * weights).sum().backward()
        (block * weights[:, rows]).sum().backward()
        for (name, p), wanted in zip(mine.named_parameters(), one.parameters(), strict=True):
            dist.all_reduce(p.grad)
            assert torch.allclose(p.grad, wanted.grad, atol=1e-11), (how, name)
    _sinks_and_chunks(tokens, rows)
    _packed(one, mine, tokens)
    _refusals(mine, tokens, rows)
    _own_attention(one, tokens)


def _packed(one: Any, mine: Any, tokens: torch.Tensor) -> None:
    """Positions that restart are documents, in any call; positions of other rows are refused in any call."""
    draw = random.Random(0)
    for i in range(12):
        layout = draw.choice(("b s/zigzag(cp)", "b s/cp"))
        if i % 4 == 0:  # later calls have the same implementation
            how = draw.choice(("gather", "ulysses", "ring"))
            current = layout
            xt.nn.register_attention(
                f"{layout} h k", MESH, how=how, shape=(None, LENGTH, None, None)
            )
        rows = xt.positions(current, MESH, shape=tokens.shape, dim="s")
        starts = [sorted(draw.sample(range(LENGTH), draw.randint(0, 4))) for _ in range(2)]
        places = torch.tensor([_restarting(row) for row in starts[: draw.choice((1, 2))]])
        wanted = one(tokens, position_ids=places, use_cache=False).logits[:, rows]
        block = mine(tokens[:, rows], position_ids=places[:, rows], use_cache=False).logits
        assert torch.allclose(block, wanted, atol=1e-11), (current, starts)
        if i % 3 == 2:
            wrong = places.flip(1)[:, rows] if i % 2 else torch.arange(len(rows))[None]
            kind, text = error_of(
                lambda rows=rows, wrong=wrong: mine(
                    tokens[:, rows], position_ids=wrong, use_cache=False
                )
            )
            assert kind == "ShapeError" and "position_ids" in text


def _sinks_and_chunks(tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """gpt-oss, and Llama 4 that scales queries by rows, have results and gradients of one device."""
    places = torch.arange(LENGTH)[None]
    padding = places.expand(2, -1) < torch.tensor([[LENGTH], [15]])
    for make, masks, keep, tolerance in (
        (_gpt_oss, {}, padding | True, 1e-10),
        (_llama4, {}, padding | True, 1e-5),  # its router computes in float32
        (_llama4, {"attention_mask": padding.long()}, padding, 1e-5),
    ):
        close = partial(torch.allclose, rtol=tolerance, atol=tolerance)
        xt.nn.register_attention(LAYOUT, MESH, how="ring", shape=(None, LENGTH, None, None))
        one = make("eager")
        torch.manual_seed(2)
        for p in one.parameters():  # far enough from 0 that softmax and experts choose
            torch.nn.init.normal_(p, std=0.5)
        mine = make("xshard")
        mine.load_state_dict(one.state_dict())
        y = one(tokens, position_ids=places, use_cache=False, **masks).logits
        cut = {name: mask[:, rows] for name, mask in masks.items()}
        block = mine(tokens[:, rows], position_ids=places[:, rows], use_cache=False, **cut).logits
        weights = torch.cos(torch.arange(y.numel()).double()).reshape(y.shape) * keep[..., None]
        assert close(block[keep[:, rows]], y[:, rows][keep[:, rows]]), make
        (y * weights).sum().backward()
        (block * weights[:, rows]).sum().backward()
        for (name, p), wanted in zip(mine.named_parameters(), one.parameters(), strict=True):
            grad = (
                torch.zeros_like(p) if p.grad is None else p.grad
            )  # of experts without tokens here
            dist.all_reduce(grad)
            assert close(grad, wanted.grad), (make, name)
    left = padding.long().flip(1)[:, rows]
    kind, text = error_of(
        lambda: mine(
            tokens[:, rows], attention_mask=left, position_ids=places[:, rows], use_cache=False
        )
    )
    assert kind == "XshardError" and "padding before the tokens" in text


def _gpt_oss(attention: str) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(attn_implementation=attention, sliding_window=5, **EXPERTS)
    return GptOssForCausalLM(config).double()


def _llama4(attention: str) -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        attn_implementation=attention, attention_chunk_size=6, no_rope_layers=[1, 0],
        floor_scale=3, intermediate_size_mlp=20, **EXPERTS,
    )  # fmt: skip
    return Llama4ForCausalLM(config).double()


def _restarting(starts: list[int]) -> list[int]:
    """The place of every row in its document."""
    return [row - max([0, *(start for start in starts if start <= row)]) for row in range(LENGTH)]


def _own_attention(one: Any, tokens: torch.Tensor) -> None:
    """Attention of transformers on a cut sequence is refused; on a gathered one, and cut batches, not."""
    from transformers import BloomConfig, BloomForCausalLM

    places = torch.arange(LENGTH)[None]
    torch.manual_seed(1)
    bloom = BloomForCausalLM(
        BloomConfig(
            hidden_size=24, n_layer=1, n_head=2, vocab_size=31, attn_implementation="xshard"
        )
    ).double()
    cut = {"input_ids": "b s -> b s/cp"}
    own = {"position_ids": "one s -> one s/cp"}
    batches = {"input_ids": "b s -> b/cp s"}
    tokens = torch.cat([tokens, tokens.flip(1)])
    for model, inputs, outputs, words in (
        (one, {"": cut | own}, {}, "model.layers.0.self_attn attends to"),
        (bloom, {"": cut}, {}, "transformer.h.0.self_attention attends to"),
        (one, {"": cut}, {"model.embed_tokens": "b s/cp c -> b s c"}, ""),
        (bloom, {"": batches}, {}, ""),
    ):
        parallel = xt.parallelize(
            copy.deepcopy(model), {"**": "..."}, inputs, MESH, outputs=outputs
        )
        whole = {"input_ids": tokens, "use_cache": False}
        if model is one:
            whole["position_ids"] = places
        if words:
            assert words in error_of(partial(parallel, **whole))[1]
            continue
        wanted = model(**whole).logits
        if inputs[""] == batches:
            wanted = wanted.chunk(4)[dist.get_rank()]
        assert torch.allclose(parallel(**whole).logits, wanted, atol=1e-11), inputs


def _refusals(model: Any, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    xt.nn.register_attention(LAYOUT, MESH, shape=(None, LENGTH, None, None))
    kind, text = error_of(lambda: model(tokens[:, : len(rows)], use_cache=False))
    assert kind == "ShapeError" and "position_ids" in text and "xt.positions" in text
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import blockwise_overlay

    attend, mask = (kinds()["xshard"] for kinds in (AttentionInterface, AttentionMaskInterface))
    x = torch.zeros(1, 6, len(rows), 4)
    module = SimpleNamespace(is_causal=True)
    q = torch.randn(1, 6, len(rows), 4)
    options: Any = {"causal": True, "softcap": 0.5, "shape": (1, LENGTH, 6, 4)}
    capped = xt.nn.attention(*[q.transpose(1, 2)] * 3, LAYOUT, MESH, **options)
    assert torch.equal(attend(module, q, q, q, None, softcap=0.5)[0], capped)
    for options, part in (({"head_mask": 5.0}, "head_mask"), ({"dropout": 0.1}, "dropout=0.1")):
        assert part in error_of(lambda options=options: attend(module, x, x, x, None, **options))[1]
    assert "of 4 dims" in error_of(lambda: attend(module, x, x, x, x))[1]
    assert "use_cache=False" in error_of(lambda: attend(module, x[:, :, :1], x, x, None))[1]
    with pytest.raises(xs.XshardError, match="a mask of blockwise_overlay"):
        mask(mask_function=blockwise_overlay(torch.zeros(1, 4)))
    assert still_connected()


def _model(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 31}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(attn_implementation=attention, **size, **heads)).double()
