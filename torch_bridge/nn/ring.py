"""Ring attention: in every round a device uses the keys and values of another, while the next ones are sent.
The backward pass sends the blocks again with their gradients. All send all blocks, so that none waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_bridge.mesh.process_mesh import ProcessMesh
from torch_bridge.nn.attention_kernels import Mask, attend, pull
from torch_bridge.redistribution import redistribute
from xshard.nn.attention import CAUSAL, SOME, Attention, Tile, tiles


@dataclass(frozen=True, eq=False)
class ProcessAttention:
    """This process's part of an attention. documents: `[batch or 1, rows of the whole sequence]`."""

    attn: Attention
    scale: float
    processes: ProcessMesh
    documents: Tensor | None

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

    def mask(self, tile: Tile, turn: int = 0) -> Mask:
        """The mask `[batch or 1, 1, rows, keys]` of a tile, and whether the tile is causal instead."""
        if self.documents is None and tile.kind != SOME:
            return None, tile.kind == CAUSAL
        rows = self.attn.query_rows(self.device)[tile.q]
        keys = self.attn.key_rows(self.device, turn)[tile.k]
        visible = torch.from_numpy(self.attn.visible(rows[:, None], keys))[None]
        if self.documents is not None:
            of_rows, of_keys = (self.documents[:, torch.from_numpy(x)] for x in (rows, keys))
            visible = visible.to(of_rows.device) & (of_rows[:, :, None] == of_keys[:, None])
        return visible[:, None], False

    def send(self, block: Tensor, by: int = 1) -> Callable[[], Tensor]:
        """Begin to send a block to the device `by` further on -> waits for the block that arrives."""
        layouts, shape = self.attn.rotation(block.shape, by)
        return redistribute(block, layouts, self.processes, shape=shape, async_op=True).wait  # type: ignore[union-attr]


class RingAttention(torch.autograd.Function):
    """`RingAttention.apply(blocks, q, kv)`: the result for a device's queries; kv: keys beside values."""

    @staticmethod
    def forward(ctx: Any, blocks: ProcessAttention, q: Tensor, kv: Tensor) -> Tensor:
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
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, y, log_sum = ctx.saved_tensors
        blocks: ProcessAttention = ctx.blocks
        wait: Any = None
        q_gradient = torch.zeros_like(q, dtype=log_sum.dtype)
        for turn, block in blocks.attn.in_turn(kv, blocks.send):
            kv_gradient = torch.zeros_like(block, dtype=log_sum.dtype)
            for tile in tiles(blocks.attn, blocks.device, turn):
                dy, queries, result, sums = (x[:, :, tile.q] for x in (cotangent, q, y, log_sum))
                parts, mask = blocks.read(block[:, :, tile.k]), blocks.mask(tile, turn)
                of_q, *of_kv = pull(dy, queries, result, sums, *parts, mask, blocks.scale)
                q_gradient[:, :, tile.q] += of_q
                blocks.add(kv_gradient[:, :, tile.k], torch.cat(of_kv, -1))
            if wait is not None:
                kv_gradient = wait() + kv_gradient
            is_last = turn + 1 == blocks.attn.rounds
            wait = blocks.send(kv_gradient, -turn if is_last else 1)
        return None, q_gradient.to(q.dtype), wait().to(kv.dtype)
