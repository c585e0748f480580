"""Embeddings with sharded rows: each process looks up the rows that it holds, and zeros for others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from xshard import Sharding
from xshard.errors import PlanError
from xshard.nn.cross_entropy import rows_of_classes


class ShardedEmbedding(nn.Embedding):
    """Ids -> this process's addend of their vectors. rows: `[v, 1]`, by `rows_of_classes`."""

    rows: Tensor
    padding_row: int | None

    def forward(self, input: Tensor) -> Tensor:
        if (n := len(self.weight)) == len(self.rows):  # on one device
            return super().forward(input)
        if self.rows.device != input.device:
            self.rows = self.rows.to(input.device)
        row = F.embedding(input, self.rows)
        if not n:
            return self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum()
        return F.embedding(row[..., 0] % n, self.weight, self.padding_row).masked_fill(row == n, 0)


def shard_embedding(
    module: nn.Module, path: str, used: Sharding, sums: Iterable[str], process: int
) -> None:
    """Let an embedding with sharded rows look up its own; code around `super().forward` stays. sums: axes
    over which the output of module `path` is a sum, by its rule. Raises PlanError.
    """
    axes = used.layout.dims[0].axes if used.shape else ()
    kind = type(module)
    if not axes or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return
    text = str(used.layout)
    calls_torch = kind.forward is nn.Embedding.forward
    reasons = [
        option for option in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, option)
    ]
    if not calls_torch and "super" not in kind.forward.__code__.co_names:
        reasons = ["a lookup of its own"]
    if reasons:
        what = f"the rows of an {kind.__name__} with {reasons[0]} are sharded"
        raise PlanError(what, text=text, hint="shard its columns, as in 'v c/tp'")
    if not {*axes} <= {*sums}:
        rule = f'outputs={{"{path}": "... c | sum({",".join(axes)}) -> ... c"}}'
        raise PlanError(
            "rows are sharded, so vectors are addends", text=text, hint=f"{rule} adds them up"
        )
    if not isinstance(module, ShardedEmbedding):
        kinds = (ShardedEmbedding,) if kind is nn.Embedding else (kind, ShardedEmbedding)
        module.__class__ = type(kind.__name__, kinds, {})
    rows = rows_of_classes(used, 0, process)
    module.rows = torch.as_tensor(rows)[:, None]  # type: ignore[assignment]
    row = (
        used.local_shape(process)[0]
        if module.padding_idx is None
        else int(rows[module.padding_idx])
    )
    module.padding_row = None if row == used.local_shape(process)[0] else row  # type: ignore[assignment]
