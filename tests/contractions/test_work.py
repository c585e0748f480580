"""What memory reads and writes for a local contraction, and the places and ways that are chosen by prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

import xshard as xs
from xshard.contractions.placements import EinsumShardings, accesses
from xshard.contractions.prices import Prices, attention_seconds, fastest_attention
from xshard.contractions.search import CandidateSearch
from xshard.nn.attention import METHODS, attention

# The sizes of dims are such that products are thin: each element is used a few times.
VALUES = "b h s/tp t, b t/tp h k -> b s/tp h k"
SIZES = {"b": 8, "h": 16, "s": 128, "t": 256, "k": 64}
H100 = xs.load_profile("h100")
HOST = replace(xs.load_profile("host"), flops_per_s=(("float32", 2.5e10),))


@pytest.mark.parametrize(
    ("equation", "expected"),
    {
        "bsd,df->bsf": (1, 1, 1),
        "sbd,dfb->bsf": (1, 3, 1),  # between rows a batch is a stride, behind them it is not
        "bhst,bthk->bshk": (1, 3, 3),
        "bshk,bthk->bhst": (3, 3, 1),
        "dfs,sb->bfd": (1, 1, 1),
        "dbf,sb->dfs": (3, 1, 1),  # summed amid rows
        "i,i->i": (1, 1, 1),
        ",i->i": (1, 1, 1),
        "bac->bc": (1, 1),
    }.items(),
)
def test_an_array_is_copied_whose_dims_are_in_no_order_of_matrices(equation, expected):
    operands, result = equation.split("->")
    arrays = [*operands.split(","), result]
    assert accesses(arrays) == expected
    # Gradients are products of the same arrays, and copy the same.
    for i in range(len(arrays) - 1):
        others = [k for k in range(len(arrays)) if k != i]
        assert accesses([arrays[k] for k in (*others, i)]) == tuple(
            expected[k] for k in (*others, i)
        )


@pytest.mark.parametrize("rate", [2.5e10, 1e15])
def test_work_is_that_of_operations_or_of_memory_whichever_takes_longer(rate):
    profile = replace(HOST, flops_per_s=(("float32", rate),))
    sizes = {"b": 8, "s": 128, "t": 256, "k": 64}
    plan = xs.plan(
        "b/tp s t, b/tp t k -> b/tp s k",
        xs.Mesh(tp=8),
        None,
        "float32",
        sizes=sizes,
        profile=profile,
    )
    flops = 2 * 128 * 256 * 64
    touched = 4 * (128 * 256 + 256 * 64 + 128 * 64)
    work = {2.5e10: flops / 2.5e10, 1e15: touched / (2 * HOST.copy_bytes_per_s)}[rate]
    assert (plan.forward_cost, plan.backward_cost) == (work, 2 * work)


@pytest.mark.parametrize("rate", [1.5e10, 4e10])
def test_values_are_not_gathered_for_every_device_to_copy(rate):
    profile = replace(HOST, flops_per_s=(("float32", rate),))
    plan = xs.plan(VALUES, xs.Mesh(tp=8), sizes=SIZES, dtype="float32", profile=profile)
    assert plan.local == "b/tp h s t, b/tp t h k -> b/tp s h k"
    copied = 16 * (128 * 256 + 3 * 256 * 64 + 3 * 128 * 64)
    assert plan.parts[0].work == max(plan.flops / rate, 4 * copied / (2 * profile.copy_bytes_per_s))


@pytest.mark.parametrize("text", [VALUES, "b s/tp t, t k -> b s/tp k", "b s/tp t -> b t"])
def test_the_search_counts_the_work_of_its_plan(text):
    names = [
        name for x in xs.contractions.expression.contraction(text).operands for name in x.names
    ]
    profile = replace(HOST, flops_per_s=())  # no limit but memory
    plan = xs.plan(
        text, xs.Mesh(tp=8), sizes={name: SIZES[name] for name in names}, profile=profile
    )
    [part] = plan.parts
    shardings = EinsumShardings(tuple(move.source for move in part.moves), part.result.target)
    prices = Prices(plan.mesh, plan.dtype, profile)
    works = {}
    for placement in shardings.placements:
        candidate = CandidateSearch(shardings, prices, "forward+backward").candidate(placement)
        works[tuple(move.dst for move in candidate.moves[:-1])] = candidate.work_s
    assert works[tuple(move.dst for move in part.moves)] == (1 + len(part.moves)) * part.work


@pytest.mark.parametrize(
    ("layout", "length", "kv_heads", "how"),
    [
        ("b h s/zigzag(cp) k", 1024, 8, "gather"),  # little to gather
        ("b h s/cp k", 65536, 32, "ulysses"),  # a ring's last device has the most work
        ("b h s/zigzag(cp) k", 65536, 8, "ring"),  # all that travels is hidden behind products
    ],
)
def test_the_cheapest_way_is_taken(layout: str, length: int, kv_heads: int, how: str) -> None:
    q, k = (
        xs.Sharding(xs.Layout.parse(layout), xs.Mesh(cp=8), (1, h, length, 128))
        for h in (32, kv_heads)
    )
    given = attention(q, k, k, causal=True)
    found = fastest_attention(given, "bfloat16", H100)
    prices = {
        way: attention_seconds(replace(given, method=way), "bfloat16", H100) for way in METHODS
    }
    assert found.method == how == min(prices, key=lambda way: prices[way]), prices
    assert fastest_attention(replace(given, method="gather"), "bfloat16", H100).method == "gather"
