"""Attention over a sharded sequence by torch's fused kernels, in blocks merged by log-sum-exps.

>>> import torch_bridge as xt
>>> from xshard import Mesh
>>> def means():
...     v = (
...         xt.positions("b s/zigzag(cp)", Mesh(cp=2), shape=(1, 8), dim="s")
...         .reshape(1, 4, 1, 1)
...         .double()
...     )
...     return xt.nn.attention(0 * v, 0 * v, v, "b s/zigzag(cp) h k", Mesh(cp=2), causal=True)
>>> [y.flatten().tolist() for y in xt.testing.run_ranks(2, means)]
[[0.0, 0.5, 3.0, 3.5], [1.0, 1.5, 2.0, 2.5]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.autodiff.function import is_transformed
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.machine import machine
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh, process_mesh
from torch_bridge.nn.placed import placed_as
from torch_bridge.redistribution import redistribute
from xshard import Layout, ProfileLike, Sharding, load_profile
from xshard.contractions.attention import AttentionCall, Verb
from xshard.contractions.prices import fastest_attention
from xshard.dtypes import name_of
from xshard.errors import DtypeError, XshardError
from xshard.layout.runs import row_numbers
from xshard.nn.attention import (
    ALL,
    CAUSAL,
    FIRST_DERIVATIVES,
    METHODS,
    REDUCE,
    RING,
    Attention,
    Tile,
    tiles,
)

aten = torch.ops.aten
_FUSED = (torch.float16, torch.bfloat16, torch.float32)  # on GPUs


class TileMask(NamedTuple):
    """The scores of a tile that count, and a bias of these; rows, keys: their numbers."""

    rows: Any
    keys: Any
    visible: Tensor | None
    is_causal: bool
    bias: Tensor | None

    def as_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as a bias: -inf where scores do not count."""
        bias = self.bias
        visible = self.visible
        if visible is None:
            return None if bias is None else bias.to(dtype)
        bias = torch.zeros((), device=visible.device) if bias is None else bias
        return torch.where(visible, bias, float("-inf")).to(dtype)

    def for_gpu(self, q: Tensor) -> Tensor | None:
        """A bias for all heads; rows begin at multiples of 16 bytes or more, as the kernel reads them."""
        if (bias := self.as_bias(q.dtype)) is None:
            return None
        keys = bias.shape[-1]
        return F.pad(bias, (0, -keys % 8))[..., :keys].expand(*q.shape[:2], -1, -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProcessAttention(AttentionCall):
    """A call in this process. like: an empty tensor of the queries' dtype and device."""

    processes: ProcessMesh
    profile: ProfileLike
    like: Tensor
    xp = torch
    empty = float("-inf")

    def enter(
        self, x: Tensor, layout: Layout, shape: Sequence[int | None] | None
    ) -> tuple[Tensor, Sharding]:
        return x, placed_as(x, layout, self.processes, shape).sharding

    def move(self, x: Tensor, layouts: tuple[Layout, Layout], shape: Sequence[int]) -> Tensor:
        return redistribute(x, layouts, self.processes, shape=shape)

    def choose(self, attn: Attention, is_plain: bool) -> Attention:
        methods: tuple[str, ...] = METHODS
        how = self.how
        if is_transformed():
            methods = tuple(m for m in METHODS if m not in FIRST_DERIVATIVES)
            if how in FIRST_DERIVATIVES or not is_plain:
                what = (
                    f"a {how}"
                    if how in FIRST_DERIVATIVES
                    else "softcap, dropout, return_lse, blind rows"
                )
                hint = 'how="gather" or "ulysses", without these options'
                raise XshardError(f"{what} under torch.func", hint=hint)
        profile = load_profile(machine(self.profile, self.like.device))
        return fastest_attention(attn, name_of(self.like.dtype), profile, methods)

    def compute(self, q: Tensor, kv: Tensor, is_plain: bool) -> tuple[Tensor, Tensor]:
        if self.attn.how == RING:  # every block is as long as the longest
            kv = F.pad(kv, (0, 0, 0, self.attn.block_rows - kv.shape[2]))
        elif is_plain and self.attn.how != REDUCE:
            return self.fused(q, kv), q[..., 0]  # log-sum-exps are not returned
        return BlockAttention.apply(self, q, kv)  # type: ignore[no-any-return]

    def fused(self, q: Tensor, kv: Tensor) -> Tensor:
        """Queries and all keys that they may see -> the result."""
        k, v = self.read(kv)
        parts = []
        for tile in tiles(self.attn, self.processes.device):
            rows = q[:, :, tile.q]
            keys = k[:, :, tile.k]
            values = v[:, :, tile.k]
            mask = self.mask(tile, any_length=True)
            bias = mask.visible if mask.bias is None else mask.as_bias(q.dtype)
            is_causal = mask.is_causal
            if is_causal and rows.shape[2] != keys.shape[2]:
                from torch.nn.attention.bias import (
                    causal_lower_right,
                )  # slow: it imports torch._dynamo

                with _disable_current_modes():  # a mode makes a plain tensor of it
                    bias = causal_lower_right(rows.shape[2], keys.shape[2])
                    is_causal = False
            options: Any = {"is_causal": is_causal, "scale": self.scale}
            parts.append(F.scaled_dot_product_attention(rows, keys, values, bias, **options))
        if not parts:  # without queries, too, the keys have a gradient, that other devices wait for
            return q @ k.mT @ v
        return torch.cat(parts, 2)

    @cached_property
    def heads_read(self) -> Tensor | None:
        """The head of keys that each head of queries reads; None if there are as many of both."""
        return (
            None
            if self.attn.group == 1
            else self.whole(self.attn.heads_read(self.processes.device))
        )

    def read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, for every head of queries."""
        return self.attn.split(
            kv if self.heads_read is None else kv.index_select(1, self.heads_read)
        )

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of `read`'s result to the gradient of the block."""
        if self.heads_read is None:
            total += gradient
        else:
            total.index_add_(1, self.heads_read, gradient.to(total.dtype))

    def held(self, dim: int) -> Tensor:
        queries = self.attn.queries
        return self.whole(
            row_numbers(queries.held(dim % len(queries.shape), self.processes.device))
        )

    def whole(self, x: Any) -> Tensor:
        return torch.as_tensor(x, device=self.like.device)

    def wide(self, x: Tensor) -> Tensor:
        return x.detach().to(self.like.device, torch.promote_types(self.like.dtype, torch.float32))

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))

    def mask(self, tile: Tile, turn: int = 0, *, any_length: bool = False) -> TileMask:
        """The mask of a tile. any_length: a causal one may have other numbers of queries than of keys."""
        rows: Any = self.attn.query_rows(self.processes.device)[tile.q]
        keys: Any = self.attn.key_rows(self.processes.device, turn)[tile.k]
        causal = (
            tile.kind == CAUSAL and self.alibi is None and (any_length or len(rows) == len(keys))
        )
        is_plain = self.documents[0] is None and (causal or tile.kind == ALL)
        if is_plain and self.alibi is None and self.kernel:  # nothing to send to a GPU
            return TileMask(rows, keys, None, causal, None)
        rows = self.whole(rows)
        keys = self.whole(keys)
        visible = None if is_plain else self.visible(rows, keys)
        return TileMask(rows, keys, visible, is_plain and causal, self.bias(rows, keys))

    @cached_property
    def kernel(self) -> str:
        """The kind of device with a fused kernel for these scores, or empty."""
        x = self.like
        is_fused = x.device.type == "cpu" or (x.is_cuda and x.dtype in _FUSED)
        return x.device.type if is_fused and self.softcap is None and not self.dropout else ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> tuple[Tensor, Tensor]:
        """The result of a tile, and the log-sum-exp of its scores; a row that sees nothing has 0 and -inf."""
        width = v.shape[-1]
        if self.kernel == "cpu":
            q, k, v = _one_width(q, k, v)
            options = {
                "is_causal": mask.is_causal,
                "attn_mask": mask.as_bias(q.dtype),
                "scale": self.scale,
            }
            y, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
        elif self.kernel == "cuda":
            q, k, v = _one_width(q, k, v, multiple=8)
            y, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
                q, k, v, mask.for_gpu(q), True, 0.0, mask.is_causal, scale=self.scale
            )
            log_sum = log_sum[..., : q.shape[2]]  # padded to whole tiles
        else:
            scores, _ = self.scores(q, k, mask.rows, mask.keys)
            log_sum = scores.logsumexp(-1)
            weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
            y = (weights * self.kept(mask.rows, mask.keys)).to(v.dtype) @ v
        if mask.visible is not None:
            log_sum = log_sum.masked_fill(~mask.visible.any(-1), float("-inf"))
        return y[..., :width], log_sum

    def pull(
        self,
        dy: Tensor,
        q: Tensor,
        result: Tensor,
        log_sum: Tensor,
        k: Tensor,
        v: Tensor,
        mask: TileMask,
    ) -> tuple[Tensor, ...]:
        """The tile's addends to the gradients of q, k and v; dy, result, log_sum are over all tiles."""
        widths = q.shape[-1], k.shape[-1], v.shape[-1]
        if self.kernel == "cpu":
            q, k, v, dy, result = _one_width(q, k, v, dy, result)
            options = {"attn_mask": mask.as_bias(q.dtype), "scale": self.scale}
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k, v, result, log_sum, 0.0, mask.is_causal, **options
            )
        elif self.kernel == "cuda":
            q, k, v, dy, result = _one_width(q, k, v, dy, result, multiple=8)
            # The kernel takes the strides of its own result for granted.
            result = result.transpose(1, 2).contiguous().transpose(1, 2)
            # Dropout's state, which is not used, and log-sum-exps padded to whole tiles.
            state = torch.zeros((), dtype=torch.int64, device=q.device)
            padding = -q.shape[2] % 32
            log_sum = F.pad(log_sum, (0, padding), value=float("inf"))
            needed = [True, True, True, False]
            *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
                dy, q, k, v, mask.for_gpu(q), result, log_sum, state, state, 0.0, needed, mask.is_causal,
                scale=self.scale,
            )  # fmt: skip
        else:
            scores, slope = self.scores(q, k, mask.rows, mask.keys)
            weights = (scores - log_sum[..., None]).exp()
            kept = self.kept(mask.rows, mask.keys)
            wide = dy.to(weights.dtype)
            change = wide @ v.mT.to(wide.dtype) * kept - (wide * result).sum(-1, keepdim=True)
            change = weights * change * slope
            weights = weights * kept
            gradients = (
                change.to(k.dtype) @ k,
                change.mT.to(q.dtype) @ q,
                weights.mT.to(v.dtype) @ dy,
            )
        return tuple(x[..., :width] for x, width in zip(gradients, widths, strict=True))

    def send(self, block: Tensor, by: int = 1) -> Callable[[], Tensor]:
        """Begin to send a block to the device `by` further on -> waits for the block that arrives."""
        layouts, shape = self.attn.rotation(block.shape, by)
        return redistribute(block, layouts, self.processes, shape=shape, async_op=True).wait  # type: ignore[union-attr]


