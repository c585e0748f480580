"""aten's kernels, with positional signatures that may change.

Of attention: the public function, `scaled_dot_product_attention`, returns no log-sum-exps. Without them
results of several tiles cannot be merged, and their gradients cannot be computed. Bound as they are: one is
called for each tile.
"""

from __future__ import annotations

import torch

from torch_bridge.versions.support import private_names

with private_names():
    # (destinations, sources): copies and casts many tensors by one call, on a GPU by few kernels.
    copy_all = torch._foreach_copy_

    # (query, key, value, *, is_causal, attn_mask, scale) -> result, log-sum-exps
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    # (cotangent, query, key, value, result, log-sum-exps, dropout, is_causal, *, attn_mask, scale)
    # -> gradients of query, key, value
    cpu_attention_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    # (query, key, value, bias, with_log_sum, dropout, is_causal, *, scale) -> result, log-sum-exps,
    # state...
    gpu_attention = torch.ops.aten._scaled_dot_product_efficient_attention

    # (cotangent, query, key, value, bias, result, log-sum-exps, state, state, dropout, is_needed,
    # is_causal, *, scale) -> gradients of query, key, value, bias
    gpu_attention_gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward
