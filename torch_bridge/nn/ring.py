"""Attention in blocks, merged by log-sum-exps, with first derivatives. In a ring, a device uses the keys and
values of another in every round, while the next ones are sent; the backward pass sends the blocks again with
their gradients. All send all blocks, so that none waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_bridge.mesh.process_mesh import ProcessMesh
from torch_bridge.nn.attention_kernels import TileMask, attend, pull
from torch_bridge.redistribution import redistribute
from xshard.layout.runs import row_numbers
from xshard.nn.attention import ALL, CAUSAL, HEADS, RING, Attention, Rows, Tile, dropped, tiles


@dataclass(frozen=True, eq=False)
class ProcessAttention:
    """This process's part of an attention; softcap, alibi, dropout and seed as in `attention`.

    like: an empty tensor of their dtype and device. documents: two arrays, for all queries and for all keys,
    `[batch or 1, rows of the whole sequence]`.
    """

    attn: Attention
    scale: float
    processes: ProcessMesh
    like: Tensor
    documents: tuple[Tensor, Tensor] | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None

    @property
    def device(self) -> int:
        return self.processes.device

    @cached_property
    def heads_read(self) -> Tensor | None:
        """The head of keys that each head of queries reads; None if there are as many of both."""
        return None if self.attn.group == 1 else torch.from_numpy(self.attn.heads_read(self.device))

    def read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, for every head of queries."""
        if self.heads_read is not None:
            kv = kv.index_select(1, self.heads_read.to(kv.device))
        return self.attn.split(kv)

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of `read`'s result to the gradient of the block."""
        if self.heads_read is None:
            total += gradient
        else:
            total.index_add_(1, self.heads_read.to(total.device), gradient.to(total.dtype))

    def mask(self, tile: Tile, turn: int = 0, *, any_length: bool = False) -> TileMask:
        """The mask of a tile. any_length: a causal one may have other numbers of queries than of keys."""
        rows = self.attn.query_rows(self.device)[tile.q]
        keys = self.attn.key_rows(self.device, turn)[tile.k]
        visible: Any = None
        bias = self._bias(rows, keys)
        causal = tile.kind == CAUSAL and bias is None and (any_length or len(rows) == len(keys))
        if self.documents is not None or not (causal or tile.kind == ALL):
            visible, causal = self._tensor(self.attn.visible(rows[:, None], keys))[None, None], False
        if self.documents is not None:
            pairs = zip(self.documents, (rows, keys), strict=True)
            of_rows, of_keys = (documents[:, self._tensor(x)] for documents, x in pairs)
            visible = visible & (of_rows[:, None, :, None] == of_keys[:, None, None])
        return TileMask(visible, causal, bias, self.softcap, self._kept(rows, keys))

    def _bias(self, rows: Rows, keys: Rows) -> Tensor | None:
        """`[1, heads, rows, keys]`: minus the slope of a head times the distance."""
        if self.alibi is None:
            return None
        queries = self.attn.queries
        heads = self._tensor(row_numbers(queries.held(len(queries.shape) + HEADS, self.device)))
        distances = self._tensor(abs(rows[:, None] + self.attn.offset - keys))
        return -self.alibi[heads, None, None][None] * distances

    def _kept(self, rows: Rows, keys: Rows) -> Tensor | None:
        """`[batch, heads, rows, keys]`: the factors of weights, some of them dropped."""
        if not self.dropout:
            return None
        cells = self.attn.cells(self.device)[..., None, None]
        numbers = map(self._tensor, (cells, rows[:, None], keys))
        drop = dropped(torch.as_tensor(self.seed, device=self.like.device), *numbers, part=self.dropout)
        return (~drop).to(torch.promote_types(self.like.dtype, torch.float32)) / (1 - self.dropout)

    def _tensor(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self.like.device)

    def send(self, block: Tensor, by: int = 1) -> Callable[[], Tensor]:
        """Begin to send a block to the device `by` further on -> waits for the block that arrives."""
        layouts, shape = self.attn.rotation(block.shape, by)
        return redistribute(block, layouts, self.processes, shape=shape, async_op=True).wait  # type: ignore[union-attr]


class BlockAttention(torch.autograd.Function):
    """A device's result and its log-sum-exps, over the keys of all rounds; kv: keys beside values."""

    @staticmethod
    def forward(ctx: Any, blocks: ProcessAttention, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = q.new_zeros((*q.shape[:3], blocks.attn.value_width), dtype=wide)
        log_sum = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for turn, block in blocks.attn.in_turn(kv, blocks.send):
            for tile in tiles(blocks.attn, blocks.device, turn):
                k, v = blocks.read(block[:, :, tile.k])
                part, added = attend(q[:, :, tile.q], k, v, blocks.mask(tile, turn), blocks.scale)
                before = log_sum[:, :, tile.q]
                after = torch.logaddexp(before, added)
                finite = after.clamp(min=torch.finfo(wide).min)  # -inf for rows that have seen nothing so far
                y[:, :, tile.q] *= (before - finite).exp()[..., None]
                y[:, :, tile.q] += part * (added - finite).exp()[..., None]
                log_sum[:, :, tile.q] = after
        y = y.to(q.dtype)
        ctx.blocks = blocks
        ctx.save_for_backward(q, kv, y, log_sum)
        ctx.set_materialize_grads(False)
        return y, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor | None, of_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        q, kv, y, log_sum = ctx.saved_tensors
        blocks: ProcessAttention = ctx.blocks
        wait: Any = None
        cotangent = torch.zeros_like(y) if cotangent is None else cotangent
        if of_log_sum is not None:  # one more column adds it to `(cotangent * y).sum(-1)` in any kernel
            cotangent = torch.cat((cotangent, -of_log_sum[..., None].to(y.dtype)), -1)
            y = F.pad(y, (0, 1), value=1.0)
        # Weights are exp(score - log_sum): none for rows that see nothing.
        log_sum = log_sum.masked_fill(log_sum == float("-inf"), float("inf"))
        q_gradient = torch.zeros_like(q, dtype=log_sum.dtype)
        for turn, block in blocks.attn.in_turn(kv, blocks.send):
            kv_gradient = torch.zeros_like(block, dtype=log_sum.dtype)
            for tile in tiles(blocks.attn, blocks.device, turn):
                dy, queries, result, sums = (x[:, :, tile.q] for x in (cotangent, q, y, log_sum))
                (k, v), mask = blocks.read(block[:, :, tile.k]), blocks.mask(tile, turn)
                wide_v = v if of_log_sum is None else F.pad(v, (0, 1))
                of_q, of_k, of_v = pull(dy, queries, result, sums, k, wide_v, mask, blocks.scale)
                q_gradient[:, :, tile.q] += of_q
                blocks.add(kv_gradient[:, :, tile.k], torch.cat((of_k, of_v[..., : v.shape[-1]]), -1))
            if wait is not None:
                kv_gradient = wait() + kv_gradient
            is_last = turn + 1 == blocks.attn.rounds
            wait = blocks.send(kv_gradient, -turn if is_last else 1) if blocks.attn.how == RING else None
        kv_gradient = kv_gradient if wait is None else wait()
        return None, q_gradient.to(q.dtype), kv_gradient.to(kv.dtype)