def _one_width(*blocks: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Blocks padded with zeros to one width, which fused kernels need; zeros change nothing."""
    width = max(x.shape[-1] for x in blocks)
    width += -width % multiple
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in blocks)


class BlockAttention(torch.autograd.Function):
    """A device's result and its log-sum-exps, over the keys of all rounds; kv: keys beside values."""

    @staticmethod
    def forward(ctx: Any, blocks: ProcessAttention, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = q.new_zeros((*q.shape[:3], blocks.attn.value_width), dtype=wide)
        log_sum = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for turn, block in blocks.attn.in_turn(kv, blocks.send):  # all send all blocks: none waits
            for tile in tiles(blocks.attn, blocks.processes.device, turn):
                k, v = blocks.read(block[:, :, tile.k])
                part, added = blocks.attend(q[:, :, tile.q], k, v, blocks.mask(tile, turn))
                before = log_sum[:, :, tile.q]
                after = torch.logaddexp(before, added)
                finite = after.clamp(
                    min=torch.finfo(wide).min
                )  # -inf for rows that have seen nothing so far
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
    def backward(
        ctx: Any, cotangent: Tensor | None, of_log_sum: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, kv, y, log_sum = ctx.saved_tensors
        blocks: ProcessAttention = ctx.blocks
        wait: Any = None
        cotangent = torch.zeros_like(y) if cotangent is None else cotangent
        if (
            of_log_sum is not None
        ):  # one more column adds it to `(cotangent * y).sum(-1)` in any kernel
            cotangent = torch.cat((cotangent, -of_log_sum[..., None].to(y.dtype)), -1)
            y = F.pad(y, (0, 1), value=1.0)
        # Weights are exp(score - log_sum): none for rows that see nothing.
        log_sum = log_sum.masked_fill(log_sum == float("-inf"), float("inf"))
        q_gradient = torch.zeros_like(q, dtype=log_sum.dtype)
        for turn, block in blocks.attn.in_turn(kv, blocks.send):
            kv_gradient = torch.zeros_like(block, dtype=log_sum.dtype)
            for tile in tiles(blocks.attn, blocks.processes.device, turn):
                dy, queries, result, sums = (x[:, :, tile.q] for x in (cotangent, q, y, log_sum))
                (k, v), mask = blocks.read(block[:, :, tile.k]), blocks.mask(tile, turn)
                wide_v = v if of_log_sum is None else F.pad(v, (0, 1))
                of_q, of_k, of_v = blocks.pull(dy, queries, result, sums, k, wide_v, mask)
                q_gradient[:, :, tile.q] += of_q
                blocks.add(
                    kv_gradient[:, :, tile.k], torch.cat((of_k, of_v[..., : v.shape[-1]]), -1)
                )
            kv_gradient = kv_gradient if wait is None else wait() + kv_gradient
            is_last = turn + 1 == blocks.attn.rounds
            wait = (
                blocks.send(kv_gradient, -turn if is_last else 1)
                if blocks.attn.how == RING
                else None
            )
        kv_gradient = kv_gradient if wait is None else wait()
        return None, q_gradient.to(q.dtype), kv_gradient.to(kv.dtype)


@between_graphs
def _attention(
    qkv: Sequence[Tensor],
    layout: Layout | str,
    mesh: Any,
    profile: Any,
    kernel: str | None,
    *options: Any,
) -> Any:
    if kernel is not None:
        hint = "it is JAX's: torch.nn.attention.sdpa_kernel() chooses torch's"
        raise XshardError(f"implementation={kernel!r}", hint=hint)
    q, k, v = (as_tensor(x, name) for x, name in zip(qkv, "qkv", strict=True))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(
            f"queries {q.dtype}, keys {k.dtype}, values {v.dtype}", hint="one floating dtype"
        )
    where: Any = {"processes": process_mesh(mesh), "profile": profile, "like": q.new_empty(0)}
    y, *lse = ProcessAttention(*options, **where).run(q, k, v, layout)
    return (y.to(q.dtype), lse[0].squeeze(-1)) if lse else y.to(q.dtype)


attention = Verb[Tensor, MeshLike](_attention).attention
