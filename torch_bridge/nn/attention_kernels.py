"""Attention of a block of queries and a block of keys, and the log-sum-exp by which such blocks are merged.
All tensors are `[batch, heads, rows, width]`; masks are `[batch or 1, 1, rows, keys]`."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

aten = torch.ops.aten
Mask = tuple[Tensor | None, bool]  # the scores that count, and whether all up to its own key do for a query
_FUSED = (torch.float16, torch.bfloat16, torch.float32)  # on GPUs


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """The result of a block, and the log-sum-exp of its scores; a row that sees nothing has 0 and -inf.

    is_causal: each query sees its own key and earlier ones only; there are as many queries as keys.
    """
    (visible, is_causal), width = mask, v.shape[-1]
    if q.device.type == "cpu":
        q, k, v = _one_width(q, k, v)
        options = {"attn_mask": _bias(visible, q.dtype), "scale": scale}
        y, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, **options)
    elif q.is_cuda and q.dtype in _FUSED:
        q, k, v = _one_width(q, k, v, multiple=8)
        bias = _bias_of_blocks(visible, q)
        y, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, is_causal, scale=scale
        )
        log_sum = log_sum[..., : q.shape[2]]  # padded to whole tiles
    else:
        scores = _scores(q, k, visible, is_causal, scale)
        log_sum = scores.logsumexp(-1)
        y = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp().to(v.dtype) @ v
    if visible is not None:
        log_sum = log_sum.masked_fill(~visible.any(-1), float("-inf"))
    return y[..., :width], log_sum


def pull(
    dy: Tensor, q: Tensor, result: Tensor, log_sum: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's addends to the gradients of q, k and v; dy, result, log_sum are over all blocks."""
    (visible, is_causal), *widths = mask, q.shape[-1], k.shape[-1], v.shape[-1]
    if q.device.type == "cpu":
        q, k, v, dy, result = _one_width(q, k, v, dy, result)
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, result, log_sum, 0.0, is_causal, attn_mask=_bias(visible, q.dtype),
            scale=scale,
        )  # fmt: skip
    elif q.is_cuda and q.dtype in _FUSED:
        q, k, v, dy, result = _one_width(q, k, v, dy, result, multiple=8)
        # The kernel takes the strides of its own result for granted.
        result = result.transpose(1, 2).contiguous().transpose(1, 2)
        # Dropout's state, which is not used, and log-sum-exps padded to whole tiles.
        state, tiles = torch.zeros((), dtype=torch.int64, device=q.device), -q.shape[2] % 32
        log_sum, needed = F.pad(log_sum, (0, tiles), value=float("inf")), [True, True, True, False]
        *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
            dy, q, k, v, _bias_of_blocks(visible, q), result, log_sum, state, state, 0.0, needed,
            is_causal, scale=scale,
        )  # fmt: skip
    else:
        weights = (_scores(q, k, visible, is_causal, scale) - log_sum[..., None]).exp()
        wide = dy.to(weights.dtype)
        change = weights * (wide @ v.mT.to(wide.dtype) - (wide * result).sum(-1, keepdim=True)) * scale
        gradients = change.to(k.dtype) @ k, change.mT.to(q.dtype) @ q, weights.mT.to(v.dtype) @ dy
    of_q, of_k, of_v = (x[..., :width] for x, width in zip(gradients, widths, strict=True))
    return of_q, of_k, of_v


def _scores(q: Tensor, k: Tensor, visible: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(dtype) * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def _one_width(*blocks: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Blocks padded with zeros to one width, which fused kernels need; zeros change nothing."""
    width = max(x.shape[-1] for x in blocks)
    width += -width % multiple
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in blocks)


def _bias(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


def _bias_of_blocks(visible: Tensor | None, q: Tensor) -> Tensor | None:
    """A bias for all heads; rows begin at multiples of 16 bytes or more, as the kernel reads them."""
    if visible is None:
        return None
    keys = visible.shape[-1]
    padded = _bias(F.pad(visible, (0, -keys % 8)), q.dtype)
    return padded[..., :keys].expand(*q.shape[:2], -1, -1)  # type: ignore[index]
