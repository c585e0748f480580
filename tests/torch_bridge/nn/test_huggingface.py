"""A model of transformers whose sequence is cut, by the name of an attention, beside one device."""

from __future__ import annotations

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
    _refusals(mine, tokens, rows)


def _refusals(model: Any, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    xt.nn.register_attention(LAYOUT, MESH, shape=(None, LENGTH, None, None))
    kind, text = error_of(lambda: model(tokens[:, : len(rows)], use_cache=False))
    assert kind == "ShapeError" and "position_ids" in text and "xt.positions" in text
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import chunked_causal_mask_function

    attend, mask = (kinds()["xshard"] for kinds in (AttentionInterface, AttentionMaskInterface))
    x = torch.zeros(1, 6, len(rows), 4)
    module = SimpleNamespace(is_causal=True)
    q = torch.randn(1, 6, len(rows), 4)
    options: Any = {"causal": True, "softcap": 0.5, "shape": (1, LENGTH, 6, 4)}
    capped = xt.nn.attention(*[q.transpose(1, 2)] * 3, LAYOUT, MESH, **options)
    assert torch.equal(attend(module, q, q, q, None, softcap=0.5)[0], capped)
    for options, part in (({"s_aux": 5.0}, "s_aux"), ({"dropout": 0.1}, "dropout=0.1")):
        assert part in error_of(lambda options=options: attend(module, x, x, x, None, **options))[1]
    assert "of 4 dims" in error_of(lambda: attend(module, x, x, x, x))[1]
    assert "use_cache=False" in error_of(lambda: attend(module, x[:, :, :1], x, x, None))[1]
    with pytest.raises(xs.XshardError, match="a mask of chunked_overlay"):
        mask(mask_function=chunked_causal_mask_function(4, torch.zeros(1)))
    assert still_connected()


def _model(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 31}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(attn_implementation=attention, **size, **heads)).double()
