"""The fastest method of attention over a sharded sequence, by its moves and the busiest device's products."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from xshard.contractions.prices import ArrayMove, Prices
from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.nn.attention import AUTO, HEADS, METHODS, RING, SEQUENCE, WIDTH, Attention

BACKWARD = 2.5  # operations of the backward pass for each of the forward pass: scores are computed again


@lru_cache(maxsize=4096)
def chosen(attn: Attention, dtype: str, profile: Profile, methods: tuple[str, ...] = METHODS) -> Attention:
    """The attention with its own method, or with the fastest of `methods`."""
    if attn.how != AUTO:
        return attn
    return min((replace(attn, how=how) for how in methods), key=lambda each: seconds(each, dtype, profile))


def seconds(attn: Attention, dtype: str, profile: Profile) -> float:
    """Predicted seconds of the forward and backward pass on the busiest device."""
    prices = Prices(attn.q.mesh, dtype, profile)
    pairs = ((attn.q, attn.queries), (attn.kv, attn.keys), (attn.result, attn.target))
    moves = [ArrayMove(src.layout, dst.layout, src.shape) for src, dst in pairs]
    moving = sum(prices.plan(move).cost + prices.plan(move.dual).cost for move in moves)
    work = _operations(attn) / profile.flops(dtype)
    if attn.how != RING or attn.rounds == 1:
        return moving + (1 + BACKWARD) * work
    *batch, heads, _, width = attn.keys.max_local_shape
    layouts, shape = attn.rotation((math.prod(batch), heads, attn.block_rows, width))
    move_s, precise = prices.plan(ArrayMove(*layouts, tuple(shape))).cost, max(1.0, 4 / itemsize(dtype))
    rounds, round_work = attn.rounds, work / attn.rounds
    forward = round_work + (rounds - 1) * max(round_work, move_s)
    # The blocks travel again, and beside them their gradients in the dtype of sums.
    backward = BACKWARD * round_work + (rounds - 1) * max(BACKWARD * round_work, move_s * (1 + precise))
    return moving + forward + backward + move_s * precise


def _operations(attn: Attention) -> float:
    """Forward operations of the busiest device: two products over the scores that are not empty."""
    batch, window = (math.prod(attn.queries.max_local_shape[:HEADS]), attn.window or attn.q.shape[SEQUENCE])
    sees = 0
    for device in attn.devices:
        rows = attn.query_rows(device)
        before = (rows + 1).clip(max=window)
        after = 0 if attn.causal else (attn.q.shape[SEQUENCE] - 1 - rows).clip(max=window - 1)
        sees = max(sees, int((before + after).sum()))
    return 2.0 * batch * attn.queries.max_local_shape[HEADS] * sees * attn.kv.shape[WIDTH]
