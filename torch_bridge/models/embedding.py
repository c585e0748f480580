"""Embeddings with sharded rows: each process looks up the rows that it holds, and zeros for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from xshard import Mesh, Sharding
from xshard.errors import PlanError
from xshard.nn.cross_entropy import rows_of_classes


class ShardedEmbedding(nn.Embedding):
    """An embedding that returns this process's addend: vectors of ids whose rows it holds, else zeros.

    Attributes:
        rows: `[v, 1]`, the row of each id in this process's block; the block's length if it is elsewhere.
        padding_row: The row of the padding id in the block, None if it is elsewhere or there is none.
    """

    rows: Tensor
    padding_row: int | None

    def forward(self, input: Tensor) -> Tensor:
        n_rows = len(self.weight)
        if n_rows == len(self.rows):  # on one device
            return super().forward(input)
        if self.rows.device != input.device:
            self.rows = self.rows.to(input.device)
        row = F.embedding(input, self.rows)  # [..., 1]
        if n_rows == 0:
            # The empty sum ties the weight to the graph: its gradient is zeros, and not None.
            return self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum()
        # Ids of rows that others hold look up row 0, and are set to zero afterwards.
        vectors = F.embedding(row[..., 0] % n_rows, self.weight, self.padding_row)
        return vectors.masked_fill(row == n_rows, 0)


def shard_embedding(
    module: nn.Module, path: str, used: Sharding, summed_axes: Iterable[str], process: int
) -> list[Callable[[], object]]:
    """Return what turns an embedding whose rows are sharded into a `ShardedEmbedding`, in place.

    It gets a table `rows` from each id to the row of this process's block. With 4 ids on 2 processes,
    the second one has ids 2 and 3, and the table [2, 2, 0, 1]: a block has rows 0 and 1, and 2 means
    that another process has the id. The weight itself is cut later. Other modules, and weights whose
    rows are not sharded, stay as they are: the list is empty.

    Args:
        module: The module.
        path: Its name.
        used: The global shape and the layout of its weight in the forward pass.
        summed_axes: The mesh axes over which the rule for its output adds up, as tp in
            "b s c | sum(tp) -> b s c".
        process: The number of this process in the mesh.

    Raises:
        PlanError: Its lookup is one that sharded rows do not have.
    """
    row_axes = used.layout.dims[0].axes if used.shape else ()
    if not row_axes or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return []
    _check_embedding(module, path, used, summed_axes)
    return [partial(_change_class, module, used, process)]


def check_frequencies(module: nn.Module, path: str, varying: Iterable[str], mesh: Mesh) -> None:
    """Raise PlanError for a module that divides gradients by how often ids are in the whole batch.

    Each process would divide by how often they are in its own part.

    Args:
        module: The module.
        path: Its name.
        varying: The axes along which its activations differ.
        mesh: All axes.
    """
    axes = sorted(axis for axis in varying if mesh.size(axis) > 1)
    if getattr(module, "scale_grad_by_freq", False) and axes:
        over = ",".join(axes)
        reason = f"scale_grad_by_freq counts ids, of which each process has its own along '{over}'"
        hint = "scale_grad_by_freq=False, or rules by which the embedding has all ids: "
        hint += f"inputs={{'{path}': 'b/{axes[0]} s -> b s'}} and outputs={{'{path}': "
        hint += f"'b s c -> b/{axes[0]} s c'}}"
        raise PlanError(reason, hint=hint)


def _change_class(module: nn.Embedding | nn.EmbeddingBag, used: Sharding, process: int) -> None:
    """Turn an embedding into a `ShardedEmbedding`; other arguments are as for `shard_embedding`."""
    if not isinstance(module, ShardedEmbedding):
        # A `forward` of yours stays in front, and its `super().forward` comes to ours.
        old_class = type(module)
        bases = (ShardedEmbedding,) if old_class is nn.Embedding else (old_class, ShardedEmbedding)
        module.__class__ = type(old_class.__name__, bases, {})

    row_of_id = torch.as_tensor(rows_of_classes(used, 0, process))
    module.rows = row_of_id[:, None]  # type: ignore[assignment]  # of ShardedEmbedding
    # The padding id gets no gradient: torch has to know its row in the block.
    padding_row = None
    if module.padding_idx is not None:
        padding_row = int(row_of_id[module.padding_idx])
        if padding_row == used.local_shape(process)[0]:  # not in this block
            padding_row = None
    module.padding_row = padding_row  # type: ignore[assignment]  # of ShardedEmbedding


def _check_embedding(
    module: nn.Embedding | nn.EmbeddingBag,
    path: str,
    used: Sharding,
    summed_axes: Iterable[str],
) -> None:
    """Raise PlanError for an embedding that cannot have its rows sharded.

    Each process returns zeros for ids of other processes, so that a sum over processes is the
    result: the rule of the output has to say so. Options that look at all rows or count ids
    (max_norm, scale_grad_by_freq, sparse) would see only those of this process, and are refused. So
    is a `forward` that never calls torch's lookup, which is what gets replaced.
    """
    text = str(used.layout)
    module_class = type(module)
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    reasons = [option for option in options if getattr(module, option)]
    # A `forward` of another class is fine if its code calls `super()`: then it gets to torch's
    # lookup.
    is_torchs = module_class.forward is nn.Embedding.forward
    if not is_torchs and "super" not in module_class.forward.__code__.co_names:
        reasons = ["a lookup of its own"]
    if reasons:
        reason = f"the rows of an {module_class.__name__} with {reasons[0]} are sharded"
        raise PlanError(reason, text=text, hint="shard its columns, as in 'v c/tp'")

    axes = used.layout.dims[0].axes
    if not set(axes) <= set(summed_axes):
        rule = f'outputs={{"{path}": "... c | sum({",".join(axes)}) -> ... c"}}'
        raise PlanError(
            "rows are sharded, so vectors are addends", text=text, hint=f"{rule} adds them up"
        )
