"""Which way attention takes: the cheapest, and the numbers that decide it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import xshard as xs
from xshard.contractions.prices import attention_seconds, fastest_attention
from xshard.nn.attention import METHODS, attention

H100 = xs.load_profile("h100")


@pytest.mark.parametrize(
    ("layout", "length", "kv_heads", "how"),
    [
        ("b h s/zigzag(cp) k", 1024, 8, "gather"),  # little to gather
        ("b h s/cp k", 65536, 32, "ulysses"),  # a ring's last device has the most work
        ("b h s/zigzag(cp) k", 65536, 8, "ring"),  # all that travels is hidden behind products
    ],
)
def test_the_cheapest_way_is_taken(layout: str, length: int, kv_heads: int, how: str) -> None:
    q, k = (xs.Sharding(xs.Layout.parse(layout), xs.Mesh(cp=8), (1, h, length, 128)) for h in (32, kv_heads))
    given = attention(q, k, k, causal=True)
    found = fastest_attention(given, "bfloat16", H100)
    prices = {way: attention_seconds(replace(given, how=way), "bfloat16", H100) for way in METHODS}
    assert found.how == how == min(prices, key=lambda way: prices[way]), prices
    assert fastest_attention(replace(given, how="gather"), "bfloat16", H100).how == "gather"
