"""A read-only tensor over the memory of a `jax.Array`.

JAX assumes that its arrays are immutable; a write to shared memory would break that. torch has no read-only
tensors of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from xshard import XshardError


class ReadOnlyTensor(Tensor):
    """`ReadOnlyTensor(block)`: the block for reading. Its views are read-only too, new results are not.

    Raises XshardError for an operation that would write to it. Does not notice writes that bypass torch's
    operations (`.numpy()`, `.data_ptr()`).
    """

    block: Tensor

    @staticmethod
    def __new__(cls, block: Tensor) -> ReadOnlyTensor:
        made = Tensor._make_subclass(cls, block)
        made.block = block
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReadOnlyTensor({self.block!r})"

    # Attributes and methods stay those of a tensor; their operations come through __torch_dispatch__.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(isinstance(x, cls) for x in tree_leaves(named.get(argument.name))):
                raise XshardError(
                    f"{func} would write to memory that a jax.Array shares",
                    hint="write to a copy: tensor.clone(), or to_torch(..., copy=True)",
                )
        shared = [x.block.untyped_storage().data_ptr() for x in tree_leaves(named) if isinstance(x, cls)]
        out = func(*tree_map_only(cls, unwrapped, args), **tree_map_only(cls, unwrapped, kwargs or {}))

        def kept(x: Tensor) -> Tensor:
            return cls(x) if x.untyped_storage().data_ptr() in shared else x

        return tree_map_only(Tensor, kept, out)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor under a read-only one, any other as it is."""
    return x.block if isinstance(x, ReadOnlyTensor) else x
