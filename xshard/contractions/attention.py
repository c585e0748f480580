"""Which way attention over a cut sequence is computed: the one that takes the fewest seconds.

Decides what is priced: the moves, forward and backward, by their plans, and the products of the busiest
device by the machine's rate. A ring passes blocks on while it multiplies, so that its rounds take the
longer of both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from xshard import dtypes
from xshard.contractions.prices import Move, Prices
from xshard.cost.model import Profile
from xshard.nn.attention import AUTO, HEADS, METHODS, RING, SEQUENCE, WIDTH, Attention

BACKWARD = 2.5  # operations of the backward pass for each of the forward pass: scores are computed again


@lru_cache(maxsize=4096)
def chosen(given: Attention, dtype: str, profile: Profile, ways: tuple[str, ...] = METHODS) -> Attention:
    """The attention in the way that it is asked for, or in the cheapest of some.

    >>> from xshard import Layout, Mesh, Sharding, load_profile
    >>> from xshard.nn.attention import attention
    >>> q, k = (Sharding(Layout.parse("b h s/zigzag(cp) k"), Mesh(cp=8), (1, h, 32768, 128)) for h in (32, 8))
    >>> [chosen(attention(q, x, x, causal=True), "bfloat16", load_profile("h100")).how for x in (q, k)]
    ['ulysses', 'ring']
    """
    if given.how != AUTO:
        return given
    return min((replace(given, how=how) for how in ways), key=lambda way: seconds(way, dtype, profile))


def seconds(given: Attention, dtype: str, profile: Profile) -> float:
    """Predicted seconds of the forward and backward pass on the busiest device."""
    prices = Prices(given.q.mesh, dtype, profile)
    pairs = (given.q, given.queries), (given.kv, given.keys), (given.result, given.target)
    moves = [Move(src.layout, dst.layout, src.shape) for src, dst in pairs]
    moving = sum(prices.plan(move).cost + prices.plan(move.dual).cost for move in moves)
    work = _operations(given) / profile.flops(dtype)
    if given.how != RING or given.rounds == 1:
        return moving + (1 + BACKWARD) * work
    *batch, heads, _, width = given.keys.max_local_shape
    layouts, shape = given.rotation((math.prod(batch), heads, given.block_rows, width))
    once, precise = prices.plan(Move(*layouts, shape)).cost, max(1.0, 4 / dtypes.itemsize(dtype))
    rounds, round_work = given.rounds, work / given.rounds
    forward = round_work + (rounds - 1) * max(round_work, once)
    # The blocks travel again, and their gradients beside them, as wide as sums are.
    backward = BACKWARD * round_work + (rounds - 1) * max(BACKWARD * round_work, once * (1 + precise))
    return moving + forward + backward + once * precise


def _operations(given: Attention) -> float:
    """Of the forward pass, on the busiest device: two products over the scores that are not empty."""
    batch, window = math.prod(given.queries.max_local_shape[:HEADS]), given.window or given.q.shape[SEQUENCE]
    sees = 0
    for device in given.devices:
        rows = given.query_rows(device)
        before = (rows + 1).clip(max=window)
        after = 0 if given.causal else (given.q.shape[SEQUENCE] - 1 - rows).clip(max=window - 1)
        sees = max(sees, int((before + after).sum()))
    return 2.0 * batch * given.queries.max_local_shape[HEADS] * sees * given.kv.shape[WIDTH]
