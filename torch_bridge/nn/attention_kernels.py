"""Attention of one block of queries and one of keys, with what merges blocks: its log-sum-exp.

Decides which of torch's fused kernels computes it; where there is none, plain products do, which hold the
scores of the block. The gradient takes the result and the log-sum-exp over all blocks, so that every block
gives its own addend. All tensors are `[batch, heads, rows, width]`; log-sum-exps have no width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

aten = torch.ops.aten
_FUSED = (torch.float16, torch.bfloat16, torch.float32)  # on GPUs


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result of a block, and the log-sum-exp of its scores: of a row that sees nothing 0 and -inf.

    seen: which scores count, `[batch or 1, 1, rows, keys]`. is_causal: as many queries as keys, each sees its
    own key and those before it.
    """
    width = v.shape[-1]
    if q.device.type == "cpu":
        q, k, v = _one_width(q, k, v)
        bias = _bias(seen, q.dtype)
        y, found = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif q.is_cuda and q.dtype in _FUSED:
        q, k, v = _one_width(q, k, v, multiple=8)
        y, found, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, _bias_of_blocks(seen, q), True, 0.0, is_causal, scale=scale
        )
        found = found[..., : q.shape[2]]  # padded to whole tiles
    else:
        scores = _scores(q, k, seen, is_causal, scale)
        found = scores.logsumexp(-1)
        y = (scores - found.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp().to(v.dtype) @ v
    if seen is not None:
        found = found.masked_fill(~seen.any(-1), float("-inf"))
    return y[..., :width], found


def pull(
    cotangent: Tensor,
    q: Tensor,
    result: Tensor,
    log_sum: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangent of the result over all blocks -> what this block adds to the gradients of q, k and v.

    result, log_sum: over all blocks.
    """
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    if q.device.type == "cpu":
        q, k, v, cotangent, result = _one_width(q, k, v, cotangent, result)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            cotangent, q, k, v, result, log_sum, 0.0, is_causal, attn_mask=_bias(seen, q.dtype), scale=scale
        )
    elif q.is_cuda and q.dtype in _FUSED:
        q, k, v, cotangent, result = _one_width(q, k, v, cotangent, result, multiple=8)
        # The kernel takes these strides for granted, which are those of its own result.
        result = result.transpose(1, 2).contiguous().transpose(1, 2)
        # Dropout's state, which is not used, and log-sum-exps padded to whole tiles.
        state, tiles = torch.zeros((), dtype=torch.int64, device=q.device), -q.shape[2] % 32
        log_sum, needed = F.pad(log_sum, (0, tiles), value=float("inf")), [True, True, True, False]
        *found, _ = aten._scaled_dot_product_efficient_attention_backward(
            cotangent, q, k, v, _bias_of_blocks(seen, q), result, log_sum, state, state, 0.0, needed,
            is_causal, scale=scale,
        )  # fmt: skip
    else:
        weights = (_scores(q, k, seen, is_causal, scale) - log_sum[..., None]).exp()
        wide = cotangent.to(weights.dtype)
        change = weights * (wide @ v.mT.to(wide.dtype) - (wide * result).sum(-1, keepdim=True)) * scale
        found = change.to(k.dtype) @ k, change.mT.to(q.dtype) @ q, weights.mT.to(v.dtype) @ cotangent
    of_q, of_k, of_v = (x[..., :width] for x, width in zip(found, widths, strict=True))
    return of_q, of_k, of_v


def _scores(q: Tensor, k: Tensor, seen: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(dtype) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def _one_width(*blocks: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Padded with zeros to one width, which fused kernels need: zeros change nothing."""
    width = max(x.shape[-1] for x in blocks)
    width += -width % multiple
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in blocks)


def _bias(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))


def _bias_of_blocks(seen: Tensor | None, q: Tensor) -> Tensor | None:
    """For all heads; rows begin at multiples of 16 bytes or more, as the kernel reads them."""
    if seen is None:
        return None
    keys = seen.shape[-1]
    padded = _bias(F.pad(seen, (0, -keys % 8)), q.dtype)
    return padded[..., :keys].expand(*q.shape[:2], -1, -1)  # type: ignore[index]
