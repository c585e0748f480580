"""Mixed precision: the dtypes in which modules use parameters that are stored in another one.

It knows no tensor of a model: `models` casts parameters, gradients and what modules take and return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.comm_dtype import CommDtype, CommDtypeLike, comm_dtype_of
from torch_bridge.versions.modules import apply_to_tensors
from xshard.errors import DtypeError, api_boundary
from xshard.rules import Pattern

# Others have too few numbers to compute in, or are no floats.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@api_boundary
@dataclass(frozen=True)
class Precision:
    """The dtypes in which a module uses its parameters, sums their gradients, and takes and returns floats.

        xt.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    Parameters stay stored as they are, and so do `.grad` and what an optimizer keeps. The names are those of
    FSDP2's `MixedPrecisionPolicy`; None leaves a dtype as it is. Parameters and tensors that are no floats,
    and buffers, are never cast.

    Args:
        param_dtype: Parameters are gathered and used in it, and kept so while they are gathered.
        reduce_dtype: Gradients are added over processes in it, and over the passes in which a gathered
            parameter is kept. None: `param_dtype`.
        output_dtype: The floats that the module returns are cast to it.
        cast_inputs: The floats that the module is called with are cast to `param_dtype`.

    Raises:
        DtypeError: A dtype is not bfloat16, float16, float32 or float64.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> xt.Precision(param_dtype=torch.bfloat16).reduce_dtype is None
        True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPES:
                hint = "bfloat16, float16, float32 or float64"
                raise DtypeError(f"{name}={dtype} is no dtype to compute in", hint=hint)

    def before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast the arguments of a module; a hook before `forward`."""
        if self.cast_inputs and self.param_dtype is not None:
            return apply_to_tensors(partial(_cast, self.param_dtype), (args, kwargs))
        return args, kwargs

    def after_forward(self, _: nn.Module, args: Any, result: Any) -> Any:
        """Cast what a module returns; a hook after `forward`."""
        if self.output_dtype is not None:
            return apply_to_tensors(partial(_cast, self.output_dtype), result)
        return result


# One for the model and all modules that gather, or by patterns of names of modules.
PrecisionLike = Precision | Mapping[str, Precision] | Mapping[Pattern, Precision] | None


def parameter_dtypes(
    precision: Precision | None, comm_dtype: CommDtypeLike, stored: torch.dtype
) -> CommDtype:
    """Return how a parameter travels into use, and its gradient back.

    Args:
        precision: That of the module; None: it is used as it is stored.
        comm_dtype: How it travels then.
        stored: The dtype in storage.
    """
    if precision is None:
        return comm_dtype_of(comm_dtype, stored)
    used = precision.param_dtype
    if used is None or not stored.is_floating_point:
        used = stored
    summed = precision.reduce_dtype
    if summed is None or not stored.is_floating_point:
        summed = used
    return CommDtype(forward=used, backward=summed, result=used)


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
