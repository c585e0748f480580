"""Attention of a block of queries and a block of keys, and the log-sum-exp by which such blocks are merged.
All tensors are `[batch, heads, rows, width]`; masks are `[batch or 1, 1, rows, keys]`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

aten = torch.ops.aten
_FUSED = (torch.float16, torch.bfloat16, torch.float32)  # on GPUs


class TileMask(NamedTuple):
    """What becomes of a block's scores.

    visible: the scores that count. is_causal: for each query only its own key and earlier ones do; there are
    as many queries as keys. bias: added to scores, `[1, heads, rows, keys]`, after softcap, their bound.
    kept: factors of the weights, `[batch, heads, rows, keys]`: 0 for dropped ones.
    """

    visible: Tensor | None
    is_causal: bool
    bias: Tensor | None = None
    softcap: float | None = None
    kept: Tensor | None = None

    @property
    def is_fused(self) -> bool:
        return self.softcap is None and self.kept is None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
    """The result of a block, and the log-sum-exp of its scores; a row that sees nothing has 0 and -inf."""
    visible, width = mask.visible, v.shape[-1]
    if q.device.type == "cpu" and mask.is_fused:
        q, k, v = _one_width(q, k, v)
        options = {"attn_mask": bias_of(mask, q.dtype), "scale": scale}
        y, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask.is_causal, **options)
    elif q.is_cuda and q.dtype in _FUSED and mask.is_fused:
        q, k, v = _one_width(q, k, v, multiple=8)
        bias = _bias_of_blocks(mask, q)
        y, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, mask.is_causal, scale=scale
        )
        log_sum = log_sum[..., : q.shape[2]]  # padded to whole tiles
    else:
        scores, _ = _scores(q, k, mask, scale)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
        y = (weights if mask.kept is None else weights * mask.kept).to(v.dtype) @ v
    if visible is not None:
        log_sum = log_sum.masked_fill(~visible.any(-1), float("-inf"))
    return y[..., :width], log_sum


def pull(
    dy: Tensor, q: Tensor, result: Tensor, log_sum: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's addends to the gradients of q, k and v; dy, result, log_sum are over all blocks."""
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    if q.device.type == "cpu" and mask.is_fused:
        q, k, v, dy, result = _one_width(q, k, v, dy, result)
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, result, log_sum, 0.0, mask.is_causal, attn_mask=bias_of(mask, q.dtype),
            scale=scale,
        )  # fmt: skip
    elif q.is_cuda and q.dtype in _FUSED and mask.is_fused:
        q, k, v, dy, result = _one_width(q, k, v, dy, result, multiple=8)
        # The kernel takes the strides of its own result for granted.
        result = result.transpose(1, 2).contiguous().transpose(1, 2)
        # Dropout's state, which is not used, and log-sum-exps padded to whole tiles.
        state, tiles = torch.zeros((), dtype=torch.int64, device=q.device), -q.shape[2] % 32
        log_sum, needed = F.pad(log_sum, (0, tiles), value=float("inf")), [True, True, True, False]
        *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
            dy, q, k, v, _bias_of_blocks(mask, q), result, log_sum, state, state, 0.0, needed,
            mask.is_causal, scale=scale,
        )  # fmt: skip
    else:
        scores, slope = _scores(q, k, mask, scale)
        weights, kept = (scores - log_sum[..., None]).exp(), 1.0 if mask.kept is None else mask.kept
        wide = dy.to(weights.dtype)
        change = wide @ v.mT.to(wide.dtype) * kept - (wide * result).sum(-1, keepdim=True)
        change, weights = weights * change * slope, weights * kept
        gradients = change.to(k.dtype) @ k, change.mT.to(q.dtype) @ q, weights.mT.to(v.dtype) @ dy
    of_q, of_k, of_v = (x[..., :width] for x, width in zip(gradients, widths, strict=True))
    return of_q, of_k, of_v


def _scores(q: Tensor, k: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor | float]:
    """The scores, and their derivative by the products."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    slope: Tensor | float = scale
    scores, visible = (q @ k.mT).to(dtype) * scale, mask.visible
    if mask.softcap is not None:
        part = (scores / mask.softcap).tanh()
        scores, slope = part * mask.softcap, (1 - part.square()) * scale
    if mask.bias is not None:
        scores = scores + mask.bias
    if mask.is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if visible is None else scores.masked_fill(~visible, float("-inf")), slope


def _one_width(*blocks: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Blocks padded with zeros to one width, which fused kernels need; zeros change nothing."""
    width = max(x.shape[-1] for x in blocks)
    width += -width % multiple
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in blocks)


def bias_of(mask: TileMask, dtype: torch.dtype) -> Tensor | None:
    """The mask as a bias: -inf where scores do not count."""
    bias, visible = mask.bias, mask.visible
    if visible is None:
        return None if bias is None else bias.to(dtype)
    bias = torch.zeros((), device=visible.device) if bias is None else bias
    return torch.where(visible, bias, float("-inf")).to(dtype)


def _bias_of_blocks(mask: TileMask, q: Tensor) -> Tensor | None:
    """A bias for all heads; rows begin at multiples of 16 bytes or more, as the kernel reads them."""
    bias = bias_of(mask, q.dtype)
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 8))[..., :keys].expand(*q.shape[:2], -1, -1)
