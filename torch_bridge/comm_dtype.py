"""The dtype in which blocks travel: floats replace floats, complex dtypes replace complex ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from xshard.errors import DtypeError


class CommDtype(NamedTuple):
    """The dtypes in which blocks and their gradients travel, and the one in which blocks arrive.

    Gradients arrive in the dtype of the blocks that were sent.
    """

    forward: torch.dtype
    backward: torch.dtype
    result: torch.dtype

    def adjoint(self, block: torch.dtype) -> CommDtype:
        """Return the dtypes in which gradients move, for blocks of a dtype."""
        return CommDtype(self.backward, self.forward, block)


# One dtype for both directions, or one for each; None for the block's own.
CommDtypeLike = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None


def comm_dtypes(comm_dtype: Any) -> CommDtype | tuple[torch.dtype | None, torch.dtype | None]:
    """Return a dtype for each direction from `comm_dtype=`. Raises DtypeError for another value."""
    if isinstance(comm_dtype, CommDtype):  # resolved already
        return comm_dtype
    if isinstance(comm_dtype, list | tuple):
        pair = tuple(comm_dtype)
    else:
        pair = (comm_dtype, comm_dtype)
    if len(pair) != 2 or not all(d is None or isinstance(d, torch.dtype) for d in pair):
        hint = "a torch dtype, or two of them, forward and backward: (torch.bfloat16, None)"
        raise DtypeError(f"comm_dtype is {comm_dtype!r}", hint=hint)
    return pair


def comm_dtype_of(comm_dtype: CommDtypeLike | CommDtype, block: torch.dtype) -> CommDtype:
    """Resolve `comm_dtype=` for blocks of a dtype. Raises DtypeError if values would change their kind."""
    if isinstance(comm_dtype, CommDtype):
        return comm_dtype
    travels: list[torch.dtype] = []
    for asked in comm_dtypes(comm_dtype):
        dtype = block if asked is None else asked
        if dtype != block and _kind(dtype) != _kind(block):
            hint = (
                "floats travel as floats, complex numbers as complex ones, other dtypes unchanged"
            )
            raise DtypeError(f"blocks of {block} do not travel as {dtype}", hint=hint)
        travels.append(dtype)
    forward, backward = travels
    return CommDtype(forward, backward, result=block)


def _kind(dtype: torch.dtype) -> object:
    """Return what a dtype may travel as: any float, any complex dtype, or itself alone."""
    if dtype == torch.float4_e2m1fn_x2:  # an element is two numbers, which no cast takes apart
        return dtype
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return dtype
